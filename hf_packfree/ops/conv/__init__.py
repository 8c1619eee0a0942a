"""Depthwise causal convolution over packed documents: one public function, one file per backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from hf_packfree.ops.backend import Backend
from hf_packfree.ops.conv import across_ranks, torch_native, triton_native
from hf_packfree.ops.conv import causal_conv1d as dao
from hf_packfree.ops.in_graph import is_operator, operator
from hf_packfree.ops.op import AcrossRanks, Op, Way
from hf_packfree.ops.tree_paths import convolve_along_paths
from hf_packfree.packing import PackedSequence

NORM_EPS = 1e-6
"""Added to the sum of squares under the norm of q and k, as upstream does."""


@dataclass(frozen=True)
class ConvBackend(Backend):
    """One implementation of the convolution.

    Attributes:
        qkv_conv: convolves q, k and v, splits them into heads and divides q and k by their L2
            norms, in one pass; None: it cannot.
    """

    qkv_conv: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None


OP = Op(
    name="conv",
    leaks="the convolution's window crosses document boundaries",
    backends={
        "triton": ConvBackend(
            triton_native.causal_conv1d,
            triton_native.unusable,
            "triton",
            batch_invariant=True,
            compiles="seconds",
            qkv_conv=triton_native.qkv_conv,
            bounded=True,
        ),
        "causal_conv1d": ConvBackend(dao.causal_conv1d, dao.unusable, "causal-conv1d"),
        "torch": ConvBackend(torch_native.causal_conv1d),
    },
    across_ranks=AcrossRanks({"context": Way(across_ranks.conv_with_context, "")}),
)
"""Every convolution here is batch-invariant. But only with our Triton kernels does the convolution
divide q and k by their L2 norms; otherwise FLA's delta rule does, in a kernel that is tuned by the
row's length. So only "triton" promises it.
"""


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    packed: PackedSequence,
    *,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    backend: str = "torch",
) -> Tensor:
    """Convolve every channel causally, without letting a window reach into the document before.

    Args:
        x: [1, T, C], any floating dtype, any strides.
        weight: [C, W], tap W-1 multiplies the current token; any W of at least 1.
        packed: the documents of the row; in a tree a window reaches back along the segment's path.
        bias: [C].
        activation: "silu" or its other name "swish", or None.
        backend: a name in `OP.backends`.

    Returns:
        [1, T, C] in x's dtype, batch-invariant: each document's values are, bit for bit, those of
        the document alone.

    Raises:
        ValueError: there is no such activation.
        BackendUnavailable: no backend has that name.

    Two documents of two tokens, one channel, and a filter that adds ten times the token before:

        >>> import torch
        >>> from hf_packfree import PackedSequence
        >>> from hf_packfree.ops.conv import causal_conv1d
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1)
        >>> weight = torch.tensor([[10.0, 1.0]])
        >>> causal_conv1d(x, weight, PackedSequence.from_lengths([2, 2]), activation=None).flatten()
        tensor([ 1., 12.,  3., 34.])

    As one document, the third token would read the second, 3 + 10 * 2:

        >>> causal_conv1d(x, weight, PackedSequence.from_lengths([4]), activation=None).flatten()
        tensor([ 1., 12., 23., 34.])
    """
    _check_activation(activation)
    if is_operator(packed):
        return _conv_in_graph(packed, x, weight, bias, activation, backend)  # type: ignore[no-any-return]
    run = OP.running(backend, packed)
    if packed.tree is not None:
        run = partial(run, weight=weight, bias=bias, silu=activation is not None)
        return convolve_along_paths(x, packed, weight.shape[1], run)  # type: ignore[no-any-return]
    return run(x, weight, packed, bias, activation is not None)  # type: ignore[no-any-return]


_conv_in_graph = operator(
    causal_conv1d,
    "Tensor x, Tensor weight, Tensor? bias, str? activation, str backend",
    lambda x, *others: x.new_empty(x.shape),
)


def qkv_conv(
    x: Tensor,
    weight: Tensor,
    packed: PackedSequence,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    *,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    qk_l2norm: bool = False,
    in_place: bool = False,
    backend: str = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve q, k and v, which lie side by side, and split them into heads.

    Args:
        x, packed, bias, activation, backend: as for `causal_conv1d`; C = 2 H K + HV V.
        weight: [C, W], or [C, 1, W] as torch's `Conv1d` holds it.
        heads, sizes: (H, HV) and (K, V).
        qk_l2norm: divide the heads of q and k by their L2 norms, x * rsqrt(sum(x^2) + 1e-6);
            backends with a `qkv_conv` do it in the same pass.
        in_place: where ranks share the row, whether the backward pass may change the gradients of
            q, k and v, which nothing else reads.

    Returns:
        q, k [1, T, H, K] and v [1, T, HV, V], in x's dtype.

    Raises:
        ValueError, BackendUnavailable: as `causal_conv1d`.
    """
    if packed.tree is not None or packed.is_shard:
        convolve = partial(
            qkv_conv,
            weight=weight,
            heads=heads,
            sizes=sizes,
            bias=bias,
            activation=activation,
            qk_l2norm=qk_l2norm,
            backend=backend,
        )
        if packed.is_shard:
            q, k, v = across_ranks.with_context(
                convolve, x, packed, weight.shape[-1], in_place=in_place
            )
            return q, k, v
        return convolve_along_paths(x, packed, weight.shape[-1], convolve)  # type: ignore[no-any-return]
    in_one_pass = OP.backend(backend).qkv_conv
    if in_one_pass is not None and is_operator(packed):
        options = heads, sizes, activation, qk_l2norm, backend
        return _qkv_in_graph(packed, x, weight, bias, *options)  # type: ignore[no-any-return]
    if in_one_pass is not None:
        _check_activation(activation)
        eps = NORM_EPS if qk_l2norm else None
        return in_one_pass(x, weight, packed, bias, activation is not None, heads, sizes, eps)
    mixed = causal_conv1d(
        x, weight.flatten(1), packed, bias=bias, activation=activation, backend=backend
    )
    keys, values = heads[0] * sizes[0], heads[1] * sizes[1]
    q, k, v = mixed.split([keys, keys, values], dim=-1)
    q, k = (part.unflatten(-1, (heads[0], sizes[0])) for part in (q, k))
    if qk_l2norm:
        q, k = (part * (part.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for part in (q, k))
    return q, k, v.unflatten(-1, (heads[1], sizes[1]))


def _like_heads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: Sequence[int],
    sizes: Sequence[int],
    *others: Any,
) -> tuple[Tensor, ...]:
    kinds = zip((heads[0], *heads), (sizes[0], *sizes), strict=True)
    return tuple(x.new_empty((*x.shape[:2], count, size)) for count, size in kinds)


_qkv_in_graph = operator(
    qkv_conv,
    "Tensor x, Tensor weight, Tensor? bias, int[] heads, int[] sizes, str? activation, "
    "bool qk_l2norm, str backend",
    _like_heads,
    outputs=3,
)


def _check_activation(activation: str | None) -> None:
    if activation not in ("silu", "swish", None):
        raise ValueError(
            f"found activation {activation!r}; wanted 'silu', 'swish' or None; pass one of them"
        )


__all__ = ["OP", "ConvBackend", "causal_conv1d", "qkv_conv"]
