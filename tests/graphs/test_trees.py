"""Trees of shared prefixes in a bucket: PyTorch's operations in the place of kernels, which read a
row's documents where a captured graph has them, and the real plans, written anew for each row.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings

from hf_packfree import PackedSequence, apply_patches, patch_report
from hf_packfree.graphs import captured_sequence
from hf_packfree.graphs.bucket import Bucket, bucket_of, in_bucket, lengthened
from hf_packfree.graphs.captured_sequence import CapturedSequence
from hf_packfree.models.state import state_of
from hf_packfree.ops.attention import OP as ATTENTION
from hf_packfree.ops.conv import OP as CONV
from hf_packfree.ops.delta_rule import OP as DELTA_RULE
from hf_packfree.ops.tree_paths import plan_levels, plan_paths, plan_windows
from hf_packfree.packing.tree import Size, TreeSizes
from tests.graphs import on_cpu
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    errors,
    gradients,
    random_weights,
    run,
    run_alone,
    runner_of,
    tiny,
)
from tests.trees import GROUP, TURNS, batch_of, forest, forests

GROUPS = (
    forest((70, 40, 30, 20, 20, 10, 60), (None, 0, 0, 0, 0, None, 5)),
    forest((100, 40, 50, 60), (None, 0, 0, 0)),
    forest((98, 52, 30, 70), (None, 0, 0, 0), inner=(0,)),
    forest((98, 10, 1, 143), (None, 0, 0, 0)),
)
"""Of one bucket: other lengths, other numbers of answers and of prompts."""


def documents_of(packed):
    """Return the record of a row by its offsets alone, as kernels read it."""
    sizes = packed.cu_seqlens.diff()
    return PackedSequence.from_lengths(sizes[sizes > 0])


def by_offsets(run):
    def call(*args, **words):
        args = [documents_of(x) if isinstance(x, PackedSequence) else x for x in args]
        if "packed" in words:
            words["packed"] = documents_of(words["packed"])
        return run(*args, **words)

    return call


def with_states(q, k, v, g, beta, initial_state, packed, qk_l2norm):
    """Empty documents leave the state that they begin with."""
    real = (packed.cu_seqlens.diff() > 0).nonzero()[:, 0]
    out, final = DELTA_RULE_WITH_STATES(
        q, k, v, g, beta, initial_state[real], documents_of(packed), qk_l2norm
    )
    return out, initial_state.index_copy(0, real, final)


DELTA_RULE_WITH_STATES = DELTA_RULE.backend("torch").with_states


@pytest.fixture
def kernels(monkeypatch):
    for op, changes in (
        (ATTENTION, {"in_tree": None}),
        (CONV, {}),
        (DELTA_RULE, {"with_states": with_states}),
    ):
        backend = op.backend("torch")
        changed = replace(backend, run=by_offsets(backend.run), **changes)
        monkeypatch.setitem(op.backends, "torch", changed)


@pytest.fixture
def model(kernels, monkeypatch):
    on_cpu.let_capture(monkeypatch)
    return apply_patches(tiny(), cuda_graphs="auto")


def replayed(model):
    return runner_of(model).replayed


def both(model, stock, tree, **inputs):
    batch = batch_of(tree, **inputs)
    weights = random_weights(batch, 128)
    return errors(run(model, batch, weights), run_alone(stock, batch, weights))


def test_trees_of_one_bucket_are_what_their_samples_are_alone(model):
    stock = tiny()
    for tree in GROUPS * 2:
        found = both(model, stock, tree)
        assert found[0] <= LOGIT_TOL and found[1] <= GRADIENT_TOL, found
    graphs = runner_of(model)
    assert graphs.replayed == 7 and len(graphs.captures.graphs) == 1, patch_report(
        model
    ).cuda_graphs


@pytest.mark.parametrize("part", ["record", "plans"])
def test_the_tree_before_would_be_seen(model, monkeypatch, part):
    """The control: offsets, or what is gathered, of the row that the graph was captured with."""
    stock = tiny()
    for _ in range(2):
        both(model, stock, GROUPS[0])

    def become(self, packed):
        for old, new in captured_sequence.tensors_of(self, packed):
            if (old.dtype == torch.int32) != (part == "record"):
                old.copy_(new)

    monkeypatch.setattr(CapturedSequence, "become", become)
    for tree in GROUPS[1:3]:
        found = both(model, stock, tree)
        assert found[0] >= CONTROL * LOGIT_TOL and found[1] >= CONTROL * GRADIENT_TOL, found
    assert replayed(model) == 3


@pytest.mark.slow
def test_branches_and_trees_do_not_feel_each_other(model):
    """Whatever tree was before: gradients of one segment's hidden states, by token."""
    both(model, tiny(), GROUPS[0])
    for before, tree in zip(GROUPS, GROUPS[1:], strict=False):
        both(model, tiny(), before)
        ids, record = batch_of(tree).inputs.values()
        seen, of_token = record.tree.sees(), record.seq_idx[0].long()
        for segment in range(len(tree.lengths)):
            embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
            hidden = model.base_model(inputs_embeds=embeddings, packed_sequence=record)[0]
            (gradient,) = torch.autograd.grad(
                hidden[:, of_token == segment].square().sum(), embeddings
            )
            felt = gradient[0].abs().sum(1)
            assert felt[~seen[segment][of_token]].sum() == 0
            assert felt[seen[segment][of_token]].min() > 0
    assert replayed(model) >= sum(len(tree.lengths) for tree in GROUPS[1:])


