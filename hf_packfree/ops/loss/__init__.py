"""A language model's head and cross entropy as one operation that never holds the logits of all
tokens.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from hf_packfree.ops.backend import needs_triton
from hf_packfree.ops.loss.chunked_loss import LossBackend, Targets
from hf_packfree.ops.loss.log_probs import Expected, TokenLogProbs, linear_log_probs
from hf_packfree.ops.loss.logits import head_scales, lazy_logits, loss_of, scaled_from
from hf_packfree.ops.loss.scaled import triton_scaled
from hf_packfree.ops.loss.softmax import softmax_gradient, triton_softmax_gradient
from hf_packfree.ops.loss.statistics import Wanted
from hf_packfree.ops.op import Op


def _chunked(
    x: Tensor,
    weight: Tensor,
    targets: Targets,
    bias: Tensor | None,
    backend: str,
) -> Tensor:
    return loss_of(lazy_logits(x, weight, bias), targets, OP.backend(backend))


def _reference(x: Tensor, weight: Tensor, targets: Targets, bias: Tensor | None) -> Tensor:
    logits = linear(x, weight, bias).flatten(0, -2).float()
    return cross_entropy(logits, targets.flat, reduction="sum", ignore_index=-1)


OP = Op(
    name="loss",
    backends={
        "triton": LossBackend(
            partial(_chunked, backend="triton"),
            needs_triton,
            "triton",
            compiles="seconds",
            softmax_gradient=triton_softmax_gradient,
            scaled=triton_scaled,
        ),
        "torch": LossBackend(
            partial(_chunked, backend="torch"),
            softmax_gradient=softmax_gradient,
        ),
        "upstream": LossBackend(_reference),
    },
    where="head",
    # torch.compile traces upstream's loss
    compiled="upstream",
)
"""In a model "upstream" means transformers' own head and loss, on the logits of all tokens; in this
folder it is the reference.
"""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor | Targets,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    backend: str = "torch",
) -> Tensor:
    """Return the sum over tokens of -log softmax(x weight' + bias)[target], as transformers' loss
    rounds it.

    "triton" and "torch" compute loss and gradients in chunks of tokens, with logits of one chunk at
    a time.

    Args:
        x: [..., D], any floating dtype.
        weight: [V, D], in x's dtype.
        targets: int64 of x's shape without D, or `Targets.of` them.
        bias: [V], in x's dtype.
        ignore_index: the target of tokens without a loss.
        backend: a name in `OP.backends`.

    Returns:
        fp32 scalar.

    Raises:
        BackendUnavailable: no backend has that name.

    Examples:
        Four tokens, one of which predicts nothing; weights of zero make every word equally likely:

        >>> import torch
        >>> from hf_packfree.ops.loss import linear_cross_entropy
        >>> x, weight = torch.ones(4, 2), torch.zeros(8, 2)
        >>> linear_cross_entropy(x, weight, torch.tensor([3, 0, -100, 7])) / 3
        tensor(2.0794)
    """
    found = targets if isinstance(targets, Targets) else Targets.of(targets, ignore_index)
    run = OP.backend(backend).run
    # which every backend of it has
    assert run is not None
    return run(x, weight, found, bias)  # type: ignore[no-any-return]


__all__ = [
    "OP",
    "Expected",
    "LossBackend",
    "Targets",
    "TokenLogProbs",
    "Wanted",
    "head_scales",
    "lazy_logits",
    "linear_cross_entropy",
    "linear_log_probs",
    "loss_of",
    "scaled_from",
]
