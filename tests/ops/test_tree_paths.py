"""Trees of shared prefixes: every operation along every sample, against the sample alone, in
values and gradients.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from torch.nn import functional as F

from hf_packfree.errors import UnsupportedInput
from hf_packfree.ops import attention as attention_room
from hf_packfree.ops import conv as conv_room
from hf_packfree.ops import delta_rule as rule_room
from hf_packfree.ops.attention import attention
from hf_packfree.ops.conv import causal_conv1d, qkv_conv
from hf_packfree.ops.delta_rule import gated_delta_rule, gated_delta_rule_with_states
from hf_packfree.ops.tree_paths import convolve_along_paths, gather
from hf_packfree.packing import PackedSequence
from tests.support import relative_rms
from tests.trees import CHAIN, GROUP, TURNS, forests

# measured: at most 1e-14
EXACT = 1e-10
HEADS, KEY_HEADS, SIZE = 4, 2, 8
CHANNELS, TAPS = 2 * SIZE + 2 * SIZE, 4


def drawn(*shapes):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attention_inputs(tokens):
    return drawn((1, tokens, HEADS, SIZE), *[(1, tokens, KEY_HEADS, SIZE)] * 2), []


def conv_inputs(tokens):
    x, *shared = drawn((1, tokens, CHANNELS), (CHANNELS, TAPS), (CHANNELS,))
    return [x], shared


def rule_inputs(tokens):
    """Decays so slow that a prefix is felt through 300 tokens."""
    q, k, v, g, beta = drawn(
        *[(1, tokens, 1, SIZE)] * 2, (1, tokens, 2, SIZE), *[(1, tokens, 2)] * 2
    )
    return [q, k, v, -0.002 * g.abs(), beta.sigmoid() / 10], []


def attend_alone(q, k, v):
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def convolve_alone(x, weight, bias):
    padded = F.pad(x.mT, (TAPS - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=CHANNELS)).mT


def rule_alone(*inputs):
    """One document, which tests/ops/test_delta_rule.py compares with the recurrence."""
    return gated_delta_rule(*inputs, PackedSequence.from_lengths([inputs[0].shape[1]]))


def convolve(x, weight, bias, packed):
    return causal_conv1d(x, weight, packed, bias=bias)


def convolve_qkv(x, weight, bias, packed):
    q, k, v = qkv_conv(x, weight[:, None], packed, (1, 2), (SIZE, SIZE), bias=bias)
    return torch.cat([part.flatten(2) for part in (q, k, v)], 2)


OPERATIONS = {
    "attention": (attention_inputs, attend_alone, attention),
    "conv": (conv_inputs, convolve_alone, convolve),
    "qkv_conv": (conv_inputs, convolve_alone, convolve_qkv),
    "delta_rule": (rule_inputs, rule_alone, gated_delta_rule),
}


def run(tree, inputs, of_sample):
    """Every sample's output, and the gradients of all inputs under random gradients of these."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = of_sample(leaves)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    found = torch.autograd.grad(outputs, leaves, weights)
    return torch.cat([x.detach() for x in outputs], 1), *found


def both_ways(name, tree, packed=None):
    """Return what a tree gives each sample, and what the samples get alone."""
    make, alone, operation = OPERATIONS[name]
    inputs, shared = make(sum(tree.lengths))
    packed = packed or tree.record

    def together(leaves):
        out = operation(*leaves, packed)
        return [out[:, tokens] for tokens in tree.samples]

    def one_by_one(leaves):
        rows, rest = leaves[: len(inputs)], leaves[len(inputs) :]
        return [alone(*(x[:, tokens] for x in rows), *rest) for tokens in tree.samples]

    return tuple(run(tree, [*inputs, *shared], way) for way in (together, one_by_one))


def errors(found, wanted):
    # queries of one-token samples have no gradient but rounding
    floor = [1e-300, *[1e-2] * len(wanted)]
    return [relative_rms(a, b, f) for a, b, f in zip(found, wanted, floor)]


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=15)
@example(tree=GROUP)
@example(tree=TURNS)
@example(tree=CHAIN)
@given(tree=forests())
def test_every_sample_gets_what_it_gets_alone(name, tree):
    assert max(errors(*both_ways(name, tree))) <= EXACT


@pytest.mark.parametrize("name", OPERATIONS)
def test_branches_read_as_one_document_are_far_off(name):
    """The control: the limit is met because branches are kept apart, and prefixes read."""
    for wrong in ([sum(TURNS.lengths)], TURNS.lengths):
        found = both_ways(name, TURNS, PackedSequence.from_lengths(wrong))
        assert min(errors(*found)[:2]) >= 1e6 * EXACT


