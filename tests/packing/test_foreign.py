"""Words of other libraries: refused alone, compared beside upstream's."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_packfree.errors import BoundaryConflict, BoundaryError
from hf_packfree.packing import Batch, PackingInputs, resolve_boundaries
from hf_packfree.packing.foreign import _ALIKE, FOREIGN, _alike
from hf_packfree.patching.registry import FAMILIES
from tests.input_formats import ROW_FORMATS, one_row

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def lengths_of(tokens, **keywords):
    """The lengths that a forward of one row of different tokens reads; None where upstream runs."""
    inputs = PackingInputs.from_kwargs(
        keywords,
        position_ids=keywords.pop("position_ids", None),
        attention_mask=keywords.pop("attention_mask", None),
    )
    assert keywords == {}, "words for documents reach no layer"
    packed = resolve_boundaries(inputs, Batch(torch.arange(tokens)[None]))
    return None if packed is None else packed.lengths


def offsets(lengths):
    return one_row(lengths)["cu_seqlens"]


WORDS = {
    "cu_seqlens": offsets,
    "cu_seqlens_q": offsets,
    "cu_seqlens_cpu": lambda lengths: offsets(lengths).long(),
    "cu_seq_lens": lambda lengths: offsets(lengths).tolist(),
    "seq_lens": torch.tensor,
    "document_lengths": np.asarray,
    "flash_attn_kwargs": lambda lengths: SimpleNamespace(cu_seqlens_q=offsets(lengths)),
    "packed_seq_params": lambda lengths: {"cu_seqlens_q": offsets(lengths)},
    "segment_ids": lambda lengths: one_row(lengths)["seq_idx"] + 1,
    "text_position_ids": lambda lengths: one_row(lengths)["position_ids"],
    "max_seqlen": max,
    "max_seqlen_q": lambda lengths: torch.tensor(max(lengths)),
}
"""{word: its value for a row of these documents}."""


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    "beside", [{}, {"attention_mask": torch.ones(1, 9)}], ids=["alone", "mask"]
)
def test_alone_they_are_refused_by_name(word, beside):
    ours = next(ours for ours, names in FOREIGN.items() if word in names)
    with pytest.raises(BoundaryError, match=f"found the keyword {word}; wanted {ours}, .* rename"):
        lengths_of(9, **{word: WORDS[word]([4, 5])}, **beside)
    assert lengths_of(9, **{word: None}, **beside) is None


@settings(max_examples=20)
@given(lengths=LENGTHS)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("beside", ["positions", "cu_seq_lens", "seq_idx", "all_flash"])
def test_beside_upstreams_they_agree(word, beside, lengths):
    given = ROW_FORMATS[beside](one_row(lengths), lengths) | {word: WORDS[word](lengths)}
    assert lengths_of(sum(lengths), **given) == (None if len(lengths) == 1 else lengths)


@settings(max_examples=20)
@given(first=LENGTHS, second=LENGTHS)
@pytest.mark.parametrize("word", [word for word in WORDS if "max" not in word])
def test_or_contradict_them(word, first, second):
    if sum(first) != sum(second):
        first, second = [*first, sum(second)], [*second, sum(first)]
    given = {"position_ids": one_row(first)["position_ids"], word: WORDS[word](second)}
    if first == second:
        assert lengths_of(sum(first), **given) == (None if len(first) == 1 else first)
        return
    with pytest.raises(BoundaryConflict, match=rf"{word}.* in disagreement"):
        lengths_of(sum(first), **given)


def test_a_longest_document_that_is_too_short():
    positions = one_row([4, 5])["position_ids"]
    with pytest.raises(BoundaryConflict, match="max_seqlen=4 with a document of 5 tokens"):
        lengths_of(9, position_ids=positions, max_seqlen=4)


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
@pytest.mark.parametrize("word", ["flash_attn_kwargs", "packed_seq_params"])
def test_every_field_of_an_object_is_compared(word, kind):
    """As NeMo-RL and Megatron fill them, with what is None left open."""
    positions, wrong = one_row([4, 5])["position_ids"], offsets([3, 6])
    agree = {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"), offsets([4, 5])),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_seqlen_kv"), 5),
    }
    for fields in (agree, agree | {"cu_seqlens_k": None, "max_seqlen_q": None}):
        assert lengths_of(9, position_ids=positions, **{word: kind(**fields)}) == [4, 5]
    for name in agree:
        fields = agree | {name: 4 if name.startswith("max") else wrong}
        with pytest.raises(BoundaryConflict, match=rf"found .*{word}.{name}(=4| .*disagreement)"):
            lengths_of(9, position_ids=positions, **{word: kind(**fields)})


def test_offsets_that_leave_out_the_padding_at_the_end():
    """As NeMo-RL and Megatron count: what follows is padding, which positions say too."""
    positions = torch.cat([one_row([4, 5])["position_ids"], torch.zeros(1, 3, dtype=torch.long)], 1)
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0])
    for word in ("cu_seqlens", "flash_attn_kwargs"):
        inputs = PackingInputs(position_ids=positions, foreign={word: WORDS[word]([4, 5])})
        packed = resolve_boundaries(inputs, Batch(ids[None]))
        assert packed.lengths == [4, 5, 3] and packed.padding_segments == (2,)


@pytest.mark.parametrize(
    "given", [object(), "0, 4, 9", torch.tensor([0.0, 4.0, 9.0])], ids=["object", "str", "floats"]
)
@pytest.mark.parametrize("word", ["cu_seqlens", "seq_lens", "segment_ids", "flash_attn_kwargs"])
def test_values_that_are_none(word, given):
    with pytest.raises(BoundaryError, match=f"found {word}"):
        lengths_of(9, position_ids=one_row([4, 5])["position_ids"], **{word: given})


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("cu_seq_len_q", "cu_seq_lens_q"),
        ("cu_seq_lens_kv", "cu_seq_lens_q"),
        ("cumulative_seqlens", "cu_seq_lens_q"),
        ("doc_offsets", "cu_seq_lens_q"),
        ("pack_lengths", "cu_seq_lens_q"),
        ("max_seq_lens", "max_length_q"),
        ("seq_index", "seq_idx"),
        ("packing_idx", "seq_idx"),
        ("attn_mask", "attention_mask"),
        ("document_mask", "attention_mask"),
        ("pos_ids", "position_ids"),
        ("positions", "position_ids"),
    ],
)
def test_what_sounds_like_boundaries_and_holds_some_is_refused(name, ours):
    for value in (torch.tensor([[0, 4, 9]]), [0, 4, 9], np.arange(3)):
        with pytest.raises(BoundaryError, match=f"found the keyword {name}; wanted {ours},"):
            PackingInputs.from_kwargs({name: value}, position_ids=None, attention_mask=None)
    for value in (None, 9, True, "x"):
        keywords = {name: value}
        PackingInputs.from_kwargs(keywords, position_ids=None, attention_mask=None)
        assert keywords == {name: value}


def test_no_word_is_one_of_upstreams():
    """A parameter of the families' own forwards, or of a vision tower's, has upstream's meaning."""
    foreign = {word for group in FOREIGN.values() for word in group}
    for family in FAMILIES:
        classes = [
            thing
            for thing in vars(import_module(family.upstream)).values()
            if hasattr(thing, "forward")
        ]
        names = {name for cls in classes for name in inspect.signature(cls.forward).parameters}
        assert names & foreign <= {"cu_seqlens", "max_seqlen"}, (
            "the vision tower alone has these two, and makes them itself"
        )
        heads = [cls for cls in classes if issubclass(cls, tuple(family.head_pairs()))]
        names = {name for cls in heads for name in inspect.signature(cls.forward).parameters}
        assert names and not {name for name in names - set(_ALIKE) if _alike(name)}
