"""The arguments of a forward that can describe documents, under transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError, UnsupportedInput
from hf_packfree.packing.foreign import longest_of, take_foreign
from hf_packfree.packing.record import PackedSequence
from hf_packfree.packing.tree import refuse_tree
from hf_packfree.packing.tree_keywords import take_tree

HF_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Upstream's keywords for packing; they are spelled in this file, and in messages that explain
one.
"""


@dataclass(frozen=True, eq=False)
class PackingInputs:
    """The arguments of a forward that can describe documents, as passed; None for those not passed.

    Shapes: B rows, S tokens of a row, N documents.

    Attributes:
        position_ids: integers [S], [B or 1, S], or a stack of 3 or 4 such rows.
        attention_mask: [B, S], 0/1 or indexed (1, 1, 2, 2, 0); [B or 1, heads or 1, S, S],
            block-diagonal, bool or additive; or transformers' dict of such masks by kind of layer;
            anything else belongs to upstream.
        cu_seq_lens_q, cu_seq_lens_k: int32 [N+1], offsets in tokens of the flattened batch.
        max_length_q, max_length_k: tokens of the longest document, or more.
        seq_idx: integers [B, S], the document of every token; below 0 is padding.
        foreign: keywords of other libraries with such values, see `hf_packfree.packing.foreign`.
        tree: keywords that describe a tree of shared prefixes, see
            `hf_packfree.packing.tree_keywords`.

    Raises:
        BoundaryError: an argument that has to be a tensor is none, is on meta, or is not dense.
        UnsupportedInput: under torch.export.
    """

    position_ids: Tensor | None = None
    attention_mask: Any = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    max_length_q: int | Tensor | None = None
    max_length_k: int | Tensor | None = None
    seq_idx: Tensor | None = None
    foreign: Mapping[str, Any] = field(default_factory=dict)
    tree: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_dict = isinstance(self.attention_mask, Mapping)
        masks = list(self.attention_mask.values()) if is_dict else [self.attention_mask]
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "position_ids"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Tensor):
                raise _no_tensor(name, given)
            _check_values(name, given)
        for mask in masks:
            if isinstance(mask, (list, tuple, np.ndarray)):
                raise _no_tensor("attention_mask", mask)
            _check_values("attention_mask", mask)

    @classmethod
    def from_kwargs(
        cls, kwargs: dict[str, Any], *, position_ids: Tensor | None, attention_mask: Any
    ) -> PackingInputs:
        """Pop upstream's packing keywords, and other libraries' words for them, from `kwargs`, so
        that layers below receive only the record.

        Raises:
            BoundaryError, UnsupportedInput: see `take_foreign` and `take_tree`.
        """
        return cls(
            position_ids,
            attention_mask,
            **{name: kwargs.pop(name, None) for name in HF_KEYWORDS},
            tree=take_tree(kwargs),
            foreign=take_foreign(kwargs),
        )

    @property
    def given(self) -> list[str]:
        """The names of the arguments that were passed."""
        words = {"foreign", "tree"}
        ours = {name: value for name, value in vars(self).items() if name not in words}
        found = ours | dict(self.foreign) | dict(self.tree)
        return [name for name, value in found.items() if value is not None]

    @property
    def named(self) -> bool:
        """Whether boundaries were passed under packing keywords, upstream's or others'."""
        ours = (self.cu_seq_lens_q, self.cu_seq_lens_k, self.seq_idx)
        return bool(self.foreign or self.tree) or any(value is not None for value in ours)

    def longest(self) -> dict[str, int]:
        """Return `max_length_q` and `_k`, and other libraries' words for them, as far as given.

        Raises:
            BoundaryError: one is no whole number.
        """
        ours = {"max_length_q": self.max_length_q, "max_length_k": self.max_length_k}
        given = (ours | longest_of(self.foreign)).items()
        return {name: _whole_number(name, value) for name, value in given if value is not None}


def _whole_number(name: str, given: Any) -> int:
    try:
        number = given.item() if isinstance(given, (Tensor, np.ndarray, np.generic)) else given
    except (RuntimeError, ValueError):
        # not one number, or on meta
        number = ()
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    raise BoundaryError(
        f"found {name}={given!r}; wanted one whole number, the tokens of the longest document; "
        "pass an int"
    )


def _no_tensor(name: str, given: Any) -> BoundaryError:
    wanted = "a torch.int32 tensor [N+1]" if name.startswith("cu_") else "a tensor"
    return BoundaryError(
        f"found {name} as a {type(given).__name__}; wanted {wanted}; call torch.tensor on it"
    )


def _check_values(name: str, given: Any) -> None:
    if not isinstance(given, Tensor):
        return
    traced = torch._C._get_tracing_state() is not None
    if traced or torch.compiler.is_exporting():
        raise UnsupportedInput(
            f"found torch.export or torch.jit.trace of a patched model with {name}, whose values "
            "decide what runs; wanted tokens alone; call remove_patches(model) before the export"
        )
    if given.is_meta:
        raise BoundaryError(
            f"found {name} on meta, without values; wanted it on the device of the tokens; build "
            "it there"
        )
    if given.layout != torch.strided or given.is_nested or given.is_quantized:
        kind = (
            "nested"
            if given.is_nested
            else "quantised"
            if given.is_quantized
            else str(given.layout)
        )
        raise BoundaryError(
            f"found {name} as a {kind} tensor; wanted a dense one; call .to_dense(), or pad it"
        )


def to_hf_kwargs(packed: PackedSequence) -> Mapping[str, Any]:
    """Return the record as the keywords that transformers' flash attention reads.

    Raises:
        UnsupportedInput: the record has a tree, which these keywords cannot describe.
    """
    refuse_tree(packed, "in transformers' keywords for flash attention")
    cu_seqlens, longest = packed.cu_seqlens, packed.max_seqlen
    return dict(
        zip(HF_KEYWORDS, (cu_seqlens, cu_seqlens, longest, longest, packed.seq_idx), strict=True)
    )
