"""The check of a Trainer's first batch: every second document is changed, then every other one, and
the rest must not notice.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_packfree.errors import BlindMeasurement, LeakDetected
from hf_packfree.models.call import UNREAD
from hf_packfree.models.media_keywords import FEATURES
from hf_packfree.models.rope_index import RowMedia, media_of
from hf_packfree.models.state import PatchState
from hf_packfree.packing import PackedSequence, shard_of, unpad
from hf_packfree.packing.media import Media, media_offsets
from hf_packfree.packing.tree import Tree
from hf_packfree.verify.packing_report import limits_for, relative_rms
from hf_packfree.verify.random_documents import media_tokens
from hf_packfree.verify.ranks import Ranks, settings_of


def first_batch_influence(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Change the tokens of documents 0, 2, 4 ... and return the relative RMS by which 1, 3, 5 ...
    change, or the other way round, whichever is larger.

    In a vision-language model the pixels and audio of those documents change too.

    All forwards draw the same random numbers, so that dropout and noise are the same in each; the
    unchanged batch runs twice, to check that.

    Under context parallelism every rank changes and compares its own tokens, of the same documents,
    and the largest number of all ranks counts.

    Takes four forwards without gradients. None where the head has already found that the batch is
    not packed, except in a process group, where the forwards of a sharded model are collective. The
    random state is restored afterwards.

    Args:
        module: a patched text model, such as Qwen3_5TextModel, or the module with towers: a
            vision-language model, such as Qwen3_5Model, or the whole thinker in transformers before
            5.21.
        args, kwargs: of its forward: `input_ids` [B, S] or `inputs_embeds` [B, S, H], and the
            boundaries.

    Returns:
        Relative RMS over the last hidden states [B, S, H] of the unchanged documents; None if there
        is one document at most.

    Raises:
        LeakDetected: the change is above rounding.
        BlindMeasurement: the change is above rounding, but so is the difference between two runs of
            the same batch, or the changed tokens draw more or fewer random numbers.
    """
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    inputs = {**dict(zip(names, args, strict=False)), **kwargs}
    takes_media = hasattr(module, "get_rope_index")
    read = inputs.get("packed_sequence", UNREAD)
    if read is not UNREAD and not _has_neighbours(read) and not in_process_group():
        return None
    with torch.no_grad(), _watched(module) as seen:
        before, drawn = _last_states(module, inputs)
        record = seen[0].for_shape(before.shape[:2]) if seen else None
        if not _has_neighbours(record) and not in_process_group():
            return None
        found: list[float] = []
        draws_others = False
        for parity in (0, 1):
            changed, kept = (
                (inputs, None) if record is None else _changed(module, inputs, record, parity)
            )
            after, of_changed = _last_states(module, changed)
            draws_others |= of_changed != drawn
            if kept is not None:
                found.append(relative_rms(after[kept], before[kept]) if bool(kept.any()) else 0.0)
        repeated = relative_rms(_last_states(module, inputs)[0], before)
    if not found:
        return None
    ranks = Ranks(settings_of(module), 0)
    influence, noise, others = (
        ranks.largest(each, before.device) for each in (found, [repeated], [draws_others])
    )
    _judge(
        influence,
        noise,
        bool(others),
        limits_for(before.device, before.dtype).influence,
        "tokens or media" if takes_media else "tokens",
    )
    return influence


def _has_neighbours(record: Any) -> bool:
    return isinstance(record, PackedSequence) and record.num_documents > 1


@contextmanager
def _watched(module: nn.Module) -> Iterator[list[PackedSequence]]:
    """Collect the records of packed forwards in the block; other observers are off meanwhile."""
    seen: list[PackedSequence] = []

    def watch(packed: PackedSequence | None, shape: tuple[int, int], mask: Any) -> None:
        if packed is not None:
            seen.append(packed)

    state = module.packfree
    if not isinstance(state, PatchState):
        yield seen
        return
    observers, followers = list(state.observers), list(state.followers)
    state.observers[:], state.followers[:] = [watch], []
    try:
        yield seen
    finally:
        state.observers[:], state.followers[:] = observers, followers


@contextmanager
def _random_numbers_kept(module: nn.Module) -> Iterator[set[torch.device]]:
    """Restore the random state of the host and of the module's GPUs after the block; yields these
    GPUs.
    """
    python, numpys = random.getstate(), np.random.get_state()
    # torch cannot fork the random state of Apple's GPUs by device
    gpus = {p.device for p in module.parameters() if p.device.type not in ("cpu", "meta", "mps")}
    if torch.cuda.is_available():
        # also where offloaded parameters are on the host
        gpus.add(torch.device("cuda", torch.cuda.current_device()))
    kind = next((gpu.type for gpu in gpus), "cuda")
    try:
        with torch.random.fork_rng([gpu.index for gpu in gpus], device_type=kind):
            yield gpus
    finally:
        random.setstate(python)
        np.random.set_state(numpys)


