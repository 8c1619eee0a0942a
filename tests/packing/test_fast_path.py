"""The fast path, for one row and for a padded batch, gives what parsing every input gives, or
leaves the batch to that.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_packfree.errors import PackFreeError
from hf_packfree.packing import Batch, PackingInputs, inputs, resolve_boundaries
from hf_packfree.packing.fast_path import offsets_of_one_row, rows_of_mask
from tests.input_formats import one_row

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)
NAMES = {
    "cu_seq_lens_q": "cu_seqlens",
    "cu_seq_lens_k": "cu_seqlens",
    "seq_idx": "seq_idx",
    "position_ids": "position_ids",
}


def different(rows: int, tokens: int) -> Batch:
    """Tokens that all differ."""
    return Batch(torch.arange(rows * tokens).view(rows, tokens))


def without_fast_path(given_inputs: PackingInputs, tokens: int):
    """The outcome when every input is parsed."""
    before, inputs.offsets_of_one_row = inputs.offsets_of_one_row, lambda *_: None
    try:
        return outcome(given_inputs, tokens)
    finally:
        inputs.offsets_of_one_row = before


def outcome(given_inputs: PackingInputs, tokens: int):
    """What the record holds, or the type of the error."""
    try:
        packed = resolve_boundaries(given_inputs, different(1, tokens))
    except PackFreeError as error:
        return type(error)
    if packed is None:
        return None
    indices = None if packed.indices is None else packed.indices.tolist()
    return packed.lengths, packed.plain, packed.padding_segments, indices


@given(
    data=st.data(),
    first=LENGTHS,
    second=LENGTHS,
    names=st.sets(st.sampled_from(sorted(NAMES)), min_size=1),
)
def test_equals_parsing_every_input(data, first, second, names):
    """Each input describes one of two lists of documents, and may have one entry changed to
    anything.
    """
    tokens = sum(first)
    second = second[:1] if sum(second[:1]) >= tokens else [*second, max(tokens - sum(second), 0)]
    passed = {}
    for name in sorted(names):
        lengths = data.draw(st.sampled_from([first, first, second]))
        passed[name] = one_row([length for length in lengths if length])[NAMES[name]].clone()
        if data.draw(st.integers(0, 4)) == 0:
            flat = passed[name].view(-1)
            flat[data.draw(st.integers(0, len(flat) - 1))] = data.draw(st.integers(-1, 3))
    given_inputs = PackingInputs(**passed)
    assert outcome(given_inputs, tokens) == without_fast_path(given_inputs, tokens)


@given(lengths=LENGTHS, names=st.sets(st.sampled_from(sorted(NAMES)), min_size=1))
def test_inputs_that_agree_take_the_fast_path(lengths, names):
    # trailing one-token documents may be padding
    lengths = [*lengths, 2]
    row = one_row(lengths)
    cu_seqlens = [row["cu_seqlens"]] * ("cu_seq_lens_q" in names) + [row["cu_seqlens"].clone()] * (
        "cu_seq_lens_k" in names
    )
    seq_idx, position_ids = (
        row[name] if name in names else None for name in ("seq_idx", "position_ids")
    )
    found = offsets_of_one_row(sum(lengths), CPU, cu_seqlens, seq_idx, position_ids)
    assert found.tolist() == row["cu_seqlens"].tolist()


INVALID = [(0, 3, 2, 5), (0, 2**31 - 1, -2, 5), (1, 3, 5), (0, 3, 4), (0, 3, 9), (-1, 3, 5), (5,)]


@pytest.mark.parametrize("offsets", INVALID, ids=str)
def test_invalid_offsets_are_left_to_the_parsers(offsets):
    assert (
        offsets_of_one_row(5, CPU, [torch.tensor(offsets, dtype=torch.int32)], None, None) is None
    )


@pytest.mark.parametrize(
    "seq_idx", [(0, 0, 1, 1, -1), (-1, -1, 0, 0, 0), (0, 0, 0, 1, 2), (0, 0, 0, 0, 1)], ids=str
)
def test_padding_in_seq_idx_and_trailing_tokens_are_left_to_the_parsers(seq_idx):
    assert offsets_of_one_row(5, CPU, [], torch.tensor([seq_idx]), None) is None


@pytest.mark.parametrize("what", ["another device", "another dtype", "another shape", "nothing"])
def test_whatever_else_is_left_to_the_parsers(what):
    positions = {
        "another device": torch.arange(4, device="meta")[None],
        "another dtype": torch.arange(4.0)[None],
        "another shape": torch.arange(4),
        "nothing": None,
    }[what]
    assert offsets_of_one_row(4, CPU, [], None, positions) is None


def test_boundaries_of_one_row_come_to_the_host_in_one_copy(monkeypatch):
    """On a GPU every further wait is a time in which it has nothing to do."""
    copies, to = [], torch.Tensor.to

    def counted(tensor, *args, **kwargs):
        if args == ("cpu",):
            copies.append((tensor.dtype, tensor.numel()))
        return to(tensor, *args, **kwargs)

    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1]])
    monkeypatch.setattr(torch.Tensor, "to", counted)
    found = offsets_of_one_row(7, CPU, [], None, positions)
    assert found.tolist() == [0, 3, 5, 7] and copies == [(torch.bool, 8)]
    # positions that start elsewhere may go back into the document before: they are read, too
    copies.clear()
    found = offsets_of_one_row(7, CPU, [], None, torch.tensor([[0, 1, 2, 5, 6, 0, 1]]))
    assert found.tolist() == [0, 3, 5, 7] and copies == [(torch.bool, 8), (torch.int64, 7)]
    assert offsets_of_one_row(7, CPU, [], None, torch.tensor([[0, 1, 2, 3, 2, 3, 4]])) is None


def test_positions_that_wrap_around_in_32_bits_start_a_document():
    far = torch.tensor([[0, 1, 2**31 - 1, -(2**31), -(2**31) + 1]], dtype=torch.int32)
    assert offsets_of_one_row(5, CPU, [], None, far).tolist() == [0, 2, 3, 5]


DTYPES = st.sampled_from([torch.bool, torch.int64, torch.int32, torch.float32])
MASKS = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=1, max_size=4
    )
)


def record_of(mask: torch.Tensor, fast_path=None):
    """Everything the record of a padded batch with this mask alone holds, or the error's
    message.
    """
    before = inputs.rows_of_mask
    inputs.rows_of_mask = fast_path or before
    try:
        batch = different(*mask.shape)
        packed = resolve_boundaries(PackingInputs(None, mask), batch, drop_padding=True)
    except PackFreeError as error:
        return str(error)
    finally:
        inputs.rows_of_mask = before
    if packed is None:
        return None
    indices = None if packed.indices is None else packed.indices.tolist()
    boundaries = packed.lengths, packed.seq_idx.tolist(), packed.max_seqlen
    return *boundaries, packed.batch_shape, packed.padding_segments, packed.plain, indices


@given(rows=MASKS, dtype=DTYPES, odd=st.sampled_from([None, None, None, 2, -1]))
def test_a_mask_alone_equals_parsing_it(rows, dtype, odd):
    """Padding at either end, holes, empty rows, nothing but padding; in some, one value is
    neither 0 nor 1.
    """
    mask = torch.tensor(rows).to(dtype)
    if odd is not None and dtype != torch.bool:
        mask[0, 0] = odd
    assert record_of(mask) == record_of(mask, lambda mask: None)


def test_a_mask_alone_is_not_parsed(monkeypatch):
    monkeypatch.setattr(inputs, "_parse", lambda *_: pytest.fail("the mask was parsed"))
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    assert record_of(mask)[0] == [2, 2]


@pytest.mark.parametrize(
    "mask",
    [[[], []], [[1, 0, 1]], [[1, 2, 0]], [[1, 1, 1]], [[0, 0, 0]], [[1.0, 0.5, 0.0]]],
    ids=str,
)
def test_holes_documents_and_extremes_of_a_mask_are_left_to_the_parsers(mask):
    assert rows_of_mask(torch.tensor(mask)) is None
