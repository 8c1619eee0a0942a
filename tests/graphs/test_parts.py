"""The backward pass in parts: the gradients of one, and those of the last layers before the others."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3_5ForCausalLM

from hf_packfree import apply_patches
from hf_packfree.graphs import parts
from hf_packfree.graphs.parts import inputs_of, layers_to_cut_at, parts_of
from hf_packfree.models.qwen3_5 import tiny_config
from tests.graphs import on_cpu
from tests.support import checkpoint_layers, gradients, runner_of, worst_gradient

LAYERS = 6


class Layer(nn.Module):
    """Reads the hidden states, and what a layer before it kept."""

    def __init__(self, weight, reads):
        super().__init__()
        self.weight, self.reads = weight, reads

    def forward(self, hidden_states, kept):
        kept.append(torch.tanh(hidden_states * self.weight))
        return hidden_states + kept[-1] + sum(kept[number] for number in self.reads)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_gradients_of_parts_are_those_of_the_whole(data):
    """Whatever reads across layers, and whichever layers share a weight."""
    shared = data.draw(st.lists(st.integers(0, 3), min_size=LAYERS, max_size=LAYERS))
    reads = [data.draw(st.sets(st.integers(0, k - 1), max_size=2)) if k else () for k in range(6)]
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(4)]
    layers = [Layer(weights[which], its) for which, its in zip(shared, reads, strict=True)]
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=data.draw(st.booleans()))
    with inputs_of(layers) as cuts:
        out, kept = x, []
        for layer in layers:
            out = layer(hidden_states=out, kept=kept)
    leaves = [one for one in (x, *weights) if one.requires_grad]
    wanted = torch.autograd.grad(out.sum(), leaves, retain_graph=True, allow_unused=True)
    found, cut, d_end = [None] * len(leaves), 0, torch.ones_like(out)
    for part in parts_of(out, cuts, leaves):
        cut += part.start is not None
        d_end, grads = part.gradients(d_end, leaves)
        for leaf, grad in zip(part.leaves, grads, strict=True):
            assert found[leaf] is None
            found[leaf] = grad
    for one, other in zip(wanted, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    # layer k's input is passed by whatever reads from a layer before k, and by a shared weight
    passed = {
        k for reader in range(LAYERS) for read in reads[reader] for k in range(read + 1, reader + 1)
    }
    for one, other in combinations(range(LAYERS), 2):
        if shared[one] == shared[other]:
            passed |= {*range(one + 1, other + 1)}
    assert cut == len({*range(1, LAYERS)} - passed)
    assert not any(layer._forward_pre_hooks for layer in layers)


def test_what_is_not_on_the_way_cuts_nothing():
    weight = nn.Parameter(torch.ones(3))
    beside, constant = (torch.ones(3) * weight).exp(), torch.ones(3)
    out = (torch.ones(3) * weight).tanh()
    (part,) = parts_of(out, [constant, weight, beside, out], [weight])
    assert part.start is None and part.leaves == [0]


def test_what_goes_past_a_cut_in_the_same_node_is_not_lost():
    weight = nn.Parameter(torch.ones(3))
    cut, past = torch.stack([2 * weight, 3 * weight]).unbind()
    (part,) = parts_of(cut.exp() + past, [cut], [weight])
    assert part.start is None


def test_a_cut_whose_gradient_has_a_hook_is_none():
    """autograd would run the hook in both parts."""
    weight = nn.Parameter(torch.ones(3))
    cut = weight.exp()
    cut.register_hook(lambda grad: 0.5 * grad)
    (part,) = parts_of(cut.tanh(), [cut], [weight])
    assert part.start is None
    cut = weight.exp()
    assert len([*parts_of(cut.tanh(), [cut], [weight])]) == 2


def test_only_tensors_that_layers_get_are_cuts():
    class Takes(nn.Module):
        def forward(self, pair=None, *, x=None):
            return x

    with inputs_of([layer := Takes()]) as cuts:
        layer((torch.ones(1), torch.ones(1)))
        layer(x=torch.ones(1))
    assert cuts == []


def test_layers_are_cut_at_evenly():
    module = nn.Module()
    assert layers_to_cut_at(module) == []
    module.layers = nn.ModuleList([nn.Identity() for _ in range(24)])
    assert [[*module.layers].index(each) for each in layers_to_cut_at(module)] == [*range(3, 24, 3)]
    module.layers = module.layers[:4]
    assert layers_to_cut_at(module) == [*module.layers]


@pytest.fixture
def model(monkeypatch):
    on_cpu.let_capture_whole_documents(monkeypatch)
    torch.manual_seed(0)
    return apply_patches(Qwen3_5ForCausalLM(tiny_config()).train(), cuda_graphs="auto")


def hidden(model, lengths=(30, 20, 7), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return model(
        input_ids=torch.randint(1, 100, (1, sum(lengths)), generator=generator),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
    ).last_hidden_state


def parts_in(model):
    (captured,) = runner_of(model).captures.graphs.values()
    return captured.graph.parts


def note_parts(events, monkeypatch):
    """Append the number of each part that runs to a list."""
    run = on_cpu.Again._run_part
    monkeypatch.setattr(
        on_cpu.Again, "_run_part", lambda graph, k: events.append(k) or run(graph, k)
    )


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_come_layer_by_layer(model, monkeypatch, recomputed):
    """When a part runs, those of all layers behind it were handed out."""
    if recomputed:
        checkpoint_layers(model)
    trunk, events = model.base_model, []
    for _ in range(3):
        model.zero_grad()
        hidden(trunk).square().sum().backward()
    wanted = gradients(model)
    note_parts(events, monkeypatch)
    for number, layer in enumerate(trunk.layers):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number: events.append(f"layer {number}")
            )
    model.zero_grad()
    hidden(trunk).square().sum().backward()
    assert runner_of(model).replayed == 3
    layers = len(trunk.layers)
    assert len(parts_in(model)) == layers
    assert [*dict.fromkeys(events)] == [
        each for number in range(layers) for each in (number, f"layer {layers - 1 - number}")
    ]
    counts, sizes = Counter(events), [len([*each.parameters()]) for each in trunk.layers]
    assert [counts[f"layer {number}"] for number in range(layers)] == sizes
    assert all(torch.equal(grad, wanted[name]) for name, grad in gradients(model).items())


def test_a_weight_of_two_layers_gets_the_gradients_of_both(model):
    trunk = model.base_model
    trunk.layers[0].mlp = trunk.layers[-1].mlp
    found = []
    for _ in range(3):
        model.zero_grad()
        hidden(trunk).square().sum().backward()
        found.append(gradients(model))
    # all layers lie between the two
    assert runner_of(model).replayed == 2 and len(parts_in(model)) == 1
    # a bucket has more rows, whose products other CPUs add up otherwise
    assert worst_gradient(found[2], found[0]) <= 1e-4


def test_a_part_alone_leaves_the_row_to_be_gone_back_through(model):
    """As `autograd.grad` of the last layers' parameters does: what is left has to be there until
    nobody has it.
    """
    trunk = model.base_model
    last = [*trunk.layers[-1].parameters()]
    for _ in range(2):
        hidden(trunk).square().sum().backward()
    loss = hidden(trunk).square().sum()
    wanted = [x.clone() for x in torch.autograd.grad(loss, last, retain_graph=True)]
    replayed = runner_of(model).replayed
    with pytest.raises(RuntimeError, match="second backward pass"):
        torch.autograd.grad(loss, last, retain_graph=True)
    # the graphs' memory is another row's no sooner than this
    hidden(trunk)
    assert runner_of(model).replayed == replayed
    del loss
    found = torch.autograd.grad(hidden(trunk).square().sum(), last)
    assert runner_of(model).replayed == replayed + 1
    assert all(map(torch.equal, wanted, found))


def test_a_gradient_of_any_part_that_somebody_keeps_is_not_written_over(model):
    trunk = model.base_model
    for _ in range(2):
        hidden(trunk).square().sum().backward()
    for layer in trunk.layers:
        replayed, loss = runner_of(model).replayed, hidden(trunk).square().sum()
        (kept,) = torch.autograd.grad(loss, [layer.mlp.down_proj.weight])
        assert runner_of(model).replayed == replayed + 1
        before = kept.clone()
        hidden(trunk, seed=1).square().sum().backward()
        assert runner_of(model).replayed == replayed + 1 and torch.equal(kept, before)
        del kept, loss


def test_an_input_s_gradient_is_a_copy(model):
    """The next row's replay writes where it was written."""
    trunk, kept, lengths = model.base_model, [], (30, 20, 7)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    for seed in range(4):
        x = torch.randn(1, 57, 64, generator=torch.Generator().manual_seed(seed))
        out = trunk(inputs_embeds=x.requires_grad_(), position_ids=positions).last_hidden_state
        out.square().sum().backward()
        kept.append((x.grad, x.grad.clone()))
    assert runner_of(model).replayed == 3
    assert all(torch.equal(grad, before) for grad, before in kept)


