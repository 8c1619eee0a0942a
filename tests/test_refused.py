"""docs/refused.md says what the code refuses, all of it."""

from __future__ import annotations

from hf_packfree import errors
from tests import refused
from tests.refused import PAGE, Refusal, _in_file, main, refusals, section_of


def test_the_page_says_what_the_code_refuses(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_that_is_behind_is_found_and_written(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "refused.md"
    copy.write_text(
        PAGE.read_text().replace("positions", "postions", 1) + "| a | row | too | many |"
    )
    families = tmp_path / "compatibility.md"
    families.write_text(refused.FAMILIES_PAGE.read_text().replace("`bloom`, ", ""))
    monkeypatch.setattr(refused, "PAGE", copy)
    monkeypatch.setattr(refused, "FAMILIES_PAGE", families)
    assert main(["--check"]) == 1 and "--write" in capsys.readouterr().out
    copy.write_text(refused.page())
    assert main(["--check"]) == 1 and "docs/compatibility.md is not" in capsys.readouterr().out
    assert main(["--write"]) == 0 and main(["--check"]) == 0
    assert "`bloom`" in families.read_text()


def test_every_error_of_every_file_is_in_a_section():
    assert len(refusals()) > 150
    assert {each.file for each in refusals() if section_of(each.file) is None} == set()
    named = {each.error for each in refusals()}
    raised = {name for name, cls in vars(errors).items() if isinstance(cls, type)}
    assert raised - named <= {"PackFreeError"}


def test_how_a_message_is_read():
    source = 'raise BoundaryError(f"found {some_name} of {len(x)}; wanted a | b; do c; or d")'
    assert list(_in_file("f.py", source)) == [
        Refusal("f.py", "BoundaryError", "*some name* of …", "a \\| b", "do c; or d")
    ]
    assert list(_in_file("f.py", "print('found x; wanted y; do z')")) == []
    assert list(_in_file("f.py", "raise KeyError(f'found x; wanted y; do z')")) == []


def test_constants_are_put_in():
    """The file's own and the package's, formatted as the message does; what depends on the
    release, and names of other kinds, stay names.
    """
    source = (
        "from hf_packfree.cli.arguments import MOST_TOKENS\n"
        "from hf_packfree.models.compat import CACHE\n"
        "_LIMIT: float = 1e-5\n"
        "RECIPE = 'f(x, ' r'a\\.*)'\n"
        "OTHER = {}\n"
        "raise ValueError(f'found {_LIMIT:.0e} of {MOST_TOKENS:,}; wanted {RECIPE!r}; "
        "pass {CACHE}, {OTHER} or {some_name}')"
    )
    (row,) = _in_file("f.py", source)
    assert row.found == "1e-05 of 16,777,216"
    assert row.wanted == r"'f(x, a\\\\.\*)'" and row.mend == "pass *CACHE*, *OTHER* or *some name*"
