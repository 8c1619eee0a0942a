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
from functools import partial
from importlib import import_module
import torch
from hf_packfree.ops.fused import add_norm
from hf_packfree.ops.attention import attention

from hf_packfree.ops.conv import causal_conv1d, qkv_conv, triton_native
from hf_packfree.ops.fused.gated_norm import gated_rms_norm
from hf_packfree.ops.fused import norm_rope
from hf_packfree.ops.fused import output_gate
from hf_packfree.ops.fused import swiglu_mlp
from hf_packfree.packing import PackedSequence

triton_native._STRIP = 32  # the interpreter walks every strip to its end
reduce, add_norm_op, norm_rope_op = (import_module(f"hf_packfree.ops.fused.{op}") for op in ("reduce", "add_norm", "norm_rope"))
reduce._ROWS = 16  # and adds the rows of a block one after another
add_norm_op._PROGRAMS = norm_rope_op._PROGRAMS = 7  # so that a program takes several rows
torch.manual_seed(0)
LENGTHS = [1, 2, 3, 63, 64, 65, 5, 4, 130]
packed, T = PackedSequence.from_lengths(LENGTHS), sum(LENGTHS)
H, K, HV, V, D, R = 2, 16, 4, 32, 24, 8
C = 2 * H * K + HV * V


def qkv(x, w, b, backend, qk_l2norm=True):
    return qkv_conv(x[..., 3 : 3 + C], w, packed, (H, HV), (K, V), bias=b, qk_l2norm=qk_l2norm, backend=backend)


def read_twice(x, z, w, v, backend):
    """x and z go on to other things too, before and after: every gradient is a sum, into buffers of autograd's own."""
    y, z = x.sin(), z.cos()
    normed, total = add_norm(y, None, w, 1e-6, backend=backend)
    again, total = add_norm(total, z * normed, v, 1e-6, backend=backend)
    return again * y, total + z, total * y


angle = torch.randn(1, T, R // 2)
cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
CASES = {
    "qkv conv": (qkv, (1, T, C + 8), (C, 4), (C,)),
    "qkv conv, 3 taps": (qkv, (1, T, C + 8), (C, 3), (C,)),
    "conv": (lambda x, w, backend: causal_conv1d(x, w, packed, activation=None, backend=backend), (1, T, 100), (100, 4)),
    "conv, every second weight": (
        lambda x, w, b, backend: causal_conv1d(x, w[::2], packed, bias=b[::2], backend=backend), (1, T, 20), (40, 4), (40,),
    ),
    "attention": (
        lambda q, k, v, backend: attention(q[..., :V], k, v[..., V:], packed, scale=0.3, backend=backend).mT,
        (1, T, 4, 2 * V), (1, T, 2, V), (1, T, 2, 2 * V),
    ),
    "gated norm": (lambda x, z, w, backend: gated_rms_norm(x, z, w, 1e-6, backend=backend), (1, T, 3, D), (1, T, 3, D), (D,)),
    "norm rope": (
        lambda x, w, backend: norm_rope(x[..., :D], w, cos.to(x.dtype), sin.to(x.dtype), 1e-6, backend=backend),
        (1, T, 3, 2 * D), (D,),
    ),
    "output gate": (lambda x, z, backend: output_gate(x, z[..., D:], backend=backend), (1, T, 3, D), (1, T, 3, 2 * D)),
    "gated norm, projected": (
        lambda x, z, w, p, backend: gated_rms_norm(x, z, w, 1e-6, projection=p, backend=backend),
        (1, T, 3, D), (1, T, 3, D), (D,), (20, 3 * D),
    ),
    "qkv conv, no norms": (partial(qkv, qk_l2norm=False), (1, T, C + 8), (C, 4), (C,)),
    "output gate, projected": (
        lambda x, z, p, backend: output_gate(x, z[..., D:], projection=p, backend=backend),
        (1, T, 3, D), (1, T, 3, 2 * D), (20, 3 * D),
    ),
    "swiglu": (lambda *inputs, backend: swiglu_mlp(*inputs, backend=backend), (1, T, D), (40, D), (40, D), (D, 40)),
    "add norm": (lambda x, z, w, backend: add_norm(x, z[..., 7:], w, 1e-6, backend=backend), (1, T, 72), (1, T, 79), (72,)),
    "add norm, nothing added": (lambda x, w, backend: add_norm(x, None, w, 1e-6, backend=backend), (1, T, 72), (72,)),
    "add norm, norm alone": (lambda x, z, w, backend: add_norm(x, z, w, 1e-6, backend=backend)[0], *[(1, T, 72)] * 2, (72,)),
    "add norm, read twice": (read_twice, (1, T, 72), (1, T, 72), (72,), (72,)),
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

for dtype, other in ((torch.float16,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)):  # the last: autocast
    x, z, w = torch.randn(1, T, 72).to(dtype), torch.randn(1, T, 72).to(other), torch.randn(72).to(dtype)
    found, wanted = (run(lambda *inputs, backend: add_norm(*inputs, 1e-6, backend=backend), (x, z, w), backend)
                     for backend in ("triton", "torch"))
    assert dtype is torch.bfloat16 or torch.equal(found[1], wanted[1])  # to bfloat16 the interpreter cuts, not rounds
    for a, b in zip(found, wanted, strict=True):
        error = float((a.double() - b.double()).norm() / b.double().norm())
        assert a.dtype == b.dtype and error < 2 * torch.finfo(b.dtype).eps, (a.dtype, b.dtype, error)

q, k, v = (torch.randn(1, T, 2, V) for _ in range(3))
for x in (q, k, v):
    x[:, 69:133] = float("nan")  # one document: what lies past another's end must not come in, times zero, as NaN
kept = torch.ones(T, dtype=torch.bool)
kept[69:133] = False
for backend in ("triton", "torch"):
    for part in run(lambda q, k, v, backend: attention(q, k, v, packed, backend=backend), (q, k, v), backend):
        assert part[:, kept].isfinite().all() and part[:, ~kept].isnan().all(), backend
print(worst)
'''

GATES = '''
from functools import partial
import torch
from hf_packfree.ops.fused import gates
from tests.support import relative_rms


def run(inputs, backend, which, across, gates=gates):
    """Values and gradients; a and b are slices, tokens or heads side by side; gradients of the outputs in `which` come."""
    ba, *shared = inputs = [x.detach().clone().requires_grad_() for x in inputs]
    b, a = (ba.mT[..., ::2] if across else ba).chunk(2, -1)
    outputs = gates(a, b, *shared, backend=backend)
    torch.manual_seed(1)  # of one sign: what A_log and dt_bias get is a sum over all tokens that should not cancel
    weights = [torch.rand(*out.mT.shape, dtype=torch.float64).to(out.dtype).mT for out in outputs]
    torch.autograd.backward([outputs[i] for i in which], [weights[i] for i in which])
    return [out.detach() for out in outputs], [x.grad for x in inputs]


worst = 0.0
for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 5e-3)):  # the interpreter cuts off where bf16 is rounded
    for size, across in ((1, False), (1, True), (200, False)):  # 200: far beyond where softplus is its argument, or 0
        inputs = [torch.randn(1, 12, 701) if across else torch.randn(1, 701, 6), torch.randn(3), torch.randn(3)]
        inputs = [(inputs[0] * size).to(dtype), *(x.to(dtype) for x in inputs[1:])]
        for which in ((0, 1), (0,), (1,)):
            found = run(inputs, "triton", which, across)
            wanted = run([x.double() for x in inputs], "torch", which, across)
            for x, y in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
                error = 0.0 if y is None else relative_rms(x, y) if y.any() else float(x.abs().max())
                assert error < limit and x.isfinite().all(), (dtype, size, which, error)
                worst = max(worst, error if dtype == torch.float32 else 0)
    assert [x.dtype for x in found[0] + found[1]] == [torch.float32] + [dtype] * 4
