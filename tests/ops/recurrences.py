"""What the tests of the delta rule and of Kimi Delta Attention share: their inputs' names, a run
with gradients, and its comparison.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_packfree.packing import PackedSequence
from tests.support import values_and_gradients

NAMES = ("out", "q", "k", "v", "g", "beta")


def run(
    rule: Callable[..., Tensor], inputs: list[Tensor], lengths: list[int], **options: object
) -> list[Tensor]:
    """Values and the gradients of all inputs, under a fixed random gradient of the output."""
    packed = PackedSequence.from_lengths(lengths)
    return values_and_gradients(lambda *leaves: rule(*leaves, packed, **options), inputs)


def assert_close(
    found: list[Tensor], wanted: list[Tensor], tolerance: float, floor: float = 1e-30
) -> None:
    """Error RMS of each, relative to what is wanted or to `floor` if that is more; written so
    that NaN fails.
    """
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        scale = y.double().square().mean().sqrt().clamp_min(floor)
        error = float((x.double() - y.double()).square().mean().sqrt() / scale)
        assert error <= tolerance, f"{name}: relative RMS {error:.1e}, allowed {tolerance:.0e}"
