"""A language model's head and the log-probabilities of given tokens as one operation that never
holds the logits of all tokens.

Which gradients the backward pass gets decides where to compute those of x and weight. The cost, in
matrix products of the logits' size, forward and backward together:

    gradient of log p alone, weight frozen               2: x's in the forward pass, whose rows the
                                                            backward pass multiplies by its gradient
    one gradient of log p for all tokens, weight trained 3: both in the forward pass, as for a loss
    else                                                 3, or 4 with a trained weight: in the
                                                            backward pass, from logits made again

Only the caller knows (a mean of log-probabilities has one gradient for every token, a policy's loss
has not), so it passes `Expected`. Where other gradients come, the third way is taken, at extra
cost, and `Expected` is corrected for the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import Backend, needs_triton
from hf_packfree.ops.loss.chunked_loss import (
    Gradients,
    Sums,
    Targets,
    choose,
    logits_in_chunks,
    scale_of,
)
from hf_packfree.ops.loss.scaled import Scaled, scaled, triton_scaled
from hf_packfree.ops.loss.statistics import (
    Differentiate,
    Measure,
    Statistics,
    Wanted,
    differentiate,
    measure,
    triton_differentiate,
    triton_measure,
)
from hf_packfree.ops.op import Op

_LOG_PROBS_ALONE = Wanted()
# of gradients, in fp16: what is smaller is scaled like it
_LEAST = 2.0**-100


@dataclass(eq=False)
class Expected:
    """The gradients that the backward pass is expected to get; each backward pass corrects this.

    Attributes:
        uniform: every token's log-probability gets the same gradient.
        entropy: the entropy gets a gradient, too.
    """

    uniform: bool = False
    entropy: bool = False


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """Log-probabilities of given tokens, and other statistics of their distributions if asked for;
    all of the targets' shape, and zero where there is no target.

    Attributes:
        log_probs: fp32 (fp64 of such inputs), with gradient.
        entropy: of the whole distribution, in nats, in the dtype of `log_probs`, with gradient. It
            is None where not wanted, and so are all fields below.
        top1: int64, the most likely token, the first of several.
        is_top1: bool, whether the most likely token is the target.
        log_sum_sq_probs: log sum p^2, without gradient.
        mean_logits: the mean over the vocabulary of the logits divided by the temperature, without
            gradient.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    top1: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenLogProbs:
        """Return these statistics with `change` applied to every tensor."""
        found: dict[str, Any] = {
            name: None if one is None else change(one) for name, one in vars(self).items()
        }
        return TokenLogProbs(**found)

    def with_detached_entropy(self) -> TokenLogProbs:
        """Return these statistics with the entropy detached, for logging alone."""
        return self if self.entropy is None else replace(self, entropy=self.entropy.detach())


@dataclass(frozen=True, kw_only=True)
class LogProbsBackend(Backend):
    """One implementation: its two functions of a chunk's logits, the statistics and their
    gradient, and the one that multiplies gradients.
    """

    measure: Measure
    differentiate: Differentiate
    scaled: Scaled = scaled


OP = Op(
    name="log_probs",
    backends={
        "triton": LogProbsBackend(
            None,
            needs_triton,
            "triton",
            measure=triton_measure,
            differentiate=triton_differentiate,
            scaled=triton_scaled,
        ),
        "torch": LogProbsBackend(measure=measure, differentiate=differentiate),
    },
    where="head",
)
"""The backend is the one that is chosen for the op "loss"."""


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    targets: Tensor | Targets,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    wanted: Wanted = _LOG_PROBS_ALONE,
    expected: Expected | None = None,
    dtype: torch.dtype | None = None,
    ignore_index: int = -100,
    backend: str = "torch",
) -> TokenLogProbs:
    """Return log softmax((x weight' + bias) / temperature)[target] of every token, in chunks of
    tokens, with logits of one chunk at a time.

    Args:
        x: [..., D], any floating dtype.
        weight: [V, D].
        targets: int64 of x's shape without D, or `Targets.of` them.
        bias: [V].
        temperature: above 0; a number, or a tensor that broadcasts to the targets' shape ([B, 1]
            for one per row); without gradient.
        wanted: what to return besides the log-probability.
        expected: which gradients will come; None: of all that is returned, not uniform.
        dtype: of the product, x's by default. Weight and bias are rounded to it; their gradients
            are summed in fp32 and rounded to their own dtypes.
        ignore_index: the target of tokens without a log-probability, which are not computed.
        backend: a name in `OP.backends`.

    Raises:
        BackendUnavailable: no backend has that name.

    Examples:
        Weights of zero make each of eight words equally likely:

        >>> import torch
        >>> from hf_packfree.ops.loss import linear_log_probs
        >>> x, weight = torch.ones(1, 3, 2), torch.zeros(8, 2)
        >>> linear_log_probs(x, weight, torch.tensor([[3, -100, 7]])).log_probs
        tensor([[-2.0794,  0.0000, -2.0794]])
    """
    kernels = OP.backend(backend)
    shape, found = x.shape[:-1], targets
    if not isinstance(found, Targets):
        found = Targets.of(found, ignore_index)
    expected = expected or Expected(entropy=wanted.entropy)
    inverse = _inverse(temperature, x, found.flat)
    call = _Call(found, inverse, wanted, expected, dtype or x.dtype, kernels)
    values: Any = _LogProbs.apply(x.flatten(0, -2), weight, bias, call)
    values = [None if one is None else one.view(shape) for one in values]
    log_probs, entropy, top1, squares, means = values
    flat = found.flat.view(shape)
    is_top1 = None if top1 is None else (top1 == flat) & (flat >= 0)
    return TokenLogProbs(log_probs, entropy, top1, is_top1, squares, means)


