"""The MLP with adapters on any of its layers, around the kernels of its gated product."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.fused import add_norm, joined_linear, lora_products, projections, swiglu_mlp
from hf_packfree.ops.fused.add_norm import take_padded, want_spare_columns
from hf_packfree.ops.fused.lora import Adapter, LoraLinear
from tests.ops.triton.compare import assert_matches, random
from tests.support import relative_rms

SIZE, WIDTH, TOKENS = 24, 40, 19
LAYERS = {"gate": (WIDTH, SIZE), "up": (WIDTH, SIZE), "down": (SIZE, WIDTH)}
RANKS = {
    "all": {"gate": (3,), "up": (3,), "down": (2,)},
    "gate alone": {"gate": (3,)},
    "down alone": {"down": (17,)},
    "several, of different ranks": {"up": (3, 5), "down": (2, 2)},
}


def mlp_of(ranks, dropout=0.0, residual=None):
    """The op, of x, the three weights and every A and B, and such tensors."""
    shapes = [
        shape
        for name in ranks
        for r in ranks[name]
        for shape in ((r, LAYERS[name][1]), (LAYERS[name][0], r))
    ]

    def op(x, *tensors, backend):
        rest = iter(tensors[3:])
        layers = [
            LoraLinear(
                weight,
                tuple(Adapter(next(rest), next(rest), 0.5, dropout) for _ in ranks.get(name, ())),
            )
            for name, weight in zip(LAYERS, tensors)
        ]
        return swiglu_mlp(x, *layers, residual=residual, backend=backend)

    return op, random((1, TOKENS, SIZE), *LAYERS.values(), *shapes)


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_values_and_gradients(ranks, launched):
    assert_matches(*mlp_of(ranks))
    assert launched == {"swiglu", "swiglu_backward"}


@pytest.mark.parametrize("ranks", [{}, RANKS["all"]], ids=["without adapters", "all"])
def test_a_sum_with_the_residual_can_be_changed_in_place(ranks):
    """As hooks on decoder layers do."""
    residual = random((1, TOKENS, SIZE), seed=1)[0].requires_grad_()
    op, inputs = mlp_of(ranks, residual=residual)
    y = op(*inputs, backend="triton")
    y *= 2
    assert relative_rms(y, 2 * op(*inputs, backend="torch")) < 1e-6
    assert torch.equal(torch.autograd.grad(y.sum(), residual)[0], torch.full_like(residual, 2))


@pytest.mark.parametrize("spare", [9, 40], ids=["too little", "more than enough"])
@pytest.mark.parametrize("written_over", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_spare_columns_of_a_norm_save_its_copy_and_change_no_number(
    spare, written_over, offset, monkeypatch
):
    total, norm, *tensors = random((1, TOKENS, SIZE), (SIZE,), (WIDTH, SIZE), (5, SIZE), (WIDTH, 5))
    first = LoraLinear(tensors[0], (Adapter(*tensors[1:], 0.5),) * 2)
    leaves, copied = [x.requires_grad_() for x in (total, norm, *tensors[1:])], []
    monkeypatch.setattr(
        joined_linear,
        "cat",
        lambda parts, dim: copied.append(parts[0].shape) or lora_products.cat(parts, dim),
    )

    def run(spare):
        copied.clear()
        options = {"offset": offset, "spare_columns": spare, "backend": "triton"}
        x, _ = add_norm(total, None, norm, 1e-6, **options)
        x = x.mul_(2.0) if written_over else x
        outs = projections(x, first, tensors[0], backend="triton")
        copies = copied.count((TOKENS, SIZE))
        return copies, [
            *outs,
            x,
            *torch.autograd.grad(
                sum(out.square().sum() for out in outs) + x.square().sum(), leaves
            ),
        ]

    (copies, found), (wanted_copies, wanted) = run(spare), run(0)
    assert (copies, wanted_copies) == (0 if spare == 40 and not written_over else 1, 1)
    assert max(relative_rms(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-6


@pytest.mark.parametrize(
    "change",
    [None, torch.Tensor.clone, lambda d: d.mul_(2), lambda d: d + d],
    ids=["no hook", "clone", "in place", "doubled"],
)
def test_spare_columns_of_a_gradient_change_no_number(change):
    """Whatever hooks make of it."""
    residual, norm = random((1, TOKENS, SIZE), (SIZE,), seed=1)
    ops, inputs = zip(
        *(mlp_of(RANKS[name], residual=residual) for name in ("all", "several, of different ranks"))
    )
    leaves = [[0.3 * x for x in each] for each in inputs]
    flat = [x.requires_grad_() for each in leaves for x in each]

    def run(backend):
        x = leaves[0][0]
        for op, each in zip(ops, leaves):
            y = op(x, *each[1:], backend=backend)
            x, total = add_norm(residual, y, norm, 1e-6, backend=backend)
            if change:
                y.register_hook(change)
        return torch.autograd.grad(x.square().sum() + total.cos().sum(), flat, allow_unused=True)

    for a, b in zip(run("triton"), run("torch"), strict=True):
        assert (a is None and b is None) or relative_rms(a, b) < 1e-5


def test_spare_columns_of_a_gradient_are_used_once():
    y = want_spare_columns(torch.randn(1, 3, 8, requires_grad=True) * 1, 4)
    normed, _ = add_norm(y, None, torch.zeros(8), 1e-6, backend="triton")
    (d,) = torch.autograd.grad(normed, y, torch.ones_like(normed))
    padded = take_padded(d)
    assert padded.shape == (1, 3, 12) and padded.data_ptr() == d.data_ptr()
    assert take_padded(d) is None


def test_dropout_leaves_the_gradients_those_of_the_values():
    op, inputs = mlp_of(RANKS["all"], dropout=0.4)
    leaves = [(0.3 * x).requires_grad_() for x in inputs]
    torch.manual_seed(0)
    y = op(*leaves, backend="triton")
    grads = torch.autograd.grad(y, leaves, y.detach())
    for number, grad in enumerate(grads):
        direction = torch.randn(grad.shape, generator=torch.Generator().manual_seed(number))
        values = []
        for step in (1e-2, -1e-2):
            torch.manual_seed(0)
            moved = [x + step * direction if i == number else x for i, x in enumerate(leaves)]
            values.append((op(*moved, backend="triton").double() * y.double()).sum().detach())
        slope = float((values[0] - values[1]) / 2e-2)
        assert abs(slope - float((grad * direction).sum())) < 1e-2 * abs(slope)
