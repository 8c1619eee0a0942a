"""Heads under context parallelism: each rank gets the whole row and runs its shard.

Loss and gradients are those of one process. With `num_items_in_batch`, they are the sums of the
ranks' losses and gradients, as the Trainer expects; without it, their means, as DDP computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import PatchConflict, UnsupportedInput
from hf_packfree.models.attention import check_attention
from hf_packfree.models.call import Call, of_media
from hf_packfree.models.labels import IGNORED
from hf_packfree.models.media_keywords import FEATURES, OF_ITEMS, SECONDS
from hf_packfree.models.same_batch import refuse_other_ranks
from hf_packfree.models.sharded_media import reaching_media
from hf_packfree.models.vision_language import share_media
from hf_packfree.ops.op import Op, in_words
from hf_packfree.ops.table import OPS
from hf_packfree.packing import PackedSequence, repad, shard_row
from hf_packfree.parallel import ContextParallel
from hf_packfree.parallel.collectives import gather_row, gathered

_OF_LOSS: tuple[str, ...] = ("shift_labels", "num_items_in_batch")
"""Keywords that the loss of a shard needs, even if upstream's head does not pass them on."""


def forward_shard(
    head: Any,
    run: Callable[[dict[str, Any], dict[str, Any]], Any],
    row: dict[str, Any],
    packed: PackedSequence,
    settings: ContextParallel,
    *,
    counted: bool,
) -> Any:
    """Run a head's forward on this rank's tokens of a row.

    Args:
        head: the patched head.
        run: runs upstream's forward; takes the forward's arguments, and keywords that the loss gets
            even if upstream's head does not pass them on.
        row: the forward's arguments for the whole row, [1, T, ...] each, targets included.
        packed: the record of the row.
        settings: the group, and how its ranks share operations.
        counted: whether the caller passed `num_items_in_batch`.

    Returns:
        Upstream's output. In training the logits are those of this rank's tokens, [1, t, V], and
        the loss is of these; under `no_grad` logits are gathered from all ranks, in the caller's
        shape, and the loss is the same on all ranks.

    Raises:
        UnsupportedInput: the loss takes no `num_items_in_batch`, ranks have different batches, or
            see `share_media`.
        PatchConflict: ranks have different packages, options or models.
    """
    if row.get("labels") is not None and "num_items_in_batch" not in row:
        raise UnsupportedInput(
            "found a loss function that takes no num_items_in_batch under context parallelism, "
            "where each rank has its own number of targets; wanted one that divides by the count "
            "it is given; add the keyword to it"
        )
    refuse_other_ranks(head, row, packed, settings)
    local = shard_row(packed, settings.rank, settings.world, settings.group, settings.ways)
    source = next(
        (module for module in (head, head.base_model) if hasattr(module, "get_rope_index")), None
    )
    media = [row.get(name) for name in FEATURES.values()]
    if source is not None:
        row, local = share_media(source, row, local)
    mine = _arguments_of(local, row, packed.num_tokens)
    of_loss = {name: mine[name] for name in _OF_LOSS if name in mine}
    with reaching_media(head.get_input_embeddings(), media):
        output = run(mine, of_loss)
    experts, loss = output.get("aux_loss"), output.get("loss")
    # every rank computes the whole auxiliary loss, which counts once
    if experts is not None and loss is not None:
        coefficient = head.config.get_text_config().router_aux_loss_coef
        loss = loss - (1 - 1 / settings.world) * coefficient * experts
    if loss is not None:
        output.loss = loss if counted else loss * settings.world
    if not torch.is_grad_enabled():
        if loss is not None:
            # alike on all ranks: of a last batch that is not full, accelerate drops ranks' losses
            output.loss = gathered(output.loss, settings.group).mean(0)
        logits = gather_row(output.logits[0], local)[None]
        output.logits = repad(logits[:, : packed.num_tokens], packed)
    return output


