"""One layer's operations side by side, and the matrix products alone. bf16, one row of packed
documents, ms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.packing import PackedSequence
from tests.benchmarks.models import build
from tests.benchmarks.shapes import Shape
from tests.benchmarks.timing import Clock, Results, free

Call = Callable[[], Any]


def operations(
    results: Results, clock: Clock, lengths: Sequence[int], *, size: int = 128, widths: Any = None
) -> None:
    """Write a row for every operation, head count and backend: forward ms ("forward_ms") and
    forward + backward ("ms").

    Args:
        lengths: of the documents, in tokens.
        size: K and V of the linear layers' heads.
        widths: {"linear": [(H, HV), ...], "full": [(heads, key heads, head size), ...],
            "stream": [D_model, ...], "adapted": [F, ...]}, these on "cuda" alone.
    """
    widths = widths or {
        "linear": [(16, 16), (16, 32)],
        "full": [(8, 2, 256), (16, 4, 256), (32, 8, 128), (32, 8, 64)],
        "stream": [2048, 4096],
        "adapted": [2048, 6144],
    }
    packed = PackedSequence.from_lengths(list(lengths), device=clock.device)
    for heads in widths["linear"]:
        _delta_rule(results, clock, packed, *heads, size)
        _conv(results, clock, packed, (2 * heads[0] + heads[1]) * size)
        _qkv_conv(results, clock, packed, *heads, size)
        _gated_norm(results, clock, packed, heads[1], size)
    for heads in widths["full"]:
        _attention(results, clock, packed, *heads)
    for width in widths["stream"]:
        _add_norm(results, clock, packed, width)
        _swiglu(results, clock, packed, width)
    for outputs in widths["adapted"]:
        for of_adapters in (torch.float32, torch.bfloat16):
            _adapters(results, clock, packed.num_tokens, outputs, of_adapters)


def _delta_rule(
    results: Results, clock: Clock, packed: PackedSequence, heads: int, values: int, size: int
) -> None:
    from hf_packfree.ops.delta_rule import OP, gated_delta_rule

    workload = f"layer delta rule {heads}/{values}"
    if not any_wanted(results, workload, OP.backends):
        return
    random = partial(leaf, clock.device, 1, packed.num_tokens)
    q, k, v = random(heads, size), random(heads, size), random(values, size)
    g = (-0.1 * torch.rand(1, packed.num_tokens, values, device=clock.device)).requires_grad_()
    beta = random(values).detach().sigmoid().requires_grad_()
    leaves = (q, k, v, g, beta)
    for backend in sorted(OP.backends):
        time_op(
            results,
            clock,
            packed,
            workload,
            backend,
            partial(gated_delta_rule, *leaves, packed, backend=backend),
            leaves,
        )


def any_wanted(results: Results, workload: str, backends: Any) -> bool:
    """Whether a row of the operation is to be run."""
    return any(results.wanted(workload, name) for name in backends)


def _conv(results: Results, clock: Clock, packed: PackedSequence, channels: int) -> None:
    from hf_packfree.ops.conv import OP, causal_conv1d

    workload = f"layer conv {channels} channels"
    if not any_wanted(results, workload, OP.backends):
        return
    x, weight = (
        leaf(clock.device, 1, packed.num_tokens, channels),
        leaf(clock.device, channels, 4),
    )
    for backend in sorted(OP.backends):
        call = partial(causal_conv1d, x, weight, packed, backend=backend)
        time_op(results, clock, packed, workload, backend, call, (x, weight))


def _qkv_conv(
    results: Results, clock: Clock, packed: PackedSequence, heads: int, values: int, size: int
) -> None:
    """Convolution, split into heads, and norms of q and k in one pass."""
    from hf_packfree.ops.conv import OP, qkv_conv

    fused = {name for name, backend in OP.backends.items() if backend.qkv_conv}

    workload = f"layer qkv conv {heads}/{values}"
    if not any_wanted(results, workload, fused):
        return
    channels = (2 * heads + values) * size
    x, weight = (
        leaf(clock.device, 1, packed.num_tokens, channels),
        leaf(clock.device, channels, 4),
    )
    for backend in sorted(fused):
        call = partial(
            qkv_conv,
            x,
            weight,
            packed,
            (heads, values),
            (size, size),
            qk_l2norm=True,
            backend=backend,
        )
        time_op(results, clock, packed, workload, backend, call, (x, weight))


def _gated_norm(
    results: Results, clock: Clock, packed: PackedSequence, values: int, size: int
) -> None:
    workload = f"layer gated norm {values} heads"
    from hf_packfree.ops.fused import OP, gated_rms_norm

    if not any_wanted(results, workload, OP.backends):
        return
    x, z = (leaf(clock.device, packed.num_tokens * values, size) for _ in range(2))
    weight = leaf(clock.device, size)
    for backend in sorted(OP.backends):
        call = partial(gated_rms_norm, x, z, weight, eps=1e-6, backend=backend)
        time_op(results, clock, packed, workload, backend, call, (x, z, weight))


def _attention(
    results: Results, clock: Clock, packed: PackedSequence, heads: int, keys: int, size: int
) -> None:
    from hf_packfree.ops.attention import OP, attention

    workload = f"layer attention {heads}/{keys} of {size}"
    others = _other_attention() if clock.device == "cuda" else {}
    if not any_wanted(results, workload, [*OP.backends, *others]):
        return
    q, k, v = (leaf(clock.device, 1, packed.num_tokens, n, size) for n in (heads, keys, keys))
    for backend in sorted(OP.backends):
        call = partial(attention, q, k, v, packed, backend=backend)
        time_op(results, clock, packed, workload, backend, call, (q, k, v))
    for variant, attend in others.items():
        call = partial(attend, q, k, v, packed)
        time_op(results, clock, packed, workload, variant, call, (q, k, v))


def _other_attention() -> dict[str, Callable[..., Tensor]]:
    """Kernels that no backend asks for where documents are short: cuDNN's for every document, and
    FlashAttention 4, which torch's varlen attention can activate, by its own function.
    """
    from hf_packfree.ops.attention import cudnn

    def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequence) -> Tensor:
        from flash_attn.cute import flash_attn_varlen_func

        bounds, longest = packed.cu_seqlens, packed.max_seqlen
        out = flash_attn_varlen_func(
            *(x.squeeze(0) for x in (q, k, v)),
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out

    return {
        "cuDNN, a call for each document": partial(cudnn.attend, long=1),
        "FlashAttention 4": flash_attention_4,
    }


def _add_norm(results: Results, clock: Clock, packed: PackedSequence, width: int) -> None:
    """Residual sum and norm, both going on: the stream and what the next part of the layer
    reads.
    """
    from hf_packfree.ops.fused import OP, add_norm

    workload = f"layer add norm {width} channels"
    if not any_wanted(results, workload, OP.backends):
        return
    x, branch = (leaf(clock.device, 1, packed.num_tokens, width) for _ in range(2))
    weight = leaf(clock.device, width)
    for backend in sorted(OP.backends):
        call = partial(add_norm, x, branch, weight, 1e-6, backend=backend)
        time_op(results, clock, packed, workload, backend, call, (x, branch, weight))


def _swiglu(results: Results, clock: Clock, packed: PackedSequence, width: int) -> None:
    """The whole MLP, matrix products included; three times as wide inside, as the published
    models.
    """
    workload = f"layer swiglu {width} channels"
    from hf_packfree.ops.fused import OP, swiglu_mlp

    if not any_wanted(results, workload, OP.backends):
        return
    leaves = (
        leaf(clock.device, 1, packed.num_tokens, width),
        leaf(clock.device, 3 * width, width),
        leaf(clock.device, 3 * width, width),
        leaf(clock.device, width, 3 * width),
    )
    for backend in sorted(OP.backends):
        time_op(
            results,
            clock,
            packed,
            workload,
            backend,
            partial(swiglu_mlp, *leaves, backend=backend),
            leaves,
        )


def _adapters(
    results: Results, clock: Clock, tokens: int, outputs: int, dtype: torch.dtype, rank: int = 16
) -> None:
    """Both gradients that adapters read a layer's d_out [T, F] for, at once and as two products;
    GB/s of d_out read once.
    """
    from hf_packfree.ops.fused.lora_products import gradients_at_once, products_for

    workload = (
        f"layer adapters' gradients {tokens} x {outputs} r{rank} "
        f"{str(dtype).removeprefix('torch.')}"
    )
    if not any_wanted(results, workload, ("at once", "products")):
        return
    split = dtype == torch.float32
    products = products_for(torch.bfloat16, dtype, tensor_cores=True)
    d_out = leaf(clock.device, tokens, outputs).detach()
    B = torch.randn(outputs, rank, device=clock.device, dtype=dtype)
    h = leaf(clock.device, tokens, products.parts * rank).detach()
    d_h = torch.empty_like(h)
    calls: dict[str, Call] = {
        "at once": partial(gradients_at_once, [d_out], [B], h, d_h, 2.0, split=split),
        "products": lambda: (
            products.d_h([d_out], [B], 2.0),
            products.d_B(d_out, h, B),
        ),
    }
    for variant, call in calls.items():
        results.row(workload, variant, partial(_rate, clock, call, d_out))


def _rate(clock: Clock, call: Call, read: Tensor) -> dict[str, Any]:
    timed = clock.measure(call)
    return timed | {
        "gb_per_s": read.nbytes / timed["ms"] / 1e6,
        "real_tokens_per_s": len(read) / timed["ms"] * 1e3,
    }


def leaf(device: str, *shape: int) -> Tensor:
    """Random numbers that want a gradient."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def time_op(
    results: Results,
    clock: Clock,
    packed: PackedSequence,
    workload: str,
    variant: str,
    call: Call,
    leaves: Sequence[Tensor],
) -> None:
    """Write a row of one call: forward ms and forward + backward."""

    def outputs() -> list[Tensor]:
        found = call()
        return (
            [found]
            if isinstance(found, Tensor)
            else [part for part in found if isinstance(part, Tensor)]
        )

    def measure() -> dict[str, Any]:
        gradients = [torch.randn_like(part) for part in outputs()]
        forward = clock.measure(outputs)["ms"]
        both = clock.measure(lambda: torch.autograd.grad(outputs(), leaves, gradients))
        return both | {
            "forward_ms": forward,
            "real_tokens_per_s": packed.num_tokens / both["ms"] * 1e3,
        }

    results.row(workload, variant, measure)


