"""The MLP of a decoder layer: PyTorch's matrix products around a fused gated product.

The gated product is recomputed in the backward pass, by the kernel that reads gate and up there anyway: a sixth memory pass
over [T, F] instead of keeping it.  What adapters add to gate and up is added where the product reads these, so that nothing
of [T, F] is written for an adapter.  Launch sizes of the kernels are fixed, so that new row lengths tune nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from hf_packfree.ops.backend import block_width, uses_triton
from hf_packfree.ops.fused.layers import Gradients, Layers
from hf_packfree.ops.fused.linear import autocast_as_in_forward
from hf_packfree.ops.fused.low_rank import Factors, Layer, Layout, layer_reference, take_apart
from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation

_BLOCK = 2048  # elements of a program
_ROWS, _COLUMNS = 64, 128  # of a tile, where there are adapters
_DEEPEST = 128
"""Most columns of h that a program holds; deeper products are added by torch."""


def swiglu_mlp(
    x: Tensor, gate: Layer, up: Layer, down: Layer, *, batch_invariant: bool = False, backend: str = "torch"
) -> Tensor:
    """Return (silu(x gate') * (x up')) down' (Shazeer, arXiv:2002.05202), each factor rounded as upstream's MLP does.

    Args:
        x: [..., D], any floating dtype.
        gate, up: [F, D], in x's dtype, or that with adapters, see `hf_packfree.ops.fused.low_rank`.
        down: [D, F], likewise.
        batch_invariant: with "triton", a token gets the same result in a row of any length, see `hf_packfree.ops.fused.linear`;
            without adapters.
        backend: "triton" or "torch".

    Returns:
        [..., D] in x's dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    if uses_triton("swiglu", backend):
        (inputs, first), (output, last) = take_apart((gate, up)), take_apart((down,))
        return _SwiGLU.apply(x, (inputs, output), batch_invariant, *first, *last)  # type: ignore[no-any-return]
    return layer_reference(silu(layer_reference(x, gate)) * layer_reference(x, up), down)


class _SwiGLU(Operation):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layouts: tuple[Layout, Layout], batch_invariant: bool, *tensors: Tensor) -> Tensor:
        from hf_packfree.ops.fused.kernels.swiglu import swiglu

        count = layouts[0].tensors
        inputs, output = Layers(layouts[0], tensors[:count]), Layers(layouts[1], tensors[count:])
        if inputs.low_rank is None:
            a, b = inputs.forward(x, batch_invariant)
            gated = torch.empty_like(a)
            _run(swiglu, a, b, gated)
        else:
            (a, b), added = inputs.apart(x)
            gated = _adapted_product(a, b, added)
        (y,) = output.forward(gated, batch_invariant)
        ctx.save_for_backward(x, a, b, *tensors, *inputs.inner, *output.inner)
        ctx.layouts, ctx.inner = layouts, len(inputs.inner)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        (x, a, b, *saved), layouts = ctx.saved_tensors, ctx.layouts
        first, count = layouts[0].tensors, layouts[0].tensors + layouts[1].tensors
        inner, tensors = saved[count:], saved[:count]
        inputs = Layers(layouts[0], tensors[:first], inner[: ctx.inner])
        output = Layers(layouts[1], tensors[first:], inner[ctx.inner :])
        needs_x, _, _, *needed = ctx.needs_input_grad
        with autocast_as_in_forward(d_y):
            last = output.backward([d_y])
            d_a, d_b, gated = _gradients(a, b, last, inputs, x)
            backward = inputs.backward((d_a, d_b))
            d_x = backward.of_input().view_as(x) if needs_x else None
            d_inputs = backward.of_tensors(x.flatten(0, -2), needed[:first])
            return d_x, None, None, *d_inputs, *last.of_tensors(gated, needed[first:])


