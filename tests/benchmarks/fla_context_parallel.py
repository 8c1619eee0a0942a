"""flash-linear-attention's own context parallelism of the gated delta rule, put in the place of
ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap
from typing import Any
from unittest.mock import patch

from torch import Tensor

from hf_packfree.models import gated_delta_net
from hf_packfree.packing import PackedSequence


def conv_delta_rule_by_fla(
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
    **backends: str,
) -> Tensor:
    """Do what `conv_delta_rule` does by exchange of states; its exchanges are FLA's own, and nobody
    counts them.
    """
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    context = packed.cached(_context, weight.shape[-1])
    mixed = causal_conv1d(
        x, weight.flatten(1), bias=bias, activation=activation, cp_context=context
    )[0]
    (keys, values), (key_size, value_size) = heads, sizes
    q, k, v = mixed.split([keys * key_size, keys * key_size, values * value_size], -1)
    q, k, v = (
        q.unflatten(-1, (keys, -1)),
        k.unflatten(-1, (keys, -1)),
        v.unflatten(-1, (values, -1)),
    )
    return unwrap(chunk_gated_delta_rule)(  # type: ignore[no-any-return]
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        g.float(),
        beta,
        use_qk_l2norm_in_kernel=True,
        cp_context=context,
    )[0]


def _context(packed: PackedSequence, taps: int) -> Any:
    from fla.ops.cp import build_cp_context

    shard = packed.shard
    offsets = shard.row.cu_seqlens.long(), shard.row.cu_seqlens_cpu.long()
    return build_cp_context(
        offsets[0], shard.group, conv1d_kernel_size=taps, cu_seqlens_cpu=offsets[1]
    )


@contextmanager
def fla_for_states() -> Iterator[None]:
    """Let models whose rows are shared exchange states in FLA's way."""
    with patch.object(gated_delta_net, "conv_delta_rule", conv_delta_rule_by_fla):
        yield
