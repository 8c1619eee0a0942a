"""Which linear layers are only their weight, and several of them that read one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.ops.projections import projections


def project(x: Tensor, *layers: nn.Module, backend: str) -> tuple[Tensor, ...]:
    """Return `layer(x)` of each, x [..., D]; "torch" means the layers, or what stands in their place.

    Layers that are more than their weights are called as they are.
    """
    weights = plain_weights(x, *layers) if backend != "torch" else None
    return tuple(layer(x) for layer in layers) if weights is None else projections(x, *weights, backend=backend)


def plain_weights(x: Any, *layers: Any) -> tuple[Tensor, ...] | None:
    """Return the layers' weights where calling each on x is one product with its weight and nothing else, otherwise None.

    Adapters, quantised layers, hooks, biases and sharded weights are more, and so is every layer under autocast and in
    compiled graphs.  Asked hundreds of times a step, so what holds for all layers is asked once.
    """
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or _all_are_hooked():
        return None
    weights, dtype = [], x.dtype
    for layer in layers:
        weight = _weight_alone(layer)
        if weight is None or weight.dtype != dtype:
            return None
        weights.append(weight)
    return tuple(weights)


def _weight_alone(layer: Any) -> Tensor | None:
    """The weight of a linear layer that is nothing else."""
    if type(layer) is not nn.Linear:  # others may hold no weight of that name
        return None
    fields = vars(layer)  # past nn.Module's own lookup, which is slow
    weight, bias = map(fields["_parameters"].get, ("weight", "bias"))
    alone = bias is None and type(weight) is nn.Parameter and "forward" not in fields and not _has_hooks(fields)
    return weight if alone else None


def is_hooked(layer: Any) -> bool:
    """Whether calling the layer does more than its class says (offloading, sharding): its weights cannot just be read."""
    return _has_hooks(vars(layer)) or _all_are_hooked()


def _has_hooks(fields: dict[str, Any]) -> bool:
    return bool(
        fields["_forward_hooks"]
        or fields["_forward_pre_hooks"]
        or fields["_backward_hooks"]
        or fields["_backward_pre_hooks"]
        or "_hf_hook" in fields
    )


_all_are_hooked = nn.modules.module._has_any_global_hook
