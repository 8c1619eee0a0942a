"""Every attribute that we put on somebody else's object is in one file, with its reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import hf_packfree
from hf_packfree.packing import marks
from hf_packfree.packing.marks import Mark

MARKS = {name: mark for name, mark in vars(marks).items() if isinstance(mark, Mark)}
THEIRS = {mark.name for mark in MARKS.values() if not mark.name.startswith("packfree_")}
# of our own classes: where they come from, and what they stand in front of
OF_CLASSES = {"packfree_home", "packfree_users_class"}


def test_no_other_file_names_an_attribute():
    house = Path(hf_packfree.__file__).parent
    found = {
        (file.name, name)
        for file in house.rglob("*.py")
        for name in re.findall(r"\bpackfree_[a-z_]+", file.read_text())
        if name not in OF_CLASSES
    }
    assert {file for file, _ in found} == {"marks.py"}, found
    assert {name for _, name in found} == {mark.name for mark in MARKS.values()} - THEIRS


def test_no_other_file_sets_one_that_upstream_named():
    house = Path(hf_packfree.__file__).parent
    found = [
        (file.name, name)
        for file in house.rglob("*.py")
        for name in THEIRS
        if re.search(rf"\.{name} = |setattr\(.*{name}", file.read_text())
    ]
    assert THEIRS and found == []


def test_each_says_why():
    body = ast.parse(Path(marks.__file__).read_text()).body
    pairs = zip(body, body[1:], strict=False)
    reasons = {
        node.target.id: ast.unparse(after)
        for node, after in pairs
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr)
    }
    assert reasons.keys() == MARKS.keys() and min(map(len, reasons.values())) > 40


@pytest.mark.parametrize("name", MARKS)
def test_a_mark_is_put_read_and_taken(name):
    mark, x, module = MARKS[name], torch.zeros(2), torch.nn.Linear(1, 1)
    marked = mark.on_view(x, 3)
    assert mark.of(marked) == 3 and mark.of(x) is None
    assert marked.data_ptr() == x.data_ptr()
    assert mark.take(marked) == 3 and mark.of(marked) is None and mark.take(marked) is None
    before = dict(vars(module))
    mark.put(module, {})
    assert mark.of(module) == {} and mark.take(module) == {} and vars(module) == before


def test_marks_have_names_of_their_own():
    assert len({mark.name for mark in MARKS.values()}) == len(MARKS)
