"""The convolution over a sharded row: it runs on the shard while the tokens before the shard
arrive, and then again on the shard's first tokens, which read them.

Shapes: t tokens of a shard, h tokens of its first document before the shard, n tokens at its start
that read these h, C = 2 H K + HV V channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, cat
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import Backend
from hf_packfree.packing import PackedSequence, shard_of, uncompiled, without_row
from hf_packfree.parallel.collectives import send_left_context


def conv_with_context(
    backend: Backend,
    x: Tensor,
    weight: Tensor,
    packed: PackedSequence,
    bias: Tensor | None,
    silu: bool,
) -> Tensor:
    """Return the convolution of a shard as a part of its row; for args and returns, see
    `Backend.run`.
    """

    def conv(x: Tensor, packed: PackedSequence) -> tuple[Tensor, ...]:
        return (backend.running(packed)(x, weight, packed, bias, silu),)

    return with_context(conv, x, packed, weight.shape[1])[0]


@uncompiled
def with_context(
    conv: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    packed: PackedSequence,
    taps: int,
    *,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """Return the part of `conv`'s result on the whole row that belongs to a shard's tokens.

    Args:
        conv: takes x [1, t, C] and the keyword `packed`, the record of x, and returns new tensors
            [1, t, ...] that conv's backward does not need, because their first tokens are
            overwritten.
        x: [1, t, C], this rank's tokens.
        packed: the record of the shard.
        taps: how many tokens an output reads, including its own.
        in_place: whether nothing else reads the gradients of the result, as where the delta rule's
            backward has just made them: then no copies of them are made.
    """
    reach, alone = taps - 1, without_row(packed)
    if not (reach and shard_of(packed).is_cut):
        return conv(x, packed=alone)
    count = min(reach, packed.lengths[0])
    x, first, last = _Edges.apply(x, count, min(reach, packed.num_tokens))
    receive = send_left_context(last[0], shard_of(packed), reach)
    found = conv(x, packed=alone)
    left = receive()
    longer = packed.cached(_one_document, len(left) + count)
    again = conv(cat([left, first[0]])[None], packed=longer)
    return _Replaced.apply(in_place, *found, *(part[:, len(left) :] for part in again))  # type: ignore[no-any-return]


def _one_document(packed: PackedSequence, tokens: int) -> PackedSequence:
    return PackedSequence.from_lengths([tokens], device=packed.seq_idx.device)


class _Edges(Function):
    """Returns a row [1, t, C], and copies of its first and last tokens, whose gradients are added
    to the row's in place, without another tensor of t tokens.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        return x, x[:, :first].clone(), x[:, -last:].clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_x: Tensor, d_first: Tensor, d_last: Tensor
    ) -> tuple[Tensor, None, None]:
        # the convolution's backward has just made d_x, and nothing else reads it
        d_x[:, : d_first.shape[1]] += d_first
        d_x[:, -d_last.shape[1] :] += d_last
        return d_x, None, None


class _Replaced(Function):
    """Overwrites the first tokens of tensors [1, t, ...] by others [1, n, ...], in place; the
    backward splits the gradients, in place too if `in_place`.
    """

    @staticmethod
    def forward(ctx: Any, in_place: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.in_place, ctx.half = in_place, len(tensors) // 2
        whole, first = tensors[: ctx.half], tensors[ctx.half :]
        for one, new in zip(whole, first, strict=True):
            one[:, : new.shape[1]] = new
        ctx.count = first[0].shape[1]
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        first = [one[:, : ctx.count].clone() for one in gradients]
        if not ctx.in_place:
            gradients = tuple(one.clone() for one in gradients)
        for one in gradients:
            # the overwritten tokens get no gradient
            one[:, : ctx.count] = 0
        return None, *gradients, *first
