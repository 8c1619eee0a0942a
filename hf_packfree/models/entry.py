"""The entry of patched models: reads a forward's arguments and builds the record of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError, CacheConflict, UnsupportedInput
from hf_packfree.models import compat
from hf_packfree.models.attention import attention_route
from hf_packfree.models.call import UNPACKED, UNREAD, Call
from hf_packfree.models.captured_layers import ahead
from hf_packfree.models.media_keywords import AUDIO_SIZES, SIZES
from hf_packfree.models.record_checks import check_record
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
from hf_packfree.packing.fast_path import Meanwhile
from hf_packfree.packing.masks import is_one_document
from hf_packfree.packing.mrope_rows import is_text
from hf_packfree.packing.tree_keywords import RECORD


def enter(call: Call, *, drop_padding: bool = True) -> Call:
    """Return a call with its record: the one in the arguments, or, in the outermost patched module,
    a new one read from the batch.

    The call that is returned has no packing keywords, but `packed_sequence`, by which patched
    modules below get the record.

    Args:
        call: its module's settings decide which rows of one document run in the patched layers.
        drop_padding: whether to drop the padding of rows of one document, if the settings allow
            that.

    Raises:
        BoundaryError, BoundaryConflict, CacheConflict: see `read_call` and `check_record`.
        UnsupportedInput: see `check_tree_call`.
    """
    arguments, module = dict(call.arguments), call.module
    found = arguments.pop("packed_sequence", UNREAD)
    positions, mask = call.position_ids, call.attention_mask
    inputs = PackingInputs.from_kwargs(arguments, position_ids=positions, attention_mask=mask)
    tree = isinstance(found, PackedSequence) and (found.tree is not None or bool(inputs.tree))
    if tree:
        # the record, the caller's or that of a module above, is compared with the other arguments
        inputs = replace(inputs, tree={**inputs.tree, RECORD: found})
    if found is UNREAD or tree:
        state = state_of(module)
        trains = replays(module)
        meanwhile = ahead(call) if trains else None
        # before reading boundaries, which waits for the GPU
        if trains:
            state.graphs.look()
        ours = _runs_here(call, packs=_names_documents(inputs))
        try:
            found = read_call(
                call,
                inputs,
                drop_padding=drop_padding and ours and state.padded != "upstream",
                drop_all=ours and not call.generates,
                unpacked=ours and (_is_misread(call, inputs) or state.runs_unpacked),
                meanwhile=meanwhile,
            )
        finally:
            if trains and not isinstance(found, PackedSequence):
                state.graphs.leave()
        if trains and isinstance(found, PackedSequence):
            state.graphs.looked_for(found)
    elif found is not UNPACKED:
        check_record(call, found, inputs)
    packed: PackedSequence | None = None if found is UNPACKED else found
    if packed is not None and packed.tree is not None:
        check_tree_call(call, packed)
        # modules below need not compare the positions again
        arguments["position_ids"] = None
    arguments["packed_sequence"] = UNPACKED if packed is None else packed
    return Call(module, arguments, packed)


def replays(module: Any) -> bool:
    """Whether rows of a module may be replayed now: never without gradients, and settings are not
    compared then: DPO's and GRPO's reference is often the model with its adapters switched off.
    """
    return bool(module.training) and torch.is_grad_enabled()


def _is_misread(call: Call, inputs: PackingInputs) -> bool:
    """Whether upstream misreads a row of one document with media: it may compute no positions if
    boundaries come without position ids, or a 4-D mask; it numbers videos as silent ones if
    nothing says that their sound is between their tokens; and before transformers 5.4 it misreads
    images without a mask.
    """
    unclear = _names_documents(inputs) or _may_be_sounding(call)
    unnumbered = inputs.position_ids is None and unclear
    unmasked = compat.MISREADS_IMAGES_WITHOUT_MASK and inputs.attention_mask is None
    return call.has_media and (unnumbered or unmasked)


def _names_documents(inputs: PackingInputs) -> bool:
    """Whether arguments besides positions describe documents, as in no stock call with media: a
    packing keyword, a 4-D mask or a dict of masks.
    """
    mask = inputs.attention_mask
    return inputs.named or isinstance(mask, Mapping) or getattr(mask, "ndim", 2) > 2


def _may_be_sounding(call: Call) -> bool:
    """Whether videos may have their sound between their tokens, which only the ids show: there are
    videos and audio, without the flag. `generate()` is upstream's, whose flag is then False.
    """
    sizes = (SIZES["video"], *AUDIO_SIZES)
    video, *audio = (call.get(name) is not None for name in sizes)
    unflagged = call.get("use_audio_in_video") is None and not call.generates
    return video and any(audio) and unflagged


def _has_features_of_generation(call: Call) -> bool:
    """Whether towers ran in `generate()`, which passes what they give without the sizes of items
    but with positions, in training mode, too.
    """
    features = call.get("mm_encoder_outputs") or {}
    without_loss = call.labels is None and call.position_ids is not None
    return without_loss and any(
        features.get(kind) is not None and call.get(size) is None for kind, size in SIZES.items()
    )


def _runs_here(call: Call, *, packs: bool) -> bool:
    """Whether rows of one document may run in the patched layers, because the call needs nothing
    that only upstream's layers have.

    Only upstream has a cache, attention weights, bidirectional attention, rotary embeddings by the
    longest position of the batch (except up to a limit, which rows that ranks share have to keep),
    media with text positions, media without ids or positions, and features of `generate()`, which
    come without the sizes of their items.
    Upstream builds a cache by default outside training. No loss needs a cache, and where rows of
    one document run in the patched layers only `use_cache=True` builds one.

    Args:
        packs: see `_names_documents`; such a call with media gets no cache by default, as it gets
            none for several documents.
    """
    positions, config = call.position_ids, call.config
    if call.has_media and (call.input_ids is None if positions is None else is_text(positions)):
        return False
    if _has_features_of_generation(call):
        return False
    use_cache, wants_weights = call.get("use_cache"), call.get("output_attentions")
    if use_cache is None:
        trains = call.module.training or call.labels is not None
        needless = trains or state_of(call.module).runs_unpacked or (packs and call.has_media)
        use_cache = not needless and getattr(config, "use_cache", False)
    if call.cache is not None or use_cache:
        return False
    if wants_weights is None:
        wants_weights = getattr(config, "output_attentions", False)
    is_causal = call.get("is_causal", getattr(config, "is_causal", True))
    # ranks can share rows in the patched layers alone
    rotates = has_fixed_frequencies(config) or state_of(call.module).context_parallel is not None
    return not wants_weights and is_causal is not False and rotates


@uncompiled
def read_call(
    call: Call,
    inputs: PackingInputs,
    *,
    drop_padding: bool,
    unpacked: bool,
    drop_all: bool = False,
    meanwhile: Meanwhile | None = None,
) -> PackedSequence | None:
    """Build the record of one forward, or return None where upstream is exact.

    Args:
        call: the call of the forward.
        inputs: the arguments that can describe documents.
        drop_padding: also build a record for padded rows of one document.
        unpacked: also build a record for rows of one document without padding.
        drop_all: also build a record for a batch of nothing but padding.
        meanwhile: see `resolve_boundaries`.

    Raises:
        BoundaryError, BoundaryConflict, UnsupportedInput: see `resolve_boundaries`.
        UnsupportedInput: the call is under a transform of torch.func, or PEFT has something for
            each row or token of the batch.
        CacheConflict: several documents together with a cache.
        UnsupportedModel: the model has adapters of PEFT that work on whole rows, see
            `row_adapters`.
    """
    batch, cache = call.batch, call.cache
    refuse_prompts_from_above(call.inputs_embeds)
    rows, tokens = batch.shape
    seen = compat.tokens_seen(cache)
    if seen and tokens == 1 and not inputs.named:
        # decoding one token a row: there are no boundaries, and the host need not wait for the GPU
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
        meanwhile=meanwhile,
    )
    if packed is None and unpacked and is_one_document(inputs.attention_mask) and rows * tokens > 0:
        packed = PackedSequence.from_lengths(
            [tokens] * rows, device=batch.device, batch_shape=batch.shape, plain=True
        )
    if packed is None:
        return None
    refuse_readers_of_the_row(call.module, packed)
    _check_with_documents(packed.num_segments, cache, seen, inputs.attention_mask)
    return packed


def _check_with_documents(documents: int, cache: Any, seen: int, mask: Any) -> None:
    """Refuse a transform of torch.func, forward-mode differentiation, a cache and a prepared mask
    in a call with packed or padded rows.
    """
    if is_transformed():
        raise UnsupportedInput(
            "found a transform of torch.func (grad, vmap, jvp), or forward-mode differentiation, "
            "around packed or padded rows; wanted a backward pass; call loss.backward() or "
            "torch.autograd.grad"
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
            "with packed rows; wanted "
            "None, a tensor or a dict of tensors; drop it, the document boundaries are enough"
        )


def _may_begin_with_padding(mask: Any) -> bool:
    """Whether a mask may have padding before a real token: everything but a 2-D mask in which no 0
    precedes a 1.
    """
    return (
        not isinstance(mask, Tensor)
        or mask.ndim != 2
        or bool(((mask[:, 1:] != 0) & (mask[:, :-1] == 0)).any())
    )


def _current(mask: Any, tokens: int, seen: int) -> Any:
    """Return the parts of a mask, or of the dict that generation prepares for a static cache, for
    the new tokens of a call with a cache: a 2-D mask, a 4-D one, or a dict of one of each.

    Of a 4-D mask, the columns of the new tokens: the last ones, unless a static cache has room for
    more tokens.
    """
    given = mask.values() if isinstance(mask, Mapping) else [mask]
    wide = sorted((one for one in given if isinstance(one, Tensor)), key=lambda one: -one.shape[-1])
    found: dict[str, Tensor] = {}
    for one in wide:
        kind = "linear_attention" if one.ndim == 2 else "full_attention"
        before = one.shape[-1] - tokens
        first = max(before if one.ndim == 2 else min(seen, before), 0)
        # sliding windows narrow the others
        found.setdefault(kind, one[..., first : first + tokens])
    # a dict without a tensor says nothing: rows without padding, which sdpa needs no mask for
    nothing = None if isinstance(mask, Mapping) else mask
    return found if len(found) == 2 else next(iter(found.values()), nothing)


def _says_nothing(mask: Any, config: Any) -> bool:
    """Whether a mask is a dict whose values are all None, in an implementation that is causal
    without a mask; eager attention is not.
    """
    return (
        isinstance(mask, Mapping)
        and not any(one is not None for one in mask.values())
        and (attention_route(config._attn_implementation) in ("varlen", "flash"))
    )
