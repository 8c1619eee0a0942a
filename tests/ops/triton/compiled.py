"""Kernels compiled for a GPU that is not here: Triton's compiler may refuse what its interpreter
runs.

    python -m tests.ops.triton.compiled

Runs every op forward and backward on the CPU, compiling its kernels and running none, and prints
{kernel: why it did not compile} as JSON. A process of its own: Triton compiles nothing where the
interpreter is chosen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from hf_packfree.ops import dropout, launch
from hf_packfree.ops.attention import attention
from hf_packfree.ops.conv import qkv_conv
from hf_packfree.ops.delta_rule.segments import fold
from hf_packfree.ops.fused import (
    add_norm,
    dropped_products,
    gated_rms_norm,
    gates,
    lora,
    lora_products,
    norm_rope,
    output_gate,
    projections,
    qkv_rope,
    rope,
    swiglu_mlp,
)
from hf_packfree.ops.fused.lora import Adapter, LoraLinear
from hf_packfree.ops.loss import Wanted, linear_cross_entropy, linear_log_probs
from hf_packfree.ops.rounded_weights import RoundedWeights
from hf_packfree.packing import PackedSequence
from tests.support import loss_after

H100 = GPUTarget("cuda", 90, 32)
# Qwen3.5-2B's, and PEFT's commonest rank
TOKENS, WIDTH, INNER, RANK = 32, 2048, 6144, 16
PACKED = PackedSequence.from_lengths([20, 12])
TRITON: Any = {"backend": "triton"}
Failures = dict[str, list[str]]


def compile_all() -> Failures:
    """Compile what every op launches in bfloat16 and in fp32."""
    failures: Failures = {}

    def compile_only(
        kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any
    ) -> None:
        found = failures.setdefault(kernel.__name__, [])
        try:
            # raises where a tensor comes after a number
            launch._read(arguments, -1)
            triton.compile(*source(kernel, arguments, constants))
        except Exception as error:
            # whatever its passes raise
            found.append(
                f"{[mangle_type(value) for value in arguments]}, {constants}: "
                f"{type(error).__name__}: {error}"
            )

    JITFunction.run = compile_only
    dropout._on_a_gpu = dropped_products._on_a_gpu = lambda x: True
    lora.on_tensor_cores = lora_products.on_tensor_cores = lambda x: True
    lora_products.on_hopper = lambda x: True
    lora_products.wide_product = lambda x, w: x.float() @ w.float()
    for dtype in (torch.bfloat16, torch.float32):
        for outputs, inputs in ops(dtype):
            torch.autograd.grad(outputs, inputs, [torch.zeros_like(out) for out in outputs])
    fold(
        *(torch.randn(2, 2, 128, 128) for _ in range(2)),
        None,
        torch.tensor([0, 2], dtype=torch.int32),
        **TRITON,
    )
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.randn(INNER, WIDTH)
        copies = RoundedWeights([weight])
        copies.of(weight, dtype)
        copies.allocate(spare=0.0)
    return failures


def source(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    """Return what `triton.compile` takes for a launch with these arguments: None and 1 are
    compiled in, as by Triton.
    """
    names = kernel.arg_names
    values = dict(zip(names, arguments)) | {
        name: value for name, value in constants.items() if name in names
    }
    fixed = {
        name: value
        for name, value in values.items()
        if name in constants or value is None or (isinstance(value, int) and value == 1)
    }
    signature = {
        name: "constexpr" if name in fixed else mangle_type(value) for name, value in values.items()
    }
    return (
        ASTSource(kernel, signature, fixed),
        H100,
        {name: constants[name] for name in constants if name not in names},
    )


def ops(dtype: torch.dtype) -> Iterator[tuple[tuple[Tensor, ...], list[Tensor]]]:
    """Yield the outputs of each op and what they were computed from; attention's kernels are for
    half precision alone.
    """

    def random(*shapes: tuple[int, ...], dtype: torch.dtype = dtype) -> list[Tensor]:
        return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]

    rows, wide = (1, TOKENS, WIDTH), (1, TOKENS, 16, 128)
    x, branch, norm = random(rows, rows, (WIDTH,))
    yield add_norm(x, branch, norm, 1e-6, **TRITON), [x, branch, norm]
    yield add_norm(x, None, norm, 1e-6, **TRITON), [x, norm]
    yield add_norm(x, branch, norm, 1e-6, offset=0.0, **TRITON), [x, branch, norm]
    a, z, norm = random(wide, wide, (128,))
    yield (output_gate(a, z, **TRITON),), [a, z]
    yield (gated_rms_norm(a, z, norm, 1e-6, **TRITON),), [a, z, norm]
    a, b, A_log, dt_bias = random(*[(1, TOKENS, 16)] * 2, *[(16,)] * 2)
    yield gates(a, b, A_log, dt_bias, **TRITON), [a, b, A_log, dt_bias]
    q, norm = random((1, TOKENS, 8, 256), (256,))
    cos, sin = (torch.randn(1, TOKENS, 64).to(dtype) for _ in range(2))
    yield (norm_rope(q, norm, cos, sin, 1e-6, **TRITON),), [q, norm]
    if dtype == torch.bfloat16:
        q, k, v = random((1, TOKENS, 8, 128), *[(1, TOKENS, 2, 128)] * 2)
        yield (attention(q, k, v, PACKED, **TRITON),), [q, k, v]
    x, taps = random((1, TOKENS, 6144), (6144, 4))
    yield qkv_conv(x, taps, PACKED, (16, 16), (128, 128), qk_l2norm=True, **TRITON), [x, taps]
    (qkv,) = random((TOKENS, 3, 16, 72))
    cos, sin = (torch.randn(TOKENS, 72) for _ in range(2))
    yield qkv_rope(qkv, cos, sin, **TRITON), [qkv]
    (q,), turns = random((1, TOKENS, 8, 128)), [torch.randn(1, TOKENS, 128).to(dtype)] * 2
    yield (rope(q, *turns, **TRITON),), [q]
    x, gate, up, down = random(rows, (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
    yield (swiglu_mlp(x, gate, up, down, **TRITON),), [x, gate, up, down]
    hidden, head = random((TOKENS, WIDTH), (512, WIDTH))
    yield (linear_cross_entropy(hidden, head, torch.arange(TOKENS), **TRITON),), [hidden, head]
    for step in (lambda z: z * 2, lambda z: (z / 30.0).tanh() * 30.0):
        yield (loss_after(step, hidden, head, torch.arange(TOKENS), "triton"),), [hidden, head]
    for entropy in (False, True):
        found = linear_log_probs(
            hidden,
            head,
            torch.arange(TOKENS),
            wanted=Wanted(entropy, top1=True, moments=True),
            **TRITON,
        )
        outputs = (found.log_probs, *([found.entropy] if entropy else []))
        yield outputs, [hidden, head]
    narrow = random((16, WIDTH), (16, WIDTH))
    yield projections(x, *narrow, backend="triton, batch-invariant"), [x, *narrow]
    for of_adapters in {dtype, torch.float32}:
        tensors = random(
            *[(RANK, WIDTH), (INNER, RANK)] * 2, (RANK, INNER), (WIDTH, RANK), dtype=of_adapters
        )
        layers = [
            LoraLinear(w.detach(), (Adapter(*tensors[2 * i : 2 * i + 2], 2.0),))
            for i, w in enumerate((gate, up, down))
        ]
        dropped = LoraLinear(gate.detach(), (Adapter(*tensors[:2], 2.0, dropout=0.1),))
        yield projections(x, dropped, **TRITON), [x, *tensors[:2]]
        yield (swiglu_mlp(x, *layers, **TRITON),), [x, *tensors]
        yield projections(x, *layers[:2], **TRITON), [x, *tensors[:4]]


if __name__ == "__main__":
    json.dump(compile_all(), sys.stdout)
