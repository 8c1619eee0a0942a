"""Linear layers that read one tensor, as one op or inside another: their outputs, and their
gradients in two steps.

The first step is the gradient of what they read; the second, of weights and adapters, needs that
tensor, which some ops recompute in between. Gradients of the tensor are summed inside the matrix
products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from hf_packfree.ops.backend import HALF, uses_triton
from hf_packfree.ops.fused.add_norm import NormOf, norm_of, take_room
from hf_packfree.ops.fused.linear import (
    NARROW,
    autocast_as_in_forward,
    linear_forward,
    narrow_linear,
    rows_of,
)
from hf_packfree.ops.fused.low_rank import (
    Layer,
    Layout,
    LowRank,
    as_read,
    layer_reference,
    take_apart,
)
from hf_packfree.ops.fused.mixed import cat, on_tensor_cores
from hf_packfree.ops.fused.weights import Weights
from hf_packfree.ops.operation import once_differentiable

Recompute = Callable[[Tensor, bool], tuple[tuple[Tensor | None, ...], Tensor | None]]


class Layers:
    """Layers, put together again from what `take_apart` made of them.

    Attributes:
        weights: [F, D] each.
        inner: what `forward` left for the backward pass.
    """

    def __init__(
        self, layout: Layout, tensors: Sequence[Tensor], inner: Sequence[Tensor] = ()
    ) -> None:
        self.layout, self.inner = layout, inner
        self.weights = Weights(tensors[: layout.layers], layout.made, layout.heights)
        self.low_rank = LowRank(layout, tensors) if layout.owners else None

    def room(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return an empty tensor for who makes what they read, x or like x [..., D], and a wider
        one whose first columns it is.

        Given to `forward` too, that one saves a copy of x there: the rest is room for what adapters
        put beside x.
        """
        columns = self.layout.columns(x)
        if not columns:
            return torch.empty_like(x), None
        wider = x.new_empty(*x.shape[:-1], x.shape[-1] + columns)
        return wider[..., : x.shape[-1]], wider

    def forward(
        self, x: Tensor, batch_invariant: bool, wider: Tensor | None = None
    ) -> list[Tensor]:
        """Return the outputs [..., F] of x [..., D]; `batch_invariant` is not promised of layers
        with adapters.
        """
        if self.low_rank is None:
            return self._without_adapters(x, batch_invariant)
        rows = rows_of(x)
        self.inner = self.low_rank.inner(rows)
        inner = cat(self.inner, 1)
        beside = _beside(rows, [inner], wider) if inner.dtype == rows.dtype else None
        outs = [self._adapted(rows, inner, beside, i) for i in range(self.layout.layers)]
        # no views to autograd, which hooks may change in place
        return [out.view(*x.shape[:-1], -1).data for out in outs]

    def _adapted(self, rows: Tensor, inner: Tensor, beside: Tensor | None, i: int) -> Tensor:
        """Return one layer's output: with x beside what is inner, and W beside B, it is one
        product and rounded once.
        """
        assert self.low_rank is not None
        weight, factor = self.weights[i], self.low_rank.outer_factor(i, rows)
        if factor is None:
            return linear(rows, weight)
        if beside is None:
            # other layers' adapters may be wider
            added = linear(inner[:, : factor.shape[1]], factor.to(inner.dtype))
            return added.to(rows.dtype).addmm_(rows, weight.T)
        return linear(beside[:, : weight.shape[1] + factor.shape[1]], cat([weight, factor], 1))

    def _without_adapters(self, x: Tensor, batch_invariant: bool) -> list[Tensor]:
        outs: list[Tensor] = []
        for group in _groups(self.weights.heights):
            weights = self.weights.of(group)
            # which reads x once for two of them
            ours = batch_invariant or len(weights) > 1 and on_tensor_cores(x)
            if ours and weights[0].shape[0] < NARROW and x.dtype in HALF:
                outs += narrow_linear(x, weights)
            else:
                outs += [linear_forward(x, weight, batch_invariant) for weight in weights]
        return outs

    def backward(
        self, d_outs: Sequence[Tensor], needed: Sequence[bool], beside: Tensor | None = None
    ) -> Gradients:
        """Return the backward pass of these layers, of the gradients [..., F] of all outputs.

        Args:
            needed: whether the gradient of each weight, and of A and B of every adapter, is.
            beside: [..., all F] where `d_outs` are parts of one tensor: the gradients of all
                weights are one product then.
        """
        wider = take_room(d_outs[0]) if len(d_outs) == 1 else None
        return Gradients(self, [rows_of(d_out) for d_out in d_outs], needed, beside, wider)


