"""README.md and docs say what is so: their code runs, their numbers are measured, their names,
commands and files exist.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import runpy
import shlex
import shutil
from configparser import ConfigParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import hf_packfree
from hf_packfree import errors
from hf_packfree.cli import main
from hf_packfree.versions import VERSIONS
from tests.data.processors import example, image_part, vision_processor
from tests.source import nodes
from tests.support import by_family, documents, tiny
from tests.vision import tiny_vision

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = {"README.md": README, "CONTRIBUTING.md": CONTRIBUTING, **DOCS}
MARK = r"^<!-- (?P<mark>[\w-]+)(?:: (?P<value>\w+))? -->\n"
BLOCK = re.compile(rf"(?:{MARK})?^```(?P<language>\S*)[^\n]*\n(?P<code>.*?)\n?```$", re.S | re.M)
LANGUAGES = {
    "python",
    "bash",
    "text",
    "{toctree}",
    "{eval-rst}",
    "{literalinclude}",
    "{include}",
    "{image}",
}
"""Text is drawings; what is in braces is Sphinx's, which checks it."""
ILLUSTRATED = [
    example("a b", image_part(seed=1)),
    example("c d e"),
    example(image_part(8, 8, seed=2), "f"),
]
LIMITS = {"lines": 200, "bytes": 14_000}


def blocks(page, language):
    return [match for match in BLOCK.finditer(PAGES[page]) if match["language"] == language]


def pages_with(language):
    return pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, language)])


@pytest.fixture
def help_of(capsys, monkeypatch):
    """A function that returns what `packfree ... --help` prints."""
    monkeypatch.setenv("COLUMNS", "120")

    def text(*command):
        with pytest.raises(SystemExit):
            main((*command, "--help"))
        return capsys.readouterr().out

    return text


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A folder that holds the checkpoint and the tokenizer that the pages load."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    with_head = hf_packfree.apply_patches(tiny(), mtp=hf_packfree.MTPOptions(from_scratch=True))
    with_head.save_pretrained(tmp_path / "my-checkpoint")
    hf_packfree.remove_mtp(with_head)
    with_head.save_pretrained(tmp_path / "my-fine-tuned")
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(tmp_path / "my-checkpoint")
    # the released one that README names, and its data set
    shutil.copytree(tmp_path / "my-checkpoint", tmp_path / "Qwen" / "Qwen3.5-2B-Base")
    rows = [json.dumps({"input_ids": document.tolist()}) for document in documents((5, 64, 1, 30))]
    (tmp_path / "trl-lib" / "Capybara").mkdir(parents=True)
    (tmp_path / "trl-lib" / "Capybara" / "train.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)


def test_readme_is_short():
    assert len(README.splitlines()) <= LIMITS["lines"] and len(README.encode()) <= LIMITS["bytes"]


def test_the_docs_begin_with_the_sentence_of_the_readme():
    _, sentence, *_ = README.split("\n\n")
    assert sentence in DOCS["index.md"]


def test_readme_works_in_a_checkout_and_on_a_package_index():
    """Links and pictures are files of this repository; an index shows none that it cannot open."""
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert len(targets) > 20
    for target in targets:
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        heads = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.M) if anchor else ()
        slugs = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
        assert not anchor or anchor in slugs, target
    shown = runpy.run_path(str(ROOT / "setup.py"))["description"](README)
    assert not re.findall(r"\]\((?!https://)|(?:src|href)=\"(?!https://)", shown)
    assert "Quickstart" in shown and "docs/influence.png" not in shown


def test_what_is_cited_is_this_version():
    assert f"\nversion: {hf_packfree.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_block_is_of_a_language_that_is_checked():
    found = {(page, match["language"]) for page in PAGES for match in BLOCK.finditer(PAGES[page])}
    assert {language for _, language in found} <= LANGUAGES, found


