"""Where a batch enters and leaves: forward arguments in, the record out; the caller's [B, S] and
the row [1, T].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError, CacheConflict, UnsupportedInput
from hf_packfree.models import compat
from hf_packfree.models.attention import attention_route
from hf_packfree.models.rotary import has_fixed_frequencies
from hf_packfree.models.row_adapters import (
    refuse_prompts_from_above,
    refuse_readers_of_the_row,
)
from hf_packfree.models.state import state_of
from hf_packfree.models.tree import check_tree_call
from hf_packfree.packing import (
    PackedSequence,
    PackingInputs,
    resolve_boundaries,
    uncompiled,
)
from hf_packfree.packing.compiling import is_transformed
from hf_packfree.packing.mrope import is_text
from hf_packfree.packing.tree_words import RECORD

UNREAD, UNPACKED = None, False
"""Values of `packed_sequence` without a record: the batch was not read yet; it was read and runs
as upstream runs it.
"""
_MEDIA = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "mm_encoder_outputs",
    "input_features",
    "feature_attention_mask",
    "audio_feature_lengths",
)
_OF_MEDIA = ("image_", "video_", "audio_")
"""What the names of further arguments of towers start with."""


def enter(
    module: Any, arguments: dict[str, Any], *, skip_padding: bool = True
) -> PackedSequence | None:
    """Return the record of a forward: the one that came down, or, in the outermost patched module,
    read from the batch.

    Afterwards `arguments` have no packing keywords any more, and `packed_sequence`, which patched
    modules below only receive.

    Args:
        module: head or text model, whose settings decide which rows of one document run in the
            patched layers.
        arguments: all of the forward's, by name; changed in place.
        skip_padding: False keeps the padding of rows of one document.

    Raises:
        BoundaryError, BoundaryConflict, CacheConflict: see `read_arguments`.
        UnsupportedInput: see `check_tree_call`.
    """
    found = arguments.pop("packed_sequence", UNREAD)
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    inputs = PackingInputs.from_kwargs(arguments, position_ids=positions, attention_mask=mask)
    tree = isinstance(found, PackedSequence) and (found.tree is not None or bool(inputs.tree))
    if tree:
        # the caller's, or what came down: it is compared with what else is given
        inputs = replace(inputs, tree={**inputs.tree, RECORD: found})
    if found is UNREAD or tree:
        ids, embeds, cache = (
            arguments.get("input_ids"),
            arguments.get("inputs_embeds"),
            compat.cache_of(arguments),
        )
        state, ours, generates = (
            state_of(module),
            runs_here(module, inputs, arguments),
            _generates(module, arguments),
        )
        # upstream gives a row of one document with media and boundaries no positions, unless its
        # token types came too
        unnumbered = inputs.named and positions is None
        misread = has_media(arguments) and (
            unnumbered or compat.MISREADS_IMAGES_WITHOUT_MASK and mask is None
        )
        found = read_arguments(
            inputs,
            ids,
            embeds,
            cache,
            module=module,
            unpacked=ours and (misread or state.runs_unpacked),
            skip_padding=skip_padding and ours and state.padded != "upstream",
            skip_all=ours and not generates,
            generates=generates,
        )
    packed: PackedSequence | None = None if found is UNPACKED else found
    if packed is not None and packed.tree is not None:
        check_tree_call(module, packed, media=has_media(arguments))
        # which modules below need not compare again
        arguments["position_ids"] = None
    arguments["packed_sequence"] = UNPACKED if packed is None else packed
    return packed


def is_batch(arguments: dict[str, Any]) -> bool:
    """Whether there are tokens to read, ids or embeddings; otherwise upstream raises its own
    error.
    """
    given = [
        arguments[name]
        for name in ("input_ids", "inputs_embeds")
        if arguments.get(name) is not None
    ]
    return len(given) == 1 and isinstance(given[0], Tensor) and given[0].ndim >= 2


def keep_padding(packed: PackedSequence, arguments: dict[str, Any]) -> None:
    """Let padded rows of one document each run with their padding after all, in releases that
    read it right.
    """
    if not (compat.MISREADS_PADDING_OF_ONE_ROW and packed.batch_shape[0] == 1):
        arguments["packed_sequence"] = UNPACKED


def has_media(arguments: dict[str, Any]) -> bool:
    """Whether a call has images, videos or audio, or features of them."""
    return any(arguments.get(name) is not None for name in _MEDIA)


def of_media(name: str) -> bool:
    """Whether an argument of a forward belongs to media: its sizes may be those of the batch by
    chance.
    """
    return name in _MEDIA or name.startswith(_OF_MEDIA)


def wants_all_logits(arguments: dict[str, Any]) -> bool:
    """Whether a head's call wants the logits of every token."""
    kept = arguments.get("logits_to_keep", 0)
    return isinstance(kept, int) and kept == 0