def _arguments_of(local: PackedSequence, row: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return a head's arguments for a shard, from those for the whole row of `tokens` tokens."""
    whole, ignored = local.whole_row, row.get("ignore_index", IGNORED)

    def cut(name: str, value: Any) -> Any:
        # [1, T], or [3 or 4, 1, T]
        if name == "position_ids" and value is not None:
            return local.cut(value, -1)
        if of_media(name) or not isinstance(value, Tensor) or value.shape[:2] != (1, tokens):
            return value
        return local.cut(value, fill=ignored if name in ("labels", "shift_labels") else 0)

    partly = whole.padding_segments and whole.num_real_tokens
    return {name: cut(name, value) for name, value in row.items()} | {
        # for the experts' statistics, which are over the whole row
        "attention_mask": whole.is_real().long() if partly else None,
        "packed_sequence": local,
    }


def resolve_ways(
    config: Any,
    sizes: dict[str, int],
    settings: ContextParallel,
    ops: Iterable[str],
    forced: Mapping[str, str],
) -> ContextParallel:
    """Return the settings for a model with every "auto" replaced by a choice; refuse a model that
    the ranks cannot share.

    Args:
        config: the text model's.
        sizes: those of the text model's token mixers; see `op_sizes`.
        settings: as the user passed them.
        ops: the operations that the token mixers call.
        forced: {operation: the backend that the user named}.

    Raises:
        PatchConflict: the ranks cannot share an operation, or their number does not divide its
            heads, or the model does not run sdpa.
    """
    ops = tuple(ops)
    if found := [what for op in ops if (what := OPS[op].needs_whole_rows(sizes)) is not None]:
        raise PatchConflict(
            f"found {found[0]} under context parallelism, which needs whole rows; wanted "
            "operations whose ranks exchange what crosses their edges; leave context_parallel out"
        )
    ways: dict[str, str] = {}
    chosen: dict[str, Any] = {}
    said = []
    for op in OPS.values():
        if (across := op.across_ranks) is None:
            continue
        asked = "auto" if across.option is None else getattr(settings, across.option)
        ways[op.name], why = _way(op, asked, sizes, settings.world, forced.get(op.name))
        if across.option is not None:
            chosen[across.option] = ways[op.name]
        exchanged = across.ways[ways[op.name]].exchanges
        # an operation of the family that no layer of this model calls has no sizes
        if op.name in ops and sizes.keys() >= across.divided() and exchanged:
            said.append(f"{op.title} exchanges {exchanged}{f' ({why})' if why else ''}")
    if check_attention(config) != "varlen":
        raise PatchConflict(
            f"found attn_implementation={config._attn_implementation!r} under context parallelism; "
            "wanted sdpa, which this "
            "package runs itself; call model.set_attn_implementation('sdpa')"
        )
    return replace(settings, **chosen, ways=ways, why="; ".join(said))


def _way(
    op: Op[Any],
    asked: str,
    sizes: Mapping[str, int],
    world: int,
    backend: str | None,
) -> tuple[str, str]:
    """Return the name of the way in which ranks share an operation, and why; `backend` is None if
    the user named none.
    """
    across = op.across_ranks
    assert across is not None
    refused = {name: way.why_not(sizes, world) for name, way in across.ways.items()}
    if asked != "auto":
        heads, (*_, instead) = across.ways[asked].divides or "", across.ways
        if heads in sizes and refused[asked] is not None:
            raise PatchConflict(
                f"found {world} ranks to share the {sizes[heads]} {in_words(heads)} of "
                f"{across.option}; wanted a number that divides them; use fewer ranks for context "
                f"parallelism, or ContextParallel(group, {across.option}={instead!r})"
            )
        return asked, "as asked for"
    if backend is not None:
        for name, way in across.ways.items():
            if (lacking := way.lacking(op.backend(backend))) is not None:
                refused[name] = f"{in_words(op.name)} on {backend} {lacking}"
    fitting = [name for name, why in refused.items() if why is None]
    if len(fitting) > 1 and across.cheaper is not None:
        return across.cheaper(sizes, world)
    why = "; ".join(why for why in refused.values() if why is not None)
    if not fitting:
        raise PatchConflict(
            f"found no way to share {in_words(op.name)} ({why}); wanted one; use another number of "
            "ranks or another backend, or leave context_parallel out"
        )
    return fitting[0], why


_SHARED = {*OF_ITEMS, *SECONDS}
"""Arguments of media of which each rank takes the items of its shard."""


def check_call(call: Call) -> None:
    """Refuse a head's call with arguments that do not work on a shard.

    Raises:
        UnsupportedInput: the caller wants attention weights, hidden states or only some logits, or
            passes media that cannot be shared.
    """
    _check_media(call)
    of_layers = ("output_attentions", "output_hidden_states")
    wanted = {
        name: getattr(call.module.config, name, None) if call.get(name) is None else call.get(name)
        for name in of_layers
    }
    wanted["logits_to_keep"] = None if call.wants_all_logits else call.get("logits_to_keep")
    for name, value in wanted.items():
        if value is not None and value is not False:
            raise UnsupportedInput(
                f"found {name}={value} under context parallelism; wanted nothing but loss and "
                "logits, because no rank has the whole row; leave it out"
            )


def refuse_labelled_padding(count: int, ignored: int) -> None:
    """Refuse labels that padding would have to predict, with which the whole batch would run as
    upstream runs it.

    Raises:
        UnsupportedInput: always.
    """
    raise UnsupportedInput(
        f"found {count} labels that padding would have to predict under context parallelism, "
        "whose ranks share the real tokens alone; wanted labels that these predict; set the labels "
        f"of padding, and of the first token after it, to {ignored}"
    )


def _check_media(call: Call) -> None:
    """Refuse media whose items cannot be assigned to the ranks that hold their placeholders."""
    made = [
        name
        for name, value in call.arguments.items()
        if of_media(name) and name not in _SHARED and value is not None
    ]
    if made:
        raise UnsupportedInput(
            f"found {made[0]} under context parallelism, made for the media of the whole row; "
            "wanted pixels and audio features, of which each rank takes its own; leave it out"
        )
    if call.has_media and call.input_ids is None:
        raise UnsupportedInput(
            "found media with inputs_embeds under context parallelism; wanted input_ids, whose "
            "placeholders say which rank computes what; pass input_ids"
        )
