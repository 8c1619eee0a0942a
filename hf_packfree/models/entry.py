"""Where a batch enters and leaves: forward arguments in, the record out; the caller's [B, S] and
the row [1, T].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_packfree.errors import BoundaryError, CacheConflict, UnsupportedInput
from hf_packfree.models import compat
from hf_packfree.models.attention import attention_route
from hf_packfree.models.call import UNPACKED, UNREAD, Call
from hf_packfree.models.rotary import has_fixed_frequencies
from hf_packfree.models.row_adapters import (
    refuse_prompts_from_above,
    refuse_readers_of_the_row,
)
from hf_packfree.models.state import state_of
from hf_packfree.models.tree_checks import check_tree_call
from hf_packfree.packing import (
    PackedSequence,
    PackingInputs,
    resolve_boundaries,
    uncompiled,
)
from hf_packfree.packing.compiling import is_transformed
from hf_packfree.packing.mrope_rows import is_text
from hf_packfree.packing.tree_keywords import RECORD


def enter(call: Call, *, drop_padding: bool = True) -> Call:
    """Return a call with its record: the one that came down, or, in the outermost patched module,
    read from the batch.

    Its arguments have no packing keywords any more, and `packed_sequence`, which patched modules
    below only receive.

    Args:
        call: of a module whose settings decide which rows of one document run in the patched
            layers.
        drop_padding: False keeps the padding of rows of one document.

    Raises:
        BoundaryError, BoundaryConflict, CacheConflict: see `read_call`.
        UnsupportedInput: see `check_tree_call`.
    """
    arguments, module = dict(call.arguments), call.module
    found = arguments.pop("packed_sequence", UNREAD)
    positions, mask = call.get("position_ids"), call.get("attention_mask")
    inputs = PackingInputs.from_kwargs(arguments, position_ids=positions, attention_mask=mask)
    tree = isinstance(found, PackedSequence) and (found.tree is not None or bool(inputs.tree))
    if tree:
        # the caller's, or what came down: it is compared with what else is given
        inputs = replace(inputs, tree={**inputs.tree, RECORD: found})
    if found is UNREAD or tree:
        state = state_of(module)
        # reading boundaries waits for the GPU, which this need not
        if module.training:
            state.graphs.look()
        ours = _runs_here(call)
        found = read_call(
            call,
            inputs,
            drop_padding=drop_padding and ours and state.padded != "upstream",
            drop_all=ours and not call.generates,
            unpacked=ours and (_is_misread(call, inputs) or state.runs_unpacked),
        )
        if module.training and isinstance(found, PackedSequence):
            state.graphs.looked_for(found)
    packed: PackedSequence | None = None if found is UNPACKED else found
    if packed is not None and packed.tree is not None:
        check_tree_call(call, packed)
        # which modules below need not compare again
        arguments["position_ids"] = None
    arguments["packed_sequence"] = UNPACKED if packed is None else packed
    return Call(module, arguments, packed)


def _is_misread(call: Call, inputs: PackingInputs) -> bool:
    """Whether upstream misreads a row of one document: with media and boundaries it makes no
    positions, unless token types came too.
    """
    unnumbered = inputs.named and inputs.position_ids is None
    unmasked = compat.MISREADS_IMAGES_WITHOUT_MASK and inputs.attention_mask is None
    return call.has_media and (unnumbered or unmasked)


def _runs_here(call: Call) -> bool:
    """Whether rows of one document may run in the patched layers, because the call asks for
    nothing that only upstream has.

    That is: a cache, attention weights, attention that looks ahead, rotary embeddings by the
    longest position of the batch, or images whose tokens count like text, or came without
    their ids. Upstream builds a cache by default outside training; no loss needs one, and
    where rows of one document run here only `use_cache=True` builds one.
    """
    positions, config = call.get("position_ids"), call.config
    if call.has_media and (
        call.get("input_ids") is None if positions is None else is_text(positions)
    ):
        return False
    use_cache, wants_weights = call.get("use_cache"), call.get("output_attentions")
    if use_cache is None:
        needless = (
            call.module.training
            or call.get("labels") is not None
            or state_of(call.module).runs_unpacked
        )
        use_cache = not needless and getattr(config, "use_cache", False)
    if call.cache is not None or use_cache:
        return False
    if wants_weights is None:
        wants_weights = getattr(config, "output_attentions", False)
    is_causal = call.get("is_causal", getattr(config, "is_causal", True))
    return not wants_weights and is_causal is not False and has_fixed_frequencies(config)


@uncompiled
def read_call(
    call: Call,
    inputs: PackingInputs,
    *,
    drop_padding: bool = False,
    drop_all: bool = False,
    unpacked: bool = False,
) -> PackedSequence | None:
    """Build the record of one forward, or return None where upstream is exact as it is.

    Args:
        call: the forward's.
        inputs: what of it can describe documents.
        drop_padding: build a record for padded rows of one document too.
        drop_all: build one for a batch of nothing but padding.
        unpacked: build one for rows of one document without padding too.

    Raises:
        BoundaryError, BoundaryConflict, UnsupportedInput: see `resolve_boundaries`.
        UnsupportedInput: a transform of torch.func.
        CacheConflict: several documents together with a cache.
        UnsupportedModel: PEFT's adapters work on whole rows, see `row_adapters`.
    """
    batch, cache = call.batch, call.cache
    refuse_prompts_from_above(call.get("inputs_embeds"))
    rows, tokens = batch.shape
    seen = compat.tokens_seen(cache)
    if seen and tokens == 1 and not inputs.named:
        # decoding one token a row: nothing to read, nothing to wait for
        return None
    cached = cache is not None and not inputs.named
    if cached:
        inputs = replace(inputs, attention_mask=_current(inputs.attention_mask, tokens, seen))
    elif _says_nothing(inputs.attention_mask, call.config):
        inputs = replace(inputs, attention_mask=None)
    misread = compat.MISREADS_PADDING_OF_ONE_ROW and rows == 1 and cache is None
    drop_padding |= misread and _may_begin_with_padding(inputs.attention_mask)
    packed = resolve_boundaries(
        inputs,
        batch,
        drop_padding=drop_padding,
        drop_all=drop_padding or drop_all,
        cached=cached,
        generates=cached or call.generates,
    )
    if packed is None and unpacked and _has_no_padding(inputs.attention_mask) and rows * tokens > 0:
        packed = PackedSequence.from_lengths(
            [tokens] * rows, device=batch.device, batch_shape=batch.shape, plain=True
        )
    if packed is None:
        return None
    refuse_readers_of_the_row(call.module)
    _check_with_documents(packed.num_segments, cache, seen, inputs.attention_mask)
    return packed


def _check_with_documents(documents: int, cache: Any, seen: int, mask: Any) -> None:
    """Refuse what a call with packed or padded rows cannot have."""
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
            f"with packed rows; wanted "
            "None, a tensor or a dict of tensors; drop it, the document boundaries are enough"
        )


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
