"""One replay, and what its backward pass is refused for."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NoReturn

from torch import Tensor

States = Sequence[tuple[int, int]]
"""Of weights, see `states_of`."""


class Row:
    """One replay. While it is alive, until its backward has run or its output is freed, the graph
    may not be replayed again.

    Args:
        parts: of the backward pass, of which `left` are still to run.
        out: the function's value, which `_Replay.forward` takes out.
        weights: those that it was computed with, see `states_of`.
    """

    def __init__(self, parts: int, out: Tensor | None = None, weights: States = ()) -> None:
        self.left, self.out, self.weights = parts, out, weights


def refuse_second() -> NoReturn:
    """Refuse a second backward pass.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "found a second backward pass through one forward pass, whose values a CUDA graph "
        "no longer has; wanted one; pass cuda_graphs='never' to PackFreeCallback or "
        "apply_patches for losses that need more"
    )


def states_of(weights: Sequence[Tensor], put_back: Container[int] = ()) -> States:
    """Return what changes if a weight is changed in place, or moved; of those whose `id` is in
    `put_back`, see `settings.put_back`, only if it is moved: a graph keeps what the adapters made
    of them, as autograd does.
    """
    return [(0 if id(x) in put_back else x._version, x.data_ptr()) for x in weights]


def refuse_changed(weights: Sequence[Tensor], before: States, after: States) -> None:
    """Refuse a backward pass, which would multiply by other weights than its forward pass did, or
    read memory that was freed.

    Args:
        before, after: see `states_of`.

    Raises:
        RuntimeError: a weight changed.
    """
    for weight, then, now in zip(weights, before, after, strict=True):
        if now != then:
            raise RuntimeError(
                f"found a weight of shape {tuple(weight.shape)} that was changed between the "
                "forward pass of a row in a CUDA graph and its backward pass; wanted it as it was; "
                "call backward before optimizer.step() or other changes of weights"
            )
