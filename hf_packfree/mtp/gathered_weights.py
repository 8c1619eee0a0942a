"""The weights of the language modelling head, gathered where FSDP2 or ZeRO-3 shards them, for the
logits of the multi-token prediction head.

The main loss calls the language modelling head once, as the sharding library expects. A second
call, for the multi-token prediction loss, does not work: FSDP2 would give the weight a gradient
even where none is wanted, and where it gathers several modules together it counts their calls.
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
class LogitLayer:
    """A layer that computes logits.

    Attributes:
        weight, bias: [V, D_model] and [V] or None, gathered, if the layer is a plain product with
            them; otherwise both None.
        logits: returns the logits [n, V] of hidden states [n, D_model].
    """

    weight: Any
    bias: Any
    logits: Callable[[Tensor], Tensor]


def readable_weights(layer: nn.Module, dtype: Any, *, detach: bool) -> LogitLayer:
    """Return a layer's weights, gathered where they are sharded; only the layer as a function where
    it has adapters or hooks.

    Args:
        layer: the last layer of the language modelling head.
        dtype: of the hidden states; gathered weights are cast to it.
        detach: whether the layer's parameters get no gradient.

    Raises:
        UnsupportedInput: the layer's parameters are sharded, `detach` is set, and the layer is no
            plain linear layer.
    """
    parameters = dict(layer.named_parameters())
    sharded = any(isinstance(one, DTensor) for one in parameters.values())
    # sharded by DeepSpeed's ZeRO-3
    partitioned = any(hasattr(one, "ds_shape") for one in parameters.values())
    # compared by forward, because FSDP2 changes the layer's class
    linear: Any = layer if forward_of(layer) is nn.Linear.forward else None
    if linear is not None and sharded:
        return _product(*(_gathered(one, dtype, detach) for one in (linear.weight, linear.bias)))
    if linear is not None and partitioned and detach:
        # ZeRO-3 gathers weights that are read in a forward, until the forward ends
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
    return LogitLayer(None, None, _without_gradients(layer, parameters) if detach else layer)


def _product(weight: Any, bias: Any) -> LogitLayer:
    return LogitLayer(
        weight,
        bias,
        lambda x: F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)),
    )


def _gathered(parameter: Any, dtype: Any, detach: bool) -> Any:
    """Return a parameter, gathered and in `dtype` where it is sharded."""
    if not isinstance(parameter, DTensor):
        return parameter
    return whole(parameter.detach() if detach else parameter).to(dtype)


def _without_gradients(
    layer: nn.Module, parameters: dict[str, nn.Parameter]
) -> Callable[[Tensor], Tensor]:
    """Return the layer as a function of its input, with detached parameters."""
    detached = {name: parameter.detach() for name, parameter in parameters.items()}
    return lambda x: functional_call(layer, detached, (x,))
