"""What a capture does besides recording: on a CPU, where nothing is recorded."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import Function

from hf_packfree import apply_patches
from hf_packfree.graphs import capture, gradient_buffers, parts
from hf_packfree.graphs.capture import Graph, in_the_place_of
from hf_packfree.graphs.captured_sequence import NotCapturable
from tests.graphs import on_cpu
from tests.support import runner_of, tiny


@pytest.fixture
def recording(monkeypatch):
    """In the place of what records on a GPU: runs it, on the current stream."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", on_cpu.Stream)
    monkeypatch.setattr(gradient_buffers, "tensor_at", on_cpu.tensor_at)
    return SimpleNamespace(stream=on_cpu.Stream(), capture=nullcontext)


class Seen(Function):
    """The identity; notes whether its backward pass runs under autocast."""

    found: list[bool] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_out):
        Seen.found.append(torch.is_autocast_enabled("cpu"))
        return d_out


def test_the_backward_pass_is_captured_without_autocast(recording):
    """A step's own is behind the block: what ran in fp32 has its gradients made in fp32."""
    Seen.found.clear()
    x, weight = torch.ones(2, 3, requires_grad=True), nn.Parameter(torch.ones(3))
    with torch.autocast("cpu", torch.bfloat16):
        Graph(lambda x: Seen.apply(x * weight), [x], [weight], recording, [weight])
        assert torch.is_autocast_enabled("cpu")
    assert Seen.found == [False] * (capture.WARM_UP + 1)


def test_what_reads_nothing_that_is_trained_is_not_captured(recording):
    """As where the adapters that are trained are switched off."""
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(NotCapturable, match="nothing that it reads is trained"):
        Graph(lambda x: 2 * x, [torch.ones(2, 3)], [weight], recording, [weight])


class Layer(nn.Module):
    """Multiplies by a weight, unless it is told to leave the gradient of what it reads out."""

    def __init__(self, detaches=False):
        super().__init__()
        self.weight, self.detaches = nn.Parameter(torch.rand(3)), detaches

    def forward(self, x):
        return NoGradient.apply(x) * self.weight if self.detaches else x * self.weight


