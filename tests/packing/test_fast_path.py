"""The swift readings, of one row and of a padded batch, say what the general one says, or leave it to that."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_packfree.errors import BoundaryError
from hf_packfree.packing import PackingInputs, inputs, resolve_boundaries
from hf_packfree.packing.fast_path import offsets_of_one_row, rows_of_mask
from tests.input_formats import one_row

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)
NAMES = {"cu_seq_lens_q": "offsets", "cu_seq_lens_k": "offsets", "seq_idx": "numbers", "position_ids": "positions"}


def general(said: PackingInputs, tokens: int):
    """Lengths of the general reading, or the type of what it raises."""
    before, inputs.offsets_of_one_row = inputs.offsets_of_one_row, lambda *_: None
    try:
        return outcome(said, tokens)
    finally:
        inputs.offsets_of_one_row = before


def outcome(said: PackingInputs, tokens: int):
    try:
        packed = resolve_boundaries(said, (1, tokens), CPU, lambda places, place: places == place)
    except BoundaryError as error:
        return type(error)
    if packed is None:
        return None
    indices = None if packed.indices is None else packed.indices.tolist()
    return packed.lengths, packed.plain, packed.padding_segments, indices


@given(data=st.data(), first=LENGTHS, second=LENGTHS, names=st.sets(st.sampled_from(sorted(NAMES)), min_size=1))
def test_equals_the_general_reading(data, first, second, names):
    """Every form of its own documents, of either list, or with one entry changed to anything."""
    tokens = sum(first)
    second = second[:1] if sum(second[:1]) >= tokens else [*second, max(tokens - sum(second), 0)]
    said = {}
    for name in sorted(names):
        lengths = data.draw(st.sampled_from([first, first, second]))
        said[name] = one_row([length for length in lengths if length])[NAMES[name]].clone()
        if data.draw(st.integers(0, 4)) == 0:
            flat = said[name].view(-1)
            flat[data.draw(st.integers(0, len(flat) - 1))] = data.draw(st.integers(-1, 3))
    given_inputs = PackingInputs(**said)
    assert outcome(given_inputs, tokens) == general(given_inputs, tokens)


@given(lengths=LENGTHS, names=st.sets(st.sampled_from(sorted(NAMES)), min_size=1))
def test_reads_what_agrees(lengths, names):
    lengths = [*lengths, 2]  # a row that ends in one-token documents may end in padding
    row = one_row(lengths)
    offsets = [row["offsets"]] * ("cu_seq_lens_q" in names) + [row["offsets"].clone()] * ("cu_seq_lens_k" in names)
    numbers, positions = (row[NAMES[name]] if name in names else None for name in ("seq_idx", "position_ids"))
    found = offsets_of_one_row(sum(lengths), CPU, offsets, numbers, positions)
    assert found.tolist() == row["offsets"].tolist()


UNSOUND = [(0, 3, 2, 5), (0, 2**31 - 1, -2, 5), (1, 3, 5), (0, 3, 4), (0, 3, 9), (-1, 3, 5), (5,)]


@pytest.mark.parametrize("offsets", UNSOUND, ids=str)
def test_leaves_unsound_offsets_to_the_general_reading(offsets):
    assert offsets_of_one_row(5, CPU, [torch.tensor(offsets, dtype=torch.int32)], None, None) is None


@pytest.mark.parametrize("numbers", [(0, 0, 1, 1, -1), (-1, -1, 0, 0, 0), (0, 0, 0, 1, 2), (0, 0, 0, 0, 1)], ids=str)
def test_leaves_padding_in_numbers_and_tails_to_the_general_reading(numbers):
    assert offsets_of_one_row(5, CPU, [], torch.tensor([numbers]), None) is None


@pytest.mark.parametrize("what", ["another device", "another dtype", "another shape", "nothing"])
def test_leaves_the_rest_to_the_general_reading(what):
    positions = {
        "another device": torch.arange(4, device="meta")[None],
        "another dtype": torch.arange(4.0)[None],
        "another shape": torch.arange(4),
        "nothing": None,
    }[what]
    assert offsets_of_one_row(4, CPU, [], None, positions) is None


def test_positions_that_wrap_around_in_32_bits_start_a_document():
    far = torch.tensor([[0, 1, 2**31 - 1, -(2**31), -(2**31) + 1]], dtype=torch.int32)
    assert offsets_of_one_row(5, CPU, [], None, far).tolist() == [0, 2, 3, 5]


DTYPES = st.sampled_from([torch.bool, torch.int64, torch.int32, torch.float32])
MASKS = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=1, max_size=4)
)


def of_mask(mask: torch.Tensor, swift=None):
    """Everything a record says, or what is raised, of a padded batch with this mask alone."""
    before = inputs.rows_of_mask
    inputs.rows_of_mask = swift or before
    try:
        packed = resolve_boundaries(
            PackingInputs(None, mask), tuple(mask.shape), CPU, lambda places, place: places == place, drop_padding=True
        )
    except BoundaryError as error:
        return str(error)
    finally:
        inputs.rows_of_mask = before
    if packed is None:
        return None
    said = packed.lengths, packed.seq_idx.tolist(), packed.max_seqlen, packed.batch_shape, packed.padding_segments, packed.plain
    return *said, None if packed.indices is None else packed.indices.tolist()


@given(rows=MASKS, dtype=DTYPES, odd=st.sampled_from([None, None, None, 2, -1]))
def test_a_mask_alone_equals_the_general_reading(rows, dtype, odd):
    """Padding at either end, holes, empty rows, nothing but padding; in some, one value is no 0 or 1."""
    mask = torch.tensor(rows).to(dtype)
    if odd is not None and dtype != torch.bool:
        mask[0, 0] = odd
    assert of_mask(mask) == of_mask(mask, lambda mask: None)


def test_a_mask_alone_is_read_without_the_general_reading(monkeypatch):
    monkeypatch.setattr(inputs, "_parse", lambda *_: pytest.fail("the general reading was asked"))
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    assert of_mask(mask)[0] == [2, 2]


@pytest.mark.parametrize("mask", [[[], []], [[1, 0, 1]], [[1, 2, 0]], [[1, 1, 1]], [[0, 0, 0]], [[1.0, 0.5, 0.0]]], ids=str)
def test_leaves_holes_documents_and_extremes_of_a_mask_to_the_general_reading(mask):
    assert rows_of_mask(torch.tensor(mask)) is None
