"""The record in compiled graphs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from hf_packfree.packing import PackedSequence


def told_by_shape(x):
    """As layers do that also run rows of one document."""
    packed = PackedSequence.from_lengths([x.shape[1]] * x.shape[0], device=x.device)
    return x.flatten(0, 1) * 2 + packed.position_ids()[0, :, None], packed.seq_idx, packed.cu_seqlens


AROUND = {"nothing": nullcontext, "inference mode": torch.inference_mode, "a default device": partial(torch.device, "cpu")}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_a_record_is_built_in_compiled_graphs_wherever_they_run(around):
    """numpy is not traced: under inference mode, or with a default device, torch.compile cannot."""
    torch._dynamo.reset()
    compiled = torch.compile(told_by_shape, backend="eager")
    with around():
        for shape in ((2, 5, 3), (2, 7, 3), (3, 9, 3)):
            x = torch.randn(shape)
            for found, wanted in zip(compiled(x), told_by_shape(x), strict=True):
                assert torch.equal(found, wanted) and found.dtype == wanted.dtype
