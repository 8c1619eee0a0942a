"""Log-probabilities, entropies and other statistics of a chunk of logits, and the gradient: in
PyTorch, and in Triton, where the gradient overwrites the logits.

Of a token's logits x and its temperature T: z = x / T, p = softmax(z), log p of the target, the
entropy H = -sum p log p. Their gradients are

    d log p[target] / d x = (one-hot(target) - p) / T
    d H / d x = -p (log p + H) / T
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_packfree.ops.launch import launch

# logits of a program at a time
_BLOCK = 4096


@dataclass(frozen=True)
class Wanted:
    """Which statistics are computed besides log p of the target.

    Attributes:
        entropy: in nats.
        top1: the most likely token.
        moments: log sum p^2, and the mean of z over the vocabulary.
    """

    entropy: bool = False
    top1: bool = False
    moments: bool = False


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of tokens, each [N], fp32, or fp64 where the logits are; None where not wanted.

    Attributes:
        log_z: log sum exp z.
        log_probs: of the targets; zero where there is none.
        entropy: H.
        top1: int64, the most likely token, the first of several.
        log_sum_sq_probs: log sum p^2.
        mean_logits: the mean of z over the vocabulary.
    """

    log_z: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    top1: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None

    @classmethod
    def empty(cls, wanted: Wanted, inverse: Tensor) -> Statistics:
        """Allocate statistics of as many tokens as `inverse` [N], in its dtype."""
        rooms = [
            torch.empty_like(inverse) if is_wanted else None
            for is_wanted in (wanted.entropy, wanted.moments, wanted.moments)
        ]
        top1 = torch.empty_like(inverse, dtype=torch.int64) if wanted.top1 else None
        rooms.insert(1, top1)
        return cls(torch.empty_like(inverse), torch.empty_like(inverse), *rooms)

    def part(self, tokens: slice) -> Statistics:
        """Return the statistics of some tokens, as views."""
        some = (None if one is None else one[tokens] for one in vars(self).values())
        return Statistics(*some)  # type: ignore[arg-type]


Measure = Callable[[Tensor, Tensor, Tensor, Statistics], None]
"""`measure` of a backend."""
Differentiate = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor
]
"""`differentiate` of a backend."""


def measured(logits: Tensor, targets: Tensor, inverse: Tensor, wanted: Wanted) -> Statistics:
    """Return the statistics of tokens from their logits, log p and entropy with gradient.

    Args:
        logits: [C, V], any floating dtype.
        targets: int64 [C], -1 where there are none.
        inverse: 1 / T [C].
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    z = logits.to(wide) * inverse.to(wide)[:, None]
    log_p, still = z.log_softmax(1), z.detach()
    column = targets.clamp(min=0)[:, None]
    return Statistics(
        still.logsumexp(1),
        log_p.gather(1, column)[:, 0].masked_fill(targets < 0, 0),
        # p log p is 0 at p = 0, and has no gradient there
        -(log_p.exp() * log_p.clamp(min=torch.finfo(wide).min)).sum(1) if wanted.entropy else None,
        still.argmax(1) if wanted.top1 else None,
        (2 * log_p.detach()).logsumexp(1) if wanted.moments else None,
        still.mean(1) if wanted.moments else None,
    )


def measure(logits: Tensor, targets: Tensor, inverse: Tensor, out: Statistics) -> None:
    """Fill in the statistics of a chunk of tokens, in their dtype.

    Args:
        logits, targets, inverse: as for `measured`.
        out: the statistics of these tokens, overwritten.
    """
    wanted = Wanted(out.entropy is not None, out.top1 is not None, out.mean_logits is not None)
    found = vars(measured(logits, targets, inverse, wanted))
    for name, one in vars(out).items():
        if one is not None:
            one.copy_(found[name])


def differentiate(
    logits: Tensor,
    targets: Tensor,
    inverse: Tensor,
    log_z: Tensor,
    entropy: Tensor | None,
    of_log_probs: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits, given those of log p and of the entropy.

    Args:
        logits: [C, V], may be overwritten.
        targets, inverse: as for `measure`.
        log_z, entropy: [C], from `measure`; the entropy is only read if `of_entropy` is given.
        of_log_probs, of_entropy: the gradients of log p and of the entropy, [C] in the statistics'
            dtype.

    Returns:
        [C, V] in the logits' dtype, zero where there is no target.
    """
    log_p = (logits.to(log_z.dtype) * inverse[:, None]).sub_(log_z[:, None])
    p = log_p.exp_()
    has, column = targets >= 0, targets.clamp(min=0)[:, None]
    gradient = p * -of_log_probs[:, None]
    gradient.scatter_add_(1, column, of_log_probs[:, None])
    if of_entropy is not None:
        assert entropy is not None
        minus_p_log_p = torch.special.entr(p)
        gradient += minus_p_log_p.addcmul_(p, entropy[:, None], value=-1) * of_entropy[:, None]
    return gradient.mul_((inverse * has)[:, None]).to(logits.dtype)


def triton_measure(logits: Tensor, targets: Tensor, inverse: Tensor, out: Statistics) -> None:
    """`measure` in Triton, in one read of the logits, whose rows have no gaps.

    A target that is no word gives NaN.
    """
    from hf_packfree.ops.loss.triton_kernels import token_statistics

    tokens, words = logits.shape
    launch(
        token_statistics,
        (tokens,),
        logits,
        targets,
        inverse,
        *vars(out).values(),
        words,
        ENTROPY=out.entropy is not None,
        TOP1=out.top1 is not None,
        MOMENTS=out.mean_logits is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def triton_differentiate(
    logits: Tensor,
    targets: Tensor,
    inverse: Tensor,
    log_z: Tensor,
    entropy: Tensor | None,
    of_log_probs: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """`differentiate` in Triton, in one read and one write: the gradient overwrites the logits."""
    from hf_packfree.ops.loss.triton_kernels import token_gradient

    tokens, words = logits.shape
    launch(
        token_gradient,
        (tokens, -(-words // _BLOCK)),
        logits,
        targets,
        inverse,
        log_z,
        entropy,
        of_log_probs,
        of_entropy,
        words,
        ENTROPY=of_entropy is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return logits
