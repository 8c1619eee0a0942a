"""The gated product of two linear layers with adapters, whose part is added where the product reads their outputs.

So nothing of [T, F] is written for an adapter.  Launch sizes of the kernels are fixed, so that new row lengths tune nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.backend import block_width
from hf_packfree.ops.fused.low_rank import Factors
from hf_packfree.ops.launch import launch

_ROWS, _COLUMNS = 64, 128  # of a tile
_DEEPEST = 128
"""Most columns of h that a program holds; deeper products are added by torch."""


def adapted_product(a: Tensor, b: Tensor, added: Sequence[Factors | None]) -> Tensor:
    """Return silu(a + its part) * (b + its part): a and b [..., F], parts h w of h [T, K] and w [K, F], or None."""
    from hf_packfree.ops.fused.kernels.swiglu import adapted_swiglu

    out = torch.empty_like(a)
    tensors, sizes, depths = _arguments(("GATE_DEPTH", "UP_DEPTH"), (a, b), added)
    launch(adapted_swiglu, _grid(a), a, b, out, *tensors, *_shape(a), *sizes, **_tile(), **depths)
    return out


def adapted_product_backward(
    a: Tensor, b: Tensor, d_out: Tensor, added: Sequence[Factors | None], of_d_out: Factors | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of both factors and their product, [T, F], where d_out lacks its part; overwrites d_out."""
    from hf_packfree.ops.fused.kernels.swiglu import adapted_swiglu_backward

    d_a, d_b = torch.empty_like(d_out), torch.empty_like(d_out)
    # What torch has added in the forward pass is part of a and b already.
    left = [None if _is_deep(factors, x) else factors for factors, x in zip(added, (a, b), strict=True)]
    names = "GATE_DEPTH", "UP_DEPTH", "OUT_DEPTH"
    tensors, sizes, depths = _arguments(names, (a, b, d_out), (*left, of_d_out))
    launch(adapted_swiglu_backward, _grid(a), a, b, d_out, d_a, d_b, *tensors, *_shape(a), *sizes, **_tile(), **depths)
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


def _shape(x: Tensor) -> tuple[int, int]:
    """Tokens and columns."""
    return x.numel() // x.shape[-1], x.shape[-1]


def _grid(x: Tensor) -> tuple[int]:
    tokens, width = _shape(x)
    return (-(-tokens // _ROWS) * -(-width // _COLUMNS),)


def _tile() -> dict[str, Any]:
    """What a program is compiled for."""
    return {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": 8}


__all__ = ["adapted_product", "adapted_product_backward"]
