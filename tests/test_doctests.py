"""The examples in public docstrings run, and print what is written there."""

from __future__ import annotations

import doctest

import pytest
import torch

from hf_packfree import PackedSequence, apply_patches, verify_packing
from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.ops.delta_rule import gated_delta_rule
from hf_packfree.ops.ssd import ssd
from hf_packfree.packing import repad, unpad

DOCUMENTED = {
    "apply_patches": apply_patches,
    "PackedSequence.from_lengths": PackedSequence.from_lengths,
    "unpad": unpad,
    "repad": repad,
    "verify_packing": verify_packing,
    "causal_conv1d": causal_conv1d,
    "gated_delta_rule": gated_delta_rule,
    "ssd": ssd,
}
"""Public objects whose docstrings teach by example; add to it what gets one."""

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_run(name):
    torch.manual_seed(0)
    torch.set_printoptions(profile="default")
    (example,) = doctest.DocTestFinder(recurse=False).find(DOCUMENTED[name], name, globs={})
    assert example.examples, f"{name} has no example"
    printed: list[str] = []
    results = doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(
        example, out=printed.append
    )
    assert results.failed == 0, "".join(printed)