@pages_with("python")
# the Trainer's default, on a machine without an accelerator
@pytest.mark.filterwarnings("ignore:'pin_memory'")
# TRL's default, and what TRL and PEFT ask for
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated")
def test_python_blocks_run(page, checkpoint, monkeypatch, tmp_path):
    """In order, in one namespace; `<!-- raises: Error -->` above a block names the error that it
    shows.
    """
    examples = [{"input_ids": document.tolist()} for document in documents((5, 64, 1, 30))]
    names = {"documents": examples}
    if "SFTTrainer(" in PAGES[page]:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        names["dataset"] = datasets.Dataset.from_list(examples)
    if "PackedVisionCollator(processor" in PAGES[page]:
        names |= {
            "processor": vision_processor(),
            "model": tiny_vision("qwen3_5"),
            "examples": ILLUSTRATED,
        }
    for block in blocks(page, "python"):
        code = compile(block["code"], page, "exec")
        if block["mark"] == "raises":
            with pytest.raises(getattr(errors, block["value"])):
                exec(code, names)
        else:
            exec(code, names)


@pages_with("bash")
def test_shell_lines_name_what_exists(page, help_of):
    """Programs are modules or files of this repository, their options are known, extras are in
    setup.cfg.
    """
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for step in re.split(r"&&|\n", "\n".join(block["code"] for block in blocks(page, "bash"))):
        words = [word.removeprefix(".venv/bin/") for word in shlex.split(step)]
        if words[0] == "pip":
            extras = {
                extra for given in re.findall(r"\.\[([\w,]+)\]", step) for extra in given.split(",")
            }
            assert words[1] == "install" and extras <= set(setup["options.extras_require"])
        elif words[0] == "packfree":
            known = help_of(words[1])
            assert {word for word in words if word.startswith("--")} <= set(
                re.findall(r"--[\w-]+", known)
            ), step
        elif words[0] == "shtab":
            module, _, function = words[words.index("packfree") + 1].rpartition(".")
            assert callable(getattr(import_module(module), function)), step
        elif words[0] in ("python", "torchrun") and "-m" in words and "pytest" not in words:
            assert find_spec(words[words.index("-m") + 1]) is not None, step
        elif words[0] == "torchrun":
            (file,) = (word for word in words if word.endswith(".py"))
            assert (ROOT / file).exists(), step
        elif words[:3] == ["python", "-m", "pytest"] and "-k" in words:
            (file,) = (word for word in words if word.endswith(".py"))
            wanted = words[words.index("-k") + 1]
            named = re.search(rf"^def test_\w*{wanted}", (ROOT / file).read_text(), re.M)
            # families are parameters
            assert named or wanted in by_family, step
        else:
            known = ["python3", "-m", "venv"], ["python", "-m", "pytest"]
            assert words[:3] in known or words[:2] == ["mkdir", "-p"], step


@pytest.mark.usefixtures("imports_tried_once")
def test_packfree_lines_run(checkpoint, capsys):
    lines = [
        line
        for page in PAGES
        for block in blocks(page, "bash")
        for line in block["code"].splitlines()
    ]
    lines = [line for line in lines if line.startswith("packfree ")]
    assert lines
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, f"{line}: {capsys.readouterr()}"