def _generates(module: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call can be generation's: outside training and without labels, for some logits
    alone.
    """
    return (
        not wants_all_logits(arguments) and not module.training and arguments.get("labels") is None
    )


@uncompiled
def read_arguments(
    inputs: PackingInputs,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    cache: Any,
    *,
    module: Any,
    skip_padding: bool = False,
    skip_all: bool = False,
    unpacked: bool = False,
    generates: bool = False,
) -> PackedSequence | None:
    """Build the record of one forward, or return None where upstream is exact as it is.

    Args:
        inputs: what the caller said of documents.
        input_ids: [B, S], or None when `inputs_embeds` [B, S, D] is given.
        cache: transformers' cache, or None.
        module: head or text model that is called, whose config names the token that pads.
        skip_padding: build a record for padded rows of one document too, see `runs_here`.
        skip_all: build one for a batch of nothing but padding.
        unpacked: build one for rows of one document without padding too.
        generates: the call may be a step of generation without a cache, see `resolve_boundaries`.

    Raises:
        BoundaryError, BoundaryConflict, UnsupportedInput: see `resolve_boundaries`.
        UnsupportedInput: a transform of torch.func.
        CacheConflict: several documents together with a cache.
        UnsupportedModel: PEFT's adapters work on whole rows, see `row_adapters`.
    """
    tokens = input_ids if input_ids is not None else inputs_embeds
    assert tokens is not None
    config = module.config.get_text_config()
    refuse_prompts_from_above(inputs_embeds)
    shape = (tokens.shape[0], tokens.shape[1])
    seen = cache.get_seq_length() if cache is not None else 0
    if seen and shape[1] == 1 and not inputs.named:
        # decoding one token a row: nothing to read, nothing to wait for
        return None
    cached = cache is not None and not inputs.named
    if cached:
        inputs = replace(inputs, attention_mask=_current(inputs.attention_mask, shape[1], seen))
    elif _says_nothing(inputs.attention_mask, config):
        inputs = replace(inputs, attention_mask=None)
    misread = compat.MISREADS_PADDING_OF_ONE_ROW and shape[0] == 1 and cache is None
    misread = misread and _may_begin_with_padding(inputs.attention_mask)
    pad = getattr(config, "pad_token_id", None)
    drop, same, is_padding = misread or skip_padding, _same_token(tokens), _is_token(input_ids, pad)
    packed = resolve_boundaries(
        inputs,
        shape,
        tokens.device,
        same,
        drop_padding=drop,
        drop_all=drop or skip_all,
        cached=cached,
        generates=generates or cached,
        is_padding=is_padding,
    )
    if (
        packed is None
        and unpacked
        and _has_no_padding(inputs.attention_mask)
        and shape[0] * shape[1] > 0
    ):
        packed = PackedSequence.from_lengths(
            [shape[1]] * shape[0], device=tokens.device, batch_shape=shape, plain=True
        )
    if packed is None:
        return None
    refuse_readers_of_the_row(module)
    _check_beside_documents(packed.num_segments, cache, seen, inputs.attention_mask)
    return packed


def _check_beside_documents(documents: int, cache: Any, seen: int, mask: Any) -> None:
    """Refuse what a call cannot have beside packed or padded rows."""
    if is_transformed():
        raise UnsupportedInput(
            "found a transform of torch.func (grad, vmap, jvp) around packed or padded rows; "
            "wanted a backward pass; call loss.backward() or torch.autograd.grad"
        )
    if cache is not None:
        raise CacheConflict(
            f"found a row of {documents} documents together with {compat.CACHE} holding "
            f"{seen} tokens; wanted no cache, which can belong to one document only; pass "
            f"{compat.CACHE}=None, or one document at a time"
        )
    if mask is not None and not isinstance(mask, (Tensor, Mapping)):
        raise BoundaryError(
            f"found a prepared attention_mask of type {type(mask).__name__} "
            f"beside packed rows; wanted "
            "None, a tensor or a dict of tensors; drop it, the document boundaries are enough"
        )


def runs_here(module: Any, inputs: PackingInputs, arguments: dict[str, Any]) -> bool:
    """Whether rows of one document may run in the patched layers: nothing is wanted that only
    upstream gives.

    That is: a cache, attention weights, attention that looks ahead, rotary embeddings by the
    longest position of the batch, or images whose tokens count like text, or came without their
    ids. Upstream builds a cache by default outside training; no loss needs one, and where rows of
    one document run here only `use_cache=True` builds one.

    Args:
        module: see `enter`.
        inputs: what the caller passed that can describe documents.
        arguments: all of the forward's, by name.
    """
    config = module.config.get_text_config()
    positions = inputs.position_ids
    if has_media(arguments) and (
        arguments.get("input_ids") is None if positions is None else is_text(positions)
    ):
        return False
    use_cache, wants_weights = arguments.get("use_cache"), arguments.get("output_attentions")
    if use_cache is None:
        needless = (
            module.training or arguments.get("labels") is not None or state_of(module).runs_unpacked
        )
        use_cache = not needless and getattr(config, "use_cache", False)
    if compat.cache_of(arguments) is not None or use_cache:
        return False
    wants_weights = (
        getattr(config, "output_attentions", False) if wants_weights is None else wants_weights
    )
    is_causal = arguments.get("is_causal", getattr(config, "is_causal", True))
    return not wants_weights and is_causal is not False and has_fixed_frequencies(config)


def _has_no_padding(mask: Any) -> bool:
    """Whether a mask says no more than that: none, or a 2-D one without a zero."""
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask != 0).all()))


def _may_begin_with_padding(mask: Any) -> bool:
    """Whether a mask can say that padding comes in front of a real token: everything but a 2-D
    one that only falls.
    """
    return (
        not isinstance(mask, Tensor)
        or mask.ndim != 2
        or bool(((mask[:, 1:] != 0) & (mask[:, :-1] == 0)).any())
    )


def _current(mask: Any, tokens: int, seen: int) -> Any:
    """The part of a mask that speaks of the new tokens, where a cache is in play.

    Of the dict that generation prepares for a static cache, only the linear layers' mask is 2-D.
    Without that, the first call's 4-D mask says what is padding, before the columns of tokens to
    come; a later one, which also speaks of the cache, is upstream's to read.
    """
    if isinstance(mask, Mapping):
        given = [one for one in mask.values() if isinstance(one, Tensor)]
        mask = min(given, key=lambda one: (one.ndim, -one.shape[-1]), default=None)
    if not isinstance(mask, Tensor) or mask.shape[-1] == tokens:
        return mask
    if mask.ndim == 2:
        return mask[:, -tokens:]
    return None if seen else mask[..., :tokens]


def _says_nothing(mask: Any, config: Any) -> bool:
    """Whether a mask is a dict of None that every layer reads as upstream reads no mask: eager
    attention would look ahead.
    """
    return (
        isinstance(mask, Mapping)
        and not any(one is not None for one in mask.values())
        and (attention_route(config._attn_implementation) in ("varlen", "flash"))
    )


def _same_token(tokens: Tensor) -> Any:
    """Return `same_token` of `resolve_boundaries`, called only for rows that end in one-token
    documents.
    """

    def same(indices: Tensor, index: int) -> Tensor:
        flat = tokens.detach().flatten(0, 1)
        equal = flat[indices.to(flat.device)] == flat[index]
        return equal.reshape(indices.numel(), -1).all(1).to("cpu", torch.bool)

    return same


def _is_token(input_ids: Tensor | None, token: int | None) -> Callable[[int], bool]:
    """Return `is_padding` of `resolve_boundaries`, called only for rows that end in a one-token
    document.
    """
    if input_ids is None or token is None:
        return lambda index: False
    return lambda index: bool(input_ids.detach().flatten()[index] == token)
