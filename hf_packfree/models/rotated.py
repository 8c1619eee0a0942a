"""Rotary embeddings of attention whose forward is upstream's: the forward runs as it is, with our
rotation as the function `apply_rotary_pos_emb` of its module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.fused import rope
from hf_packfree.ops.fused.rope import rope_reference

NAME = "apply_rotary_pos_emb"
"""The function by which transformers' attention layers rotate queries and keys."""
Forward = Callable[..., Any]


def with_our_rotation(forward: Forward, backend: str) -> Forward:
    """Return a forward of upstream's attention that rotates queries and keys in our kernel; the
    same forward where it calls no such function, or one of another formula than `rope`'s.
    """
    plain = inspect.unwrap(forward)
    rotates = getattr(plain, "__globals__", {}).get(NAME)
    if rotates is None or NAME not in plain.__code__.co_names or not is_rope(rotates):
        return forward
    return _with_rotation(plain, rotates, backend)


@cache
def is_rope(rotates: Callable[..., Any]) -> bool:
    """Whether a function (q, k, cos, sin) [B, H, T, D] computes what `rope` does, by its values on
    a CPU.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (4, 2))
    # both halves of the angles are equal
    cos, sin = (torch.randn(1, 3, 4, generator=generator).repeat(1, 1, 2) for _ in range(2))
    try:
        found = rotates(q, k, cos, sin)
        wanted = [rope_reference(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k)]
        return len(found) == 2 and all(map(torch.allclose, found, wanted))
    # a kernel that runs on GPUs alone, or a function of other arguments
    except Exception:
        return False


@cache
def _with_rotation(plain: Any, rotates: Callable[..., Any], backend: str) -> Forward:
    ours = partial(_rotate, rotates, backend)
    forward = FunctionType(
        plain.__code__,
        _Globals(plain.__globals__, {NAME: ours}),
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    forward.__kwdefaults__ = plain.__kwdefaults__
    return forward


class _Globals(dict[str, Any]):
    """The globals of a module as they are at each look, but for some names."""

    def __init__(self, module: dict[str, Any], others: dict[str, Any]) -> None:
        super().__init__(others)
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module[name]


def _rotate(
    rotates: Callable[..., Any],
    backend: str,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k [1, heads, T, D] by cos and sin [1, T, D]; by upstream's function where the
    arguments are others.
    """
    others = args or kwargs or q.ndim != 4 or len(q) != 1
    if others or cos.shape != (1, q.shape[2], q.shape[3]) or k.shape[-1] != q.shape[-1]:
        rotated: tuple[Tensor, Tensor] = rotates(q, k, cos, sin, *args, **kwargs)
        return rotated
    turned = (rope(x.transpose(1, 2), cos, sin, backend=backend) for x in (q, k))
    rotated_q, rotated_k = (x.transpose(1, 2) for x in turned)
    return rotated_q, rotated_k


__all__ = ["NAME", "is_rope", "with_our_rotation"]