def _last_states(module: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, list[Any]]:
    """Return the last hidden states [B, S, H], also of a model with a head, whose logits would take
    more memory, and the result of `_drawn`.
    """
    with _random_numbers_kept(module) as gpus:
        if not hasattr(module, "lm_head"):
            states = module.forward(**inputs).last_hidden_state
        else:
            output = module.forward(**{**inputs, "output_hidden_states": True})
            states = output.hidden_states[-1]
        return states, _drawn(gpus)


def _drawn(gpus: set[torch.device]) -> list[Any]:
    """Return the states of all random generators, which differ after two runs that drew different
    numbers of values.
    """
    numpys: Any = np.random.get_state()
    states = [torch.get_rng_state()]
    states += [getattr(torch, gpu.type).get_rng_state(gpu) for gpu in gpus]
    host = [random.getstate(), numpys[1].tolist(), *numpys[2:]]
    return [*host, *(state.tolist() for state in states)]


def _judge(influence: float, noise: float, draws_others: bool, limit: float, what: str) -> None:
    if influence <= limit:
        return
    if not noise <= limit:
        raise BlindMeasurement(
            f"found a first batch whose outputs are {noise:.1e} relative RMS apart when it runs "
            f"twice, of the same weights and random numbers; wanted at most {limit:.0e}, above "
            "which a leak would show; run verify_packing(model), which measures without dropout "
            "and noise"
            if math.isfinite(noise)
            else "found NaN or Inf in the outputs of the first batch; wanted finite numbers, which "
            "can be compared; run verify_packing(model), which names weights that are not"
        )
    if draws_others:
        raise BlindMeasurement(
            f"found a first batch in which other {what} change how many random numbers are drawn, "
            f"and outputs by {influence:.1e} relative RMS; wanted the same noise before and after, "
            "so that a leak would show; run verify_packing(model), which measures without "
            "dropout and noise"
        )
    raise LeakDetected(
        f"found documents of the first batch reacting to each other's {what}: {influence:.1e} "
        f"relative RMS; wanted at most {limit:.0e}, which is rounding; run "
        "verify_packing(model) for the details and report it"
    )


def observers_of(module: nn.Module) -> list[Any]:
    """Return the list of functions that are called before every training forward of the text model
    in a patched module.
    """
    state = module.packfree
    return state.observers if isinstance(state, PatchState) else []


def in_process_group() -> bool:
    """Whether other processes take part in the forwards."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _changed(
    module: nn.Module, inputs: dict[str, Any], packed: PackedSequence, parity: int
) -> tuple[dict[str, Any], Tensor]:
    """Return the inputs with documents `parity`, `parity` + 2, ... changed, and bool [B, S]: the
    tokens of the other documents.
    """
    rows, tokens = packed.batch_shape
    number = torch.full((rows * tokens,), -1, dtype=torch.int32, device=packed.seq_idx.device)
    real = (
        packed.indices
        if packed.indices is not None
        else torch.arange(rows * tokens, device=number.device)
    )
    of_row = packed.cut(packed.whole_row.seq_idx)
    if packed.tree is not None:
        of_row = _by_branches(packed.tree, 1 - parity).to(of_row.device)[of_row.long()]
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


def _by_branches(tree: Tree, inner: int) -> Tensor:
    """Return int32 [N], a number for every segment: a leaf's number among the leaves, and `inner`
    for other segments, which must not change.
    """
    numbers = torch.full((len(tree.parents),), inner, dtype=torch.int32, device="cpu")
    numbers[tree.leaves] = torch.arange(len(tree.leaves), dtype=torch.int32, device="cpu")
    return numbers


def _other_media(
    source: Any, inputs: Mapping[str, Any], packed: PackedSequence, parity: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield pixels and audio, with the sign of every second document's flipped."""
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
    """Return int64 [M] on the host: the document of every media item of one kind, given the row's
    ids [T], or a shard's [t].
    """
    if not packed.is_shard:
        offsets = media_offsets(ids, packed.cu_seqlens_cpu, kind)
        numbers = torch.arange(len(offsets) - 1, device="cpu")
        return torch.repeat_interleave(numbers, offsets.diff())
    places = (ids == kind.token).nonzero()[:, 0]
    features = shard_of(packed).features[kind.name].start + torch.arange(len(places), device="cpu")
    items = torch.searchsorted(kind.sizes.cumsum(0), features, right=True)
    numbers = packed.cut(packed.whole_row.seq_idx)[0].to("cpu", torch.int64)
    owners = torch.zeros(len(kind.sizes), dtype=torch.int64, device="cpu")
    return owners.index_copy(0, items, numbers[places])
