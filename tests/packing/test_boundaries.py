"""Boundaries from every input format; what is malformed or contradictory raises before anything
runs.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_packfree.errors import BoundaryConflict, BoundaryError
from hf_packfree.packing import (
    Batch,
    PackedSequence,
    PackingInputs,
    resolve_boundaries,
    to_hf_kwargs,
    unpad,
)
from tests.input_formats import (
    ROW_FORMATS,
    ROWS_FORMATS,
    additive,
    block_mask,
    one_row,
    padded_rows,
)

CPU, INT32 = torch.device("cpu"), torch.int32
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def resolve(shape=None, ids=None, cached=False, **inputs) -> PackedSequence | None:
    """Resolve the boundaries of a batch whose tokens all differ, or are `ids`."""
    ids = torch.arange(shape[0] * shape[1]).view(shape) if ids is None else ids
    return resolve_boundaries(PackingInputs(**inputs), Batch(ids), cached=cached)


def lengths_of(packed):
    return None if packed is None else packed.lengths


@given(lengths=LENGTHS)
@pytest.mark.parametrize("input_format", ROW_FORMATS)
def test_every_input_format_gives_the_same_lengths(input_format, lengths):
    inputs = dict(ROW_FORMATS[input_format](one_row(lengths), lengths))
    packed = resolve((1, sum(lengths)), **inputs)
    upstreams = len(lengths) == 1 and not input_format.startswith("block_mask")
    assert lengths_of(packed) == (None if upstreams else lengths)


@given(rows=st.lists(LENGTHS, min_size=1, max_size=4), extra=st.integers(0, 3), left=st.booleans())
@pytest.mark.parametrize("input_format", ROWS_FORMATS)
def test_every_format_of_several_rows_gives_the_same_documents(input_format, rows, extra, left):
    """Padded on either side; padding is dropped, or has segments of its own where the format
    makes it one.
    """
    _, numbers, positions = padded_rows(rows, "left" if left else "right", extra)
    inputs, lengths = (
        ROWS_FORMATS[input_format](numbers, positions),
        [length for row in rows for length in row],
    )
    # real tokens all differ, padding is 0
    ids = torch.arange(1, numbers.numel() + 1).view(numbers.shape) * (numbers > 0)
    documents = ids[ids > 0].split(lengths)
    # zero positions on the left are documents of one token
    assume(not (left and input_format == "positions_zero_tail"))
    packed = resolve(ids=ids, **inputs)
    if packed is None:
        assert all(len(row) == 1 for row in rows), "only rows of one document are upstream's"
        return
    spans = packed.cu_seqlens_cpu.tolist()
    found = [unpad(ids, packed)[0, start:end] for start, end in zip(spans, spans[1:])]
    if input_format in ("positions_zero_tail", "cu_seq_lens_with_tails"):
        found = [tokens for tokens in found if tokens.any()]
    else:
        assert packed.lengths == lengths
    assert all(torch.equal(one, other) for one, other in zip(found, documents, strict=True))


@given(lengths=LENGTHS)
def test_a_record_in_upstreams_keywords_reads_back_as_itself(lengths):
    packed = PackedSequence.from_lengths(lengths)
    found = resolve((1, sum(lengths)), **to_hf_kwargs(packed))
    assert lengths_of(found) == (None if len(lengths) == 1 else lengths)


@given(first=LENGTHS, second=LENGTHS)
@pytest.mark.parametrize("one", ["positions", "cu_seq_lens", "seq_idx", "indexed_mask"])
def test_two_formats_agree_or_raise(one, first, second):
    """Restarting positions beside any other format: accepted exactly when they mean the same
    documents.
    """
    if sum(first) != sum(second):
        first, second = first + [sum(second)], second + [sum(first)]
    # an indexed mask of ones alone is a padding mask, which does not separate documents
    assume(one != "indexed_mask" or len(first) > 1)
    inputs = dict(ROW_FORMATS[one](one_row(first), first))
    inputs["position_ids"] = inputs.get("position_ids", one_row(second)["position_ids"])
    inputs.setdefault("seq_idx", one_row(second)["seq_idx"])
    if first == second:
        assert lengths_of(resolve((1, sum(first)), **inputs)) == (
            None if len(first) == 1 else first
        )
        return
    starts = [set(one_row(lengths)["cu_seqlens"].tolist()) for lengths in (first, second)]
    message = (
        f"disagreement: a document starts at row 0, token {min(starts[0] ^ starts[1])} in one of "
        f"them"
    )
    with pytest.raises(BoundaryConflict, match=message):
        resolve((1, sum(first)), **inputs)


def test_positions_that_jump_ahead_in_a_padded_row_are_refused():
    """One document with a gap, as transformers reads it, or two documents: only beside `seq_idx`
    is it known.
    """
    positions, mask = (
        torch.tensor([[0, 1, 2, 20, 21, 22, 0, 0]]),
        torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]),
    )
    with pytest.raises(
        BoundaryError,
        match="jump ahead within a padded row, by 18 at row 0, token 3; wanted .* pass seq_idx",
    ):
        resolve((1, 8), position_ids=positions, attention_mask=mask)
    apart = resolve(
        (1, 8),
        position_ids=positions,
        attention_mask=mask,
        seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]]),
    )
    assert lengths_of(apart) == [3, 3]
    assert lengths_of(resolve((1, 6), position_ids=positions[:, :6])) == [3, 3], (
        "without padding a second document starts"
    )


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
        (offsets(0, 4, 9).to("meta"), "on meta, without values"),
    ],
)
@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_bad_offsets(name, cu_seqlens, why):
    with pytest.raises(BoundaryError, match=why) as error:
        resolve((1, 9), **{name: cu_seqlens})
    assert name in str(error.value) and "found" in str(error.value)


def test_empty_documents_in_offsets_drop_out():
    assert resolve((1, 9), cu_seq_lens_q=offsets(0, 0, 4, 4, 9, 9)).lengths == [4, 5]


def test_offsets_of_queries_and_keys_must_agree():
    with pytest.raises(BoundaryConflict, match="cu_seq_lens_q and cu_seq_lens_k"):
        resolve((1, 9), cu_seq_lens_q=offsets(0, 4, 9), cu_seq_lens_k=offsets(0, 5, 9))


def test_a_document_may_not_cross_rows():
    with pytest.raises(BoundaryError, match="start of every row"):
        resolve((2, 5), cu_seq_lens_q=offsets(0, 3, 10))
    assert resolve((2, 5), cu_seq_lens_q=offsets(0, 3, 5, 10)).lengths == [3, 2, 5]


@pytest.mark.parametrize(
    ("inputs", "why"),
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
def test_bad_shapes_and_values(inputs, why):
    with pytest.raises(BoundaryError, match=why):
        resolve((1, 9), **inputs)


@given(lengths=LENGTHS, given_length=st.integers(1, 12))
@pytest.mark.parametrize("name", ["max_length_q", "max_length_k"])
def test_a_max_length_is_refused_exactly_when_a_document_is_longer(name, lengths, given_length):
    inputs = {"cu_seq_lens_q": one_row(lengths)["cu_seqlens"], name: given_length}
    if given_length >= max(lengths):
        assert lengths_of(resolve((1, sum(lengths)), **inputs)) == (
            None if len(lengths) == 1 else lengths
        )
        return
    with pytest.raises(
        BoundaryConflict, match=f"{name}={given_length} with a document of {max(lengths)} tokens"
    ):
        resolve((1, sum(lengths)), **inputs)


def test_longest_document():
    facts = one_row([4, 5])
    with pytest.raises(BoundaryConflict, match="max_length_k=4"):
        resolve((1, 9), cu_seq_lens_q=facts["cu_seqlens"], max_length_k=4)
    assert resolve(
        (1, 9), cu_seq_lens_q=facts["cu_seqlens"], max_length_q=7, max_length_k=torch.tensor(5)
    ).lengths == [4, 5]
    with pytest.raises(BoundaryError, match="alone"):
        resolve((1, 9), max_length_q=9)


@pytest.mark.parametrize(
    "given",
    ["5", math.nan, math.inf, 4.5, [5], True, torch.tensor([5, 5]), torch.tensor(5, device="meta")],
    ids=repr,
)
@pytest.mark.parametrize("name", ["max_length_q", "max_length_k"])
def test_a_longest_document_that_is_no_number(name, given):
    with pytest.raises(BoundaryError, match=f"found {name}=.* wanted one whole number"):
        resolve((1, 9), cu_seq_lens_q=offsets(0, 4, 9), **{name: given})


POSITIONS = [0, 1, 2, 3, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor(POSITIONS, dtype=torch.float32) + 0.5,
        torch.full((9,), torch.nan),
        torch.tensor(POSITIONS).bool(),
        torch.tensor(POSITIONS).bfloat16(),
        torch.tensor(POSITIONS).half(),
        torch.tensor(POSITIONS, dtype=torch.complex64),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_positions_that_are_no_whole_numbers(given, rows):
    with pytest.raises(BoundaryError, match=f"found position_ids of {given.dtype}"):
        resolve((1, 9), position_ids=given.expand(rows, 1, 9) if rows > 1 else given[None])
    assert resolve((1, 9), position_ids=torch.tensor([POSITIONS], dtype=torch.float32)).lengths == [
        4,
        5,
    ]


def test_times_of_videos_may_be_fractions():
    """Omni's rows of time, height and width are float32 with parts of seconds; the text row
    counts tokens.
    """
    text = torch.tensor([[POSITIONS]], dtype=torch.float32)
    assert resolve((1, 9), position_ids=torch.cat([text, text + 0.5, text, text])).lengths == [4, 5]
    counted = torch.arange(9.0)[None, None]
    assert resolve((1, 9), position_ids=torch.cat([counted + 0.5, counted, counted])) is None


@pytest.mark.parametrize("name", ["position_ids", "seq_idx", "attention_mask", "cu_seq_lens_q"])
def test_arrays_and_tensors_without_values(name):
    given = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]], dtype=INT32)
    with pytest.raises(BoundaryError, match=f"found {name} as a ndarray; wanted a .*tensor"):
        resolve((1, 9), **{name: given.numpy()})
    with pytest.raises(BoundaryError, match=f"found {name} on meta"):
        resolve((1, 9), **{name: given.to("meta")})


@pytest.mark.parametrize("name", ["position_ids", "seq_idx", "attention_mask", "cu_seq_lens_q"])
@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        lambda given: torch.nested.nested_tensor([given.float()]),
        lambda given: torch.quantize_per_tensor(given.float(), 1.0, 0, torch.quint8),
    ],
    ids=["sparse", "nested", "quantised"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.*quantize")
def test_tensors_of_other_layouts(name, make):
    with pytest.raises(BoundaryError, match=f"found {name} as a .* tensor; wanted a dense one"):
        PackingInputs(**{name: make(torch.tensor([[0, 1, 2, 0]]))})


def test_block_diagonal_masks():
    mask = block_mask(one_row([4, 5])["seq_idx"])
    assert resolve((1, 9), attention_mask=mask).lengths == [4, 5]
    assert resolve((1, 9), attention_mask=mask.long()).lengths == [4, 5]
    assert resolve((1, 9), attention_mask=mask.expand(1, 3, 9, 9)).lengths == [4, 5]
    leaky = mask.clone()
    leaky[..., 6, 1] = True
    with pytest.raises(BoundaryError, match="block-diagonal"):
        resolve((1, 9), attention_mask=leaky)
    full = mask | mask.transpose(-1, -2)
    with pytest.raises(BoundaryError, match="block-diagonal"):
        resolve((1, 9), attention_mask=full)
    biased = additive(mask)
    biased[..., 3, 1] = -2.0
    with pytest.raises(BoundaryError, match="block-diagonal"):
        resolve((1, 9), attention_mask=biased)


def test_4d_masks_of_one_document_are_upstreams_where_it_reads_them_as_they_are_meant():
    causal = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    assert resolve((1, 9), attention_mask=additive(causal)) is None
    assert resolve((1, 9), attention_mask=additive(causal.triu(-3))) is None, "a window is a bias"
    assert resolve((1, 9), attention_mask=causal).lengths == [9], "added to scores, True is 1"
    assert resolve((1, 9), attention_mask=torch.ones_like(causal), cached=True) is None


# trailing padding
# --------------------------------------------------------------------------------------------------
TAIL_IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 3, 3]])


@pytest.mark.parametrize(
    "inputs",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])},
        {
            "cu_seq_lens_q": offsets(0, 3, 5, 8),
            "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]]),
        },
        {
            "cu_seq_lens_q": offsets(0, 3, 5, 8),
            "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]]),
        },
    ],
)
def test_a_tail_of_pad_tokens_is_one_segment(inputs):
    assert resolve(ids=TAIL_IDS, **inputs).lengths == [3, 2, 3]


@pytest.mark.parametrize(
    "positions",
    [{}, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])}],
    ids=["", "positions"],
)
@pytest.mark.parametrize(
    "inputs",
    [
        {"cu_seq_lens_q": offsets(0, 3, 5, 6, 7, 8), "max_length_q": 3},
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 2, 3, 4]], dtype=INT32)},
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 3, 4, 5]])},
    ],
)
def test_documents_that_an_input_separates_stay_apart_even_if_equal(inputs, positions):
    found = resolve(ids=TAIL_IDS, **inputs, **positions)
    assert found.lengths == [3, 2, 1, 1, 1] and found.padding_segments == (2, 3, 4), (
        "each a segment, none in statistics"
    )


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("input_format", ["positions", "cu_seq_lens", "seq_idx", "indexed_mask"])
def test_a_single_token_at_the_end_is_padding_if_it_is_the_padding_token(input_format, pads):
    inputs = PackingInputs(**dict(ROW_FORMATS[input_format](one_row([3, 2, 1]), [3, 2, 1])))
    found = resolve_boundaries(inputs, Batch(torch.arange(6)[None], pad=5 if pads else None))
    assert found.lengths == [3, 2, 1] and found.padding_segments == ((2,) if pads else ())


@given(lengths=LENGTHS, padding=st.integers(2, 5))
def test_any_row_padded_with_zero_positions_ends_in_one_padding_segment(lengths, padding):
    """The last document's token differs from the padding token, or it would be padding too."""
    real = sum(lengths)
    ids = torch.cat((torch.arange(1, real + 1), torch.zeros(padding, dtype=torch.long)))[None]
    positions = torch.cat(
        (one_row(lengths)["position_ids"], torch.zeros(1, padding, dtype=torch.long)), 1
    )
    packed = resolve(ids=ids, position_ids=positions)
    assert packed.lengths == [*lengths, padding] and packed.padding_segments == (len(lengths),)
    assert packed.num_documents == len(lengths) and packed.num_real_tokens == real


