"""The border: a model's forward arguments in, the record out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError, CacheConflict
from hf_packfree.models import eras
from hf_packfree.packing import Forms, PackedSequence, read_forms, uncompiled


@uncompiled
def read_arguments(
    forms: Forms, input_ids: Tensor | None, inputs_embeds: Tensor | None, past_key_values: Any
) -> PackedSequence | None:
    """Build the record of one forward, or return None where upstream is exact as it is.

    Args:
        forms: what the caller said of documents.
        input_ids: [B, S], or None when `inputs_embeds` [B, S, D] is given.
        past_key_values: transformers' cache, or None.

    Raises:
        BoundaryError, BoundaryConflict: see `read_forms`.
        CacheConflict: several documents together with a cache.
    """
    tokens = input_ids if input_ids is not None else inputs_embeds
    assert tokens is not None
    shape = (tokens.shape[0], tokens.shape[1])
    seen = past_key_values.get_seq_length() if past_key_values is not None else 0
    if seen and shape[1] == 1 and not forms.named:
        return None  # decoding one token a row: nothing to read, nothing to wait for
    if seen and isinstance(forms.attention_mask, Tensor) and forms.attention_mask.shape[-1] != shape[1]:
        forms = Forms(forms.position_ids, _current(forms.attention_mask, shape[1]), *_named(forms))
    misread = eras.MISREADS_PADDING_OF_ONE_ROW and shape[0] == 1 and past_key_values is None
    packed = read_forms(forms, shape, tokens.device, _same_token(tokens), drop_padding=misread)
    if packed is None:
        return None
    if past_key_values is not None:
        raise CacheConflict(
            f"found a row of {packed.num_segments} documents together with past_key_values holding {seen} tokens; "
            "wanted no cache, which can belong to one document only; pass past_key_values=None, or one document at a time"
        )
    if forms.attention_mask is not None and not isinstance(forms.attention_mask, Tensor):
        raise BoundaryError(
            f"found a prepared attention_mask of type {type(forms.attention_mask).__name__} beside packed rows; wanted "
            "None or a tensor; drop it, the document boundaries are enough"
        )
    return packed


def _current(mask: Tensor, tokens: int) -> Tensor | None:
    """The part of a 2-D mask that speaks of the new tokens; masks of other shapes are upstream's to read."""
    return mask[:, -tokens:] if mask.ndim == 2 else None


def _named(forms: Forms) -> tuple[Any, ...]:
    return forms.cu_seq_lens_q, forms.cu_seq_lens_k, forms.max_length_q, forms.max_length_k, forms.seq_idx


def _same_token(tokens: Tensor) -> Any:
    """Return the comparison that `read_forms` asks for; only rows that end in one-token documents cause it."""

    def same(places: Tensor, place: int) -> Tensor:
        flat = tokens.detach().flatten(0, 1)
        equal = flat[places.to(flat.device)] == flat[place]
        return equal.reshape(places.numel(), -1).all(1).to("cpu", torch.bool)

    return same
