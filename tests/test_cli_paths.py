"""What a command writes is looked at before it works, and what it measured is shown when writing
fails all the same.
"""

from __future__ import annotations

import pytest

import hf_packfree.bench
import hf_packfree.demo
from hf_packfree.cli import main
from tests.test_bench import TINY, Candidate, report_of


@pytest.fixture
def no_work(monkeypatch):
    """Fail if any work begins."""
    # which the demo's command sets
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def work(*args):
        raise AssertionError("work began")

    monkeypatch.setattr(hf_packfree.bench, "run_bench", work)
    monkeypatch.setattr(hf_packfree.demo, "run_demo", work)


def refused(capsys, *argv: str) -> str:
    """Return the one sentence on stderr."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "wanted a f" in err
    return err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "a folder"),
        ("folder.png", "a folder"),
        ("picture", "ending names no kind"),
        ("picture.frob", "names no kind"),
        ("nowhere/picture.png", "a folder that does not exist"),
        ("file/picture.png", "a folder that does not exist"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_first(capsys, tmp_path, no_work, name, said):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    assert said in refused(capsys, "bench", "--png", f"{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("name", "said"),
    [("/file", "a file"), ("/file/below", "is no folder"), ("/file/far/below", "is no folder")],
)
def test_a_folder_that_cannot_be_made_is_refused_first(capsys, tmp_path, no_work, name, said):
    (tmp_path / "file").touch()
    assert said in refused(capsys, "demo", "--out", f"{tmp_path}{name}")
    assert "names nothing" in refused(capsys, "demo", "--out", "")


def test_the_folder_of_the_demo_is_looked_at_when_none_is_named_too(
    capsys, tmp_path, no_work, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packfree-demo").touch()
    assert "found --out 'packfree-demo', a file" in refused(capsys, "demo")


def test_where_nothing_may_be_written_is_refused_first(capsys, tmp_path, no_work, monkeypatch):
    monkeypatch.setattr("hf_packfree.cli.arguments.os.access", lambda path, how: False)
    assert "cannot be written" in refused(capsys, "bench", "--png", str(tmp_path / "picture.png"))
    assert "cannot be written" in refused(capsys, "demo", "--out", str(tmp_path / "new"))


def test_numbers_are_shown_when_drawing_fails(capsys, tmp_path, monkeypatch):
    def draw(report, path):
        raise OSError("no space left")

    rows = [
        Candidate(name, 40, (1.0,), 10.0)
        for name in ("unpatched padded", "unpatched packed", "patched padded")
    ]
    monkeypatch.setattr(hf_packfree.bench, "run_bench", lambda options, progress: report_of(*rows))
    monkeypatch.setattr("hf_packfree.bench.bars.draw", draw)
    assert main([*TINY, "--png", str(tmp_path / "picture.png")]) == 2
    out, err = capsys.readouterr()
    assert (
        "of the peak memory." in out
        and "Drawn into" not in out
        and err.strip() == "packfree: no space left"
    )
