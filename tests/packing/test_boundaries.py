"""Boundaries from every form; what is malformed or contradictory is named before anything runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_packfree.errors import BoundaryConflict, BoundaryError
from hf_packfree.packing import PackedSequence, PackingInputs, resolve_boundaries, repad, unpad
from tests.input_formats import ROW_FORMATS, block_mask, one_row

CPU, INT32 = torch.device("cpu"), torch.int32
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def read(shape=None, ids=None, **given_forms) -> PackedSequence | None:
    """Read forms of a batch whose tokens all differ, or are `ids`."""
    ids = torch.arange(shape[0] * shape[1]).view(shape) if ids is None else ids
    flat = ids.reshape(-1)
    inputs, same_token = PackingInputs(**given_forms), lambda places, place: flat[places] == flat[place]
    return resolve_boundaries(inputs, tuple(ids.shape), CPU, same_token)


def lengths_of(packed):
    return None if packed is None else packed.lengths


@given(lengths=LENGTHS)
@pytest.mark.parametrize("form", ROW_FORMATS)
def test_every_form_reads_the_same_lengths(form, lengths):
    forms = dict(ROW_FORMATS[form](one_row(lengths), lengths))
    packed = read((1, sum(lengths)), **forms)
    assert lengths_of(packed) == (None if len(lengths) == 1 else lengths)


@given(first=LENGTHS, second=LENGTHS)
@pytest.mark.parametrize("one", ["positions", "cu_seq_lens", "seq_idx", "indexed_mask"])
def test_two_forms_agree_or_raise(one, first, second):
    """Restarting positions beside any other form: accepted exactly when they mean the same documents."""
    if sum(first) != sum(second):
        first, second = first + [sum(second)], second + [sum(first)]
    assume(one != "indexed_mask" or len(first) > 1)  # numbered 1 throughout it is a plain mask, which speaks of padding alone
    forms = dict(ROW_FORMATS[one](one_row(first), first))
    forms["position_ids"] = forms.get("position_ids", one_row(second)["positions"])
    forms.setdefault("seq_idx", one_row(second)["numbers"])
    if first == second:
        assert lengths_of(read((1, sum(first)), **forms)) == (None if len(first) == 1 else first)
        return
    with pytest.raises(BoundaryConflict, match=r"disagreement: a document starts at row 0, token \d+"):
        read((1, sum(first)), **forms)


def test_positions_that_jump_ahead_in_a_padded_row_are_refused():
    """One document with a gap, as transformers reads it, or the next one's later part: beside seq_idx it is known."""
    positions, mask = torch.tensor([[0, 1, 2, 20, 21, 22, 0, 0]]), torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    with pytest.raises(BoundaryError, match="jump ahead within a padded row, by 18 at row 0, token 3; wanted .* pass seq_idx"):
        read((1, 8), position_ids=positions, attention_mask=mask)
    apart = read((1, 8), position_ids=positions, attention_mask=mask, seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]]))
    assert lengths_of(apart) == [3, 3]
    assert lengths_of(read((1, 6), position_ids=positions[:, :6])) == [3, 3], "without padding another document starts"


@given(rows=st.lists(LENGTHS, min_size=1, max_size=4), extra=st.integers(0, 3), left=st.booleans())
def test_unpad_and_repad_are_inverse(rows, extra, left):
    width = max(map(sum, rows)) + extra
    numbers = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        filled = torch.cat([torch.full((n,), i) for i, n in enumerate(row, 1)])
        at = width - len(filled) if left else 0
        numbers[index, at : at + len(filled)] = filled
    packed = read(ids=torch.arange(numbers.numel()).view(numbers.shape), attention_mask=numbers)
    if packed is None:
        assert all(len(row) == 1 for row in rows)
        return
    assert packed.lengths == [n for row in rows for n in row]
    batch = torch.randn(*numbers.shape, 3)
    row = unpad(batch, packed)
    assert row.shape == (1, sum(map(sum, rows)), 3)
    assert torch.equal(repad(row, packed), batch * (numbers > 0)[..., None])
    assert torch.equal(unpad(repad(row, packed), packed), row)


@given(lengths=LENGTHS)
def test_the_record_is_consistent(lengths):
    packed = PackedSequence.from_lengths(lengths)
    assert packed.cu_seqlens.dtype == packed.seq_idx.dtype == INT32
    assert packed.lengths == lengths and packed.max_seqlen == max(lengths) and packed.num_segments == len(lengths)
    assert torch.equal(packed.position_ids(), one_row(lengths)["positions"])
    assert torch.equal(packed.seq_idx, one_row(lengths)["numbers"])
    assert packed.cached(len_of, 3) is packed.cached(len_of, 3)


def len_of(packed, times):
    return [packed.num_tokens] * times


