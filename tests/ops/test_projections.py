"""Linear layers that read one tensor share a backward pass, and narrow neighbours one product;
here in torch, on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from hf_packfree.models.plain_layers import plain_layers
from hf_packfree.ops.fused import projections
from tests.support import relative_rms

SIZES = {
    "qkv, z, b, a": (256, 128, 3, 3),
    "q, k, v": (256, 128, 128),
    "narrow alone, in front and behind": (5, 256, 3, 2, 4, 128, 1),
    "all narrow": (16, 16),
}


@pytest.mark.parametrize("backend", ["triton", "triton, batch-invariant"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_layers_called_separately(sizes, backend):
    torch.manual_seed(0)
    x = torch.randn(1, 37, 24, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(size, 24, dtype=torch.float64, requires_grad=True) for size in sizes]
    d_outs = [torch.randn(1, 37, size, dtype=torch.float64) for size in sizes]
    found = projections(x, *weights, backend=backend)
    wanted = [linear(x, weight) for weight in weights]
    grads = [torch.autograd.grad(outs, [x, *weights], d_outs) for outs in (found, wanted)]
    for a, b in zip((*found, *grads[0]), (*wanted, *grads[1]), strict=True):
        assert a.shape == b.shape and relative_rms(a, b) < 1e-12


@pytest.mark.parametrize("trained", [True, False])
def test_under_autocast_a_weight_is_what_it_was_set_to(trained):
    """Also by a write that hides from autograd, inside one autocast: no rounded copy is kept."""
    torch.manual_seed(0)
    x, other = torch.randn(1, 9, 24), torch.randn(40, 24)
    layer = torch.nn.Linear(24, 40, bias=False).requires_grad_(trained)
    read = x.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        projections(read, *plain_layers(x, layer), backend="triton")
        layer.weight.data.copy_(other)
        (found,) = projections(read, *plain_layers(x, layer), backend="triton")
    found.sum().backward()
    assert torch.equal(found, linear(x.bfloat16(), other.bfloat16()))
    assert relative_rms(read.grad, other.sum(0).expand_as(x)) < torch.finfo(torch.bfloat16).eps
    # saved, merged and moved is what is trained
    assert layer.weight.dtype == torch.float32 and torch.equal(layer.weight, other)


@pytest.mark.parametrize("shape", [(1, 0, 8), (0, 8), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("backend", ["triton", "triton, batch-invariant"])
def test_no_tokens(backend, shape):
    x = torch.ones(shape, requires_grad=True)
    weights = [torch.ones(size, 8, requires_grad=True) for size in (200, 3)]
    outs = projections(x, *weights, backend=backend)
    sum(out.sum() for out in outs).backward()
    assert [out.shape for out in outs] == [(*shape[:-1], size) for size in (200, 3)]
    assert x.grad.shape == shape and not any(weight.grad.any() for weight in weights)


def test_outputs_nobody_reads_and_frozen_layers():
    torch.manual_seed(0)
    x = torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(size, 8, dtype=torch.float64) for size in (200, 3, 3)]
    weights[2].requires_grad_()
    wide, _, a = projections(x, *weights, backend="triton")
    (wide.sum() + a.square().sum()).backward()
    d_a = 2 * x.detach() @ weights[2].detach().T
    assert relative_rms(x.grad, weights[0].sum(0) + d_a @ weights[2].detach()) < 1e-12
    assert [weight.grad is None for weight in weights] == [True, True, False]
    assert relative_rms(weights[2].grad, d_a[0].T @ x.detach()[0]) < 1e-12


def test_gradients_can_be_scaled_and_cleared_in_place():
    """Those of one product share memory; optimisers and clipping work on them in place."""
    x = torch.randn(1, 5, 8)
    weights = [torch.nn.Parameter(torch.randn(3, 8)) for _ in range(2)]
    for step in range(2):
        sum(out.sum() for out in projections(x, *weights, backend="triton")).backward()
        assert relative_rms(weights[0].grad, x.sum((0, 1)).expand(3, 8)) < 1e-5
        torch.nn.utils.clip_grad_norm_(weights, 1e-3)
        torch.optim.SGD(weights, 0.1).zero_grad(set_to_none=step == 1)
        assert step or not weights[1].grad.any()


def test_a_backward_pass_under_autocast_is_that_of_the_forward():
    torch.manual_seed(0)
    x = torch.randn(1, 5, 8, requires_grad=True)
    weights = [torch.randn(size, 8, requires_grad=True) for size in (200, 3)]
    grads = []
    for enabled in (False, True):
        outs = projections(x, *weights, backend="triton")
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(sum(out.sum() for out in outs), [x, *weights]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_hook_on_all_modules_is_called():
    layer, x = torch.nn.Linear(8, 8, bias=False), torch.randn(1, 5, 8)
    assert plain_layers(x, layer) == (layer.weight,)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: None
    )
    try:
        assert plain_layers(x, layer) is None, (
            "whatever counts or changes calls of modules would miss this one"
        )
    finally:
        handle.remove()