class NoGradient(Function):
    """The identity, whose input gets no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_out):
        return None


def captured(recording, monkeypatch, layers, unread):
    """A graph of layers that is cut at each, with gradients as of a sum."""
    monkeypatch.setattr(torch, "zeros_like", torch.ones_like)
    x, parameters = torch.rand(2, 3, requires_grad=True), [each.weight for each in layers]

    def body(x):
        for layer in layers:
            x = layer(x)
        return x

    leaves = [*parameters, unread]
    graph = Graph(body, [x], leaves, recording, leaves, layers=layers)
    return graph, torch.autograd.grad(body(x).sum(), [x, *leaves], allow_unused=True)


def test_parts_are_captured_one_after_the_other(recording, monkeypatch):
    """The gradients of each stay where they are until the last is captured: later parts would
    write there.
    """
    alive, compute = [], parts.Part.gradients

    def watched(part, d_end, leaves):
        assert all(grad() is not None for grad in alive)
        d_start, grads = compute(part, d_end, leaves)
        alive.extend(weakref.ref(grad) for grad in grads)
        return d_start, grads

    monkeypatch.setattr(parts.Part, "gradients", watched)
    layers = [Layer() for _ in range(3)]
    graph, _ = captured(recording, monkeypatch, layers, nn.Parameter(torch.ones(1)))
    assert [part.leaves for part in graph.parts] == [[3], [2], [0, 1]]
    assert len(alive) == 4 and all(grad() is None for grad in alive)
    assert not any(layer._forward_pre_hooks for layer in layers)


@pytest.fixture
def computed(monkeypatch):
    """What parts compute stays, since nothing is replayed here."""
    kept, compute = [], parts.Part.gradients

    def keeping(part, d_end, leaves):
        kept.append(compute(part, d_end, leaves))
        return kept[-1]

    monkeypatch.setattr(parts.Part, "gradients", keeping)


@pytest.mark.usefixtures("computed")
def test_the_gradients_of_captured_parts_are_those_of_the_function(recording, monkeypatch):
    layers = [Layer() for _ in range(3)]
    graph, wanted = captured(recording, monkeypatch, layers, nn.Parameter(torch.ones(1)))
    # nothing reads the last leaf
    assert wanted[4] is None and graph._gradient(4) is None
    assert all(torch.allclose(graph._gradient(place), wanted[place]) for place in range(4))


@pytest.mark.usefixtures("computed")
def test_a_part_without_a_gradient_at_its_start_is_the_last(recording, monkeypatch):
    layers = [Layer(), Layer(detaches=True), Layer()]
    graph, wanted = captured(recording, monkeypatch, layers, nn.Parameter(torch.ones(1)))
    assert [part.leaves for part in graph.parts] == [[3], [2]]
    assert [grad is None for grad in wanted] == [True, True, False, False, True]
    for place, grad in enumerate(wanted):
        found = graph._gradient(place)
        assert found is grad is None or torch.allclose(found, grad)


@pytest.mark.parametrize("change", [lambda x: x.bfloat16(), torch.clone], ids=["dtype", "memory"])
def test_a_layer_that_moves_a_parameter_is_not_captured(change):
    """As bitsandbytes moves a bias to the dtype of its input: a replay would read that memory,
    which nobody keeps.
    """
    layer = nn.Linear(2, 3)
    before = layer.bias.data_ptr()
    with pytest.raises(NotCapturable, match=r"moves a parameter of \(3,\)"):
        with in_the_place_of([layer.weight, layer.bias], layer):
            layer.bias.data = change(layer.bias.data)
    assert layer.bias.data_ptr() == before and layer.bias.dtype == torch.float32
    with in_the_place_of([layer.weight, layer.bias], layer) as read:
        assert [x.data_ptr() for x in read] == [layer.weight.data_ptr(), before]


@pytest.fixture
def model(monkeypatch):
    on_cpu.let_capture_whole_documents(monkeypatch)
    return apply_patches(tiny().train(), cuda_graphs="auto")


def hidden(model):
    return model.base_model(
        input_ids=torch.arange(1, 49)[None],
        position_ids=torch.cat([torch.arange(20), torch.arange(28)])[None],
    ).last_hidden_state


def test_rows_are_replayed_in_tf32(model, monkeypatch):
    """After `TrainingArguments(tf32=True)` torch's older way to ask for it raises."""

    def raises():
        raise RuntimeError("you have used mix of the legacy and new APIs")

    matmul = SimpleNamespace(fp32_precision="tf32")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", raises)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    for _ in range(3):
        hidden(model).sum().backward()
    (in_tf32,) = runner_of(model).captures.graphs.values()
    assert runner_of(model).replayed == 2
    matmul.fp32_precision = "ieee"
    hidden(model).sum().backward()
    assert in_tf32 not in runner_of(model).captures.graphs.values()


def test_hooks_of_all_modules_are_not_passed_over(model):
    """Nor recorded: a replay calls none."""
    called, runner = [], runner_of(model)
    for turn in range(3):
        handle = nn.modules.module.register_module_forward_hook(lambda *_: called.append(None))
        try:
            hidden(model).sum().backward()
        finally:
            handle.remove()
        # every layer calls it, and more
        assert len(called) > 4 and runner.replayed == turn
        called.clear()
        for _ in range(1 + (turn == 0)):
            hidden(model).sum().backward()
        assert not called and runner.replayed == turn + 1
    (reason,) = (each for each in runner.reasons if each.startswith("all modules have hooks"))
    assert runner.reasons[reason] == 3


def test_a_backward_pass_still_to_come_keeps_the_frozen_weights_of_its_forward_pass(model):
    norm = model.base_model.layers[0].input_layernorm
    norm.weight.requires_grad_(False)
    for _ in range(3):
        pending = hidden(model)
        if _ < 2:
            pending.sum().backward()
    assert runner_of(model).replayed == 2
    kept = weakref.ref(norm.weight)
    norm.weight = nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)
    hidden(model)
    assert kept() is not None
    pending.sum().backward()
    del pending
    assert kept() is None
