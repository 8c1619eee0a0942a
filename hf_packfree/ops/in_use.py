"""What operations find while a CUDA graph is captured, or a row runs without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def listed(one: T, among: list[T]) -> Iterator[None]:
    """Append `one` in the block, for all threads: autograd recomputes layers in one of its own."""
    among.append(one)
    try:
        yield
    finally:
        among.remove(one)