def table_after(page, first):
    """The cells of the rows after a table's head, which starts with these words."""
    text = PAGES[page].split(first)[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_the_first_numbers_are_measured():
    """Same order of magnitude as a run: the weights are random."""
    rows = table_after("README.md", "| relative RMS error ")
    report = hf_packfree.verify_packing("qwen3_5")
    assert len(rows) == 3
    for (_, unpatched, patched, limit), name in zip(rows, ("logits", "gradients", "influence")):
        assert float(limit) == getattr(report.limits, name)
        for written, measured in ((unpatched, report.unpatched), (patched, report.patched)):
            found = getattr(measured, name)
            assert float(written) / 10 <= found <= float(written) * 10, (
                f"{name}: README {written}, measured {found:.1e}"
            )


def test_the_speed_on_a_cpu_is_that_of_the_page():
    (times,) = re.findall(r"`packfree bench` measures ([\d.]+) times", README)
    bench = (
        DOCS["performance.md"].split("<!-- bench: packfree bench")[1].split("<!-- /bench -->")[0]
    )
    (found,) = re.findall(r"^\| patched packed \| [\d,]+ \| [\d,]+ \| ([\d.]+) \|", bench, re.M)
    assert float(times) == pytest.approx(float(found), abs=0.06)


@pytest.mark.parametrize("mark", ["demo-command", "test-command"])
def test_the_two_commands_are_one_line_without_cuda(mark):
    (line,) = [block["code"] for block in blocks("README.md", "bash") if block["mark"] == mark]
    assert "\n" not in line
    steps = [shlex.split(step) for step in line.split("&&")]
    assert steps[0] == ["python3", "-m", "venv", ".venv"]
    torch = next(step for step in steps if any(word.startswith("torch==") for word in step))
    assert torch[-2:] == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    assert steps.index(torch) == 1, "torch comes before whatever requires it"


def test_every_command_takes_one_torch_and_the_torchvision_made_for_it():
    pages = "\n".join(PAGES.values())
    (minor,) = set(re.findall(r"\btorch==2\.(\d+)\.0\b", pages))
    assert set(re.findall(r"\btorch==([\d.]+\d)", pages)) == {f"2.{minor}.0"}
    assert set(re.findall(r"\btorchvision==([\d.]+\d)", pages)) == {f"0.{int(minor) + 15}.0"}


def test_commands_and_their_options_exist(help_of):
    text = help_of()
    written = re.findall(r"^\| `packfree (\w+)[^`]*` \| (.+?) \|$", DOCS["usage.md"], re.M)
    assert sorted(command for command, _ in written) == sorted(
        re.findall(r"^    (\w+) ", text, re.M)
    )
    for command, row in written:
        # of every command
        common = {"--help", "--json", "--quiet", "--verbose"}
        options = set(re.findall(r"--[\w-]+", help_of(command).split("examples:")[0])) - common
        row = row.replace("`--verbose`", "")
        assert set(re.findall(r"`(--[\w-]+)`", row)) == options, command


def test_exit_codes(help_of):
    table = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", DOCS["usage.md"], re.M))
    help_text = dict(re.findall(r"^  (\d+)  (.+)$", help_of(), re.M))
    assert help_text and help_text.keys() <= table.keys()


def test_every_public_name_and_option_is_mentioned():
    for name in hf_packfree.__all__:
        page = "refused.md" if hasattr(errors, name) else "usage.md"
        assert name == "PackFreeError" or re.search(rf"\b{name}\b", DOCS[page]), name
        assert name == "__version__" or re.search(
            rf"^\.\. auto(function|class|exception):: {name}$", DOCS["reference.md"], re.M
        ), name
    for function in (
        hf_packfree.apply_patches,
        hf_packfree.verify_packing,
        hf_packfree.PackFreeCallback,
    ):
        section = DOCS["usage.md"].split(f"| option of `{function.__name__}` |")[1].split("\n\n")[0]
        options = {
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }
        written = {
            name
            for row in section.splitlines()
            for name in re.findall(r"`(\w+)`", row.split("|")[1])
        }
        assert written == options, function.__name__


def test_the_reference_is_complete_and_names_no_file_of_the_docs():
    """What a function returns is there too; pages are linked, and not named as files."""
    documented, module = {}, ""
    pattern = r"^\.\. (currentmodule|auto(?:function|class|exception)):: ([\w.]+)$"
    for directive, name in re.findall(pattern, DOCS["reference.md"], re.M):
        if directive == "currentmodule":
            module = name
        else:
            documented[name] = getattr(import_module(module), name)
    for name, found in documented.items():
        text = inspect.getdoc(found) or ""
        assert "docs/" not in text, name
        # what else is named is here, or is what one of these has
        for other in re.findall(r"see `([\w.]+)`", text):
            assert other.split(".")[0] in documented | dict.fromkeys(["hf_packfree"]), name
        # Sphinx takes what stands before a colon there for a type, and two names for one
        assert not re.search(r"^Returns:\n +[^\n]*: ", text, re.M), name
        attributes = re.search(r"^Attributes:\n(.*?)(?:^\S|\Z)", text, re.S | re.M)
        assert not attributes or not re.search(r"^    \w+, ", attributes[1], re.M), name
        if inspect.isfunction(found):
            kind = inspect.signature(found).return_annotation
            ours = getattr(import_module(found.__module__), kind, None)
            of_ours = inspect.isclass(ours) and ours.__module__.startswith("hf_packfree")
            assert not of_ours or kind in documented, f"{name} returns {kind}"
    # what those reports are made of
    assert {"Measurement", "Limits", "gated_delta_rule"} <= documented.keys()


def test_what_the_reference_has_is_public():
    """By its own name or its module's; classes that functions return are, too."""
    module = ""
    for directive, name in re.findall(
        r"^\.\. (currentmodule|autofunction):: ([\w.]+)$", DOCS["reference.md"], re.M
    ):
        if directive == "currentmodule":
            module = name
        else:
            public = module in ("hf_packfree", "hf_packfree.data")
            assert public or re.search(rf"\b{name}`", DOCS["stability.md"]), name


def test_every_operation_and_backend_is_listed():
    from hf_packfree.ops.table import OPS

    rows = {
        row[0].split("`")[1]: row[1]
        for row in table_after("performance.md", "| operation | from the fastest on |")
    }
    assert rows.keys() == OPS.keys()
    for op in OPS:
        assert set(OPS[op].backends) <= set(re.findall(r"`(\w+)`", rows[op])), op


def test_the_releases_are_those_of_the_table():
    """If not: write what hf_packfree/versions.py says into docs/compatibility.md."""
    rows = table_after("compatibility.md", "| package | oldest that is taken |")
    assert rows == [
        [row.name, row.floor or "any", " to ".join(row.cpu), ", ".join(row.gpu)]
        for row in VERSIONS.values()
    ]


def test_every_error_is_listed_with_its_builtin():
    section = DOCS["refused.md"].split("<!-- refused -->")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", section, re.M))
    kinds = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.PackFreeError)
    ]
    wanted = {kind.__name__: kind for kind in kinds if kind is not errors.PackFreeError}
    assert listed.keys() == wanted.keys()
    for name, kind in wanted.items():
        assert issubclass(kind, getattr(__import__("builtins"), listed[name])), name


