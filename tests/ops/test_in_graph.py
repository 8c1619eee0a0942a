"""Operations in compiled graphs: whole graphs, the values and gradients of eager mode, any
documents without new graphs, and no operator outside of them.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hf_packfree.ops import in_graph
from hf_packfree.ops.attention import attention
from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.ops.delta_rule import gated_delta_rule
from hf_packfree.ops.kda import kda
from hf_packfree.ops.ssd import ssd
from hf_packfree.packing import PackedSequence
from tests.support import relative_rms

LENGTHS, OTHERS = [5, 64, 1, 33], [[40, 2, 70], [9, 1, 1, 1, 60, 3], [103], [12, 12]]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def normal(*size):
    return torch.randn(1, *size)


def decays(*size):
    return -0.05 * torch.rand(1, *size)


CASES = {
    "conv": (
        partial(causal_conv1d, bias=torch.ones(6)),
        lambda t: (normal(t, 6), torch.randn(6, 4)),
    ),
    # sizes of no whole cache lines, and an output that is a view
    "delta_rule": (
        partial(gated_delta_rule, qk_l2norm=True),
        lambda t: (normal(t, 2, 8), normal(t, 2, 8), normal(t, 4, 5), decays(t, 4), normal(t, 4)),
    ),
    "kda": (
        kda,
        lambda t: (
            (normal(t, 2, 8), normal(t, 2, 8), normal(t, 2, 16), decays(t, 2, 8))
            + (torch.rand(1, t, 2),)
        ),
    ),
    "ssd": (
        ssd,
        lambda t: (
            (normal(t, 4, 8), torch.rand(1, t, 4), -torch.rand(4), normal(t, 2, 8))
            + (normal(t, 2, 8), torch.randn(4))
        ),
    ),
    "attention": (attention, lambda t: (normal(t, 4, 8), normal(t, 2, 8), normal(t, 2, 8))),
    "attention, all options": (
        partial(attention, scale=0.3, window=7, softcap=20.0, sinks=torch.ones(4)),
        lambda t: (normal(t, 4, 8), normal(t, 2, 8), normal(t, 2, 8)),
    ),
}
every_case = pytest.mark.parametrize(("run", "inputs"), CASES.values(), ids=CASES)


def compiled(run, **options):
    return torch.compile(lambda *given: run(*given).sin(), fullgraph=True, **options)


def results(call, tensors, lengths):
    """Return the output and the gradients of a sum that weighs every element."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = call(*leaves, PackedSequence.from_lengths(lengths))
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)


@every_case
def test_a_whole_graph_has_the_values_and_gradients_of_eager_mode(run, inputs):
    """Bit for bit; and as one document, the row has others."""
    tensors = inputs(sum(LENGTHS))
    wanted = results(lambda *given: run(*given).sin(), tensors, LENGTHS)
    call = compiled(run, backend="aot_eager")
    for found, right in zip(results(call, tensors, LENGTHS), wanted, strict=True):
        assert torch.equal(found, right)
    leaking = results(call, tensors, [sum(LENGTHS)])
    assert relative_rms(leaking[0], wanted[0]) > 1e-3


@pytest.mark.parametrize("name", ["delta_rule", "attention"])
def test_documents_one_by_one(name):
    run, inputs = CASES[name]
    tensors, call = inputs(sum(LENGTHS)), compiled(run, backend="aot_eager")
    whole = results(call, tensors, LENGTHS)[0]
    for part, document in zip(
        whole.split(LENGTHS, 1), zip(*(x.split(LENGTHS, 1) for x in tensors)), strict=True
    ):
        alone = run(*document, PackedSequence.from_lengths([part.shape[1]])).sin()
        assert relative_rms(part, alone) < 1e-6


@every_case
def test_other_documents_need_no_new_graphs(run, inputs):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    call = compiled(run, backend=count)
    for lengths in [LENGTHS, *OTHERS]:
        tensors = inputs(sum(lengths))
        wanted = results(lambda *given: run(*given).sin(), tensors, lengths)
        assert all(map(torch.equal, results(call, tensors, lengths), wanted))
    assert len(graphs) == 2


def test_a_frozen_input_has_no_gradient_and_costs_none():
    run, inputs = CASES["delta_rule"]
    tensors = inputs(sum(LENGTHS))
    q = tensors[0].requires_grad_()
    packed = PackedSequence.from_lengths(LENGTHS)
    gradients = [
        torch.autograd.grad(call(*tensors, packed).sum(), q)[0]
        for call in (compiled(run, backend="aot_eager"), lambda *given: run(*given).sin())
    ]
    assert torch.equal(*gradients)


def test_layers_share_the_plans_of_a_row():
    run, inputs = CASES["conv"]
    in_graph._record.cache_clear()
    tensors = inputs(sum(LENGTHS))
    call = compiled(lambda x, *rest: run(run(x, *rest), *rest), backend="aot_eager")
    results(call, tensors, LENGTHS)
    found = in_graph._record.cache_info()
    assert (found.misses, found.hits) == (1, 3)


def test_a_row_of_evaluation_may_be_trained_on_afterwards():
    run, inputs = CASES["attention"]
    in_graph._record.cache_clear()
    tensors, call = inputs(sum(LENGTHS)), compiled(run, backend="eager")
    with torch.inference_mode():
        call(*tensors, PackedSequence.from_lengths(LENGTHS))
    results(call, tensors, LENGTHS)


def test_eager_mode_calls_functions(monkeypatch):
    def refuse(*given):
        raise AssertionError("an operator, which takes the host as long as a few kernels")

    monkeypatch.setattr(in_graph, "_record", refuse)
    for run, inputs in CASES.values():
        results(run, inputs(sum(LENGTHS)), LENGTHS)


def test_what_stays_out_of_graphs():
    """Dropout: its numbers would be drawn twice."""
    _, inputs = CASES["attention"]
    tensors, packed = inputs(sum(LENGTHS)), PackedSequence.from_lengths(LENGTHS)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(partial(attention, dropout=0.1), backend="eager")(*tensors, packed)


@pytest.mark.parametrize("name", ["gated_delta_rule", "attention", "causal_conv1d", "qkv_conv"])
def test_what_graphs_are_told_of_an_operator_is_so(name):
    t, offsets = sum(LENGTHS), PackedSequence.from_lengths(LENGTHS).cu_seqlens_cpu
    given = {
        "gated_delta_rule": (*CASES["delta_rule"][1](t), True, "torch"),
        "attention": (*CASES["attention"][1](t), None, None, None, None, "torch"),
        "causal_conv1d": (normal(t, 6), torch.randn(6, 4), None, "silu", "torch"),
    }
    if name == "qkv_conv":
        # of kernels alone
        fake = torch.ops.hf_packfree.qkv_conv
        x, weight = torch.empty(1, t, 40, device="meta"), torch.empty(40, 4, device="meta")
        outs = fake(offsets.to("meta"), x, weight, None, [2, 3], [4, 8], "silu", True, "triton")
        assert [out.shape for out in outs] == [(1, t, 2, 4), (1, t, 2, 4), (1, t, 3, 8)]
        return
    values = [
        x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in given[name]
    ]
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    operator = getattr(torch.ops.hf_packfree, name).default
    torch.library.opcheck(operator, (offsets, *values), test_utils=checks)
