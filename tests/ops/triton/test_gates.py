"""The delta rule's gates, of inputs in any strides and of any size."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from hf_packfree.ops.fused import gates
from tests.ops.triton.compare import TOKENS, random
from tests.support import relative_rms

KERNELS = {"gates", "gates_backward"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that 63 tokens have several."""
    monkeypatch.setattr(import_module("hf_packfree.ops.fused.gates"), "_BLOCK", 128)


def run(inputs, backend, wanted=(0, 1), across=False):
    """Values and gradients: a and b are slices, tokens or heads side by side; only the outputs
    in `wanted` get gradients.
    """
    ba, *shared = inputs = [x.detach().clone().requires_grad_() for x in inputs]
    b, a = (ba.mT[..., ::2] if across else ba).chunk(2, -1)
    outputs = gates(a, b, *shared, backend=backend)
    # of one sign: what A_log and dt_bias get is a sum over all tokens that should not cancel
    torch.manual_seed(1)
    d_outputs = [torch.rand(*out.mT.shape, dtype=torch.float64).to(out.dtype).mT for out in outputs]
    torch.autograd.backward([outputs[i] for i in wanted], [d_outputs[i] for i in wanted])
    return [*(out.detach() for out in outputs), *(x.grad for x in inputs)]


def assert_matches(inputs, across, limit):
    for wanted in ((0, 1), (0,), (1,)):
        ours, reference = (
            run(inputs, "triton", wanted, across),
            run([x.double() for x in inputs], "torch", wanted, across),
        )
        for x, y in zip(ours, reference, strict=True):
            error = 0.0 if y is None else relative_rms(x, y) if y.any() else float(x.abs().max())
            assert error < limit and x.isfinite().all(), (wanted, error)
    assert [x.dtype for x in ours] == [torch.float32] + [inputs[0].dtype] * 4


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("across", [False, True], ids=["heads side by side", "tokens side by side"])
def test_values_and_gradients(tokens, across, launched):
    assert_matches(random((1, 12, tokens) if across else (1, tokens, 6), (3,), (3,)), across, 1e-6)
    assert launched == KERNELS | {"sum_partials"}


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("scale", [1, 200], ids=["", "where softplus is its argument, or 0"])
def test_many_tokens(scale, dtype, limit):
    """In bfloat16 too, to which the interpreter truncates where a GPU rounds."""
    ba, *shared = random((1, 701, 6), (3,), (3,))
    assert_matches([x.to(dtype) for x in (ba * scale, *shared)], False, limit)


def test_softplus_keeps_its_last_bits_far_below_zero():
    """Where log(1 + exp(x)) would have lost them."""
    small, one = torch.linspace(-80, -8, 99)[None, :, None], torch.zeros(1)
    (x, _), (y, _) = (
        gates(small, small, one, one, backend=backend) for backend in ("triton", "torch")
    )
    assert ((x - y).abs() <= 1e-6 * y.abs()).all()
