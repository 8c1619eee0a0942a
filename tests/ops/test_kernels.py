"""Our Triton kernels in Triton's interpreter, against their torch twins; the GPU's own tests are in tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = '''
import sys
import torch
from hf_packfree.ops.conv import causal_conv1d, qkv_conv
from hf_packfree.ops.gated_norm import gated_rms_norm
from hf_packfree.ops.norm_rope import norm_rope
from hf_packfree.ops.output_gate import output_gate
from hf_packfree.packing import PackedSequence

torch.manual_seed(0)
LENGTHS = [1, 2, 3, 63, 64, 65, 5, 4, 130]
packed, T = PackedSequence.from_lengths(LENGTHS), sum(LENGTHS)
H, K, HV, V, D, R = 2, 16, 4, 32, 24, 8
C = 2 * H * K + HV * V


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def qkv(x, w, b, backend):
    q, k, v, is_unit = qkv_conv(x[..., 3 : 3 + C], w, packed, (H, HV), (K, V), bias=b, backend=backend)
    return (q, k, v) if is_unit else (unit(q), unit(k), v)


angle = torch.randn(1, T, R // 2)
cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
CASES = {
    "qkv conv": (qkv, (1, T, C + 8), (C, 4), (C,)),
    "qkv conv, 3 taps": (qkv, (1, T, C + 8), (C, 3), (C,)),
    "conv": (lambda x, w, backend: causal_conv1d(x, w, packed, activation=None, backend=backend), (1, T, 100), (100, 4)),
    "gated norm": (lambda x, z, w, backend: gated_rms_norm(x, z, w, 1e-6, backend=backend), (1, T, 3, D), (1, T, 3, D), (D,)),
    "norm rope": (
        lambda x, w, backend: norm_rope(x[..., :D], w, cos.to(x.dtype), sin.to(x.dtype), 1e-6, backend=backend),
        (1, T, 3, 2 * D), (D,),
    ),
    "output gate": (lambda x, z, backend: output_gate(x, z[..., D:], backend=backend), (1, T, 3, D), (1, T, 3, 2 * D)),
}


def run(f, inputs, backend):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = f(*inputs, backend=backend)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn(out.shape, dtype=torch.float64).to(out.dtype) for out in outputs])
    return [*(out.detach() for out in outputs), *(x.grad for x in inputs)]


worst = 0.0
for name, (f, *shapes) in CASES.items():
    inputs = [torch.randn(shape) for shape in shapes]
    found, wanted = run(f, inputs, "triton"), run(f, [x.double() for x in inputs], "torch")
    for a, b in zip(found, wanted, strict=True):
        error = float((a.double() - b).norm() / b.norm())
        assert error < 1e-6, f"{name}: {error}"
        worst = max(worst, error)
print(worst)
'''


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; pip install triton (it runs on CPUs here)")
def test_triton_kernels_match_their_twins():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < float(done.stdout) < 1e-6
