"""`packfree bench --tree`: what samples that share their beginnings save."""

from __future__ import annotations

import json

import pytest
import torch

from hf_packfree.bench import TreeOptions, TreeReport, read_tree, run_tree_bench
from hf_packfree.bench.candidates import Candidate
from hf_packfree.bench.shared_prefixes import _packed, _shared
from hf_packfree.cli import main
from hf_packfree.errors import BoundaryError, UnsupportedInput
from tests.support import relative_rms, tiny

GROUP = "40,8x3,5"
TURNS = {"lengths": [40, 30, 6, 7, 9, 12], "parents": [None, 0, 1, 1, 0, None]}


def test_lengths_of_a_group_and_a_file_of_a_tree(tmp_path):
    group = read_tree(GROUP)
    assert group.lengths == (40, 8, 8, 8, 5) and group.parents == (-1, 0, 0, 0, 0)
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(TURNS))
    turns = read_tree(str(file))
    assert turns.lengths == tuple(TURNS["lengths"]) and turns.parents == (-1, 0, 1, 1, 0, -1)


@pytest.mark.parametrize("source", ["40", "40,x2", "40,0", "many", "40,-3", "nowhere.json"])
def test_what_is_no_tree_is_refused(source):
    with pytest.raises(UnsupportedInput, match="for --tree; wanted a prompt's tokens"):
        read_tree(source)


@pytest.mark.parametrize(
    ("tree", "said"),
    [("1,1x99999999999", "100,000,000,000 segments"), ("9000000,9,9", "give fewer or shorter seg")],
)
def test_a_tree_that_fits_no_machine_is_refused_as_one(capsys, tree, said):
    """By what a tree has: it is neither of --documents nor of a --longest."""
    assert main(["bench", "--tree", tree]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[]", UnsupportedInput),
        ('{"lengths": [3, 4]}', UnsupportedInput),
        ('{"lengths": [3, 4.5], "parents": [null, 0]}', UnsupportedInput),
        ('{"lengths": [3, 4], "parents": [null, null]}', UnsupportedInput),
        ('{"lengths": [3, 4], "parents": [null, 5]}', BoundaryError),
    ],
)
def test_a_file_that_holds_none_is_refused(tmp_path, text, error):
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(error):
        read_tree(str(file))


def test_both_rows_have_one_loss_and_one_gradient(tmp_path):
    from hf_packfree import apply_patches

    file = tmp_path / "tree.json"
    file.write_text(json.dumps(TURNS))
    model, tree = apply_patches(tiny()), read_tree(str(file))
    ids, found = torch.randint(128, (sum(tree.lengths),)), []
    for make in (_packed, _shared):
        runner = make(model, tree, ids)
        runner.step()
        found.append((runner.loss, [p.grad.clone() for p in model.parameters()]))
    assert relative_rms(found[1][0], found[0][0]) <= 1e-6
    floor = float(torch.cat([one.flatten() for one in found[0][1]]).pow(2).mean().sqrt()) / 100
    assert max(relative_rms(a, b, floor) for a, b in zip(found[1][1], found[0][1])) <= 1e-4


@pytest.mark.slow
def test_a_group_measured_for_real():
    """A long prompt, and answers of a few tokens: a sixth of the tokens."""
    steps = []
    options = TreeOptions("qwen3_5", (200, *[8] * 7), parents=(-1, *[0] * 7), rounds=3, threads=1)
    report = run_tree_bench(options, lambda *step: steps.append(step))
    packed, tree = report.candidates
    assert (packed.computed_tokens, tree.computed_tokens) == (7 * 208, 256)
    assert report.samples == 7 and report.complete and report.difference <= 1e-6
    # no time is too long: machines are shared
    assert len(packed.seconds) == len(tree.seconds) == 3 and min(packed.seconds + tree.seconds) > 0
    assert report.memory_share < 0.4
    assert steps[0] == ("packed", 0, 10) and steps[-1] == ("done", 10, 10)


def report_of(*candidates):
    options = TreeOptions("small", (40, 8, 8), parents=(-1, 0, 0))
    return TreeReport(
        options=options,
        samples=2,
        model="M",
        parameters=7,
        device="cpu",
        dtype="float32",
        versions={},
        candidates=candidates,
        difference=1e-7,
        memory="somehow",
    )


def test_the_sentence():
    packed, tree = Candidate("packed", 96, (3.0,), 100.0), Candidate("tree", 56, (1.5,), 40.0)
    assert str(report_of(packed, tree)) == (
        "M on cpu: in a tree, 2 samples of 96 tokens are 56, a step is 2.00 times as fast, in 40% "
        "of the peak memory"
    )
    full = report_of(Candidate("packed", 96, refused="out of memory"), tree)
    assert "no comparison, because packed did not run (out of memory)" in str(full)
    assert full.faster is full.memory_share is None and not full.complete


FAST = ("bench", "qwen3_5", "--tree", GROUP, "--rounds", "1", "--threads", "1")


@pytest.mark.slow
def test_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*FAST]) == 0
    out, err = capsys.readouterr()
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert "189" in rows["packed"] and "69" in rows["tree"]
    assert out.strip().splitlines()[-1].endswith("of the peak memory.")
    assert "training steps: 6 of 6, done" in err and "Both losses are the same" in out


@pytest.mark.slow
def test_command_as_json_and_quiet(capsys):
    assert main([*FAST, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 4 and found["difference"] <= 1e-6
    assert [row["computed_tokens"] for row in found["candidates"]] == [189, 69]
    assert found["times_as_fast"] > 0 and found["memory_share"] < 1
    assert main([*FAST, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == ""


@pytest.mark.parametrize("more", [("--documents", "3"), ("--longest", "9"), ("--png", "x.png")])
def test_a_tree_and_documents_are_not_measured_at_once(capsys, more):
    assert main([*FAST, *more]) == 2
    assert f"found {more[0]} with --tree" in " ".join(capsys.readouterr().err.split())
