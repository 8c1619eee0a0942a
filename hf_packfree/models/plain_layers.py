"""Checks that a module computes the formula of its class and nothing else (no hooks, no unknown
adapters, no sharded weights), so that a fused kernel may replace its call.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from hf_packfree.models.base import Replacement, upstream_of
from hf_packfree.models.linear_weights import (
    cast_weight,
    compute_dtype,
    has_hooks,
    plain_weight,
    read_weight,
    runs_class_forward,
    under_autocast,
)
from hf_packfree.models.peft_lora import is_lora, read_lora
from hf_packfree.models.state import PatchState
from hf_packfree.ops.fused import OP as FUSED
from hf_packfree.ops.fused import projections
from hf_packfree.ops.fused.lora import Layer, weight_of

OTHER_FORMULA = "an MLP of another formula than SwiGLU"
SWIGLU = "gate_proj", "up_proj", "down_proj"
_LIGERS = {
    ("liger_kernel.transformers.swiglu", f"{kind}.forward")
    for kind in ("LigerSwiGLUMLP", "LigerQwen3MoeSwiGLUMLP")
}
_LIGERS_OFFSETS: dict[Any, float] = {"llama": 0.0, "gemma": 1.0}
"""{casting mode of Liger's norm: the offset of the formula that has it}."""
_GATED_MLP = "hf_packfree.models.gated_mlp", "GatedMLP.forward"
"""Our forward in front of an MLP, which computes what the MLP's own does."""


def swiglu_layers(
    mlp: Any, layer: nn.Module, x: Tensor, *, adapters: bool = True
) -> tuple[Layer, Layer, Layer] | None:
    """Return the weights of gate, up and down if `mlp(x)` is down(silu(gate(x)) * up(x)) and
    nothing else, else None.

    Such an MLP is of the modeling module that `layer` comes from, or runs Liger's kernel, on the
    class or on the instance. None for experts, hooks, biases and sharded weights; see
    `plain_layers` for adapters and quantised weights.
    """
    if torch.compiler.is_compiling() or all_are_hooked():
        return None
    if why_mlp_is_called(mlp, layer) is not None:
        return None
    parts = map(mlp._modules.get, SWIGLU)
    return plain_layers(x, *parts, adapters=adapters)  # type: ignore[return-value]


def why_mlp_is_called(mlp: Any, layer: nn.Module) -> str | None:
    """Return why a call of `mlp`, a part of `layer`, is not down(silu(gate(x)) * up(x)) and nothing
    else, in words; None if it is, whatever its linear layers are.
    """
    if has_hooks(vars(mlp)):
        return "hooks on their MLP"
    if _is_swiglu(mlp, layer):
        return None
    return "a forward of its own on their MLP" if "forward" in vars(mlp) else OTHER_FORMULA


def _is_swiglu(mlp: Any, layer: nn.Module) -> bool:
    runs = forward_of(mlp)
    if _names_of(runs) in _LIGERS:
        # Liger's kernel computes silu, whatever activation the module holds
        return True
    return is_upstreams(mlp, layer, "MLP") and is_silu(getattr(mlp, "act_fn", None))


def is_silu(activation: Any) -> bool:
    """Whether calling `activation` is torch's silu and nothing else."""
    if type(activation) is not nn.SiLU and type(activation) is not SiLUActivation:
        return False
    return not is_hooked(activation) and "forward" not in vars(activation)


def adds_one(norm: Any, layer: Replacement) -> bool:
    """Whether calling `norm`, a part of `layer`, is x / sqrt(mean(x^2) + eps) * (1 + weight) in
    fp32 and nothing else.
    """
    return norm_offset(norm, layer) == 1.0


def norm_offset(norm: Any, layer: Replacement) -> float | None:
    """Return the offset if calling `norm`, a part of `layer`, is x / sqrt(mean(x^2) + eps) *
    (offset + weight) in fp32 and nothing else, else None.

    Such a norm is the RMS norm of the family's modeling module, whose offset is the layer's
    `norm_offset`, or runs Liger's kernel, on the class or on the instance. None with adapters,
    hooks or sharded weights.
    """
    if not _has_plain_weight(norm):
        return None
    if forward_of(norm).__module__.startswith("liger_kernel."):
        offset: float | None = _LIGERS_OFFSETS.get(getattr(norm, "casting_mode", None))
        return offset if getattr(norm, "offset", None) == offset else None
    return layer.norm_offset if is_upstreams(norm, layer, "RMSNorm") else None


def is_gated_norm(norm: Any, layer: Replacement) -> bool:
    """Whether calling `norm`, a part of `layer`, with x and z is x / sqrt(mean(x^2) + eps) *
    weight * silu(z) and nothing else.

    Such a norm is the gated one of the family's modeling module, or flash-linear-attention's.
    False with adapters, hooks or sharded weights.
    """
    if not _has_plain_weight(norm):
        return False
    runs = forward_of(norm)
    if _names_of(runs)[1] == "FusedRMSNormGated.forward" and runs.__module__.startswith("fla."):
        return getattr(norm, "activation", None) in ("silu", "swish")
    return is_upstreams(norm, layer, "RMSNormGated")


def _has_plain_weight(norm: Any) -> bool:
    """Whether a norm has no hooks, and a weight of its own that is a plain parameter."""
    return not is_hooked(norm) and type(norm._parameters.get("weight")) is nn.Parameter


def epsilon(norm: Any) -> float:
    """Return the norm's epsilon, which classes name `variance_epsilon` or `eps`."""
    found: float = vars(norm)["variance_epsilon" if "variance_epsilon" in vars(norm) else "eps"]
    return found


def project(x: Tensor, *layers: nn.Module, state: PatchState) -> tuple[Tensor, ...]:
    """Return `layer(x)` for each layer, x [..., D]: in one fused product if all layers are plain
    linear layers, with or without LoRA; by calling the modules otherwise, or if the backend of
    "fused" is "torch".
    """
    backend = state.kernels_for(x.device, x.dtype)["fused"]
    adapters = FUSED.backend(backend).adapters
    found = plain_layers(x, *layers, adapters=adapters) if backend != "torch" else None
    if found is None:
        return tuple(layer(x) for layer in layers)
    return projections(x, *found, backend=backend)


def plain_layers(x: Any, *layers: Any, adapters: bool = True) -> tuple[Layer, ...] | None:
    """Return the layers' weights if each layer computes x @ weight.T and nothing else, else None.
    The weights are in the dtype of the product, which under autocast is autocast's.

    With `adapters`, layers may have PEFT's LoRA or DoRA, and weights in bitsandbytes' 4 bits. None
    for other adapters and quantised layers, hooks, biases, sharded weights, and in compiled graphs.
    Called hundreds of times a step, so conditions that are common to all layers are checked once.
    """
    if torch.compiler.is_compiling() or all_are_hooked():
        return None
    dtype, found = compute_dtype(x), list[Layer]()
    for layer in layers:
        read: Layer | None = None
        weight = plain_weight(layer)
        if weight is not None:
            read = cast_weight(weight, dtype)
        elif adapters:
            read = read_lora(layer, x) if is_lora(layer) else read_weight(layer, dtype)
        if read is None or weight_of(read).dtype != dtype:
            return None
        found.append(read)
    return tuple(found)


def dtype_read(x: Tensor, layers: Iterable[Any]) -> torch.dtype | None:
    """Return autocast's dtype if every layer only multiplies its input, rounded to that dtype, else
    None.
    """
    if not under_autocast(x.device):
        return None
    dtype = compute_dtype(x)
    return dtype if all(_only_multiplies(layer, dtype) for layer in layers) else None


def _only_multiplies(layer: Any, dtype: torch.dtype) -> bool:
    """Whether the layer reads x in `dtype` and only multiplies it by weights; it may have LoRA and
    a bias.
    """
    if type(layer) is nn.Linear:
        return type(layer.weight) is nn.Parameter and runs_class_forward(vars(layer))
    if is_lora(layer):
        return _only_multiplies(layer.base_layer, dtype)
    return read_weight(layer, dtype) is not None


def patch_weights(conv: Any, patches: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Return weight [D, C] and bias [D] if `conv` is one product with the patches [P, C] and
    nothing else, else None.

    Such a convolution's window is the whole patch. None with adapters, hooks, sharded weights or
    padding, and in compiled graphs.
    """
    if type(conv) is not nn.Conv3d or "forward" in vars(conv) or is_hooked(conv):
        return None
    if torch.compiler.is_compiling():
        return None
    weight, bias = conv.weight, conv.bias
    whole = (conv.padding, conv.dilation, conv.groups) == ((0, 0, 0), (1, 1, 1), 1)
    if (
        not whole
        or type(weight) is not nn.Parameter
        or weight.numel() != len(weight) * patches.shape[-1]
    ):
        return None
    return weight.flatten(1), bias


def layer_norm_weights(norm: Any, reader: Any, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return weight [D] and bias [D] if `norm(x)` is torch's layer norm over x's last dimension and
    nothing else, else None.

    None in compiled graphs, which fuse by themselves. None under autocast, where torch's norm
    returns fp32, unless the layer `reader` rounds its input again, see `dtype_read`.
    """
    if type(norm) is not nn.LayerNorm or "forward" in vars(norm) or is_hooked(norm):
        return None
    autocast = under_autocast(x.device)
    if torch.compiler.is_compiling() or (autocast and dtype_read(x, [reader]) is None):
        return None
    weight, bias = norm._parameters["weight"], norm._parameters["bias"]
    if type(weight) is not nn.Parameter or type(bias) is not nn.Parameter:
        return None
    known = weight.dtype == bias.dtype and (weight.dtype == x.dtype or autocast)
    return (weight, bias) if known and weight.shape == x.shape[-1:] else None


def is_hooked(layer: Any) -> bool:
    """Whether a call of the layer runs hooks (offloading, sharding), so that reading its weights is
    not enough.
    """
    return has_hooks(vars(layer)) or all_are_hooked()


all_are_hooked = nn.modules.module._has_any_global_hook


def forward_of(module: Any) -> Any:
    """Return the forward that a call of `module` runs: the instance's attribute, or else the
    class's method.
    """
    return vars(module).get("forward", type(module).forward)


def is_upstreams(module: Any, layer: nn.Module, ending: str) -> bool:
    """Whether `module`, a part of `layer`, is of a class of the layer's modeling module and runs
    that class's forward.

    False if the class's name does not end in `ending`, or if the forward was replaced or wrapped,
    on the class or the instance.
    """
    owner: Any = type(layer)
    kind: Any = type(module)
    family, runs = _modules_of(owner), forward_of(module)
    if _names_of(runs) == _GATED_MLP and not hasattr(runs, "__wrapped__"):
        runs = upstream_of(kind).forward
    replaced = (
        "forward" in vars(module) or runs.__module__ not in family or hasattr(runs, "__wrapped__")
    )
    return not replaced and kind.__module__ in family and kind.__name__.endswith(ending)


def _names_of(forward: Any) -> tuple[str, str]:
    return forward.__module__, getattr(forward, "__qualname__", "")


@cache
def _modules_of(kind: type) -> frozenset[str]:
    """Return the names of the modules that define a class and its bases."""
    return frozenset(base.__module__ for base in kind.__mro__)
