"""The MLP with adapters on any of its layers, around the kernels of its gated product."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.fused import swiglu_mlp
from hf_packfree.ops.fused.low_rank import Adapted, Adapter
from tests.ops.triton.compare import assert_matches, random

SIZE, WIDTH, TOKENS = 24, 40, 19
LAYERS = {"gate": (WIDTH, SIZE), "up": (WIDTH, SIZE), "down": (SIZE, WIDTH)}
RANKS = {
    "all": {"gate": (3,), "up": (3,), "down": (2,)}, "gate alone": {"gate": (3,)}, "down alone": {"down": (17,)},
    "several, of different ranks": {"up": (3, 5), "down": (2, 2)},
}


def mlp_of(ranks, dropout=0.0):
    """The op, of x, the three weights and every A and B, and the shapes of the latter."""
    shapes = [shape for name in ranks for r in ranks[name] for shape in ((r, LAYERS[name][1]), (LAYERS[name][0], r))]

    def op(x, *tensors, backend):
        rest = iter(tensors[3:])
        layers = [
            Adapted(weight, tuple(Adapter(next(rest), next(rest), 0.5, dropout) for _ in ranks.get(name, ())))
            for name, weight in zip(LAYERS, tensors)
        ]
        return swiglu_mlp(x, *layers, backend=backend)

    return op, random((1, TOKENS, SIZE), *LAYERS.values(), *shapes)


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_values_and_gradients(ranks, launched):
    assert_matches(*mlp_of(ranks))
    assert launched == {"swiglu", "swiglu_backward"}


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
