"""Dropout whose masks are drawn from a seed (`hf_packfree.ops.seeds`), and again for the backward
pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.launch import launch
from hf_packfree.ops.seeds import Seed

# a program has four times as many elements
_BLOCK = 1024


def drop(x: Tensor, seed: Seed, probability: float) -> Tensor:
    """Return x with zeros where it is dropped out: at the same places of every tensor of as many
    elements, on one device and given one seed.
    """
    if _on_a_gpu(x):
        return _by_kernel(x, seed, probability)
    # a sum beyond int64 is none of torch's seeds
    generator = torch.Generator(x.device).manual_seed((int(seed.of_row) + seed.number) % 2**63)
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    return x * keep.bernoulli_(1 - probability, generator=generator)


def dropout(x: Tensor, seed: Seed, probability: float) -> Tensor:
    """Return x with zeros where it is dropped out, and the rest divided by 1 - probability, as
    `torch.nn.functional.dropout` does.
    """
    found: Tensor = _Dropout.apply(x, seed, probability)
    return found


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Seed, probability: float) -> Tensor:
        ctx.seed, ctx.probability = seed, probability
        return _scaled(x, seed, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return _scaled(d_out, ctx.seed, ctx.probability), None, None


def _scaled(x: Tensor, seed: Seed, probability: float) -> Tensor:
    # of a probability of 1, nothing is kept
    return drop(x, seed, probability) * (1 / (1 - probability) if probability < 1 else 0.0)


def _on_a_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _by_kernel(x: Tensor, seed: Seed, probability: float) -> Tensor:
    from hf_packfree.ops.fused.kernels.drop import drop_out

    x = x.contiguous()
    out, grid = torch.empty_like(x), (-(-x.numel() // (4 * _BLOCK)),)
    arguments = x, out, seed.of_row, seed.number, x.numel(), float(probability)
    launch(drop_out, grid, *arguments, BLOCK=_BLOCK, num_warps=4)
    return out