class Gradients:
    """The backward pass of layers, d_outs being [T, F]; of one layer it may be the first columns
    of a `wider` tensor.
    """

    def __init__(
        self,
        layers: Layers,
        d_outs: list[Tensor],
        needed: Sequence[bool],
        beside: Tensor | None,
        wider: Tensor | None,
    ) -> None:
        self.layers, self.d_outs, self.needed, self.wider = layers, d_outs, needed, wider
        self.groups = [
            (group, cat(d_outs[group], -1)) for group in _narrowest_first(layers.weights.heights)
        ]
        self.of_weights = self.groups if beside is None else [(slice(None), rows_of(beside))]
        self.d_inner: list[Tensor] = []
        if layers.low_rank is not None:
            of_adapters = needed[layers.layout.layers :]
            self.d_inner, self.d_ups = layers.low_rank.outer_gradients(
                d_outs, layers.inner, of_adapters
            )

    def of_input(self) -> Tensor:
        """Return the gradient of x, [T, D]."""
        (group, d_out), *others = self.groups
        weight, low_rank = cat(self.layers.weights.of(group), 0), self.layers.low_rank
        if low_rank is None:
            d_x = torch.mm(d_out, weight)
        elif (
            d_out.shape[1] <= weight.shape[1]
            and (factor := low_rank.input_factor(d_out)) is not None
        ):
            # less is copied than added
            d_x = _beside(d_out, self.d_inner, self.wider) @ cat([weight, factor], 0)
        else:
            d_x = low_rank.input_gradient(self.d_inner, d_out).addmm_(d_out, weight)
        for group, d_out in others:
            d_x.addmm_(d_out, cat(self.layers.weights.of(group), 0))
        return d_x

    def of_tensors(self, x: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of weights and adapters, given x [T, D], as far as they are
        needed.
        """
        layers, count, needed = self.layers, self.layers.layout.layers, self.needed
        found: list[Tensor | None] = [None] * count
        if x is None or not any(needed):
            return [None] * len(needed)
        for group, d_out in self.of_weights:
            if any(needed[:count][group]):
                found[group] = layers.weights.gradients(group, d_out, x)
        if layers.low_rank is not None:
            d_downs = layers.low_rank.down_gradients(x, self.d_inner, needed[count:])
            pairs = [
                pair for i in range(len(self.d_ups)) for pair in (d_downs.get(i), self.d_ups[i])
            ]
            found += [
                found if needs else None for found, needs in zip(pairs, needed[count:], strict=True)
            ]
        return found


def linear_backward(
    d_out: Tensor, layers: Layers, recompute: Recompute, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of what a linear layer's input x was computed from, and then of its
    tensors.

    Args:
        d_out: [..., F], the gradient of the layer's output.
        layers: the one layer.
        recompute: given the gradient of x [T, D], and whether x is needed, returns the gradients of
            what x was computed from, and x recomputed or None.
        needed: whether each tensor's gradient is needed.
    """
    with autocast_as_in_forward(d_out):
        backward = layers.backward([d_out], needed)
        gradients, x = recompute(backward.of_input(), any(needed))
        rows = None if x is None else x.view(backward.d_outs[0].shape[0], -1)
        return *gradients, *backward.of_tensors(rows)


def projections(
    x: Tensor, *layers: Layer, batch_invariant: bool = False, backend: str = "torch"
) -> tuple[Tensor, ...]:
    """Return the output of each linear layer; "triton" sums the gradients of x inside the matrix
    products.

    Args:
        x: [..., D], any floating dtype; rounded to the layers'.
        layers: [F, D] each, in one dtype, or that with adapters, see
            `hf_packfree.ops.fused.low_rank`.
        batch_invariant: with "triton", a row of x gives the same result among any number of rows,
            without adapters.
        backend: "triton" or "torch".

    Returns:
        [..., F] each, in the layers' dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    x = as_read(x, layers[0])
    if uses_triton("projections", backend):
        layout, tensors = take_apart(layers)
        return _Projections.apply(layout, batch_invariant, norm_of(x), x, *tensors)  # type: ignore[no-any-return]
    return tuple(layer_reference(x, layer) for layer in layers)


class _Projections(Function):
    @staticmethod
    def forward(
        ctx: Any,
        layout: Layout,
        batch_invariant: bool,
        norm: NormOf | None,
        x: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        layers = Layers(layout, tensors)
        outs = layers.forward(x, batch_invariant, norm.wider if norm else None)
        ctx.save_for_backward(
            *kept_input(x, norm, ctx.needs_input_grad[4:]), *tensors, *layers.inner
        )
        ctx.layout, ctx.eps, ctx.dtype = layout, norm.eps if norm else None, x.dtype
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, *saved), layout = ctx.saved_tensors, ctx.layout
        needs_x, *needed = ctx.needs_input_grad[3:]
        with autocast_as_in_forward(d_outs[0]):
            backward = Layers(layout, saved[: layout.tensors], saved[layout.tensors :]).backward(
                d_outs, needed
            )
            d_x = backward.of_input().view(*d_outs[0].shape[:-1], -1) if needs_x else None
            x = input_again(x, weight, ctx.eps, ctx.dtype)
            return None, None, None, d_x, *backward.of_tensors(x)


def kept_input(
    x: Tensor, norm: NormOf | None, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return what layers keep of their input x, the norm of something perhaps, and whether that is
    to be computed again.

    Nothing where no gradient of a weight or adapter is `needed`; else x, or what the norm is of,
    with the norm's weight.
    """
    if not any(needed):
        return None, None
    return (x, None) if norm is None else (norm.total, norm.weight)


def input_again(
    kept: Tensor | None, weight: Tensor | None, eps: float | None, dtype: torch.dtype
) -> Tensor | None:
    """Return x [T, D] in its dtype, of what `kept_input` returned, with the norm's eps."""
    if kept is None:
        return None
    x = kept if weight is None or eps is None else NormOf(kept, weight, eps).again(dtype)
    return rows_of(x)


def _beside(x: Tensor, inner: Sequence[Tensor], wider: Tensor | None) -> Tensor:
    """Return [T, D + all K], x and what is inner, [T, K] each, side by side: `wider`, whose
    first columns x is, or a copy.
    """
    end = x.shape[1] + sum(part.shape[1] for part in inner)
    if wider is None or wider.shape[-1] < end:
        return cat([x, *inner], 1)
    beside = rows_of(wider)[:, :end]
    beside[:, x.shape[1] :] = cat(inner, 1)
    return beside


@cache
def _groups(heights: tuple[int, ...]) -> list[slice]:
    """Cut the layers into those multiplied as one: narrow neighbours together, every other one
    by itself.
    """
    narrow = [height < NARROW for height in heights]
    starts = [i for i in range(len(heights)) if i == 0 or not (narrow[i] and narrow[i - 1])]
    return [slice(*ends) for ends in zip(starts, [*starts[1:], len(heights)], strict=True)]


@cache
def _narrowest_first(heights: tuple[int, ...]) -> list[slice]:
    """Return the same in the order of a backward pass: `addmm_` reads and writes all of d_x, for
    which narrow products wait.
    """
    return sorted(_groups(heights), key=lambda group: sum(heights[group.start : group.stop]))


__all__ = ["Layers", "linear_backward", "projections"]
