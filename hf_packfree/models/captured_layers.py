"""Running a packed row through a text model by a CUDA graph of its layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.graphs.by_layer import are_sharded, gathered_dtype
from hf_packfree.graphs.settings import embedding_of
from hf_packfree.models.attention import attention_route
from hf_packfree.models.call import Call
from hf_packfree.models.compat import masks_the_layers_ignore
from hf_packfree.models.plain_layers import all_are_hooked
from hf_packfree.models.recompute import has_saved_tensor_hooks
from hf_packfree.models.rotary import has_fixed_frequencies
from hf_packfree.models.state import state_of
from hf_packfree.ops.backend import HALF
from hf_packfree.ops.rounded_weights import beside_rows
from hf_packfree.ops.table import OPS
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.fast_path import Meanwhile

_READ = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "position_ids",
        "attention_mask",
        "packed_sequence",
        "use_cache",
        "return_dict",
    }
)
"""The arguments that a graph's layers can have; a row with any other argument that is not None is
not replayed.
"""
_OF_THE_LOSS = "labels", "shift_labels", "num_items_in_batch"
"""Keywords that upstream's heads pass to the text model and no layer reads."""
_MULTIPLIED = {"falcon_h1"}
"""Models that compute something else from ids than from their embeddings."""
_OUTPUTS = "output_hidden_states", "output_router_logits", "output_attentions"


def in_graph(
    trunk: Any, forward: Callable[..., Any], row: dict[str, Any], packed: PackedSequence
) -> Any:
    """Return the text model's output for a row from a CUDA graph, or without one if its ids were
    embedded already, which hooks see once; None where the row has to run without.

    Args:
        trunk: the text model.
        forward: upstream's forward of the text model.
        row: the arguments of the forward.
        packed: the record in `row`.
    """
    state = state_of(trunk)
    if state.cuda_graphs == "never" or not _is_training_step(trunk, row):
        return None
    # nn.DataParallel builds its replicas anew for each step, and runs them in threads of their own
    if getattr(trunk, "_is_replica", False):
        return None
    kinds: list[type[Any]] = []
    device, enabled, dtype = packed.seq_idx.device, *_autocast(packed.seq_idx.device)

    def layers(given: Tensor, positions: Tensor, captured: PackedSequence) -> Tensor:
        name = "inputs_embeds" if given.is_floating_point() else "input_ids"
        # autocast's cache keeps rounded weights: a replay would read them after the weights have
        # changed
        with torch.autocast(device.type, dtype, enabled, cache_enabled=False):
            output = forward(
                **{name: given},
                position_ids=positions,
                attention_mask=masks_the_layers_ignore(trunk.config, device),
                packed_sequence=captured,
                use_cache=False,
                return_dict=True,
            )
        kinds.append(type(output))
        return output.last_hidden_state

    runner, given = state.graphs.of(trunk), _given(row)
    why_not, wait = _why_not(trunk, row), state.graphs.wait
    made: list[Tensor] = []

    def embed(given: Tensor) -> Tensor:
        made.append(_embed(trunk, given))
        return made[-1]

    hidden = runner.run(layers, embed, given, row["position_ids"], packed, why_not, wait)
    if hidden is None:
        embedded = {"input_ids": None, "inputs_embeds": made[-1] if made else None}
        return without_graph(trunk, forward, row | embedded) if made else None
    runner.output = kinds[0] if kinds else runner.output
    return runner.output(last_hidden_state=hidden)


def without_graph(trunk: Any, forward: Callable[..., Any], row: dict[str, Any]) -> Any:
    """As `in_graph`, but without a graph: in a training step under autocast, fp32 weights are
    rounded once for the row, and not again where its layers are recomputed.
    """
    if torch.compiler.is_compiling():
        return forward(**row)
    # there is no recomputation, and that of a row before is still to come
    if not torch.is_grad_enabled():
        with beside_rows():
            return forward(**row)
    graphs = state_of(trunk).graphs
    if not (_is_training_step(trunk, row) and _rounds_weights(trunk, row)):
        graphs.round_each(trunk)
        return forward(**row)
    with graphs.rounded_once(trunk):
        return forward(**row)


def _rounds_weights(trunk: Any, row: dict[str, Any]) -> bool:
    """Whether autocast rounds weights to half precision, and the text model has its own: replicas
    of nn.DataParallel have others in each step, and FSDP frees what it gathered. Parameters that
    FSDP2 shards by layers are no ordinary ones, see `Copies`.
    """
    enabled, dtype = _autocast(row["position_ids"].device)
    marks = "_is_replica", "_is_fsdp_managed_module"
    return enabled and dtype in HALF and not any(getattr(trunk, mark, False) for mark in marks)


