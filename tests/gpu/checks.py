"""Where GPU tests run, and documents cut out of a row."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from hf_packfree.packing import PackedSequence

TRIAL = os.environ.get("PACKFREE_GPU_TESTS") == "cpu"
"""A trial of the tests themselves on a CPU, with tiny sizes."""
DEVICE = "cpu" if TRIAL else "cuda"
LENGTHS = (1, 2, 3, 63, 64, 65, 129, 200, 513)
LONG = (*LENGTHS, 1000, 2000)
"""Left to itself, FlashQLA computes parts of documents of 500 tokens and more apart, from an
approximate state.
"""
HEADS = (2, 4, 16) if TRIAL else (16, 32, 128)
"""Key heads, value heads and their size in the linear layers: grouped, and the published models'
size.
"""
ATTENTION = (4, 2, 16) if TRIAL else (8, 2, 256)
"""Query heads, key heads and their size in full attention."""
TOWER = (2, 16) if TRIAL else (16, 64)
"""Heads of a vision tower, and their size in the published 2B model."""
WIDTH = 72 if TRIAL else 2048
"""Of the residual stream."""

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not TRIAL and not torch.cuda.is_available(), reason="needs a CUDA device"),
    # the kernels' packages warn in their own ways
    pytest.mark.filterwarnings("default"),
]


def spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of every document."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(end - length, end) for end, length in zip(ends, lengths)]


def record_of(lengths: Sequence[int]) -> PackedSequence:
    """The documents' record on the tests' device."""
    return PackedSequence.from_lengths(list(lengths), device=DEVICE)
