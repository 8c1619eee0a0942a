"""`verify_packing(model, tree=...)`: samples that share prefixes against themselves alone."""

from __future__ import annotations

import json
import re

import pytest

from hf_packfree import apply_patches, verify_packing
from hf_packfree.cli import main
from hf_packfree.errors import BoundaryError, LeakDetected
from hf_packfree.ops import tree_paths
from hf_packfree.packing import PackedSequence
from tests.support import leak_in_the_convolution, tiny
from tests.vision import tiny_vision

LENGTHS, PARENTS = (20, 70, 5, 65, 3, 40, 9), (None, 0, 1, 1, 0, 4, None)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl_moe"])
def test_samples_are_exact_and_the_control_is_not(family):
    report = verify_packing(apply_patches(tiny(family)), lengths=LENGTHS, tree=PARENTS)
    found, control = report.patched, report.unpatched
    assert report.lengths == (95, 155, 63, 9) and report.tree
    assert found.logits <= 1e-5 and found.gradients <= 1e-4
    assert found.influence == found.cross_gradient == 0.0
    assert control.logits >= 1e-2 and control.gradients >= 1e-2
    assert "4 prefix-sharing samples equal the same samples alone" in str(report)


def test_the_first_is_the_prompt_of_the_others():
    report = verify_packing(apply_patches(tiny()), lengths=(20, 5, 64), tree=True)
    assert report.lengths == (25, 84) and report.patched.prefix_gradient > 0
    packed = verify_packing(apply_patches(tiny()), lengths=(20, 5, 64))
    assert packed.lengths == (20, 5, 64) and packed.patched.prefix_gradient is None


def test_text_in_a_vision_language_model():
    report = verify_packing(apply_patches(tiny_vision("qwen3_5")), lengths=LENGTHS, tree=PARENTS)
    assert report.patched.logits <= 1e-5 and report.media == ()


def test_a_leak_between_branches_is_found(monkeypatch):
    model = apply_patches(tiny())
    leak_in_the_convolution(monkeypatch)
    with pytest.raises(LeakDetected, match="documents react to each other's tokens") as leak:
        verify_packing(model, lengths=(20, 5, 64), tree=True)
    assert leak.value.report.patched.influence > 1e-3


def test_a_prefix_that_nobody_reads_is_found(monkeypatch):
    """Branches without what is in front of them are documents of their own."""
    monkeypatch.setattr(PackedSequence, "from_tree", lambda lengths, parents, device: flat)
    flat = PackedSequence.from_lengths([20, 5, 64])
    with pytest.raises(LeakDetected, match="no gradient reaches a shared prefix"):
        verify_packing(apply_patches(tiny()), lengths=(20, 5, 64), tree=True)


def test_branches_that_are_added_wrongly_are_found(monkeypatch):
    """The gradient of one branch alone reaches the prefix."""
    whole = tree_paths.plan_shared

    def first_alone(*given):
        others, shared, numbers = whole(*given)
        return others[:0], shared, numbers[:0]

    monkeypatch.setattr(tree_paths, "plan_shared", first_alone)
    with pytest.raises(LeakDetected, match="a gradient differs from a backward per document"):
        verify_packing(apply_patches(tiny()), lengths=(20, 5, 64), tree=True)


def test_parents_that_are_none():
    with pytest.raises(BoundaryError, match="found parents"):
        verify_packing(apply_patches(tiny()), lengths=(20, 5, 64), tree=[None, 0])


@pytest.mark.parametrize(
    ("lengths", "tree"), [((5, 64), True), ((5, 6, 7), (None, 0, 1)), ((64, 3), (None, 0))]
)
def test_a_single_sample_is_refused(lengths, tree):
    """It was called a leak, of nan."""
    with pytest.raises(ValueError, match="found a tree of . segments with one sample; wanted two"):
        verify_packing("llama", lengths=lengths, tree=tree)


@pytest.mark.parametrize("tree", [5, None, 1.5])
def test_trees_that_are_none_are_refused(tree):
    with pytest.raises(ValueError, match="found tree=.*; wanted True, False or the number"):
        verify_packing("llama", lengths=(20, 5, 64), tree=tree)


def test_on_the_command_line(capsys):
    assert main(("verify", "qwen3_5", "--tree", "--lengths", "20,5,64", "--no-gradients")) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "One row of samples of 25, 84 tokens, which share a prefix, against" in shown
    assert main(("verify", "qwen3_5", "--tree", "--lengths", "20,5,64", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["tree"] is True