def ahead(call: Call) -> Meanwhile | None:
    """Return what replays the row of a training step's call before the host has read its documents,
    see `Runner.run_ahead`; None where there is no graph, where rows have to run without one for
    what the call wants, or where the text model's inputs may be others than the call's.
    """
    runner, module = state_of(call.module).graphs.of_one(), call.module
    trunk = None if runner is None else runner.trunk()
    given, positions = _given(call.arguments), call.position_ids
    if runner is None or trunk is None or not runner.captures.graphs or call.has_media:
        return None
    # recomputed, the call would have to save the same tensors again
    if has_saved_tensor_hooks() or any(call.get(name) for name in _OUTPUTS):
        return None
    if trunk is not module and trunk is not module.base_model:
        return None
    # what is around the text model may embed for it
    if not isinstance(positions, Tensor) or given.dtype != runner.given:
        return None
    # inference tensors do not tell whether they were changed
    if positions.shape != given.shape[:2] or positions.is_inference() or given.is_inference():
        return None
    # ranks that embed a row a second time would gather a sharded embedding once more; PEFT's token
    # adapters compute `weight` when it is read
    embedding = embedding_of(trunk)
    kinds = set() if embedding is None else {type(one) for one in embedding.parameters()}
    if not kinds or not kinds <= {Tensor, nn.Parameter}:
        return None
    return partial(runner.run_ahead, partial(_embed, trunk), given, positions)


def _given(arguments: dict[str, Any]) -> Tensor:
    """Return the ids, or else the embeddings, that a text model is called with."""
    embeddings: Tensor | None = arguments.get("inputs_embeds")
    return arguments["input_ids"] if embeddings is None else embeddings


def _embed(trunk: Any, given: Tensor) -> Tensor:
    """Return the embeddings of ids, or embeddings as they are."""
    return given if given.is_floating_point() else trunk.get_input_embeddings()(given)


def _is_training_step(trunk: Any, row: dict[str, Any]) -> bool:
    """Whether the row belongs to a training step in eager mode on a GPU."""
    x = _given(row)
    eager = not torch.compiler.is_compiling()
    return bool(trunk.training and torch.is_grad_enabled() and x.is_cuda and eager)


def _why_not(trunk: Any, row: dict[str, Any]) -> str | None:
    """Return why a row cannot be replayed, or None."""
    if (why := _why_not_now(trunk, row.get("input_ids") is not None)) is not None:
        return why
    for name in _OUTPUTS:
        wanted = row.get(name)
        if getattr(trunk.config, name, False) if wanted is None else wanted:
            return f"{name} is wanted"
    if (why := _unbounded(trunk)) is not None:
        return why
    known = _READ | {*_OUTPUTS, *_OF_THE_LOSS}
    other = next((name for name, value in row.items() if not (value is None or name in known)), "")
    return f"{other} is given" if other else None


def _why_not_now(trunk: Any, has_ids: bool) -> str | None:
    """Return why no row of such inputs can be replayed at present, or None."""
    if not has_fixed_frequencies(trunk.config):
        return "its rotary embedding depends on the longest position"
    if has_ids and trunk.config.model_type in _MULTIPLIED:
        return "its forward pass multiplies the embeddings of ids, and of nothing else"
    # Gemma 4 would search for the ids of embeddings, among all at once
    if getattr(trunk.config, "hidden_size_per_layer_input", 0) and not are_sharded(trunk):
        return "its layers embed ids, too"
    if all_are_hooked():
        return "all modules have hooks (register_module_forward_hook and the like)"
    # a capture would copy activations to memory that belongs to other tensors at a replay
    if has_saved_tensor_hooks():
        return "activations are offloaded or recomputed (hooks of saved tensors)"
    return None


def _unbounded(trunk: Any) -> str | None:
    """Return which operation runs in an implementation of which no graph can be captured, or was
    tried, in words, or None.
    """
    embedding = embedding_of(trunk)
    weight = next((trunk if embedding is None else embedding).parameters())
    enabled, dtype = _autocast(weight.device)
    dtype = dtype if enabled else gathered_dtype(trunk) or weight.dtype
    kernels = state_of(trunk).kernels_for(weight.device, dtype)
    loaded = trunk.config._attn_implementation
    ours = loaded in state_of(trunk).attends_for or attention_route(loaded) == "flash"
    if "attention" in kernels and not ours:
        return f"attention runs in {loaded} (load the model with attn_implementation='sdpa')"
    # which no kernel has
    if "attention" in kernels and getattr(trunk.config, "attention_dropout", None):
        return "attention has dropout"
    mixing = ((op, name) for op, name in kernels.items() if OPS[op].leaks is not None)
    for op, name in mixing:
        if not OPS[op].backend(name).runs_bounded:
            return f"{op} runs in {name}, of which no graph can be captured"
    return None


def _autocast(device: torch.device) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
