"""silu(gate) * up with nothing kept but its inputs: bit for bit torch's two operations."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu

from hf_packfree.ops.fused import gated_product


def by_torch(gate, up):
    return silu(gate) * up


def inputs(dtype=torch.float32, wanted=(True, True)):
    torch.manual_seed(0)
    # a tail that fills no vector, and values at which a sigmoid is 0 or 1
    made = [torch.randn(3, 37, dtype=dtype) * size for size in (30, 1)]
    return [x.requires_grad_(needs) for x, needs in zip(made, wanted)]


def gradients(function, dtype=torch.float32, wanted=(True, True), create_graph=False):
    leaves = inputs(dtype, wanted)
    out = function(*leaves)
    direction = torch.linspace(-2, 2, out.numel(), dtype=dtype).view_as(out)
    leaves = [x for x in leaves if x.requires_grad]
    return out, torch.autograd.grad(out, leaves, direction, create_graph=create_graph), leaves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_values_and_gradients_have_the_bits_of_torch(dtype, wanted):
    (out, found, _), (expected, right, _) = (
        gradients(function, dtype, wanted) for function in (gated_product, by_torch)
    )
    assert torch.equal(out, expected) and out.dtype == dtype
    assert len(found) == len(right) and all(map(torch.equal, found, right))


def test_its_inputs_alone_are_kept():
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        gated_product(*inputs())
        assert kept == [(3, 37)] * 2
        by_torch(*inputs())
    assert len(kept) == 2 + 3


def test_it_can_be_differentiated_again():
    """For rows of one document, which are transformers' own in this, too."""
    firsts, seconds = [], []
    for function in (gated_product, by_torch):
        _, first, leaves = gradients(function, torch.float64, create_graph=True)
        firsts.append(first)
        seconds.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    assert all(map(torch.equal, *firsts))
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(*seconds))


def test_gradients_in_batches_have_the_bits_of_torch():
    """vmap goes over the backward pass: `is_grads_batched`, and jacobians with `vectorize`."""
    batch, found = torch.linspace(-2, 2, 5 * 3 * 37).view(5, 3, 37), []
    for function in (gated_product, by_torch):
        leaves = inputs()
        grad = partial(torch.autograd.grad, function(*leaves), leaves, retain_graph=True)
        found.append((*grad(batch, is_grads_batched=True), *torch.func.vmap(grad)(batch)))
        assert found[-1][0].shape == (5, 3, 37)
    assert all(map(torch.equal, *found))
