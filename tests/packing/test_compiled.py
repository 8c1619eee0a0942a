"""The record in compiled graphs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from hf_packfree.packing import PackedSequence


def rows_as_documents(x):
    """Build a record of one document per row, as a layer does, and use it."""
    packed = PackedSequence.from_lengths([x.shape[1]] * x.shape[0], device=x.device)
    return (
        x.flatten(0, 1) * 2 + packed.position_ids()[0, :, None],
        packed.seq_idx,
        packed.cu_seqlens,
    )


AROUND = {
    "nothing": nullcontext,
    "inference mode": torch.inference_mode,
    "a default device": partial(torch.device, "cpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_a_record_is_built_in_compiled_graphs_wherever_they_run(around):
    """numpy is not traced: under inference mode, or with a default device, torch.compile cannot."""
    torch._dynamo.reset()
    compiled = torch.compile(rows_as_documents, backend="eager")
    with around():
        for shape in ((2, 5, 3), (2, 7, 3), (3, 9, 3)):
            x = torch.randn(shape)
            for found, wanted in zip(compiled(x), rows_as_documents(x), strict=True):
                assert torch.equal(found, wanted) and found.dtype == wanted.dtype


def doubled_positions(packed, times):
    return packed.position_ids() * times


def numbers(packed, times):
    return torch.full((1, packed.num_tokens), 100.0 * times)


def test_cached_plans_are_shared_in_compiled_graphs():
    """Nested functions and functions of a module keep their own plans there, and a second record
    brings its own.
    """

    def layer(x, packed):
        plans = packed.cached(doubled_positions, 2)[0], packed.cached(numbers, 2)[0]
        return x * plans[0] + plans[1] + packed.is_real()[0], packed.position_ids()

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for lengths in ([3, 2], [1, 4], [2, 2, 1]):
        packed = PackedSequence.from_lengths(lengths, padding_segments=[len(lengths) - 1])
        x = torch.randn(5)
        for found, wanted in zip(compiled(x, packed), layer(x, packed), strict=True):
            assert torch.equal(found, wanted)