def test_one_token_documents_that_differ_stay_apart():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])
    assert resolve(
        ids=torch.tensor([[5, 6, 7, 8, 9, 4, 3, 3]]), position_ids=positions
    ).lengths == [3, 2, 1, 2]
    assert resolve(
        ids=torch.tensor([[5, 6, 7, 8, 9, 3, 3, 4]]), position_ids=positions
    ).lengths == [3, 2, 1, 1, 1]


def test_tails_end_with_their_row():
    ids = torch.tensor([[5, 6, 3, 3], [3, 3, 7, 8]])
    positions = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]])
    assert resolve(ids=ids, position_ids=positions).lengths == [2, 2, 1, 1, 2]


def test_padding_may_be_counted_or_not_in_positions():
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
    assert (
        resolve((1, 6), attention_mask=mask, position_ids=torch.tensor([[0, 1, 1, 1, 2, 3]]))
        is None
    )
    assert resolve((1, 6), attention_mask=mask, position_ids=torch.arange(6)[None]) is None
    assert resolve(
        (1, 6), attention_mask=mask, position_ids=torch.tensor([[0, 1, 0, 0, 0, 1]])
    ).lengths == [2, 2]


def test_padding_that_upstream_would_misread_makes_a_record():
    assert resolve(
        (1, 6), seq_idx=torch.tensor([[0, 0, 0, 0, -1, -1]], dtype=INT32)
    ).indices.tolist() == [0, 1, 2, 3]
    assert resolve((1, 6), attention_mask=torch.tensor([[2, 2, 2, 2, 0, 0]])).lengths == [4]


def test_nothing_but_padding_is_upstreams():
    assert resolve((2, 3), attention_mask=torch.zeros(2, 3).long()) is None


@pytest.mark.parametrize("name", ["position_ids", "seq_idx", "attention_mask"])
def test_lists_are_refused(name):
    with pytest.raises(BoundaryError, match=f"found {name} as a list; wanted a tensor"):
        resolve((1, 3), **{name: [[0, 1, 2]]})


def test_a_mask_that_is_no_tensor_is_upstreams():
    assert resolve((2, 3), attention_mask=object()) is None


def test_a_dict_without_a_mask_for_attention_makes_a_record():
    """Upstream's eager attention would look ahead."""
    assert resolve((2, 3), attention_mask={"full_attention": None}).lengths == [3, 3]


@pytest.mark.parametrize("name", ["position_ids", "seq_idx", "attention_mask"])
def test_a_batch_of_no_rows_is_refused(name):
    """As which accelerate cuts a row of several documents for two processes, with split_batches."""
    with pytest.raises(BoundaryError, match="no rows.*accelerator_config={'dispatch_batches': Fal"):
        resolve((0, 3), **{name: torch.zeros(0, 3, dtype=torch.long)})
