"""Head and cross entropy in chunks of tokens: one pass computes loss and gradients, with logits of
one chunk at a time.

The forward pass computes the gradients, for a gradient of the loss of 1, so that the logits are
computed once; the backward pass multiplies them. (Liger and torch's `linear_cross_entropy` do so,
too.) They are summed in fp32 over the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.backend import HALF, Backend
from hf_packfree.ops.loss.scaled import Scaled, scaled
from hf_packfree.ops.loss.softmax import SoftmaxGradient

_ELEMENTS = {"cuda": 2**30}
"""Logits of a chunk, by device. On a GPU, large chunks write the fp32 sums of the weight's gradient
less often: 4,096 tokens of a vocabulary of 248,320.
"""
_CHUNKS = 4
"""The most chunks that a batch of few tokens is cut into."""
_ENOUGH = 2048
"""Tokens of one chunk, at least: below this the logits take less memory than the weight's gradient,
which the backward pass makes later.
"""
_ELEMENTS_ELSEWHERE = 2**22
"""Logits of a chunk on a CPU, which stay in its caches."""
_FEWEST = 256
"""Tokens of a chunk on a CPU, at least: matrix products of fewer rows are slow."""
_SCALE = {torch.float16: 2.0**10}
"""The factor on gradients of logits in fp16, in which a softmax over a large vocabulary would
underflow.
"""
_WORTH = 0.95
"""With a larger share of tokens that have targets, selecting these costs more than the products of
the others.
"""


@dataclass(frozen=True)
class LossBackend(Backend):
    """One implementation of head and loss.

    Attributes:
        softmax_gradient: computes a chunk's losses and turns its logits into their gradient; None:
            the backend computes the logits of all tokens.
        scaled: multiplies the gradients that the forward pass made.
    """

    softmax_gradient: SoftmaxGradient | None = None
    scaled: Scaled = scaled


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of all tokens, and how many there are.

    Attributes:
        flat: int64 [T], -1 where there is nothing to predict; other targets below 0 are made larger
            than V, so that they stay invalid.
        count: int64 scalar on the host, the number of tokens with a target; on CUDA valid after
            `ready`.
        ready: the CUDA event after which `count` is valid; None on other devices.
    """

    flat: Tensor
    count: Tensor
    ready: Any = None

    @classmethod
    def of(cls, targets: Tensor, ignore_index: int) -> Targets:
        """Read targets, int64 of any shape, and start to count them.

        Called before a forward pass, so that the count is on the host before the loss reads it.
        """
        flat = targets.detach().reshape(-1)
        has = flat != ignore_index
        # other negative targets are invalid, and must not become -1
        flat = flat.bitwise_and(torch.iinfo(torch.int64).max).where(has, -1)
        if not flat.is_cuda:
            return cls(flat, has.sum())
        count = torch.empty((), dtype=torch.int64, pin_memory=True)
        count.copy_(has.sum(), non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(flat.device))
        return cls(flat, count, ready)

    def chosen(self) -> Tensor | None:
        """Return int64 [N], the tokens that have targets; None where nearly all do."""
        if self.ready is not None:
            self.ready.synchronize()
        count = int(self.count)
        if count > _WORTH * self.flat.numel():
            return None
        if self.ready is None:
            return (self.flat >= 0).nonzero()[:, 0]
        # a stable sort puts tokens with targets first; `nonzero` would wait for the device
        return (self.flat >= 0).argsort(descending=True, stable=True)[:count]


@dataclass(frozen=True)
class Gradients:
    """The loss's gradients, in fp32, before they are multiplied by `factor`; None where not needed.

    Attributes:
        x: [N, D], of the tokens that `choose` returned.
        weight: [V, D].
        bias: [V].
        factor: undoes the scale that keeps gradients in half precision from underflowing.
    """

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    factor: float = 1.0


def loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    needed: tuple[bool, bool, bool],
    softmax_gradient: SoftmaxGradient,
    growth: float = 1.0,
) -> tuple[Tensor, Gradients]:
    """Return the sum of the tokens' losses, fp32, and its gradients.

    Args:
        x: [N, D].
        weight: [V, D] in x's dtype.
        bias: [V] or None.
        targets: int64 [N], see `Targets.flat`.
        needed: which gradients are needed: of x, weight and bias.
        softmax_gradient: see `hf_packfree.ops.loss.softmax`.
        growth: bound of the factor, at least 1, by which `softmax_gradient` may enlarge the logits'
            gradient on its way through a head's scale or cap.
    """
    scale = scale_of(x.dtype, growth) if any(needed) else None
    sums = Sums(x, weight, needed)
    losses = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
    for part, logits in logits_in_chunks(x, weight, bias):
        losses[part], gradient = softmax_gradient(logits, targets[part], scale)
        if gradient is not None:
            sums.add(gradient, part)
    return losses.sum().float(), sums.gradients(1 / (scale or 1.0))