def test_a_hook_on_a_layer_s_input_runs_once(model):
    """Two layers' gradients are halved by it, and not those of the layers before by a quarter."""

    class Halving(type(model.base_model.layers[2].input_layernorm)):
        def forward(self, x):
            if x.requires_grad:
                x.register_hook(lambda grad: 0.5 * grad)
            return super().forward(x)

    model.base_model.layers[2].input_layernorm.__class__ = Halving
    found = []
    for _ in range(3):
        model.zero_grad()
        hidden(model.base_model).square().sum().backward()
        found.append(gradients(model))
    assert runner_of(model).replayed == 2
    # a bucket has more rows, whose products other CPUs add up otherwise
    assert worst_gradient(found[2], found[0]) <= 1e-4


@pytest.mark.usefixtures("one_rank")
def test_ddp_reduces_gradients_while_others_are_computed(model, monkeypatch):
    """A bucket is reduced as soon as its gradients are handed out, the last layers' first."""
    trunk, events = model.base_model, []
    wrapped = DistributedDataParallel(trunk, bucket_cap_mb=0.01)

    def reduced(state, bucket):
        events.append("reduced")
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, reduced)
    note_parts(events, monkeypatch)
    found = []
    for _ in range(3):
        model.zero_grad()
        events.clear()
        hidden(wrapped).square().sum().backward()
        found.append(gradients(model))
    assert runner_of(model).replayed == 2
    last = len(parts_in(model)) - 1
    assert last > 0 and [each for each in events if each != "reduced"] == [*range(last + 1)]
    assert "reduced" in events[: events.index(last)]
    assert all(torch.equal(found[1][name], grad) for name, grad in found[2].items())
    monkeypatch.setattr(parts, "PARTS", 1)
    runner_of(model).captures.graphs.clear()
    for _ in range(2):
        events.clear()
        hidden(wrapped).square().sum().backward()
    assert [each for each in events if each != "reduced"] == [0] and events[0] == 0
