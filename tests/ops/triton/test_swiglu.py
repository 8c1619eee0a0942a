"""The MLP around the fused gated product."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.fused import swiglu_mlp
from hf_packfree.ops.fused.lora import Adapter, LoraLinear
from tests.ops.triton.compare import TOKENS, assert_matches, random

KERNELS = {"swiglu", "swiglu_backward"}
SIZE, WIDTH = 24, 40


@pytest.mark.parametrize("tokens", TOKENS)
def test_values_and_gradients(tokens, launched):
    assert_matches(
        swiglu_mlp, random((1, tokens, SIZE), (WIDTH, SIZE), (WIDTH, SIZE), (SIZE, WIDTH))
    )
    assert launched == KERNELS


@pytest.mark.parametrize("adapted", [False, True], ids=["", "LoRA"])
@pytest.mark.parametrize("shape", [(1, 0, SIZE), (0, SIZE)], ids=str)
def test_no_tokens(shape, adapted):
    x = torch.ones(shape, requires_grad=True)
    shapes = (WIDTH, SIZE), (WIDTH, SIZE), (SIZE, WIDTH)
    layers = leaves = [torch.ones(one, requires_grad=True) for one in shapes]
    if adapted:
        leaves = [torch.ones(s, requires_grad=True) for F, D in shapes for s in ((2, D), (F, 2))]
        pairs = zip(leaves[::2], leaves[1::2], strict=True)
        adapters = [(Adapter(A, B, 1.0),) for A, B in pairs]
        layers = [LoraLinear(w.detach(), one) for w, one in zip(layers, adapters, strict=True)]
    out = swiglu_mlp(x, *layers, backend="triton")
    out.sum().backward()
    assert out.shape == x.grad.shape == shape
    assert not any(leaf.grad.any() for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_residual_is_added(dtype, launched):
    """In its own dtype, where that is another."""

    def op(x, gate, up, down, residual, *, backend):
        wide = residual.to(dtype) if backend == "triton" else residual
        return swiglu_mlp(x, gate, up, down, residual=wide, backend=backend)

    assert_matches(
        op, random((1, 5, SIZE), (WIDTH, SIZE), (WIDTH, SIZE), (SIZE, WIDTH), (1, 5, SIZE))
    )
    assert launched == KERNELS


def test_gradients_are_finite_where_exp_overflows_in_fp32():
    far = torch.tensor([[[-200.0, 200.0]]], requires_grad=True)
    eye = torch.eye(2)
    (d_far,) = torch.autograd.grad(swiglu_mlp(far, eye, eye, eye, backend="triton").sum(), far)
    wide = far.detach().double().requires_grad_()
    (d_wide,) = torch.autograd.grad(
        swiglu_mlp(wide, eye.double(), eye.double(), eye.double()).sum(), wide
    )
    assert d_far.isfinite().all() and torch.allclose(d_far.double(), d_wide, rtol=1e-6, atol=1e-6)