def scale_of(dtype: torch.dtype, growth: float = 1.0) -> float:
    """Return the factor, a power of two, on gradients of logits of a dtype: the products stay
    finite even where they grow by the factor `growth`.
    """
    scale = _SCALE.get(dtype, 1.0)
    while dtype in _SCALE and scale * growth > torch.finfo(dtype).max:
        scale /= 2
    return scale


def logits_in_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of tokens, as a slice and their logits [C, V], in a buffer that the next chunk
    overwrites.
    """
    (tokens, _), words = x.shape, weight.shape[0]
    rows = rows_of_a_chunk(tokens, words, x.device.type)
    buffer = x.new_empty(min(rows, tokens), words)
    for begin in range(0, tokens, rows):
        part = slice(begin, min(begin + rows, tokens))
        logits = buffer[: part.stop - begin]
        torch.mm(x[part], weight.t(), out=logits) if bias is None else torch.addmm(
            bias, x[part], weight.t(), out=logits
        )
        yield part, logits


class Sums:
    """Sums over chunks of the gradients of x, weight and bias."""

    def __init__(self, x: Tensor, weight: Tensor, needed: tuple[bool, bool, bool]) -> None:
        (tokens, size), words = x.shape, weight.shape[0]
        make = x.new_empty if tokens else x.new_zeros
        wide = torch.promote_types(x.dtype, torch.float32)
        self.x, self.weight = x, weight
        self.d_x, self.d_weight, self.d_bias = (
            make(shape, dtype=wide) if wanted else None
            for shape, wanted in zip(((tokens, size), (words, size), (words,)), needed, strict=True)
        )

    def add(self, gradient: Tensor, part: slice) -> None:
        """Add the parts from the gradient [C, V] of a chunk's logits; chunks come in order."""
        first = part.start == 0
        d_x = None if self.d_x is None else self.d_x[part]
        _add_products(gradient, self.x[part], self.weight, d_x, self.d_weight, first=first)
        if self.d_bias is not None:
            total = gradient.sum(0, dtype=self.d_bias.dtype)
            self.d_bias.copy_(total if first else self.d_bias + total)

    def gradients(self, factor: float) -> Gradients:
        """Return the sums, to be multiplied by `factor`."""
        return Gradients(self.d_x, self.d_weight, self.d_bias, factor)


def rows_of_a_chunk(tokens: int, words: int, device: str) -> int:
    """Return the number of tokens of a chunk, such that all chunks have about the same size."""
    most = max(
        min(
            _ELEMENTS.get(device, _ELEMENTS_ELSEWHERE) // words, max(-(-tokens // _CHUNKS), _ENOUGH)
        ),
        _FEWEST,
    )
    chunks = max(-(-tokens // most), 1)
    return max(-(-tokens // chunks), 1)


def _add_products(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    d_x: Tensor | None,
    d_weight: Tensor | None,
    *,
    first: bool,
) -> None:
    """Write gradient weight to d_x, and write gradient' x to d_weight if `first`, else add it; in
    fp32 for half precision.
    """
    beta = 0 if first else 1
    if x.dtype in HALF and x.is_cuda:
        if d_x is not None:
            torch.mm(gradient, weight, out_dtype=d_x.dtype, out=d_x)
        if d_weight is not None:
            torch.addmm(
                d_weight, gradient.t(), x, beta=beta, out_dtype=d_weight.dtype, out=d_weight
            )
        return
    gradient = gradient.to(torch.promote_types(x.dtype, torch.float32))
    if d_x is not None:
        torch.mm(gradient, weight.to(gradient.dtype), out=d_x)
    if d_weight is not None:
        d_weight.addmm_(gradient.t(), x.to(gradient.dtype), beta=beta)


def choose(x: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return x [N, D] of the tokens that have targets, these targets [N], and the tokens' indices
    [N]; where nearly all have one, all tokens and no indices.
    """
    chosen = targets.chosen()
    if chosen is None:
        return x, targets.flat, None
    return x.index_select(0, chosen), targets.flat[chosen], chosen
