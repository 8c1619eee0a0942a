"""Our own `apply`: torch's values and gradients, its words where a transform of torch.func is on, never a lost gradient."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.fused import projections
from hf_packfree.ops.fused.linear import linear_forward
from hf_packfree.ops.operation import Operation


class Doubled(Operation):
    @staticmethod
    def forward(ctx, x, scale, rows=None):
        ctx.save_for_backward(scale)
        return 2 * x * scale, x if rows is None else x[rows]

    @staticmethod
    def backward(ctx, d_doubled, d_x):
        return 2 * d_doubled * ctx.saved_tensors[0] + d_x, None, None


class ByTorch(torch.autograd.Function):
    forward, backward = Doubled.forward, Doubled.backward


def results(function):
    x, scale = torch.arange(4.0, requires_grad=True), torch.tensor(3.0)
    doubled, same = function.apply(x, scale, None)
    (doubled.sum() + same.pow(2).sum()).backward()
    return doubled, same, x.grad


def test_values_and_gradients_are_torchs():
    for found, wanted in zip(results(Doubled), results(ByTorch), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(results(Doubled)[2], torch.tensor([6.0, 8.0, 10.0, 12.0]))


def test_nothing_is_looked_through_where_no_transform_is_on(monkeypatch):
    from torch._functorch import utils

    looked = []
    monkeypatch.setattr(utils, "unwrap_dead_wrappers", lambda arguments: looked.append(1) or arguments)
    results(Doubled)
    assert not looked
    results(ByTorch)
    assert looked, "torch's own still does, so this test can fail"


@pytest.mark.parametrize("function", [Doubled, ByTorch])
def test_a_transform_is_refused_in_torchs_words(function):
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: function.apply(x, torch.tensor(3.0), None)[0].sum())(torch.ones(2))


@pytest.mark.parametrize(
    "operation",
    [lambda x, w: projections(x, w, backend="triton"), lambda x, w: linear_forward(x, w, False)],
    ids=["projections", "linear_forward"],
)
def test_a_tensor_that_a_finished_transform_left_behind_raises(operation):
    """It holds another, whose gradient would be lost without a word; torch's `apply` would look inside."""
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.ones(1, 3, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="data pointer|storage"):
        operation(kept[0], torch.ones(200, 4, requires_grad=True))
