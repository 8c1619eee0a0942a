"""The check of a Trainer's first batch: every second document is changed, and the others must
not notice.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.errors import LeakDetected
from hf_packfree.models.mrope import RowMedia, media_of
from hf_packfree.models.state import PatchState
from hf_packfree.models.vision_language import FEATURES
from hf_packfree.packing import PackedSequence, unpad
from hf_packfree.packing.media import Media, media_offsets
from hf_packfree.verify.documents import media_tokens
from hf_packfree.verify.ranks import Ranks, settings_of
from hf_packfree.verify.report import limits_for, relative_rms


def first_batch_influence(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Change the tokens of documents 0, 2, 4 ... and return the relative RMS by which 1, 3, 5 ...
    change.

    In a vision-language model the pixels and sounds of those documents change too, and then those
    of the others, because a tower may look ahead; the larger number counts.

    Under context parallelism every rank changes and compares its own tokens, of the same documents,
    and the largest number of all ranks counts.

    Takes two forwards without gradients, three in a vision-language model; in a process group also
    for a batch that is not packed, since the forwards of a sharded model are collective. The random
    state is as before afterwards.

    Args:
        module: a patched text model, such as Qwen3_5TextModel, or what holds towers: a
            vision-language model, such as Qwen3_5Model, or the whole thinker of transformers before
            5.22.
        args, kwargs: of its forward: `input_ids` [B, S] or `inputs_embeds` [B, S, H], and the
            boundaries.

    Returns:
        Relative RMS over the last hidden states [B, S, H] of the unchanged documents; None if there
        is one document at most.

    Raises:
        LeakDetected: the change is above rounding.
    """
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    inputs = {**dict(zip(names, args, strict=False)), **kwargs}
    takes_media = hasattr(module, "get_rope_index")
    seen: list[PackedSequence] = []

    def watch(packed: PackedSequence | None, shape: tuple[int, int], mask: Any) -> None:
        if packed is not None:
            seen.append(packed)

    observers = observers_of(module)
    others, observers[:] = list(observers), [watch]
    found: list[float] = []
    try:
        with torch.no_grad(), torch.random.fork_rng():
            before = _last_states(module, inputs)
            if not in_process_group() and (not seen or seen[0].num_documents < 2):
                return None
            record = seen[0].for_shape(before.shape[:2]) if seen else None
            for parity in (0, 1) if takes_media else (0,):
                changed, kept = (
                    (inputs, None) if record is None else _changed(module, inputs, record, parity)
                )
                after = _last_states(module, changed)
                if kept is not None:
                    found.append(
                        relative_rms(after[kept], before[kept]) if bool(kept.any()) else 0.0
                    )
    finally:
        observers[:] = others
    if not found:
        return None
    influence = Ranks(settings_of(module), 0).largest(found, before.device)
    _judge(
        influence,
        limits_for(before.device, before.dtype).influence,
        "tokens or media" if takes_media else "tokens",
    )
    return influence


def _last_states(module: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return [B, S, H], of a head too, whose logits would be larger."""
    if not hasattr(module, "lm_head"):
        output = module.forward(**inputs)
        states: Tensor = output.last_hidden_state
        return states
    of_layers: Tensor = module.forward(**{**inputs, "output_hidden_states": True}).hidden_states[-1]
    return of_layers


def _judge(influence: float, limit: float, what: str) -> None:
    if not influence <= limit:
        raise LeakDetected(
            f"found documents of the first batch reacting to each other's {what}: {influence:.1e} "
            f"relative RMS; wanted at most {limit:.0e}, which is rounding; run "
            "verify_packing(model) for the details and report it"
        )


def observers_of(module: nn.Module) -> list[Any]:
    """Return what is called before every training forward of the text model in a patched module."""
    state = module.packfree
    return state.observers if isinstance(state, PatchState) else []


def in_process_group() -> bool:
    """Whether other processes take part in the forwards."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _changed(
    module: nn.Module, inputs: dict[str, Any], packed: PackedSequence, parity: int
) -> tuple[dict[str, Any], Tensor]:
    """Return the inputs with every second document changed, from `parity` on, and bool [B, S]:
    the tokens of the others.
    """
    rows, tokens = packed.batch_shape
    number = torch.full((rows * tokens,), -1, dtype=torch.int32, device=packed.seq_idx.device)
    real = (
        packed.indices
        if packed.indices is not None
        else torch.arange(rows * tokens, device=number.device)
    )
    of_row = packed.seq_idx if packed.shard is None else packed.shard.cut(packed.shard.row.seq_idx)
    number = number.index_copy(0, real, of_row[0]).view(rows, tokens)
    change = (number >= 0) & (number % 2 == parity)
    changed = dict(inputs)
    ids = inputs.get("input_ids")
    if ids is None:
        changed["inputs_embeds"] = torch.where(
            change[..., None], -inputs["inputs_embeds"], inputs["inputs_embeds"]
        )
    elif hasattr(module, "get_rope_index"):
        fixed = torch.tensor(sorted(media_tokens(module.config).values()), device=ids.device)
        other = ids.roll(1, dims=1)
        text = ~torch.isin(ids, fixed) & ~torch.isin(other, fixed)
        changed["input_ids"] = torch.where(change & text, other, ids)
        changed |= dict(_other_media(module, inputs, packed, parity))
    else:
        changed["input_ids"] = torch.where(change, ids.roll(1, dims=1), ids)
    return changed, (number >= 0) & ~change


def _other_media(
    source: Any, inputs: Mapping[str, Any], packed: PackedSequence, parity: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield pixels and sounds with the sign of every second document's turned."""
    media = RowMedia.from_arguments(inputs)
    ids = unpad(inputs["input_ids"], packed)[0].to("cpu")
    for kind in media_of(source, media):
        values = inputs.get(FEATURES[kind.name])
        if values is None:
            continue
        owner = _documents_of_items(ids, packed, kind)
        grids = {"image": media.image_grid_thw, "video": media.video_grid_thw}.get(kind.name)
        owner = owner if grids is None else owner.repeat_interleave(grids.prod(-1))
        change = (owner % 2 == parity).to(values.device).view(-1, *[1] * (values.ndim - 1))
        yield FEATURES[kind.name], torch.where(change, -values, values)


def _documents_of_items(ids: Tensor, packed: PackedSequence, kind: Media) -> Tensor:
    """Return int64 [M] on the host: the document of every item of one kind, by the ids [T], or
    [t] of a shard.
    """
    if packed.shard is None:
        offsets = media_offsets(ids, packed.cu_seqlens_cpu, kind)
        return torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    places = (ids == kind.token).nonzero()[:, 0]
    features = packed.shard.features[kind.name].start + torch.arange(len(places))
    items = torch.searchsorted(kind.sizes.cumsum(0), features, right=True)
    numbers = packed.shard.cut(packed.shard.row.seq_idx)[0].to("cpu", torch.int64)
    return torch.zeros(len(kind.sizes), dtype=torch.int64).index_copy(0, items, numbers[places])