def _inverse(temperature: float | Tensor, x: Tensor, targets: Tensor) -> Tensor:
    """Return 1 / temperature of every token, [T], and 1 without a target, so that a temperature of
    padding may be 0. Numbers use `torch.full`, since copying a tensor
    made of a number to the GPU makes the host wait.
    """
    tokens, wide = x.shape[:-1], torch.promote_types(x.dtype, torch.float32)
    if not isinstance(temperature, Tensor):
        return torch.full((tokens.numel(),), 1.0 / temperature, dtype=wide, device=x.device)
    inverse = temperature.detach().to(x.device, wide).reciprocal()
    # in memory of its own: of one number, `reshape` makes a view, and kernels read T of them
    return inverse.expand(tokens).contiguous().view(-1).masked_fill_(targets < 0, 1.0)


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of the operation that are not differentiable; `inverse` is 1 / temperature
    [T].
    """

    targets: Targets
    inverse: Tensor
    wanted: Wanted
    expected: Expected
    dtype: torch.dtype
    kernels: LogProbsBackend

    def rounded(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return x, weight and bias in the dtype of the product."""
        dtype = self.dtype
        return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _LogProbs(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        needed: Any = tuple(ctx.needs_input_grad[:3])
        now = _made_in_the_forward_pass(call.expected, needed)
        some, targets, chosen = choose(x, call.targets)
        inputs = call.rounded(some, weight, bias)
        wide = torch.promote_types(call.dtype, torch.float32)
        inverse = (call.inverse if chosen is None else call.inverse[chosen]).to(wide)
        found = Statistics.empty(call.wanted, inverse)
        sums = Sums(*inputs[:2], needed if now else (False, False, False))
        scale = _scale(call.dtype, inverse)
        ones = torch.ones_like(inverse) * scale
        for part, logits in logits_in_chunks(*inputs):
            given = logits, targets[part], inverse[part]
            call.kernels.measure(*given, found.part(part))
            if now:
                gradient = call.kernels.differentiate(
                    *given, found.log_z[part], None, ones[part], None
                )
                sums.add(gradient, part)
        if any(needed):
            ctx.save_for_backward(x, weight, bias, sums.d_x, sums.d_weight, sums.d_bias)
            ctx.call, ctx.now, ctx.scale = call, now, scale
            ctx.tokens = chosen, targets, inverse, found.log_z, found.entropy
        outputs = list(vars(found).values())[1:]
        placed = [_placed(one, chosen, targets, len(x)) for one in outputs]
        ctx.mark_non_differentiable(*(one for one in placed[2:] if one is not None))
        return tuple(placed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        chosen, targets, *_ = ctx.tokens
        of_log_probs, of_entropy = (
            None if one is None else one if chosen is None else one.index_select(0, chosen)
            for one in grads[:2]
        )
        if of_log_probs is None and of_entropy is None:
            return None, None, None, None
        expected, factor = ctx.call.expected, None
        expected.entropy = of_entropy is not None
        if ctx.now and of_entropy is None:
            assert of_log_probs is not None
            trained = any(ctx.needs_input_grad[1:3])
            factor = _only_one(of_log_probs, targets) if trained else of_log_probs
            expected.uniform = factor is not None if trained else expected.uniform
        *inputs, d_x, d_weight, d_bias = ctx.saved_tensors
        if factor is None:
            found = _made_now(ctx, inputs, of_log_probs, of_entropy)
        else:
            found = Gradients(d_x, d_weight, d_bias, 1 / ctx.scale)
        return *_multiplied(found, factor, inputs, chosen, ctx.call.kernels.scaled), None


def _made_in_the_forward_pass(expected: Expected, needed: tuple[bool, bool, bool]) -> bool:
    """Whether the forward pass computes the gradients; see the top of this file."""
    trained = needed[1] or needed[2]
    return not expected.entropy and (expected.uniform if trained else needed[0])


def _only_one(gradients: Tensor, targets: Tensor) -> Tensor | None:
    """Return the gradient that all tokens with a target share, a scalar, or None if they differ;
    the host waits for the comparison.
    """
    if not len(gradients):
        return gradients.new_zeros(())
    has, far = targets >= 0, torch.inf
    highest = gradients.masked_fill(~has, -far).amax()
    return highest if bool(highest == gradients.masked_fill(~has, far).amin()) else None


def _made_now(
    ctx: Any, inputs: list[Any], of_log_probs: Tensor | None, of_entropy: Tensor | None
) -> Gradients:
    """Return the gradients of x, weight and bias, given those of log p and of the entropy, from
    recomputed logits.
    """
    call: _Call = ctx.call
    (x, *weights), (chosen, targets, inverse, log_z, entropy) = inputs, ctx.tokens
    rounded = call.rounded(x if chosen is None else x.index_select(0, chosen), *weights)
    scale = _scale(call.dtype, inverse, of_log_probs, of_entropy)
    of_log_probs = torch.zeros_like(log_z) if of_log_probs is None else of_log_probs * scale
    of_entropy = None if of_entropy is None else of_entropy * scale
    needed: Any = tuple(ctx.needs_input_grad[:3])
    sums = Sums(*rounded[:2], needed)
    for part, logits in logits_in_chunks(*rounded):
        values: Any = (
            None if one is None else one[part]
            for one in (targets, inverse, log_z, entropy, of_log_probs, of_entropy)
        )
        sums.add(call.kernels.differentiate(logits, *values), part)
    return sums.gradients(1.0 / scale)


def _scale(dtype: torch.dtype, inverse: Tensor, *gradients: Tensor | None) -> Any:
    """Return the factor, a power of two, on the gradients of log p and of the entropy, all 1 if
    none are given: in fp16 it takes the largest gradient of logits to about `scale_of`.
    """
    scale: Any = scale_of(dtype)
    if scale == 1 or not len(inverse):
        return scale
    given = [one.abs().amax() for one in gradients if one is not None]
    # of gradients that are all 0, any: 0 x inf would be NaN
    largest = torch.stack(given).amax().clamp(min=_LEAST) if given else 1.0
    return scale / (largest * inverse.amax().clamp(min=1.0)).log2().ceil().exp2()


def _placed(
    values: Tensor | None, chosen: Tensor | None, targets: Tensor, tokens: int
) -> Tensor | None:
    """Return the values [N] of the tokens with targets as [T], with zeros for other tokens; a new
    tensor: outputs may be changed in place, and kept with their graph they would keep themselves.
    """
    if values is None or chosen is None:
        return None if values is None else values.masked_fill(targets < 0, 0)
    return values.new_zeros(tokens).index_copy_(0, chosen, values)


def _multiplied(
    found: Gradients,
    by: Tensor | None,
    inputs: list[Any],
    chosen: Tensor | None,
    scaled: Scaled,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x [T, D], weight and bias: those in `found` times `by`, a scalar for
    all, or one number for each row of x.
    """
    (x, weight, bias), d_x = inputs, None
    factor = found.factor if by is None else by * found.factor
    if not isinstance(factor, Tensor):
        # copying a number to a GPU would make the host wait
        factor = torch.full((), factor, device=x.device)
    if found.x is not None:
        d_x = scaled(found.x, factor[:, None] if factor.ndim else factor, x)
        if chosen is not None:
            d_x = torch.zeros_like(x).index_copy_(0, chosen, d_x)
    d_weight = None if found.weight is None else scaled(found.weight, factor, weight)
    return d_x, d_weight, None if found.bias is None else scaled(found.bias, factor, bias)
