"""One op on its Triton kernels against its reference implementation in fp64, values and
gradients.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tests.support import relative_rms, values_and_gradients

TOKENS = (1, 63, 65, 100)
DOCUMENTS = {"1": [1], "63": [63], "65": [65], "100": [100], "several": [1, 2, 3, 4, 5, 64]}


def run(
    op: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], backend: str
) -> list[Tensor]:
    """Return `values_and_gradients` of a backend."""
    return values_and_gradients(partial(op, backend=backend), inputs)


def random(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Return tensors of these shapes, fp32."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def with_heads_far_apart(x: Tensor) -> Tensor:
    """Return bf16 x [1, T, 3, D] with heads 2^30 elements apart, so that the last one's offset is
    beyond int32, in memory that the machine does not need to have; where int32 would wrap to is
    part of it.
    """
    # Linux's MAP_NORESERVE, which Python names from 3.13 on
    apart, flags = 2**30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    memory = mmap.mmap(-1, 2 * (2 * 2 * apart + x.shape[1] * x.shape[3]), flags)
    strides = 0, x.shape[3], apart, 1
    whole = torch.frombuffer(memory, dtype=torch.bfloat16)
    return whole.as_strided(x.shape, strides, 2 * apart).copy_(x)


def assert_matches(
    op: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    tolerance: float = 1e-6,
) -> None:
    """Assert that the relative RMS error of every output and gradient is below the tolerance.

    Of those that are zero but for rounding, as the gradients of a single token's query, the error
    itself.
    """
    found, wanted = run(op, inputs, "triton"), run(op, [x.double() for x in inputs], "torch")
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        error = relative_rms(a, b, floor=1e-300 if b.abs().max() > 1e-12 else 1.0)
        assert error < tolerance, f"of shape {tuple(a.shape)}: {error:.1e}"
