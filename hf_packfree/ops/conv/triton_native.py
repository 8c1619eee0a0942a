"""The causal convolution on our Triton kernels: channels stay last and nothing is copied.

Given the heads, it also splits q, k and v into tensors of their own and divides q and k by their L2
norms, which would otherwise be three more passes over the row. Launch sizes are fixed: nothing is
tuned at run time, and a document's values are batch-invariant. Its gradients are so up to rounding:
the order of the sum over taps depends on a token's position among the four that are computed
together.

Shapes: T tokens, C channels, W taps, S strips.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import Target, block_width, needs_triton
from hf_packfree.ops.fused.reduce import sum_partials
from hf_packfree.ops.launch import launch
from hf_packfree.packing import PackedSequence, uncompiled

_TAPS = 4
# tokens of one program
_STRIP = 256
# channels of one program
_CHANNELS = 512
_WARPS = {"forward": 2, "backward": 4}
# registers of a thread, so that three programs fit on an SM
_REGISTERS = {} if torch.version.hip else {"backward": {"maxnreg": 160}}


class Heads(NamedTuple):
    """The channels of one launch: from channel `first` on, `keys` heads each of q and k and
    `values` heads of v, all of `size` channels.
    """

    first: int
    keys: int
    values: int
    size: int

    @property
    def counts(self) -> list[int]:
        """Number of heads of q, k and v, without the tensors that have none in this launch."""
        return [count for count in (self.keys, self.keys, self.values) if count]

    @property
    def channels(self) -> int:
        """The channels of q, k and v together."""
        return (2 * self.keys + self.values) * self.size


class ConvOptions(NamedTuple):
    """What a convolution computes, and in which launches.

    Attributes:
        launches: the heads of each launch: one launch where all heads have the same size, else one
            for q and k and one for v.
        silu: whether the convolution is activated.
        eps: added under the root of the L2 norms that q and k are divided by; None: no norms.
    """

    launches: tuple[Heads, ...]
    silu: bool
    eps: float | None


def unusable(target: Target) -> str | None:
    """Return why these kernels cannot run at `target`, or None."""
    if target.sizes.get("taps", 1) > _TAPS:
        return f"it has {_TAPS} taps at most, the model {target.sizes['taps']}"
    return needs_triton(target)


@uncompiled
def causal_conv1d(
    x: Tensor, weight: Tensor, packed: PackedSequence, bias: Tensor | None, silu: bool
) -> Tensor:
    """See `hf_packfree.ops.conv.causal_conv1d`."""
    # without norms, heads may be any equal cut of the channels
    size = math.gcd(x.shape[2], 128)
    options = ConvOptions((Heads(0, 0, x.shape[2] // size, size),), silu, None)
    (out,) = _apply(x, weight, packed, bias, options)
    return out.view(x.shape)


@uncompiled
def qkv_conv(
    x: Tensor,
    weight: Tensor,
    packed: PackedSequence,
    bias: Tensor | None,
    silu: bool,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    eps: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `hf_packfree.ops.conv.qkv_conv`."""
    (keys, values), (key_size, value_size) = heads, sizes
    launches: tuple[Heads, ...] = (Heads(0, keys, values, key_size),)
    if key_size != value_size:
        launches = Heads(0, keys, 0, key_size), Heads(2 * keys * key_size, 0, values, value_size)
    return _apply(x, weight, packed, bias, ConvOptions(launches, silu, eps))  # type: ignore[return-value]


class MaskPlan(NamedTuple):
    """Where the filter's window has to be masked, on the model's device.

    Attributes:
        pos_in_seq: int32 [T], each token's position in its document.
        interior: int32 [T / 4, rounded up], 1 where all four tokens are in one document and none is
            among its first three, so that no tap has to be masked; else 0.
    """

    pos_in_seq: Tensor
    interior: Tensor