small = torch.linspace(-80, -8, 99)[None, :, None]  # log(1 + exp(x)) would have lost these
one = torch.zeros(1)
(x, _), (y, _) = (gates(small, small, one, one, backend=backend) for backend in ("triton", "torch"))
assert ((x - y).abs() <= 1e-6 * y.abs()).all()
print(worst)
'''

REMADE = '''
from functools import partial
import torch
from hf_packfree.ops.fused.gated_norm import gated_rms_norm
from hf_packfree.ops.fused import output_gate
from tests.support import relative_rms

torch.manual_seed(0)
T, H, D, F = 37, 3, 24, 20
x, z, p, w = (torch.randn(shape, requires_grad=True) for shape in ((1, T, H, D), (1, T, H, D), (F, H * D), (D,)))
worst = 0.0
for op, *others in ((output_gate,), (partial(gated_rms_norm, eps=1e-6), w)):
    def run(x, z, p, *others, backend="triton"):
        return op(x, z, *others, projection=p, backend=backend)

    leaves, sizes = [x, z, p, *others], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        y = run(*leaves)
    assert sorted(sizes) == sorted(t.numel() for t in leaves), sizes  # not what lies between: it is made again
    d_y = y.detach().clone()
    first, again = (torch.autograd.grad(y, leaves, d_y, retain_graph=keep) for keep in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(first, again)) and torch.equal(d_y, y)  # nothing kept is written over
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wanted = torch.autograd.grad(run(*wide, backend="torch"), wide, d_y.double())
    worst = max(worst, *(relative_rms(a, b) for a, b in zip(first, wanted, strict=True)))
    frozen = [t.detach().requires_grad_(t is not p) for t in leaves]
    some = torch.autograd.grad(run(*frozen), [t for t in frozen if t.requires_grad], d_y)
    assert all(torch.equal(a, b) for a, b in zip(some, [a for a, t in zip(first, leaves) if t is not p], strict=True))
    y = run(*leaves)
    with torch.autocast("cpu", torch.bfloat16):  # around the backward pass alone
        around = torch.autograd.grad(y, leaves, d_y)
    assert all(torch.equal(a, b) for a, b in zip(first, around))
assert worst < 1e-6, worst
print(worst)
'''

SWIGLU = '''
import torch
from hf_packfree.ops.fused import swiglu_mlp
from tests.support import relative_rms

