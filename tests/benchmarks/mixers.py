"""One layer's operations of Mamba-2, Kimi Delta Attention, short convolutions and attention with
options, by backend. bf16, one row of packed documents, ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from hf_packfree.packing import PackedSequence
from tests.benchmarks.layers import any_wanted, leaf, time_op
from tests.benchmarks.timing import Clock, Results

Sizes = tuple[int, ...]


def mixers(results: Results, clock: Clock, lengths: Sequence[int], tiny: bool) -> None:
    """Write a row for every operation, its sizes and backend, as `layers.operations` does."""
    packed = PackedSequence.from_lengths(list(lengths), device=clock.device)
    wanted: dict[Callable[..., None], list[Sizes]] = {
        _ssd: [(4, 16, 16, 1)] if tiny else [(64, 64, 128, 1), (112, 64, 128, 8)],
        _kda: [(2, 16)] if tiny else [(32, 128)],
        _short_conv: [(64, 3), (64, 7)] if tiny else [(2048, 3), (2048, 7)],
        # gpt-oss, Kimi Linear, Gemma 3 1B
        _attention: [(4, 2, 16, 16, 8, 1), (4, 4, 24, 16, 0, 0)]
        if tiny
        else [
            (64, 8, 64, 64, 128, 1),
            (64, 8, 64, 64, 0, 1),
            (32, 32, 192, 128, 0, 0),
            (4, 1, 256, 256, 512, 0),
        ],
    }
    for operation, every in wanted.items():
        for sizes in every:
            operation(results, clock, packed, *sizes)


def _ssd(
    results: Results,
    clock: Clock,
    packed: PackedSequence,
    heads: int,
    size: int,
    state: int,
    groups: int,
) -> None:
    from hf_packfree.ops.ssd import OP, ssd

    workload = f"layer ssd {heads} heads of {size}, state {state}, groups {groups}"
    if not any_wanted(results, workload, OP.backends):
        return
    random = partial(leaf, clock.device, 1, packed.num_tokens)
    x, B, C = random(heads, size), random(groups, state), random(groups, state)
    dt = (0.1 * torch.rand(1, packed.num_tokens, heads, device=clock.device)).requires_grad_()
    A = (-torch.rand(heads, device=clock.device)).requires_grad_()
    leaves = (x, dt, A, B, C, torch.randn(heads, device=clock.device).requires_grad_())
    for backend in OP.backends:
        call = partial(ssd, *leaves, packed, backend=backend)
        time_op(results, clock, packed, workload, backend, call, leaves)


def _kda(results: Results, clock: Clock, packed: PackedSequence, heads: int, size: int) -> None:
    from hf_packfree.ops.kda import OP, kda

    workload = f"layer kda {heads} heads of {size}"
    if not any_wanted(results, workload, OP.backends):
        return
    random = partial(leaf, clock.device, 1, packed.num_tokens, heads)
    q, k, v = random(size), random(size), random(size)
    g = (-0.1 * torch.rand(q.shape, device=clock.device)).requires_grad_()
    beta = random().detach().sigmoid().requires_grad_()
    leaves = (q, k, v, g, beta)
    for backend in OP.backends:
        call = partial(kda, *leaves, packed, backend=backend)
        time_op(results, clock, packed, workload, backend, call, leaves)


def _short_conv(
    results: Results, clock: Clock, packed: PackedSequence, channels: int, width: int
) -> None:
    from hf_packfree.ops.conv import OP, causal_conv1d

    workload = f"layer conv {channels} channels of width {width}"
    if not any_wanted(results, workload, OP.backends):
        return
    leaves = leaf(clock.device, 1, packed.num_tokens, channels), leaf(clock.device, channels, width)
    for backend in OP.backends:
        call = partial(causal_conv1d, *leaves, packed, activation=None, backend=backend)
        time_op(results, clock, packed, workload, backend, call, leaves)


def _attention(
    results: Results,
    clock: Clock,
    packed: PackedSequence,
    heads: int,
    keys: int,
    size: int,
    value_size: int,
    window: int,
    has_sinks: int,
) -> None:
    """Attention with options; a window of 0 is none."""
    from hf_packfree.ops.attention import OP, attention

    sized = f"{size}/{value_size}" if size != value_size else f"{size}"
    options = f" within {window}" * bool(window) + ", sinks" * has_sinks
    workload = f"layer attention {heads}/{keys} of {sized}{options}"
    if not any_wanted(results, workload, OP.backends):
        return
    shapes = (heads, size), (keys, size), (keys, value_size)
    leaves = [leaf(clock.device, 1, packed.num_tokens, *shape) for shape in shapes]
    leaves += [leaf(clock.device, heads)] * has_sinks
    for backend in OP.backends:
        sinks = leaves[3] if has_sinks else None
        call = partial(attention, *leaves[:3], packed, window=window or None, sinks=sinks)
        time_op(results, clock, packed, workload, backend, partial(call, backend=backend), leaves)