def plan_masks(packed: PackedSequence) -> MaskPlan:
    """Return where the taps of a row have to be masked."""
    pos_in_seq = packed.position_ids()[0].int()
    # if the last of four tokens is at position 6 or later, the first is at 3 or later
    interior = (pos_in_seq[3::4] >= 6).int()
    return MaskPlan(pos_in_seq, pad(interior, (0, -(-len(pos_in_seq) // 4) - len(interior))))


def _apply(
    x: Tensor, weight: Tensor, packed: PackedSequence, bias: Tensor | None, options: ConvOptions
) -> tuple[Tensor, ...]:
    return _Convolution.apply(x, weight, bias, options, *packed.cached(plan_masks))  # type: ignore[no-any-return]


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: ConvOptions,
        *plan: Tensor,
    ) -> tuple[Tensor, ...]:
        from hf_packfree.ops.conv.triton_kernels import conv

        x = x if x.stride(2) == 1 else x.contiguous()
        ctx.save_for_backward(x, weight, bias, *plan)
        ctx.options, tokens = options, x.shape[1]
        outs: list[Tensor] = []
        for heads in options.launches:
            tensors = [x.new_empty(1, tokens, count, heads.size) for count in heads.counts]
            launch(
                conv,
                _grid(tokens, heads),
                _from(x, heads),
                *_taps(weight, bias, heads),
                *plan,
                *_three(tensors, heads),
                tokens,
                x.stride(1),
                heads.keys,
                heads.values,
                heads.size,
                options.eps or 0.0,
                **_blocks(weight, bias, options, heads, "forward"),
            )
            outs += tensors
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.conv.triton_kernels import conv_backward

        x, weight, bias, *plan = ctx.saved_tensors
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        d_weights, d_biases, tokens = [], [], x.shape[1]
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        left = [d_out.contiguous() for d_out in d_outs]
        for heads in ctx.options.launches:
            tensors = [left.pop(0) for _ in heads.counts]
            grid = _grid(tokens, heads)
            of_strips = grid[0], heads.channels
            d_weight = (
                x.new_empty(*of_strips, *weight.shape[1:], dtype=torch.float32)
                if needs_weight
                else None
            )
            d_bias = x.new_empty(of_strips, dtype=torch.float32) if needs_bias else None
            launch(
                conv_backward,
                grid,
                _from(x, heads),
                *_taps(weight, bias, heads),
                *plan,
                *_three(tensors, heads),
                _from(d_x, heads),
                d_weight,
                d_bias,
                tokens,
                x.stride(1),
                d_x.stride(1),
                heads.keys,
                heads.values,
                heads.size,
                ctx.options.eps or 0.0,
                **_blocks(weight, bias, ctx.options, heads, "backward"),
            )
            d_weights.append(d_weight)
            d_biases.append(d_bias)
        return d_x, _sum_strips(d_weights, weight), _sum_strips(d_biases, bias), None, None, None


def _sum_strips(strips: list[Tensor | None], parameter: Tensor | None) -> Tensor | None:
    """A parameter's gradient: the sum over strips of each launch's partial gradients, for the
    launches' channels in turn.
    """
    parts = [
        sum_partials(part, parameter.dtype)
        for part in strips
        if part is not None and parameter is not None
    ]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _three(tensors: list[Tensor], heads: Heads) -> list[Tensor]:
    """The q, k and v arguments of a launch; a tensor of which the launch has no heads is stood in
    for by another, which is not written.
    """
    q, v = tensors[0], tensors[-1]
    return [q, tensors[1] if heads.keys else v, v]


def _from(x: Tensor, heads: Heads) -> Tensor:
    """x [1, T, C] from a launch's first channel on; x itself from channel 0 on, which saves the
    host a view.
    """
    return x if heads.first == 0 else x[:, :, heads.first :]


def _taps(weight: Tensor, bias: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor | None]:
    """The weights and the bias from a launch's first channel on."""
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    return (
        (weight, bias)
        if heads.first == 0
        else (weight[heads.first :], None if bias is None else bias[heads.first :])
    )


def _grid(tokens: int, heads: Heads) -> tuple[int, int]:
    """(strips, blocks of q's heads, of k's and of v's)."""
    block = _block(heads)
    return -(-tokens // _STRIP), 2 * -(-heads.keys // block) + -(-heads.values // block)


def _block(heads: Heads) -> int:
    """Heads of one program."""
    return max(1, _CHANNELS // block_width(heads.size))


def _blocks(
    weight: Tensor, bias: Tensor | None, options: ConvOptions, heads: Heads, direction: str
) -> dict[str, Any]:
    """The `tl.constexpr` arguments and launch options of a kernel."""
    return {
        "TAPS": weight.shape[-1],
        "BIAS": bias is not None,
        "SILU": options.silu,
        "QK_L2NORM": options.eps is not None,
        "STRIP": _STRIP,
        "BLOCK_H": _block(heads),
        "BLOCK_D": block_width(heads.size),
        "num_warps": _WARPS[direction],
        **_REGISTERS.get(direction, {}),
    }
