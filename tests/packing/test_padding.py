"""Unpad and repad are inverses, lazily too; pad tokens that stay in the row."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_packfree.packing import (
    Batch,
    PackedSequence,
    PackingInputs,
    lazy_repad,
    repad,
    resolve_boundaries,
    unpad,
    with_left_pad_tokens,
)
from tests.input_formats import padded_rows

CPU = torch.device("cpu")
ROWS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=1, max_size=4)


def resolve(mask, drop_padding=False) -> PackedSequence | None:
    ids = torch.arange(mask.numel()).view(mask.shape)
    return resolve_boundaries(PackingInputs(None, mask), Batch(ids), drop_padding=drop_padding)


@given(rows=ROWS, extra=st.integers(0, 3), left=st.booleans())
def test_unpad_and_repad_are_inverse(rows, extra, left):
    _, numbers, _ = padded_rows(rows, "left" if left else "right", extra)
    packed = resolve(numbers)
    if packed is None:
        assert all(len(row) == 1 for row in rows)
        return
    assert packed.lengths == [length for row in rows for length in row]
    batch = torch.randn(*numbers.shape, 3)
    row = unpad(batch, packed)
    assert row.shape == (1, sum(map(sum, rows)), 3)
    assert torch.equal(repad(row, packed), batch * (numbers > 0)[..., None])
    assert torch.equal(unpad(repad(row, packed), packed), row)


@given(rows=ROWS, extra=st.integers(0, 3), left=st.booleans())
def test_lazy_padding_has_the_values_and_gradients_of_repad(rows, extra, left):
    _, numbers, _ = padded_rows([row[:1] for row in rows], "left" if left else "right", extra)
    packed = resolve((numbers > 0).long(), drop_padding=True)
    if packed is None:
        assert bool((numbers > 0).all())
        return
    weights, row = (
        torch.randn(*numbers.shape, 3),
        torch.randn(1, packed.num_tokens, 3, requires_grad=True),
    )
    eager, lazy = repad(row, packed), lazy_repad(row, packed)
    assert lazy.shape == eager.shape and lazy.dtype == eager.dtype and torch.equal(lazy, eager)
    wanted, found = (
        torch.autograd.grad((padded * weights).sum(), row)[0] for padded in (eager, lazy)
    )
    assert torch.equal(found, wanted)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), data=st.data())
def test_kept_left_pad_tokens_are_segments_of_their_own_and_stay_zero(lengths, data):
    """The last pad token before some left-padded documents stays in the row."""
    width = max(lengths) + 1
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    chosen = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    indices = torch.tensor([row * width + width - lengths[row] - 1 for row in chosen])
    packed = with_left_pad_tokens(resolve(mask, drop_padding=True), indices)
    assert packed.lengths == [
        size for row, length in enumerate(lengths) for size in ([1] * (row in chosen) + [length])
    ]
    pads = torch.isin(packed.indices, indices)
    assert packed.padding_segments == packed.left_pad_segments and torch.equal(
        packed.is_real(), ~pads[None]
    )
    assert packed.num_documents == len(lengths) and packed.num_real_tokens == sum(lengths)
    mixed = torch.ones(1, packed.num_tokens, 2)
    assert torch.equal(packed.zero_left_pad(mixed), (~pads)[None, :, None].expand_as(mixed).float())
    batch = torch.arange(mask.numel()).view(mask.shape)
    assert torch.equal(unpad(batch, packed)[0], packed.indices)