def products(shape: Shape) -> Counter[tuple[int, int, int]]:
    """Count the trunk's matrix products: {(experts that share a token's k choices or 1, outputs,
    inputs): how often}.
    """
    trunk = build(shape, "meta").base_model
    found: Counter[tuple[int, int, int]] = Counter()
    for module in trunk.modules():
        if isinstance(module, nn.Linear):
            found[(1, *module.weight.shape)] += 1
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name, None)
            if isinstance(weight, nn.Parameter) and weight.ndim == 3:
                found[tuple(weight.shape)] += 1
    return found


def floor(shape: Shape, tokens: int, clock: Clock) -> dict[str, Any]:
    """Time the linear layers' products alone: forward, and the gradients of inputs and weights;
    experts evenly loaded.

    "ms" is the sum of every shape timed by itself, which is over before a GPU slows down at its
    power limit; "sustained_ms" is a step's worth of all of them, as often as a step is timed.
    """
    choices = shape.sizes.get("num_experts_per_tok", 1)
    counts = products(shape)
    calls = {
        key: _three(clock.device, tokens if key[0] == 1 else tokens * choices // key[0], *key)
        for key in counts
    }

    def step() -> None:
        for key, count in counts.items():
            for _ in range(count):
                calls[key]()

    short = replace(clock, least=0.0)
    parts = {
        " x ".join(map(str, (count, *key))): count * short.measure(calls[key])["ms"]
        for key, count in counts.items()
    }
    total, sustained = sum(parts.values()), clock.measure(step)
    calls.clear()
    free()
    return {
        "ms": total,
        "sustained_ms": sustained["ms"],
        "real_tokens_per_s": tokens / total * 1e3,
        "peak_gib": sustained["peak_gib"],
        "parts_ms": parts,
        "layers": shape.layers,
    }


def _three(device: str, rows: int, experts: int, outputs: int, inputs: int) -> Call:
    """The products of one layer's forward pass and of its gradients of x and w, on random
    numbers.
    """
    x, dy, w = (
        leaf(device, experts, *sides).detach()
        for sides in ((rows, inputs), (rows, outputs), (outputs, inputs))
    )
    if experts == 1:
        x, dy, w = x[0], dy[0], w[0]

    def three() -> None:
        x @ w.mT, dy @ w, dy.mT @ x

    return three
