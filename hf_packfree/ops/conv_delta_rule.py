"""The convolution and the delta rule of a Gated DeltaNet layer, one after the other.

The two ops have backends of their own, but either can divide q and k by their L2 norms. A
convolution that holds whole heads in registers does it for free; with other convolutions the delta
rule does it. This module decides which. Where ranks share heads, both ops mix tokens head by head,
the convolution even channel by channel: one exchange around the two is enough.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat

from hf_packfree.ops.conv import OP as CONV
from hf_packfree.ops.conv import qkv_conv
from hf_packfree.ops.delta_rule import OP as DELTA_RULE
from hf_packfree.ops.delta_rule import gated_delta_rule
from hf_packfree.ops.delta_rule.across_ranks import exchange_heads
from hf_packfree.packing import PackedSequence, shard_of, uncompiled
from hf_packfree.parallel.collectives import heads_to_tokens


def conv_delta_rule(
    x: Tensor,
    weight: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    *,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    conv: str = "torch",
    delta_rule: str = "torch",
) -> Tensor:
    """Convolve q, k and v within documents, and run the gated delta rule on them.

    Args:
        x: [1, T, C], q, k and v side by side, C = 2 H K + HV V; any floating dtype, any strides.
        weight, bias, activation: of the convolution, see `hf_packfree.ops.conv.qkv_conv`.
        g, beta: [1, T, HV], log decay and write strength, see
            `hf_packfree.ops.delta_rule.gated_delta_rule`.
        packed: the documents of the row.
        heads, sizes: (H, HV) and (K, V).
        conv, delta_rule: the backends of the two ops.

    Returns:
        [1, T, HV, V] in x's dtype.

    Raises:
        ValueError: there is no such activation.
        BackendUnavailable: no backend has that name.
    """
    if packed.shard is not None and packed.shard.ways.get(DELTA_RULE.name) == "heads":
        options = {"activation": activation, "conv": conv, "delta_rule": delta_rule}
        return _by_heads(x, weight, g, beta, packed, heads, sizes, bias, **options)
    in_conv = CONV.backend(conv).qkv_conv is not None
    q, k, v = qkv_conv(
        x,
        weight,
        packed,
        heads,
        sizes,
        bias=bias,
        activation=activation,
        qk_l2norm=in_conv,
        # the delta rule's backward pass makes these gradients anew
        in_place=True,
        backend=conv,
    )
    return gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        packed,
        qk_l2norm=not in_conv,
        backend=delta_rule,
    )


@uncompiled
def _by_heads(
    x: Tensor,
    weight: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    bias: Tensor | None,
    **options: Any,
) -> Tensor:
    """Do it with 1 / W of the heads on each of W ranks, over all tokens; see `Way`."""
    shard, (keys, values) = shard_of(packed), heads
    widths = [keys * sizes[0], keys * sizes[0], values * sizes[1]]

    def mine(channels: Tensor) -> Tensor:
        """Return this rank's of q, k and v [C, ...]."""
        return cat([part.chunk(shard.world)[shard.rank] for part in channels.split(widths)])

    mixed, g, beta = exchange_heads(x[0].split(widths, 1), g, beta, packed)
    out = conv_delta_rule(
        mixed,
        mine(weight),
        g,
        beta,
        shard.row,
        (keys // shard.world, values // shard.world),
        sizes,
        bias=None if bias is None else mine(bias),
        **options,
    )
    return heads_to_tokens(out[0], shard.group)[None]
