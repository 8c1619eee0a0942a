"""`Operation.apply`: torch's values, gradients and errors, without its search for tensors of
finished transforms.
"""

from __future__ import annotations

import sys

import pytest
import torch

from hf_packfree.ops.fused import projections
from hf_packfree.ops.fused.linear import linear_forward
from hf_packfree.ops.operation import Operation


class Doubled(Operation):
    @staticmethod
    def forward(ctx, x, scale, index=None):
        ctx.save_for_backward(scale)
        return 2 * x * scale, x if index is None else x[index]

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


def builtins_called(function):
    """The functions in C named "apply" that one call runs, which is how an operation enters
    autograd's graph.
    """
    found, arguments = [], (torch.ones(2, requires_grad=True), torch.tensor(3.0), None)

    def note(frame, event, called):
        if event == "c_call" and called.__name__ == "apply":
            found.append(called.__self__ is function)

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        function.apply(*arguments)
    finally:
        sys.setprofile(previous)
    return found


def test_values_and_gradients_are_torchs():
    for found, wanted in zip(results(Doubled), results(ByTorch), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(results(Doubled)[2], torch.tensor([6.0, 8.0, 10.0, 12.0]))


def test_it_ends_in_the_call_that_torchs_own_ends_in():
    """The private one: a torch whose `apply` enters the graph by another way fails here."""
    assert builtins_called(Doubled) == builtins_called(ByTorch) == [True]


@pytest.mark.parametrize("function", [Doubled, ByTorch])
def test_a_transform_is_refused_in_torchs_words(function):
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: function.apply(x, torch.tensor(3.0), None)[0].sum())(
            torch.ones(2)
        )


def left_behind():
    """A tensor of a transform that is finished: it wraps another, to which gradients belong."""
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.ones(1, 3, 4, requires_grad=True))
    return kept[0]


OPERATIONS = {
    "two layers": lambda x, w: projections(x, w, w, backend="triton"),
    "one layer": lambda x, w: linear_forward(x, w, True),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_tensor_that_a_finished_transform_left_behind_raises(operation):
    """Its gradient would be lost without a word; torch's `apply` would unwrap it."""
    with pytest.raises(RuntimeError, match="data pointer|storage"):
        operation(left_behind(), torch.ones(200, 4, requires_grad=True))


def test_torchs_own_apply_unwraps_it():
    """The search that `Operation` leaves out."""
    doubled, _ = ByTorch.apply(left_behind(), torch.tensor(3.0), None)
    assert torch.equal(doubled, torch.full((1, 3, 4), 6.0)) and doubled.requires_grad