torch.manual_seed(0)
T, D, F = 701, 24, 40
shapes = (1, T, D), (F, D), (F, D), (D, F)
x, *weights = leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
sizes = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
    y = swiglu_mlp(*leaves, backend="triton")
assert sorted(sizes) == sorted([T * D, F * D, F * D, D * F, T * F, T * F]), sizes  # not the product: it is made again
loss = y.square().sum()
first, again = (torch.autograd.grad(loss, leaves, retain_graph=keep) for keep in (True, False))
assert all(torch.equal(a, b) for a, b in zip(first, again))  # the kernel writes over nothing that is kept
frozen = [t.detach().requires_grad_(i in (0, 2)) for i, t in enumerate(leaves)]
some = torch.autograd.grad(swiglu_mlp(*frozen, backend="triton").square().sum(), [frozen[0], frozen[2]])
assert torch.equal(some[0], first[0]) and torch.equal(some[1], first[2])
y = swiglu_mlp(*leaves, backend="triton")
with torch.autocast("cpu", torch.bfloat16):  # around the backward pass alone
    around = torch.autograd.grad(y, leaves, 2 * y.detach())
assert all(torch.equal(a, b) for a, b in zip(first, around))
far = torch.tensor([[[-200.0, 200.0]]], requires_grad=True)  # where exp overflows in fp32
eye = torch.eye(2)
(d_far,) = torch.autograd.grad(swiglu_mlp(far, eye, eye, eye, backend="triton").sum(), far)
wide = far.detach().double().requires_grad_()
(d_wide,) = torch.autograd.grad(swiglu_mlp(wide, eye.double(), eye.double(), eye.double()).sum(), wide)
assert d_far.isfinite().all() and torch.allclose(d_far.double(), d_wide, rtol=1e-6, atol=1e-6), (d_far, d_wide)
print(relative_rms(y.detach(), swiglu_mlp(*(t.detach().double() for t in leaves))))
'''

NARROW = '''
import torch
from hf_packfree.ops.fused import projections

torch.manual_seed(0)
worst = 0.0
for rows, depth in ((1, 40), (64, 128), (130, 300)):  # 300: the last part of the sums is cut
    for sizes in ((3,), (16, 16), (5, 40, 31), (100, 5), (127, 127)):
        x = torch.randn(1, rows, depth + 7).half()[..., 7:]  # the interpreter does not multiply bf16
        weights = [torch.randn(size, depth).half() for size in sizes]
        found = projections(x, *weights, batch_invariant=True, backend="triton")
        wanted = projections(x.double(), *(weight.double() for weight in weights))
        alone = projections(x[:, -1:], *weights, batch_invariant=True, backend="triton")
        for a, b, c in zip(found, wanted, alone, strict=True):
            assert a.dtype == x.dtype and a.shape == b.shape and a.is_contiguous()
            assert torch.equal(a[:, -1:], c), "a row's bits depend on the others"
            worst = max(worst, float((a.double() - b).norm() / b.norm()))
assert worst < torch.finfo(x.dtype).eps, worst
print(worst / 10)
'''

MODEL = '''
import dataclasses
import torch
from hf_packfree import apply_patches
from hf_packfree.models import rematerialize
from hf_packfree.models.state import Kernels
from tests.support import ROW, documents, gradients, relative_rms, tiny

ids = torch.cat(documents(ROW))[None]
positions = torch.cat([torch.arange(length) for length in ROW])[None]
weights = torch.randn(1, ids.shape[1], 128, generator=torch.Generator().manual_seed(3))
OURS = Kernels(conv="triton", attention="triton", fused="triton")


def run(kernels, hooked=False):
    model = apply_patches(tiny())
    for name, module in model.named_modules():
        if "packfree" in vars(module):
            vars(module)["packfree"] = dataclasses.replace(vars(module)["packfree"], elsewhere=kernels)
        if hooked and name.endswith(("out_proj", "o_proj")):
            module.register_forward_hook(lambda *_: None)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    (logits * weights).sum().backward()
    return logits.detach(), gradients(model)


made = []
arrange = rematerialize.recompute_saved


def counted(tensor, make, worth_it):
    return arrange(tensor, lambda: made.append(1) or make(), worth_it)


rematerialize.recompute_saved = counted
wanted, worst = run(Kernels()), 0.0
for hooked, made_again in ((False, 0), (True, 3 + 1)):
    made.clear()
    found = run(OURS, hooked)
    assert relative_rms(found[0], wanted[0]) < 1e-5, relative_rms(found[0], wanted[0])
    worst = max(worst, *(relative_rms(grad, wanted[1][name]) for name, grad in found[1].items()))
    assert found[1].keys() == wanted[1].keys() and worst < 1e-4, worst
    assert len(made) == made_again  # the normed output of three layers, the gated output of the fourth
print(worst)
'''


PROGRAMS = {"ops": PROGRAM, "gates": GATES, "remade": REMADE, "swiglu": SWIGLU, "narrow": NARROW, "model": MODEL}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; pip install triton (it runs on CPUs here)")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_triton_kernels_match_their_twins(program):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < float(done.stdout) < 1e-4