@pytest.mark.parametrize("name", OPERATIONS)
def test_branches_do_not_feel_each_other_and_prefixes_are_felt(name):
    make, _, operation = OPERATIONS[name]
    inputs, shared = make(sum(TURNS.lengths))
    seen = TURNS.record.tree.sees()
    of_token = TURNS.record.seq_idx[0].long()
    for segment in range(len(TURNS.lengths)):
        # x of the convolution, values of the others
        read = min(2, len(inputs) - 1)
        x = inputs[read].clone().requires_grad_()
        out = operation(*inputs[:read], x, *inputs[read + 1 :], *shared, TURNS.record)
        (gradient,) = torch.autograd.grad(out[:, of_token == segment].square().sum(), x)
        felt = gradient[0].flatten(1).abs().sum(1)
        path = seen[segment][of_token]
        assert felt[~path].eq(0).all()
        last = TURNS.tokens(segment)[-TURNS.lengths[segment] - 1 : -1]
        assert felt[last].gt(0).all()


@pytest.mark.parametrize("name", ["attention", "conv", "delta_rule"])
@pytest.mark.parametrize(("tree", "levels"), [(GROUP, 2), (TURNS, 4), (CHAIN, 6)])
def test_a_level_of_depth_is_one_call_at_most(name, tree, levels, monkeypatch):
    room = {"attention": attention_room, "conv": conv_room, "delta_rule": rule_room}[name]
    backend, calls = room.OP.backends["torch"], []
    field = {"delta_rule": "with_states", "attention": "in_tree"}.get(name, "run")

    def counting(*arguments, **options):
        calls.append(name)
        return getattr(backend, field)(*arguments, **options)

    monkeypatch.setitem(room.OP.backends, "torch", replace(backend, **{field: counting}))
    make, _, operation = OPERATIONS[name]
    inputs, shared = make(sum(tree.lengths))
    operation(*inputs, *shared, tree.record)
    assert len(calls) == (levels if name == "delta_rule" else 1) and tree.depth == levels


def test_every_token_attends_once(monkeypatch):
    """But for padding to sizes of buckets: paths would be 248 tokens, 37 of them four times."""
    queries, plain = [], F.scaled_dot_product_attention

    def counting(q, *rest, **options):
        queries.append(q.shape[0] * q.shape[2])
        return plain(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    attention(*attention_inputs(sum(GROUP.lengths))[0], GROUP.record)
    assert sorted(queries) == [2 * 8, 32, 40, 64]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_branches_are_added_in_fp32(dtype):
    """Of 4,096 gradients of 1, half precision alone would keep 256 or 2,048."""
    wanted = torch.tensor(4097.0).to(dtype).item()
    row = torch.zeros(1, 2, 1, dtype=dtype, requires_grad=True)
    gather(row, torch.zeros(4097, dtype=torch.int64)).sum().backward()
    assert row.grad.dtype == dtype and row.grad.flatten().tolist() == [wanted, 0.0]

    def add_the_one_before(x, packed):
        return x + F.pad(x[:, :-1], (0, 0, 1, 0))

    # a root with a child that has none, and 4,095 that have
    row = torch.zeros(1, 8192, 1, dtype=dtype, requires_grad=True)
    parents = [None, *[0] * 4096, *range(2, 4097)]
    packed = PackedSequence.from_tree([1] * 8192, parents)
    convolve_along_paths(row, packed, 2, add_the_one_before).sum().backward()
    found = row.grad.flatten().tolist()
    assert row.grad.dtype == dtype and found == [wanted, 1.0, *[2.0] * 4095, *[1.0] * 4095]


def test_what_has_no_path_is_refused():
    inputs, _ = rule_inputs(sum(GROUP.lengths))
    with pytest.raises(UnsupportedInput, match="a tree .* begins with a state of its own"):
        gated_delta_rule_with_states(*inputs, GROUP.record)


def test_no_second_derivative():
    row = torch.zeros(1, 3, 2, dtype=torch.float64, requires_grad=True)
    out = gather(row, torch.tensor([0, 1, 0])).square().sum()
    (gradient,) = torch.autograd.grad(out, row, create_graph=True)
    with pytest.raises(UnsupportedInput, match="second derivative"):
        torch.autograd.grad(gradient.sum(), row)