def test_the_bits_of_the_same_bucket_without_a_graph(model):
    trunk, embed = model.base_model, model.get_input_embeddings()
    for _ in range(2):
        both(model, tiny(), GROUPS[0])
    (bucket, _), *_ = runner_of(trunk).captures.graphs
    for tree in GROUPS:
        ids, record = batch_of(tree).inputs.values()
        weight, found = torch.randn(1, record.num_tokens, 64), []
        for row in (record, in_bucket(record, bucket)):
            model.zero_grad()
            state_of(trunk).__dict__["cuda_graphs"] = "auto" if row is record else "never"
            embeddings = lengthened(embed(ids), bucket, 1) if row is not record else embed(ids)
            hidden = trunk(inputs_embeds=embeddings, packed_sequence=row)[0]
            hidden = hidden[:, : record.num_tokens]
            (hidden * weight).sum().backward()
            found.append((hidden, gradients(model)))
        (one, its), (other, others) = found
        assert torch.equal(one, other)
        assert all(torch.equal(grad, others[name]) for name, grad in its.items())
    assert replayed(model) == 1 + len(GROUPS)


def test_a_layer_that_reads_one_tree_is_not_captured(model, monkeypatch):
    layer = type(model.base_model.layers[0])
    forward = layer.forward

    def reads(self, *args, **kwargs):
        assert kwargs["packed_sequence"].tree.parents
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", reads)
    for _ in range(3):
        run(model, batch_of(GROUP), random_weights(batch_of(GROUP), 128))
    assert replayed(model) == 0
    assert "2 because a layer reads tree.parents of the record" in patch_report(model).cuda_graphs


def both_in_a_bucket(one, other):
    """Return the records of two rows filled up to the sizes of both."""
    tokens = max(record.num_tokens for record in (one, other)) + 7
    sizes = [
        (paths, *levels)
        for paths, levels in (
            each.tree.padded(tokens - each.num_tokens).sizes for each in (one, other)
        )
    ]
    paths, *levels = (
        Size(64 + max(a.tokens, b.tokens), 2 + max(a.documents, b.documents))
        for a, b in zip(*sizes, strict=True)
    )
    segments = 2 + max(one.num_segments, other.num_segments)
    bucket = Bucket(tokens, segments, tokens, TreeSizes(paths, tuple(levels)))
    return [in_bucket(record, bucket) for record in (one, other)]


@settings(max_examples=50)
@example(one=GROUP, other=GROUPS[0])
@example(one=TURNS, other=forest((9, 3, 200, 1, 8), (None, 0, 1, 2, 2)))
@given(one=forests(), other=forests())
def test_plans_of_a_bucket_have_one_size(one, other):
    """And every token of the row is read where it was gathered, by its own positions."""
    for tree in (one, other):
        assert tree.depth == 1 or bucket_of(tree.record).holds(tree.record)
    if one.depth != other.depth or one.depth == 1:
        return
    captured = CapturedSequence.of(both_in_a_bucket(one.record, other.record)[0])
    builds = (plan_paths,), (plan_windows, 3), (plan_levels,)
    for build in builds:
        captured.cached(*build)
    for row in reversed(both_in_a_bucket(one.record, other.record)):
        captured.become(row)
        every = torch.arange(row.num_tokens)
        paths, windows, levels = (captured.cached(*build) for build in builds)
        for plan in (paths, windows):
            assert torch.equal(plan.tokens[plan.own], every)
            assert plan.record.cu_seqlens[-2] == plan.record.cu_seqlens[-1] == len(plan.tokens)
        assert torch.equal(levels.order[levels.back], every)
        found = documents_of(paths.record).position_ids()[0, paths.own]
        assert torch.equal(found, row.position_ids()[0])
