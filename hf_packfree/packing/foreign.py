"""Other libraries' keywords for documents, which transformers ignores: refused, or compared with
transformers' own.

Passed alone, such keywords would leak in silence. Together with upstream's they are accepted where
both agree, because frameworks pass both. Shapes: B rows, S tokens of a row, N documents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError
from hf_packfree.packing.boundaries import (
    BoundarySpec,
    integers_of,
    parse_cu_seqlens,
    parse_position_ids,
    parse_seq_idx,
)

_OFFSETS = (
    "cu_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "cu_seqlens_cpu",
    "cu_seqlen",
    "cu_seq_lens",
    "cu_seq_len",
    "cu_lens",
    "cu_doc_lens",
    "linear_attn_cu_seq_lens_q",
)
"""Keywords for offsets, integers [N+1]; tokens after the last offset are padding."""
_LENGTHS = (
    "seq_lens",
    "seqlens",
    "seq_lengths",
    "sequence_lengths",
    "doc_lens",
    "document_lengths",
)
"""Keywords for lengths, integers [N], in tokens."""
_OBJECTS = ("packed_seq_params", "flash_attn_kwargs", "flash_attention_kwargs")
"""Keywords for objects or dicts with `cu_seqlens_q`, and maybe more of `_FIELDS`; None is
ignored.
"""
_FIELDS = {
    "offsets": ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"),
    "longest": ("max_seqlen_q", "max_seqlen_k", "max_seqlen_kv"),
}
"""The fields of such an object that are read like `_OFFSETS` and like `_LONGEST`."""
_LONGEST = (
    "max_seqlen",
    "max_seqlens",
    "max_seqlen_q",
    "max_seqlen_k",
    "max_seqlen_kv",
    "max_seq_len_q",
    "max_seq_len_k",
    "max_doc_len",
    "max_doc_lens",
)
"""Keywords for the longest document, whole numbers of tokens."""
_NUMBERS = (
    "segment_ids",
    "segment_id",
    "segment_idx",
    "document_ids",
    "document_id",
    "doc_ids",
    "doc_id",
    "sequence_ids",
    "sequence_id",
    "seq_ids",
    "seq_id",
    "sample_ids",
    "sample_idx",
    "example_ids",
    "packing_ids",
)
"""Keywords for the document of every token, integers [B, S]."""
_POSITIONS = ("text_position_ids", "segment_positions")
"""Keywords for positions, like `position_ids`."""

FOREIGN = {
    "cu_seq_lens_q": (*_OFFSETS, *_LENGTHS, *_OBJECTS),
    "max_length_q": _LONGEST,
    "seq_idx": _NUMBERS,
    "position_ids": _POSITIONS,
}
"""{upstream's keyword: keywords of the same meaning in Megatron, verl, AReaL, NeMo-RL, VeOmni,
ms-swift, prime-rl, OLMo and JAX's libraries}.
"""

_DOCUMENT = "(seq|sequence|doc|document|segment|sample|example|pack|packed|packing)_?"
_ALIKE = {
    "cu_seq_lens_q": rf"cu(m|mulative)?_?(seq|doc|segment|sample|len)|{_DOCUMENT}"
    r"(lens?|lengths?|offsets?|starts?|ends?|boundar\w+)$",
    "max_length_q": rf"max_?{_DOCUMENT}len",
    "seq_idx": rf"{_DOCUMENT}(ids?|idx|ind\w+|numbers?)$",
    "attention_mask": r"(attn|doc|document|block|segment|packing|packed|block_diagonal)_?mask$",
    "position_ids": r"(text_|token_|doc_|document_)?pos(ition)?(s|_ids?|_idx)$",
}
"""{upstream's keyword: a pattern of names that look like it, such as misspelt ones}."""


def take_foreign(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the keywords of other libraries from a forward's keywords, and return them.

    Raises:
        BoundaryError: an unknown keyword is named like one for boundaries, and holds a tensor or a
            list.
    """
    known = {name for names in FOREIGN.values() for name in names}
    taken = {name: kwargs.pop(name) for name in list(kwargs) if name in known}
    for name, value in kwargs.items():
        if isinstance(value, (Tensor, np.ndarray, list, tuple)) and (ours := _alike(name)):
            raise misspelt(name, ours)
    return {name: value for name, value in taken.items() if value is not None}


def misspelt(name: str, ours: str) -> BoundaryError:
    """Return the error for a keyword that upstream would ignore."""
    return BoundaryError(
        f"found the keyword {name}; wanted {ours}, as transformers spells it; rename it"
    )


def parse_foreign(
    foreign: Mapping[str, Any], specs: list[BoundarySpec], shape: tuple[int, int]
) -> list[BoundarySpec]:
    """Return the documents that other libraries' keywords describe, for comparison with `specs`,
    those of upstream's keywords.

    Raises:
        BoundaryError: `specs` separate no documents, so that upstream's keywords are missing; or a
            value is not of its keyword's type.
    """
    if foreign and not any(spec.values is not None for spec in specs):
        name = next(iter(foreign))
        raise misspelt(name, next(ours for ours, names in FOREIGN.items() if name in names))
    words: dict[str, Any] = {}
    for name, value in foreign.items():
        words |= _offsets_of(name, value) if name in _OBJECTS else {name: value}
    return [_parse(name, value, shape) for name, value in words.items() if name not in _LONGEST]


def longest_of(foreign: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords and fields of objects that give the length of the longest document, with
    their values.
    """
    found = {name: value for name, value in foreign.items() if name in _LONGEST}
    for name in foreign.keys() & set(_OBJECTS):
        found |= _fields(name, foreign[name], "longest")
    return found


def _offsets_of(name: str, given: Any) -> dict[str, Any]:
    """Return the fields of an object that hold offsets. `cu_seqlens_q` is always among them, so
    that an object without it is refused.
    """
    return {f"{name}.cu_seqlens_q": None} | _fields(name, given, "offsets")


def _fields(name: str, given: Any, kind: str) -> dict[str, Any]:
    read = given.get if isinstance(given, Mapping) else lambda field: getattr(given, field, None)
    found = {f"{name}.{field}": read(field) for field in _FIELDS[kind]}
    return {field: value for field, value in found.items() if value is not None}


@cache
def _alike(name: str) -> str | None:
    """Return upstream's keyword that the name of an unknown keyword resembles, or None."""
    if name in _ALIKE:
        return None
    return next((ours for ours, sound in _ALIKE.items() if re.match(sound, name)), None)


def _parse(name: str, value: Any, shape: tuple[int, int]) -> BoundarySpec:
    if name in _LENGTHS:
        lengths = _integers(name, value)
        return _parse_offsets(name, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), shape)
    if name.rpartition(".")[2] in _OFFSETS:
        return _parse_offsets(name, value, shape)
    if name in _POSITIONS:
        spec = parse_position_ids(_integers(name, value), shape)
        assert spec is not None
        return replace(spec, name=name)
    return replace(parse_seq_idx(_integers(name, value), shape), name=name, real=None)


def _parse_offsets(name: str, value: Any, shape: tuple[int, int]) -> BoundarySpec:
    offsets, total = _integers(name, value), shape[0] * shape[1]
    if offsets.ndim == 1 and offsets.numel() and offsets[-1] < total:
        offsets = torch.nn.functional.pad(offsets, (0, 1), value=total)
    return parse_cu_seqlens(name, offsets.to(torch.int32), shape, offsets.device)


def _integers(name: str, value: Any) -> Tensor:
    """Return integers on the host, as int64."""
    if (given := integers_of(value)) is None:
        raise BoundaryError(
            f"found {name} as {type(value).__name__}; wanted integers, to compare them with "
            "transformers' keywords; leave it out where those are passed"
        )
    return given