@pytest.mark.parametrize("page", PAGES)
def test_files_it_names_exist(page):
    named = set(re.findall(r"`((?:hf_packfree|tests|notebooks|docs)/[\w/.-]*)`", PAGES[page]))
    modules = {
        name.replace(".", "/") for name in re.findall(r"python -m (tests[\w.]+)", PAGES[page])
    }
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing + [name for name in modules if not (ROOT / f"{name}.py").exists()]


def test_every_family_is_listed():
    from hf_packfree.patching.registry import FAMILIES

    section = DOCS["compatibility.md"].split("## Families")[1].split("\n## ")[0]
    assert [family.name for family in FAMILIES] == re.findall(r"^\| `(\w+)` \|", section, re.M)


def said() -> str:
    """Every text of the package, with a star where a value is put in."""
    texts = []
    for path in (ROOT / "hf_packfree").rglob("*.py"):
        for node in nodes(path.read_text()):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        part.value if isinstance(part, ast.Constant) else "*"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_troubleshooting_quotes_what_is_said_and_names_every_error():
    page, texts = DOCS["troubleshooting.md"], said()
    warnings, problems = page.split("## Errors")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", warnings + problems, re.M)[2:]
    for says, means in rows:
        theirs = re.search(
            r"(transformers'|TRL's|PEFT's) own|bitsandbytes|too long|broken environment", means
        )
        quoted = [] if theirs else re.findall(r"`([^`]+)`", says)
        for fragment in (
            part.strip() for text in quoted for part in re.split(r"\.\.\.|\bN\b", text)
        ):
            fragment = re.sub(r"^\W+|\W+$", "", fragment)
            known = fragment in texts or hasattr(errors, fragment)
            assert len(fragment) < 12 or known, fragment
    kinds = {name for name in dir(hf_packfree) if hasattr(errors, name)} - {"PackFreeError"}
    assert kinds <= set(re.findall(r"^\| `(\w+)`", problems, re.M))
