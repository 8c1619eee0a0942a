"""Gradients where a graph wrote them: they are read in time, or moved, or the graph has to wait."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import Parameter

from hf_packfree.graphs import gradient_buffers
from tests.graphs import on_cpu


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(gradient_buffers, "tensor_at", on_cpu.tensor_at)


@pytest.fixture
def written():
    """What a graph wrote: of two parameters, of one without a gradient, of one whose is transposed."""
    return [torch.arange(6.0).view(2, 3), torch.ones(4), None, torch.arange(6.0).view(3, 2).mT]


def made(written, owner=None):
    sizes = (2, 3), (4,), (5,), (2, 3)
    parameters = [Parameter(torch.zeros(size)) for size in sizes]
    return parameters, gradient_buffers.GradientBuffers(parameters, written, owner)


def test_they_are_handed_out_where_they_are(written):
    _, handed = made(written)
    for found, own in zip(map(handed.hand_out, range(4)), written, strict=True):
        if own is None:
            assert found is None
        else:
            assert found.data_ptr() == own.data_ptr() and torch.equal(found, own)
    del found
    assert handed.take_back()


def test_what_a_parameter_holds_is_moved(written):
    parameters, handed = made(written)
    for parameter, grad in zip(parameters, map(handed.hand_out, range(4)), strict=True):
        parameter.grad = grad
    held, before = parameters[0].grad, [None if x is None else x.clone() for x in written]
    assert handed.take_back()
    for x in written:
        if x is not None:
            x.fill_(float("nan"))
    for parameter, value in zip(parameters, before, strict=True):
        assert value is None or torch.equal(parameter.grad, value)
    assert parameters[0].grad is held
    # of its own memory, which is not moved once more
    place = held.data_ptr()
    assert handed.take_back() and held.data_ptr() == place


def test_what_somebody_else_keeps_is_not_written_over(written):
    _, handed = made(written)
    kept = handed.hand_out(1).view(2, 2)
    assert not handed.take_back() and torch.equal(kept, torch.ones(2, 2))
    del kept
    assert handed.take_back()


def test_a_view_of_what_a_parameter_holds_stays_one(written):
    """What the next row adds to the gradient is in the view, as it is without graphs."""
    parameters, handed = made(written)
    for parameter, grad in zip(parameters, map(handed.hand_out, range(4)), strict=True):
        parameter.grad = grad
    del grad
    view = parameters[0].grad.view(-1)
    assert not handed.take_back()
    parameters[0].grad += 1
    assert torch.equal(view, torch.arange(1.0, 7.0))
    del view
    assert handed.take_back()
    written[0].fill_(float("nan"))
    assert torch.equal(parameters[0].grad, torch.arange(1.0, 7.0).view(2, 3))


def test_gradients_that_share_memory_are_copies():
    """In-place changes of one, as clipping makes them, are not the other's."""
    whole, other = torch.arange(8.0), torch.ones(2)
    parameters = [Parameter(torch.zeros(size)) for size in (8, 4, 2)]
    handed = gradient_buffers.GradientBuffers(parameters, [whole, whole[2:6], other], None)
    first, second, alone = map(handed.hand_out, range(3))
    first.mul_(0)
    assert torch.equal(second, torch.arange(2.0, 6.0)) and torch.equal(whole, torch.arange(8.0))
    alone.mul_(0)
    assert torch.equal(other, torch.zeros(2)) and not handed.take_back()


def test_neighbours_in_memory_are_not_copied():
    """As the rows of a joined projection's gradient are."""
    whole = torch.arange(8.0).view(4, 2)
    parameters = [Parameter(torch.zeros(2, 2)) for _ in range(2)]
    handed = gradient_buffers.GradientBuffers(parameters, whole.split(2), None)
    places = [grad.data_ptr() for grad in map(handed.hand_out, range(2))]
    assert places == [part.data_ptr() for part in whole.split(2)]


def test_the_memory_outlives_its_graph(written):
    """A graph that is gone leaves the gradients that somebody holds."""

    class Owner:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    parameters, handed = made(written, owner)
    parameters[0].grad = handed.hand_out(0)
    del owner, handed
    gc.collect()
    assert gone() is not None
    parameters[0].grad = None
    assert gone() is None
