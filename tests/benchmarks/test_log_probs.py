"""What is timed side by side computes the same, and becomes a table."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from tests.benchmarks import log_prob_report
from tests.benchmarks.log_probs import KINDS, losses, main, variants
from tests.support import relative_rms

NEEDS = {"packfree": "torch", "TRL": "trl", "Liger": "liger_kernel"}
INPUTS = torch.randn(40, 16), torch.randn(70, 16), torch.arange(40)


@pytest.mark.parametrize("who", NEEDS)
def test_sides_compute_the_same(who):
    if find_spec(NEEDS[who]) is None:
        pytest.skip(f"{NEEDS[who]} is not installed")
    x, weight, targets = INPUTS
    log_p = (x @ weight.t()).log_softmax(1)
    wanted = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    for kind in KINDS:
        scores = dict(variants(kind, "cpu"))[who]()
        found = scores(x.requires_grad_(), weight, targets)
        assert relative_rms(found[0], wanted[0]) <= 1e-6
        if "entropy" in kind:
            assert relative_rms(found[1], wanted[1]) <= 1e-6
    if who == "packfree":
        loss = dict(losses("cpu"))[who]()(*INPUTS)
        assert relative_rms(loss, -wanted[0].mean()) <= 1e-6


def test_a_row_says_what_was_timed_or_why_not(tmp_path, monkeypatch):
    only = "^rl.* (packfree|cut-cross-entropy), trained, log p$"
    out = ["--out", str(tmp_path), "--only", only, "--device", "cpu", "--tiny"]
    monkeypatch.setattr("sys.argv", ["log_probs", *out])
    main()
    about, *rows = map(json.loads, (tmp_path / "log_probs.jsonl").read_text().splitlines())
    assert about["workload"] == "machine" and about["versions"]["torch"]
    # a GPU is needed
    assert rows[0]["ms"] > 0 and rows[0]["error"] < 1e-6 and "ms" not in rows[1]


def test_every_run_becomes_tables_of_what_it_timed(tmp_path):
    about = {"workload": "machine", "machine": "NVIDIA Test", "versions": {}}
    timed = {"ms": 27.444, "peak_gib": 2.0199}
    frozen = {"workload": "rl-logprobs-8k", "variant": "packfree, frozen, log p", **timed}
    others = [
        {"workload": "rl-logprobs-8k", "variant": "TRL, trained, log p and entropy", **timed},
        {"workload": "rl-logprobs-8k", "variant": "Liger, frozen, log p", "error": "ImportError: "},
        {"workload": "sft-loss-32k", "variant": "Liger", "error": "OutOfMemoryError: CUDA"},
    ]
    for day, rows in (("2026-01-02", [frozen, *others]), ("2026-01-03", [frozen])):
        lines = [{**about, "date": day}, *rows]
        path = tmp_path / f"{day}-nvidia-test.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (text,) = log_prob_report.tables(log_prob_report.results(tmp_path)).values()
    newer, older = text.split("Made on ")[1:]
    assert newer.startswith("2026-01-03 on one NVIDIA Test")
    assert "| packfree | 27.4 (2.0) |\n" in newer and "entropy" not in newer
    assert older.startswith("2026-01-02 on one NVIDIA Test")
    assert "| packfree | 27.4 (2.0) |  |\n" in older
    assert "| TRL's chunked function |  | 27.4 (2.0) |\n" in older
    assert "| Liger | did not import |  |\n" in older
    assert "| Liger, Triton |  | out of memory |\n" in older
