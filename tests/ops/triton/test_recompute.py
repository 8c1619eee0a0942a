"""What an op keeps for the backward pass, and that recomputing the rest there changes no bit,
however often it runs.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hf_packfree.ops.fused import add_norm, gated_rms_norm, output_gate, projections, swiglu_mlp
from tests.ops.triton.compare import random
from tests.support import relative_rms

T, H, D, F = 37, 3, 24, 20


def norm_projected(x, z, projection, weight):
    return gated_rms_norm(x, z, weight, 1e-6, projection=projection, backend="triton")


def gate_projected(x, z, projection):
    return output_gate(x, z, projection=projection, backend="triton")


def mlp_of_norm(total, norm, gate, up, down, offset=1.0):
    x, total = add_norm(total, None, norm, 1e-6, offset=offset, backend="triton")
    return swiglu_mlp(x, gate, up, down, backend="triton")


def layers_of_norm(total, norm, first, second, offset=1.0):
    x, total = add_norm(total, None, norm, 1e-6, offset=offset, backend="triton")
    return sum(projections(x, first, second, backend="triton"))


def test_a_norm_whose_input_was_changed_since_is_kept():
    """A frozen first layer's: no graph of the norm counts its versions."""
    x, weight, first = random((1, T, D), (D,), (F, D))
    first.requires_grad_()
    normed, total = add_norm(x, None, weight, 1e-6, backend="triton")
    total.add_(1)
    (out,) = projections(normed, first, backend="triton")
    out.sum().backward()
    assert relative_rms(first.grad, normed[0].sum(0).expand(F, D)) < 1e-6


def test_a_norm_of_inputs_made_in_inference_mode_is_kept():
    with torch.inference_mode():
        x, weight = random((1, T, D), (D,))
    first = random((F, D))[0].requires_grad_()
    normed, _ = add_norm(x, None, weight, 1e-6, backend="triton")
    (out,) = projections(normed, first, backend="triton")
    out.sum().backward()
    assert relative_rms(first.grad, normed[0].sum(0).expand(F, D)) < 1e-6


HEADS = ((1, T, H, D), (1, T, H, D), (F, H * D))
OPS = {
    "gated norm": (norm_projected, (*HEADS, (D,)), ()),
    "output gate": (gate_projected, HEADS, ()),
    "swiglu": (
        partial(swiglu_mlp, backend="triton"),
        ((1, T, D), (F, D), (F, D), (D, F)),
        (T * F, T * F),
    ),
    "swiglu of a norm": (
        mlp_of_norm,
        ((1, T, D), (D,), (F, D), (F, D), (D, F)),
        (T * D, D, T * F, T * F),
    ),
    "layers of a norm": (layers_of_norm, ((1, T, D), (D,), (F, D), (F, D)), (T * D, D)),
}


OPS |= {
    f"{name}, as Llama's": (partial(op, offset=0.0), *rest)
    for name, (op, *rest) in OPS.items()
    if op in (mlp_of_norm, layers_of_norm)
}


@pytest.fixture(params=OPS.values(), ids=OPS)
def case(request):
    """The op, its inputs, and the sizes of what it keeps beside them."""
    op, shapes, kept = request.param
    return op, [x.requires_grad_() for x in random(*shapes)], kept


def test_keeps_its_inputs_and_not_the_input_of_the_projection(case):
    op, leaves, kept = case
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        op(*leaves)
    assert sorted(sizes) == sorted([*(t.numel() for t in leaves), *kept])


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_recomputed_norm_has_the_bits_of_the_first(offset):
    total, norm, weight = random((1, T, D), (D,), (F, D))
    weight.requires_grad_()
    x, _ = add_norm(total, None, norm, 1e-6, offset=offset, backend="triton")
    (y,) = projections(x, weight, backend="triton")
    (found,) = torch.autograd.grad(y, weight, y)
    assert torch.equal(found, y[0].T @ x[0])


def test_a_norm_that_was_written_over_is_kept_as_it_is():
    total, norm, weight = random((1, T, D), (D,), (F, D))
    weight.requires_grad_()
    x, _ = add_norm(total, None, norm, 1e-6, backend="triton")
    x.mul_(2)
    (y,) = projections(x, weight, backend="triton")
    (found,) = torch.autograd.grad(y, weight, y)
    assert torch.equal(found, y[0].T @ x[0])


def test_a_second_backward_pass_has_the_same_bits(case):
    """Nothing that is kept, and not the gradient that comes in, is written over."""
    op, leaves, _ = case
    y = op(*leaves)
    d_y = y.detach().clone()
    first, again = (
        torch.autograd.grad(y, leaves, d_y, retain_graph=keep) for keep in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) and torch.equal(d_y, y)


def test_frozen_inputs_change_no_other_gradient(case):
    op, leaves, _ = case
    y = op(*leaves)
    wanted = torch.autograd.grad(y, leaves, y.detach())
    for i in range(len(leaves)):
        frozen = [t.detach().requires_grad_(j != i) for j, t in enumerate(leaves)]
        found = torch.autograd.grad(op(*frozen), [t for t in frozen if t.requires_grad], y.detach())
        assert all(
            torch.equal(a, b)
            for a, b in zip(found, [d for j, d in enumerate(wanted) if j != i], strict=True)
        )


def test_autocast_around_the_backward_pass_changes_nothing(case):
    op, leaves, _ = case
    y = op(*leaves)
    wanted = torch.autograd.grad(y, leaves, y.detach())
    y = op(*leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y, leaves, y.detach())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