def test_names_of_the_first_version_still_read():
    packed = PackedSequence.from_lengths([3, 2], padding_segments=[1])
    with pytest.warns(DeprecationWarning, match="padding_segments"):
        assert packed.filler == packed.padding_segments == (1,)
    with pytest.warns(DeprecationWarning, match="cached"):
        assert packed.derive(len_of, 3) is packed.cached(len_of, 3)


@pytest.mark.parametrize("lengths", [[], [3, 0, 2], [-1]])
def test_documents_have_at_least_one_token(lengths):
    with pytest.raises(BoundaryError, match="at least one token"):
        PackedSequence.from_lengths(lengths)


def offsets(*values, dtype=INT32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("cu_seqlens", "why"),
    [
        (offsets(1, 4, 9), "start at 0"),
        (offsets(0, 4, 8), "end at 9"),
        (offsets(0, 4, 12), "end at 9"),
        (offsets(0, 6, 4, 9), "never decrease"),
        (offsets(0, 4, 9, dtype=torch.int64), "int32"),
        (offsets(0, 4, 9, dtype=torch.float32), "int32"),
        (offsets(0, 4, 9)[None], "int32 tensor"),
        (offsets(0), "end at 9"),
        ([0, 4, 9], "int32 tensor"),
        (offsets(0, 4, 9).to("meta"), "wanted it on cpu"),
    ],
)
@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_bad_offsets(name, cu_seqlens, why):
    with pytest.raises(BoundaryError, match=why) as error:
        read((1, 9), **{name: cu_seqlens})
    assert name in str(error.value) and "found" in str(error.value)


def test_empty_documents_in_offsets_drop_out():
    assert read((1, 9), cu_seq_lens_q=offsets(0, 0, 4, 4, 9, 9)).lengths == [4, 5]


def test_offsets_of_queries_and_keys_must_agree():
    with pytest.raises(BoundaryConflict, match="cu_seq_lens_q and cu_seq_lens_k"):
        read((1, 9), cu_seq_lens_q=offsets(0, 4, 9), cu_seq_lens_k=offsets(0, 5, 9))


def test_a_document_may_not_cross_rows():
    with pytest.raises(BoundaryError, match="start of every row"):
        read((2, 5), cu_seq_lens_q=offsets(0, 3, 10))
    assert read((2, 5), cu_seq_lens_q=offsets(0, 3, 5, 10)).lengths == [3, 2, 5]


@pytest.mark.parametrize(
    ("forms", "why"),
    [
        ({"attention_mask": torch.ones(1, 8)}, r"\[1, 8\]"),
        ({"attention_mask": torch.ones(2, 9)}, r"\[2, 9\]"),
        ({"attention_mask": torch.ones(9)}, r"\[9\]"),
        ({"attention_mask": torch.ones(1, 9, 9)}, r"\[1, 9, 9\]"),
        ({"attention_mask": torch.ones(1, 1, 9, 8)}, r"\[1, 1, 9, 8\]"),
        ({"attention_mask": -torch.ones(1, 9).long()}, "0 and 1"),
        ({"attention_mask": torch.full((1, 9), 0.5)}, "0 and 1"),
        ({"position_ids": torch.arange(8)[None]}, "position_ids"),
        ({"position_ids": torch.zeros(2, 1, 9).long()}, "position_ids"),
        ({"seq_idx": torch.zeros(1, 8).int()}, "seq_idx"),
        ({"seq_idx": torch.zeros(1, 9)}, "seq_idx"),
    ],
)
def test_bad_shapes_and_values(forms, why):
    with pytest.raises(BoundaryError, match=why):
        read((1, 9), **forms)


def test_longest_document():
    facts = one_row([4, 5])
    with pytest.raises(BoundaryConflict, match="max_length_k=4"):
        read((1, 9), cu_seq_lens_q=facts["offsets"], max_length_k=4)
    assert read((1, 9), cu_seq_lens_q=facts["offsets"], max_length_q=7, max_length_k=torch.tensor(5)).lengths == [4, 5]
    with pytest.raises(BoundaryError, match="alone"):
        read((1, 9), max_length_q=9)


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_q", "max_seqlen"])
def test_other_libraries_names_are_refused(name):
    with pytest.raises(BoundaryError, match="rename"):
        PackingInputs.from_kwargs({name: 1}, position_ids=None, attention_mask=None)


