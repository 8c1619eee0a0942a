"""Linear layers that read the same tensor, for `projections` and the ops that end or begin with
such layers: outputs, and gradients in two steps.

The first step computes the gradient of the tensor x that the layers read; the second the gradients
of weights and adapters, which need x itself: some ops recompute it in between. The layers'
gradients of x are summed inside the matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from hf_packfree.ops.backend import BATCH_INVARIANT, HALF
from hf_packfree.ops.fused.add_norm import take_padded
from hf_packfree.ops.fused.computed_weights import ComputedWeight, Weights
from hf_packfree.ops.fused.linear import (
    NARROW,
    as_leading,
    autocast_as_in_forward,
    linear_forward,
    narrow_linear,
    rows_of,
)
from hf_packfree.ops.fused.lora import (
    Adapter,
    AdapterGroup,
    JoinedAdapters,
    Layer,
    LoraLinear,
    group_adapters,
    spare_columns,
)
from hf_packfree.ops.fused.lora_products import cat, on_tensor_cores

Recompute = Callable[[Tensor, bool], tuple[tuple[Tensor | None, ...], Tensor | None]]


@dataclass(frozen=True)
class JoinedSpec:
    """Layers that read the same tensor, without their tensors.

    Attributes:
        out_features: of each.
        computed: how each weight is computed; None for plain weights.
        groups: the groups of the layers' adapters.
        batch_invariant: whether a row of x gives the same result among any number of rows; not
            promised for layers with adapters.
    """

    out_features: tuple[int, ...]
    computed: tuple[ComputedWeight | None, ...]
    groups: Sequence[AdapterGroup]
    batch_invariant: bool

    @property
    def num_tensors(self) -> int:
        """The number of tensors that `flatten_inputs` returns."""
        return len(self.computed) + (2 * self.groups[-1].adapters.stop if self.groups else 0)

    def spare_columns(self, x: Tensor) -> int:
        """Return how many spare columns after each row of an input like x [..., D] the adapters' h
        needs.
        """
        pairs = [(group.products, group.rank * len(group.layers)) for group in self.groups]
        return spare_columns(x, x.dtype, pairs)


def flatten_inputs(layers: Sequence[Layer], backend: str) -> tuple[JoinedSpec, list[Tensor]]:
    """Return layers as a spec and a list of tensors, as autograd functions take them: the weights
    or their sources, then A and B of every adapter. `backend` decides `batch_invariant`.
    """
    tensors: list[Tensor] = []
    out_features: list[int] = []
    computed: list[ComputedWeight | None] = []
    owned: list[tuple[int, Adapter]] = []
    for i, layer in enumerate(layers):
        if isinstance(layer, LoraLinear):
            weight = layer.weight
            owned += [(i, adapter) for adapter in layer.adapters]
        else:
            weight = layer
        out_features.append(weight.shape[0])
        computed.append(weight if isinstance(weight, ComputedWeight) else None)
        tensors.append(weight if isinstance(weight, Tensor) else weight.source)
    groups: list[AdapterGroup] = []
    if owned:
        groups, of_adapters = group_adapters(owned, weight.dtype)
        tensors += of_adapters
    invariant = backend.endswith(BATCH_INVARIANT)
    return JoinedSpec(tuple(out_features), tuple(computed), groups, invariant), tensors


class JoinedLinear:
    """Layers that read the same tensor, rebuilt from the results of `flatten_inputs`.

    Attributes:
        weights: [F, D] each.
        h: [T, K] of each group of adapters, see `AdapterGroup`; set by `forward`, read by the
            backward pass.
    """

    def __init__(
        self, spec: JoinedSpec, tensors: Sequence[Tensor], h: Sequence[Tensor] = ()
    ) -> None:
        count = len(spec.computed)
        self.spec, self.h = spec, h
        self.weights = Weights(tensors[:count], spec.computed)
        self.adapters = JoinedAdapters(spec.groups, tensors[count:]) if spec.groups else None

    def empty_input(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Allocate the layers' input, like x [..., D]: (input, padded), input = padded[..., :D];
        padded is None where h takes no spare columns.

        Pass padded to `forward`, which then writes h into the spare columns, instead of copying the
        input.
        """
        spare = self.spec.spare_columns(x)
        if not spare:
            return torch.empty_like(x), None
        padded = x.new_empty(*x.shape[:-1], x.shape[-1] + spare)
        return padded[..., : x.shape[-1]], padded

    def forward(self, x: Tensor, padded: Tensor | None = None) -> list[Tensor]:
        """Return the outputs [..., F] of x [..., D]."""
        if self.adapters is None:
            return self._without_adapters(x)
        rows = rows_of(x)
        self.h = self.adapters.h(rows)
        h = cat(self.h, 1)
        x_and_h = _append_h(rows, [h], padded) if h.dtype == rows.dtype else None
        outs = [self._with_adapters(rows, h, x_and_h, i) for i in range(len(self.spec.computed))]
        # `.data`: autograd must not take the outputs for views, because hooks may change them in
        # place
        return [as_leading(out, x).data for out in outs]

    def _with_adapters(self, x: Tensor, h: Tensor, x_and_h: Tensor | None, layer: int) -> Tensor:
        """Return one layer's output [x, h] [W, B]^T: one product, so that base and adapters are
        summed in fp32 and rounded once.
        """
        assert self.adapters is not None
        B = self.adapters.factor_B(layer)
        if not B:
            return linear(x, self.weights[layer])
        # h may have more columns, of other layers' adapters
        columns = sum([part.shape[1] for part in B])
        if x_and_h is None:
            added = linear(h[:, :columns], cat(B, 1).to(h.dtype))
            return added.to(x.dtype).addmm_(x, self.weights[layer].T)
        return linear(x_and_h[:, : x.shape[1] + columns], self.weights.beside(layer, B))

    def _without_adapters(self, x: Tensor) -> list[Tensor]:
        batch_invariant, outs = self.spec.batch_invariant, list[Tensor]()
        for group in _groups(self.spec.out_features):
            weights = self.weights.of(group)
            narrow = weights[0].shape[0] < NARROW and x.dtype in HALF
            # our kernel for narrow layers reads x once for two layers
            use_narrow = narrow and (batch_invariant or len(weights) > 1 and on_tensor_cores(x))
            if use_narrow:
                outs += narrow_linear(x, weights)
            else:
                outs += [linear_forward(x, weight, batch_invariant) for weight in weights]
        return outs


