"""One op on its Triton kernels against its reference implementation in fp64, values and
gradients.
"""

from __future__ import annotations

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