def test_square_masks():
    mask = block_mask(one_row([4, 5])["numbers"])
    assert read((1, 9), attention_mask=mask).lengths == [4, 5]
    assert read((1, 9), attention_mask=mask.long()).lengths == [4, 5]
    assert read((1, 9), attention_mask=mask.expand(1, 3, 9, 9)).lengths == [4, 5]
    leaky = mask.clone()
    leaky[..., 6, 1] = True
    with pytest.raises(BoundaryError, match="block-diagonal"):
        read((1, 9), attention_mask=leaky)
    full = mask | mask.transpose(-1, -2)
    with pytest.raises(BoundaryError, match="block-diagonal"):
        read((1, 9), attention_mask=full)
    biased = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    biased[..., 3, 1] = -2.0
    with pytest.raises(BoundaryError, match="block-diagonal"):
        read((1, 9), attention_mask=biased)


def test_square_masks_of_one_document_are_upstreams_whatever_they_say():
    causal = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    assert read((1, 9), attention_mask=causal) is None
    assert read((1, 9), attention_mask=torch.ones_like(causal)) is None
    assert read((1, 9), attention_mask=causal & torch.ones_like(causal).triu(-3)) is None


# tails of padding --------------------------------------------------------------------------------------------------
TAIL_IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 3, 3]])


@pytest.mark.parametrize(
    "forms",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])},
        {"cu_seq_lens_q": offsets(0, 3, 5, 8), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])},
        {"cu_seq_lens_q": offsets(0, 3, 5, 8), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])},
    ],
)
def test_a_tail_of_pad_tokens_is_one_segment(forms):
    assert read(ids=TAIL_IDS, **forms).lengths == [3, 2, 3]


@pytest.mark.parametrize("positions", [{}, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])}], ids=["", "positions"])
@pytest.mark.parametrize(
    "forms",
    [
        {"cu_seq_lens_q": offsets(0, 3, 5, 6, 7, 8), "max_length_q": 3},
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 2, 3, 4]], dtype=INT32)},
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 3, 4, 5]])},
    ],
)
def test_documents_that_are_told_apart_stay_apart_even_if_equal(forms, positions):
    found = read(ids=TAIL_IDS, **forms, **positions)
    assert found.lengths == [3, 2, 1, 1, 1] and found.padding_segments == (2, 3, 4), "each alone, none in statistics"


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("form", ["positions", "cu_seq_lens", "seq_idx", "indexed_mask"])
def test_a_single_token_at_the_end_is_padding_if_it_is_the_one_that_pads(form, pads):
    forms = PackingInputs(**dict(ROW_FORMATS[form](one_row([3, 2, 1]), [3, 2, 1])))
    same_token, is_padding = lambda places, place: places == place, lambda place: pads and place == 5
    found = resolve_boundaries(forms, (1, 6), CPU, same_token, is_padding=is_padding)
    assert found.lengths == [3, 2, 1] and found.padding_segments == ((2,) if pads else ())


def test_one_token_documents_that_differ_stay_apart():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])
    assert read(ids=torch.tensor([[5, 6, 7, 8, 9, 4, 3, 3]]), position_ids=positions).lengths == [3, 2, 1, 2]
    assert read(ids=torch.tensor([[5, 6, 7, 8, 9, 3, 3, 4]]), position_ids=positions).lengths == [3, 2, 1, 1, 1]


def test_tails_end_with_their_row():
    ids = torch.tensor([[5, 6, 3, 3], [3, 3, 7, 8]])
    positions = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]])
    assert read(ids=ids, position_ids=positions).lengths == [2, 2, 1, 1, 2]


def test_padding_may_be_counted_or_not_in_positions():
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
    assert read((1, 6), attention_mask=mask, position_ids=torch.tensor([[0, 1, 1, 1, 2, 3]])) is None
    assert read((1, 6), attention_mask=mask, position_ids=torch.arange(6)[None]) is None
    assert read((1, 6), attention_mask=mask, position_ids=torch.tensor([[0, 1, 0, 0, 0, 1]])).lengths == [2, 2]


def test_padding_that_only_we_can_read_makes_a_record():
    assert read((1, 6), seq_idx=torch.tensor([[0, 0, 0, 0, -1, -1]], dtype=INT32)).indices.tolist() == [0, 1, 2, 3]
    assert read((1, 6), attention_mask=torch.tensor([[2, 2, 2, 2, 0, 0]])).lengths == [4]


def test_nothing_but_padding_is_upstreams():
    assert read((2, 3), attention_mask=torch.zeros(2, 3).long()) is None


@pytest.mark.parametrize("form", ["position_ids", "seq_idx", "attention_mask"])
def test_lists_are_refused(form):
    with pytest.raises(BoundaryError, match=f"found {form} as a list; wanted a tensor"):
        read((1, 3), **{form: [[0, 1, 2]]})


@pytest.mark.parametrize("mask", [{"full_attention": None}, object()], ids=["a dict", "anything"])
def test_masks_that_are_no_tensor_are_upstreams(mask):
    assert read((2, 3), attention_mask=mask) is None
