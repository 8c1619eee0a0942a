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

from hf_packfree.models.base import is_transformers_own
from hf_packfree.ops.fused import rope
from hf_packfree.ops.fused.rope import rope_reference

NAME = "apply_rotary_pos_emb"
"""The function by which transformers' attention layers rotate queries and keys."""
Forward = Callable[..., Any]


def with_our_rotation(forward: Forward, backend: str) -> Forward:
    """Return a forward of upstream's attention that rotates queries and keys in our kernel; the
    same forward where it calls no such function, or one of another formula than `rope`'s, and where
    somebody replaced or wrapped it.
    """
    if not is_transformers_own(forward):
        return forward
    plain = inspect.unwrap(forward)
    rotates = getattr(plain, "__globals__", {}).get(NAME)
    if rotates is None or NAME not in plain.__code__.co_names or not angle_repeats(rotates):
        return forward
    return _with_rotation(plain, rotates, backend)


@cache
def angle_repeats(rotates: Callable[..., Any]) -> int:
    """Return how often the cos and sin that a function (q, k, cos, sin) takes, q and k [B, H, T,
    D], have to be repeated so that `rope` computes the same: once as Llama's [B, T, D], twice as
    gpt-oss's [B, T, D / 2]. 0: it computes something else, by its values on a CPU.
    """
    # whatever the defaults are
    options: Any = {"generator": torch.Generator("cpu").manual_seed(0)}
    options |= {"device": "cpu", "dtype": torch.float32}
    q, k = (torch.randn(1, heads, 3, 8, **options) for heads in (4, 2))
    half = [torch.randn(1, 3, 4, **options) for _ in range(2)]
    whole = [x.repeat(1, 1, 2) for x in half]
    wanted = [rope_reference(x.transpose(1, 2), *whole).transpose(1, 2) for x in (q, k)]
    for repeats, angles in ((1, whole), (2, half)):
        try:
            found = rotates(q, k, *angles)
            if len(found) == 2 and all(map(torch.allclose, found, wanted)):
                return repeats
        # a kernel that runs on GPUs alone, or a function of other arguments
        except Exception:
            continue
    return 0


@cache
def _with_rotation(plain: Any, rotates: Callable[..., Any], backend: str) -> Forward:
    ours = partial(_rotate, rotates, angle_repeats(rotates), backend)
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
    repeats: int,
    backend: str,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k [1, heads, T, D] by cos and sin [1, T, D / repeats]; by upstream's function
    where the arguments are others.
    """
    others = args or kwargs or q.ndim != 4 or len(q) != 1 or k.shape[-1] != q.shape[-1]
    if others or (*cos.shape[:-1], repeats * cos.shape[-1]) != (1, *q.shape[2:]):
        rotated: tuple[Tensor, Tensor] = rotates(q, k, cos, sin, *args, **kwargs)
        return rotated
    if repeats > 1:
        cos, sin = (angles.repeat(1, 1, repeats) for angles in (cos, sin))
    turned = (rope(x.transpose(1, 2), cos, sin, backend=backend) for x in (q, k))
    rotated_q, rotated_k = (x.transpose(1, 2) for x in turned)
    return rotated_q, rotated_k