class JoinedBackward:
    """The backward pass of `JoinedLinear`, given the gradients `d_outs` [..., F] of all outputs.

    Args:
        needed: whether the gradient of each tensor is needed: of the weights, then of A and B of
            every adapter.
        joined: [..., all F] where `d_outs` are parts of one tensor: the gradients of all weights
            are one product then.
    """

    def __init__(
        self,
        layers: JoinedLinear,
        d_outs: Sequence[Tensor],
        needed: Sequence[bool],
        joined: Tensor | None = None,
    ) -> None:
        self.layers, self.needed = layers, needed
        # a single layer's d_out may be the first columns of a padded tensor
        self.padded = take_padded(d_outs[0]) if len(d_outs) == 1 else None
        rows = [rows_of(d_out) for d_out in d_outs]
        groups = _narrowest_first(layers.spec.out_features)
        self.groups = [(group, cat(rows[group], -1)) for group in groups]
        self.of_weights = self.groups if joined is None else [(slice(None), rows_of(joined))]
        self.d_h: list[Tensor] = []
        if layers.adapters is not None:
            needed_B = needed[len(d_outs) + 1 :: 2]
            self.d_h, self.d_B = layers.adapters.d_h_and_d_B(rows, layers.h, needed_B)

    def d_x(self) -> Tensor:
        """Return the gradient of x, [T, D]."""
        (group, d_out), *others = self.groups
        weights, adapters = self.layers.weights, self.layers.adapters
        # one product copies d_out [T, F], two products read and write d_x [T, D]: the smaller wins
        short = d_out.shape[1] <= weights.in_features
        if adapters is None:
            d_x = torch.mm(d_out, cat(weights.of(group), 0))
        elif short and (A := adapters.factor_A(d_out.dtype)) is not None:
            d_x = _append_h(d_out, self.d_h, self.padded) @ weights.above(group, A)
        else:
            d_x = adapters.d_x(self.d_h, d_out.dtype).addmm_(d_out, cat(weights.of(group), 0))
        for group, d_out in others:
            d_x.addmm_(d_out, cat(weights.of(group), 0))
        return d_x

    def d_tensors(self, x: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of weights and adapters, given x [T, D]; None where not needed."""
        layers, needed = self.layers, self.needed
        if x is None or not any(needed):
            return [None] * len(needed)
        features = layers.spec.out_features
        found: list[Tensor | None] = [None] * len(features)
        for group, d_out in self.of_weights:
            if any(needed[: len(features)][group]):
                found[group] = layers.weights.gradients(group, features[group], d_out, x)
        if layers.adapters is not None:
            d_A = layers.adapters.d_A(x, self.d_h, needed[len(features) :: 2])
            for pair in zip(d_A, self.d_B, strict=True):
                found += pair
        return [d if needs else None for d, needs in zip(found, needed, strict=True)]


def linear_backward(
    d_out: Tensor, layer: JoinedLinear, recompute: Recompute, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the tensors that a linear layer's input x was computed from, then of
    the layer's own tensors.

    Args:
        d_out: [..., F], the gradient of the layer's output.
        layer: one.
        recompute: given the gradient of x [T, D], and whether x is needed, returns the gradients of
            the tensors that x was computed from, and x recomputed or None.
        needed: whether each tensor's gradient is needed.
    """
    with autocast_as_in_forward(d_out):
        backward = JoinedBackward(layer, [d_out], needed)
        d_x = backward.d_x()
        gradients, x = recompute(d_x, any(needed))
        return *gradients, *backward.d_tensors(None if x is None else x.view(d_x.shape))


def _append_h(x: Tensor, h: Sequence[Tensor], padded: Tensor | None) -> Tensor:
    """Return x and every h [T, K] side by side, [T, D + all K]: in `padded`, whose first columns x
    is, or a copy.
    """
    width = x.shape[1]
    end = width + sum([part.shape[1] for part in h])
    if padded is None or padded.shape[-1] < end:
        return cat([x, *h], 1)
    x_and_h = rows_of(padded)[:, :end]
    x_and_h[:, width:] = cat(h, 1)
    return x_and_h


@cache
def _groups(out_features: tuple[int, ...]) -> list[slice]:
    """Group the layers whose weights are multiplied as one: narrow neighbours together, every other
    layer by itself.
    """
    narrow = [size < NARROW for size in out_features]
    starts = [i for i in range(len(out_features)) if i == 0 or not (narrow[i] and narrow[i - 1])]
    return [slice(*ends) for ends in zip(starts, [*starts[1:], len(out_features)], strict=True)]


@cache
def _narrowest_first(out_features: tuple[int, ...]) -> list[slice]:
    """Return `_groups`, the narrowest first: later groups add to d_x by `addmm_`, which reads and
    writes all of it, and only wide products hide that.
    """
    return sorted(
        _groups(out_features), key=lambda group: sum(out_features[group.start : group.stop])
    )
