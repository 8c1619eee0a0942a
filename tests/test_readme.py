"""README.md says what is so: its code runs, its numbers are measured, its names, commands and files exist."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hf_packfree
from hf_packfree import errors
from tests.support import documents, tiny

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def fenced(language):
    return re.findall(rf"(?:<!-- ([\w-]+) -->\n)?```{language}\n(.+?)\n```", README, re.S)


def packfree(*arguments):
    command = [sys.executable, "-m", "hf_packfree", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.filterwarnings("ignore:'pin_memory'")  # the Trainer's default, on a machine without an accelerator
def test_python_blocks_run(tmp_path, monkeypatch):
    """In order, in one namespace, in a folder that holds the checkpoint they load; a `not-run` mark skips a block."""
    tiny().save_pretrained(tmp_path / "my-checkpoint")
    monkeypatch.chdir(tmp_path)
    blocks = [code for mark, code in fenced("python") if mark != "not-run"]
    assert blocks
    names = {"documents": [{"input_ids": document.tolist()} for document in documents((5, 64, 1, 30))]}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_the_first_numbers_are_measured():
    """Same order of magnitude as a run: the weights are random."""
    table = README.split("<!-- numbers: packfree verify qwen3_5 -->\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    report = hf_packfree.verify_packing("qwen3_5")
    assert len(rows) == 3
    for (_, stock, patched, limit), name in zip(rows, ("logits", "gradients", "influence")):
        assert float(limit) == getattr(report.limits, name)
        for written, measured in ((stock, report.stock), (patched, report.patched)):
            found = getattr(measured, name)
            assert float(written) / 10 <= found <= float(written) * 10, f"{name}: README {written}, measured {found:.1e}"


@pytest.mark.parametrize("mark", ["demo-command", "test-command"])
def test_the_two_commands_are_one_line_without_cuda(mark):
    (line,) = [code for found, code in fenced("bash") if found == mark]
    assert "\n" not in line
    steps = [shlex.split(step) for step in line.split("&&")]
    assert steps[0] == ["python3", "-m", "venv", ".venv"]
    torch = next(step for step in steps if any(word.startswith("torch==") for word in step))
    assert torch[-2:] == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    assert steps.index(torch) == 1, "torch comes before whatever requires it"


def test_commands_and_their_options_exist():
    text = packfree("--help").stdout
    written = re.findall(r"^\| `packfree (\w+)[^`]*` \| (.+?) \|$", README, re.M)
    assert sorted(command for command, _ in written) == sorted(re.findall(r"^    (\w+) ", text, re.M))
    for command, row in written:
        options = set(re.findall(r"--[\w-]+", packfree(command, "--help").stdout)) - {"--help"}
        assert set(re.findall(r"`(--[\w-]+)`", row)) == options, command


def test_exit_codes():
    table = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", README, re.M))
    help_text = dict(re.findall(r"^  (\d+)  (.+)$", packfree("--help").stdout, re.M))
    assert help_text and help_text.keys() <= table.keys()


def test_every_public_name_and_option_is_mentioned():
    for name in hf_packfree.__all__:
        assert re.search(rf"\b{name}\b", README), name
    for function in (hf_packfree.apply_patches, hf_packfree.verify_packing, hf_packfree.PackFreeCallback):
        section = README.split(f"| option of `{function.__name__}` |")[1].split("\n\n")[0]
        options = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
        written = {name for row in section.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
        assert written == options, function.__name__


def test_every_error_is_listed_with_its_builtin():
    section = README.split("### What is refused")[1].split("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", section, re.M))
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.PackFreeError)]
    wanted = {kind.__name__: kind for kind in kinds if kind is not errors.PackFreeError}
    assert listed.keys() == wanted.keys()
    for name, kind in wanted.items():
        assert issubclass(kind, getattr(__import__("builtins"), listed[name])), name


def test_files_it_names_exist():
    named = set(re.findall(r"\]\(([^):]+)\)|`((?:hf_packfree|tests|notebooks|benchmarks)/[\w/.]+)`", README))
    paths = {path for pair in named for path in pair if path}
    assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_every_family_is_listed():
    from hf_packfree.patching.registry import FAMILIES

    section = README.split("### Families")[1].split("###")[0]
    assert [family.name for family in FAMILIES] == re.findall(r"^\| `(\w+)` \|", section, re.M)