def _gradients(a: Tensor, b: Tensor, last: Gradients, inputs: Layers, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients [T, F] of the two factors, and their gated product, from the gradients of the last layer."""
    from hf_packfree.ops.fused.kernels.swiglu import swiglu_backward

    if inputs.low_rank is not None or last.layers.low_rank is not None:
        d_gated, of_gated = last.of_input_apart()
        return _adapted_product_backward(a, b, d_gated, inputs.factors(x.flatten(0, -2)), of_gated)
    d_gated = last.of_input()
    d_a, d_b = torch.empty_like(d_gated), torch.empty_like(d_gated)
    _run(swiglu_backward, a, b, d_gated, d_a, d_b)  # overwrites d_gated with the gated product
    return d_a, d_b, d_gated


def _run(kernel: Any, a: Tensor, *others: Tensor) -> None:
    launch(kernel, (-(-a.numel() // _BLOCK),), a, *others, *_size(a), BLOCK=_BLOCK, num_warps=8)


def _adapted_product(a: Tensor, b: Tensor, added: Sequence[Factors | None]) -> Tensor:
    """Return silu(a + its part) * (b + its part): a and b [..., F], parts h w of h [T, K] and w [K, F], or None."""
    from hf_packfree.ops.fused.kernels.swiglu import adapted_swiglu

    out = torch.empty_like(a)
    tensors, sizes, depths = _arguments(("GATE_DEPTH", "UP_DEPTH"), (a, b), added)
    launch(adapted_swiglu, _grid(a), a, b, out, *tensors, *_size(a), *sizes, **_tile(), **depths)
    return out


def _adapted_product_backward(
    a: Tensor, b: Tensor, d_out: Tensor, added: Sequence[Factors | None], of_d_out: Factors | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of both factors and their product, [T, F], where d_out lacks its part; overwrites d_out."""
    from hf_packfree.ops.fused.kernels.swiglu import adapted_swiglu_backward

    d_a, d_b = torch.empty_like(d_out), torch.empty_like(d_out)
    # What torch has added in the forward pass is part of a and b already.
    left = [None if _is_deep(factors, x) else factors for factors, x in zip(added, (a, b), strict=True)]
    names = "GATE_DEPTH", "UP_DEPTH", "OUT_DEPTH"
    tensors, sizes, depths = _arguments(names, (a, b, d_out), (*left, of_d_out))
    launch(adapted_swiglu_backward, _grid(a), a, b, d_out, d_a, d_b, *tensors, *_size(a), *sizes, **_tile(), **depths)
    return d_a, d_b, d_out


def _arguments(
    names: Sequence[str], xs: Sequence[Tensor], added: Sequence[Factors | None]
) -> tuple[list[Tensor | None], list[int], dict[str, int]]:
    """Return h and w of each part, their sizes, and the depths that a program is compiled for.

    Parts too deep for a program are added to x here, in place.
    """
    tensors: list[Tensor | None] = []
    sizes: list[int] = []
    depths: dict[str, int] = {}
    for name, x, factors in zip(names, xs, added, strict=True):
        if factors is not None and _is_deep(factors, x):
            x.add_((factors[0] @ factors[1]).view_as(x))
            factors = None
        h, w = factors or (None, None)
        tensors += [h, w]
        sizes += [0, 0] if h is None else [h.stride(0), h.shape[1]]
        depths[name] = 16 if h is None else max(16, block_width(h.shape[1]))
    return tensors, sizes, depths


def _is_deep(factors: Factors | None, x: Tensor) -> bool:
    """Whether torch adds the part to x: it is too deep for a program, or of another dtype."""
    return factors is not None and (factors[0].shape[1] > _DEEPEST or factors[0].dtype != x.dtype)


def _size(x: Tensor) -> tuple[int, int]:
    """Tokens and columns, [T, F]."""
    return x.numel() // x.shape[-1], x.shape[-1]


def _grid(x: Tensor) -> tuple[int]:
    tokens, width = _size(x)
    return (-(-tokens // _ROWS) * -(-width // _COLUMNS),)


def _tile() -> dict[str, Any]:
    """What a program is compiled for."""
    return {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": 8}


__all__ = ["swiglu_mlp"]
