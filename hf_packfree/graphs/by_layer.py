"""Each layer of a text model in graphs of its own, see `hf_packfree.graphs.layer_graphs`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_packfree.graphs import checkpointing
from hf_packfree.graphs.ahead import Inputs
from hf_packfree.graphs.layer_calls import CallsOfLayers, forwards_of
from hf_packfree.graphs.layer_graphs import LayerGraphs, Memory
from hf_packfree.graphs.settings import HOOKS, WEIGHTS, Settings
from hf_packfree.graphs.whole import Layers, ToCapture
from hf_packfree.ops.rounded_weights import RoundedWeights
from hf_packfree.ops.seeds import Seeds
from hf_packfree.packing import PackedSequence

_FSDP = "torch.distributed.fsdp."


def are_sharded(trunk: Any) -> bool:
    """Whether FSDP2 gathers weights of a text model: of its layers or its embedding by themselves,
    or of all of it with what is around it.
    """
    if any(isinstance(part, FSDPModule) for part in trunk.modules() if part is not trunk):
        return True
    # FSDP1 marks modules too; it wraps them, and gathers views
    if not getattr(trunk, "_is_fsdp_managed_module", False):
        return False
    wraps = any(isinstance(part, FullyShardedDataParallel) for part in trunk.modules())
    return not wraps and all(weight.is_leaf for weight in trunk.parameters())


def gathered_dtype(trunk: Any) -> torch.dtype | None:
    """Return the dtype of the weights that FSDP2 gathers for a text model's layers; None: it does
    not shard them, or does not cast.
    """
    layers = [*getattr(trunk, "layers", ())]
    layer: Any = checkpointing.called_in_hooks(layers[0]) if layers else None
    if not isinstance(layer, FSDPModule):
        # gathered, with what is around the text model
        managed = layer is not None and getattr(trunk, "_is_fsdp_managed_module", False)
        return next((x.dtype for x in layer.parameters()), None) if managed else None
    return param_dtype(layer)


def param_dtype(module: Any) -> torch.dtype | None:
    """Return the `param_dtype` of the policy with which FSDP2 shards a module."""
    # FSDP2 has no public name for the policy; a dtype noted in an earlier row would be stale once a
    # model is sharded
    found: torch.dtype | None = module._get_fsdp_state()._mp_policy.param_dtype
    return found


def is_of_fsdp(hook: Any) -> bool:
    """Whether a hook is FSDP's own."""
    return getattr(hook, "__module__", "").startswith(_FSDP)


class ByLayer:
    """As `Whole`, for a text model whose layers FSDP2 shards.

    Args:
        trunk: the text model.
    """

    def __init__(self, trunk: Any) -> None:
        self._layers: nn.ModuleList = trunk.layers
        why_not_around = partial(_why_not_around, _parts_around(trunk))
        # weights are read where FSDP2 has gathered them
        self.settings = Settings(trunk, own_weights=False, further=why_not_around)
        self.why_not = why_not_layers(trunk.layers) or why_not_around()
        self.rounded, self.seeds = RoundedWeights(), Seeds()
        self._calls: dict[Any, CallsOfLayers] = {}
        self._memory: Memory = {}

    def forget(self) -> None:
        """Free the memory of weights."""
        self._memory = {}

    def note(self, key: Any, layers: Layers, inputs: Inputs, row: PackedSequence) -> Tensor | None:
        """Run the first row without a graph, and note what its layers are called with: to call them
        for a capture alone would gather weights that no other rank sends. Return None if that is
        known, as for rows of other lengths later.
        """
        length = tokens, kind = _length_of(key)
        if length in self._calls:
            return None
        for (others, its), calls in self._calls.items():
            resized = calls.resized(others, tokens) if its == kind else None
            if resized is not None:
                self._calls[length] = resized
                return None
        calls = CallsOfLayers(self._layers)
        with forwards_of(self._layers, calls.noting):
            out = layers(*inputs, row)
        calls.end()
        self._calls[length] = calls
        return out

    def capture(self, wanted: ToCapture) -> LayerGraphs:
        """Return the graphs of the layers, see `Whole.capture`."""
        calls = self._calls[_length_of(wanted.key)]
        has_gradients = all(call.hidden.requires_grad for call in calls.calls)
        seeds = self.seeds
        with checkpointing.in_capture(self._layers, has_gradients, seeds), seeds.in_use():
            kept = self.settings, seeds
            return LayerGraphs(calls, wanted.packed, wanted.pool, self._memory, kept)


def _length_of(key: Any) -> Any:
    """Return what decides the sizes of a layer's arguments."""
    return key[0].tokens, key[1]


def why_not_layers(layers: nn.ModuleList) -> str | None:
    """Return why sharded layers cannot be captured, or None."""
    whole = {*layers, *map(checkpointing.called_in_hooks, layers)}
    for name, part in layers.named_modules():
        if (why := checkpointing.why_not(part)) is not None:
            return why
        found = _why_not_part(part, part in whole)
        if found is not None:
            return f"layers.{name} {found}"
    return None


def _why_not_part(part: Any, whole: bool) -> str | None:
    """Return why a layer, or a part of one, cannot be captured, as the rest of a sentence."""
    if isinstance(part, FSDPModule) and not whole:
        return "is sharded by itself"
    # before transformers 5.24 with the hooks that gather its weights
    is_own = checkpointing.recomputes(part) == checkpointing.FUNCTION
    if is_own and type(part).__call__ is not nn.Module.__call__:
        return "is recomputed with its hooks"
    if part._compiled_call_impl is not None:
        return "is compiled"
    if not all(whole and is_of_fsdp(each) for each in _hooks(part)):
        return "has hooks"
    kinds = {type(x) for x in (*part._parameters.values(), *part._buffers.values())}
    others = kinds - {*WEIGHTS, DTensor, type(None)}
    return f"holds a {others.pop().__name__}" if others else None


def _parts_around(trunk: Any) -> list[tuple[str, nn.Module]]:
    """Return the parts of a text model that are not its layers', with their names."""
    others = {trunk, *trunk.layers.modules()}
    return [(name, part) for name, part in trunk.named_modules() if part not in others]


def _why_not_around(parts: list[tuple[str, nn.Module]]) -> str | None:
    """Return why what is around the layers cannot run on padded rows, or None."""
    for name, part in parts:
        if not all(is_of_fsdp(each) or _asks_for_gradients(each) for each in _hooks(part)):
            return f"{name} has hooks, which would see padding"
        if "forward" in vars(part):
            return f"{name} has a forward of its own, which would see padding"
    return None


def _asks_for_gradients(hook: Any) -> bool:
    """Whether a hook is transformers' or PEFT's that lets embeddings have gradients."""
    return getattr(hook, "__name__", "").startswith("make_inputs_require_grad")


def _hooks(part: Any) -> list[Any]:
    """Return all hooks of a module."""
    found = [vars(part).get(name) or {} for name in HOOKS]
    # dictionaries, and accelerate's one hook
    return [
        hook for each in found for hook in (each.values() if isinstance(each, dict) else [each])
    ]
