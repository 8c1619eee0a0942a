"""Frozen weights in the dtype that autocast computes in: rounded once, and kept beside the weight.

Autocast rounds a frozen fp32 weight in every forward pass, and once more where a layer is
recomputed. Here the rounded one stays for as long as the weight does, at half the weight's size.
The weight itself is never touched, so that whoever saves, merges or moves it sees the true one.

What has changed since is rounded anew: a weight that was written in place, replaced or moved. Only
writes that hide from autograd (`weight.data.copy_()`) show no sign; see `check_one`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_Sign = tuple[int, int, torch.device]


@dataclass(eq=False)
class _Kept:
    """A rounded weight.

    Attributes:
        of: the weight.
        sign: its address, version and device when it was rounded.
        rounded: [F, D].
    """

    of: weakref.ref[nn.Parameter]
    sign: _Sign
    rounded: Tensor


_KEPT: dict[int, _Kept] = {}
"""By the weight's `id`."""


def rounded_once(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return a frozen weight in `dtype`, from what is kept if nothing has changed since."""
    kept, sign = _KEPT.get(id(weight)), _sign(weight)
    if kept is None or kept.of() is not weight or kept.sign != sign or kept.rounded.dtype != dtype:
        with torch.no_grad():
            kept = _Kept(weakref.ref(weight, _dropper(id(weight))), sign, weight.to(dtype))
        _KEPT[id(weight)] = kept
    return kept.rounded


def _sign(weight: Tensor) -> _Sign:
    return weight.data_ptr(), weight._version, weight.device


def _dropper(number: int) -> Callable[[weakref.ref[nn.Parameter]], None]:
    def drop(ref: weakref.ref[nn.Parameter]) -> None:
        kept = _KEPT.get(number)
        if kept is not None and kept.of is ref:
            del _KEPT[number]

    return drop


__all__ = ["rounded_once"]
