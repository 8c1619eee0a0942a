"""The language modelling head's weights, by which the multi-token prediction head's states are
multiplied, gathered where FSDP2 or ZeRO-3 shards them.

The main loss runs that layer once, as its sharder expects. A second call for the head's loss would
not do: FSDP2 would give it the weight with its gradient, also where none is wanted, and gathers of
several modules together count their calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.head_loss import whole
from hf_packfree.models.plain_layers import forward_of, is_hooked


@dataclass(frozen=True)
class Weights:
    """A layer that makes logits.

    Attributes:
        weight, bias: [V, D_model] and [V] or None, whole, where logits are the product with them;
            None where they are not.
        logits: returns the logits [n, V] of hidden states [n, D_model].
    """

    weight: Any
    bias: Any
    logits: Callable[[Tensor], Tensor]


def readable_weights(layer: nn.Module, dtype: Any, *, detach: bool) -> Weights:
    """Return a layer's weights, from all ranks where they are sharded; the layer alone where
    adapters or hooks are around it.

    Args:
        layer: the language modelling head's last one.
        dtype: of the hidden states, which gathered weights get.
        detach: whether the layer's parameters get no gradient.

    Raises:
        UnsupportedInput: its parameters are sharded, and it is more than a product with one of
            them.
    """
    parameters = dict(layer.named_parameters())
    sharded = any(isinstance(one, DTensor) for one in parameters.values())
    # by DeepSpeed's ZeRO-3
    partitioned = any(hasattr(one, "ds_shape") for one in parameters.values())
    # FSDP2 makes a class of its own of it
    linear: Any = layer if forward_of(layer) is nn.Linear.forward else None
    if linear is not None and sharded:
        return _product(*(_gathered(one, dtype, detach) for one in (linear.weight, linear.bias)))
    if linear is not None and partitioned and detach:
        # reading them in a forward is what gathers them, until it ends
        return _product(
            *(
                None if one is None else one.detach().to(dtype, copy=True)
                for one in (linear.weight, linear.bias)
            )
        )
    if linear is not None and not is_hooked(linear):
        return _product(
            *(
                one.detach() if detach and one is not None else one
                for one in (linear.weight, linear.bias)
            )
        )
    if detach and (sharded or partitioned):
        raise UnsupportedInput(
            f"found a sharded {type(layer).__name__} as the language modelling head in a training "
            "step with multi-token prediction; wanted a plain linear layer, whose weights can be "
            "gathered; leave lm_head out of the adapters"
        )
    return Weights(None, None, _without_gradients(layer, parameters) if detach else layer)


def _product(weight: Any, bias: Any) -> Weights:
    return Weights(
        weight,
        bias,
        lambda x: F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)),
    )


def _gathered(parameter: Any, dtype: Any, detach: bool) -> Any:
    """Return the whole of a sharded parameter."""
    if not isinstance(parameter, DTensor):
        return parameter
    return whole(parameter.detach() if detach else parameter).to(dtype)


def _without_gradients(
    layer: nn.Module, parameters: dict[str, nn.Parameter]
) -> Callable[[Tensor], Tensor]:
    """Return the layer as a function of its input alone."""
    detached = {name: parameter.detach() for name, parameter in parameters.items()}
    return lambda x: functional_call(layer, detached, (x,))
