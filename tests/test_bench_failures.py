"""What a benchmark says of a step that did not run: memory that ran out is an answer, a defect
of ours is raised.
"""

from __future__ import annotations

import json

import pytest
import torch

from hf_packfree.bench.bars import draw
from hf_packfree.bench.turns import Trial
from hf_packfree.cli import main
from hf_packfree.errors import ran_out
from tests.test_bench import TINY, Candidate, report_of


@pytest.fixture
def broken(monkeypatch):
    """Let the steps of one candidate raise."""
    step = Trial.step

    def put(name, error):
        def raising(runner):
            if runner.name == name:
                raise error
            step(runner)

        monkeypatch.setattr(Trial, "step", raising)

    return put


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("unpatched padded", 3),
        ("unpatched packed", 0),
        ("patched padded", 3),
        ("patched packed", 3),
    ],
)
def test_a_row_without_memory_is_said_and_the_exit_code_tells(capsys, broken, name, code):
    broken(name, FULL)
    assert main([*TINY, "--json"]) == code
    rows = json.loads(capsys.readouterr().out)["candidates"]
    said = (
        f"out of memory: {FULL}; fewer documents (--documents) or shorter ones (--longest) need "
        f"less"
    )
    assert {row["name"]: row["refused"] for row in rows if row["refused"]} == {name: said}
    assert not any("refused" in row["note"] and "memory" in row["note"] for row in rows)


@pytest.mark.slow
def test_what_breaks_the_unpatched_model_is_said_and_what_breaks_us_is_raised(capsys, broken):
    broken("unpatched padded", TypeError("found no mask"))
    assert (
        main(TINY) == 3
        and "unpatched padded: did not run: found no mask." in capsys.readouterr().out
    )
    for name in ("patched padded", "patched packed"):
        broken(name, RuntimeError("sizes differ"))
        assert (
            main(TINY) == 3
            and "found RuntimeError: sizes differ, an unexpected error" in capsys.readouterr().err
        )


@pytest.mark.parametrize("where", ["model_of", "padded", "Floor.seconds"])
def test_memory_that_runs_out_beside_the_steps_is_a_sentence_with_advice(
    capsys, monkeypatch, where
):
    def full(*args):
        raise FULL

    monkeypatch.setattr(f"hf_packfree.bench.turns.{where}", full)
    assert main(TINY) == 2
    out, err = capsys.readouterr()
    assert (
        out == ""
        and "found no memory for qwen3_5 and" in err
        and "out of memory" in err
        and "unexpected error" not in err
    )
    assert "give fewer documents (--documents), shorter ones (--longest) or a smaller model" in err


def test_memory_that_ran_out_is_known_by_what_torch_raises():
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**58)
    assert ran_out(found.value) and ran_out(FULL) and ran_out(MemoryError())
    assert not ran_out(RuntimeError("sizes differ")) and not ran_out(ValueError("out of memory"))


def test_a_picture_shows_what_did_not_run_too(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.annotate", lambda axes, text, *args, **options: written.append(text)
    )
    full, ran = (
        Candidate("unpatched padded", 60, refused="out of memory"),
        Candidate("patched padded", 40, (1.0,), 25.0),
    )
    for rows, said in (
        ((full,), ["not measured"] * 2),
        ((full, ran), ["not measured", "1,000", "not measured", "25"]),
    ):
        draw(report_of(*rows), tmp_path / "picture.png")
        assert [text.strip() for text in written] == said and (
            tmp_path / "picture.png"
        ).stat().st_size > 5_000
        written.clear()
