"""Attention within documents, with grouped heads and slices of wider tensors."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.graphs.bucket import bucket_of, in_bucket, lengthened
from hf_packfree.ops.attention import attention, triton_native
from hf_packfree.ops.tree_paths import plan_paths
from hf_packfree.packing import PackedSequence
from tests.ops.triton.compare import DOCUMENTS, assert_matches, random, run
from tests.trees import GROUP, TURNS

KERNELS = {"attn_fwd", "attn_bwd_dq", "attn_bwd_dkdv"}
HEADS, KEY_HEADS, SIZE = 4, 2, 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that short documents have several."""
    monkeypatch.setattr(triton_native, "_BLOCK", 32)
    monkeypatch.setattr(triton_native, "_INNER_BLOCK", {"fwd": 16, "bwd_dq": 16, "bwd_dkdv": 16})


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_values_and_gradients(lengths, launched):
    packed = PackedSequence.from_lengths(lengths)
    tokens = packed.num_tokens

    def op(q, k, v, *, backend):
        return attention(q[..., :SIZE], k, v[..., SIZE:], packed, scale=0.3, backend=backend).mT

    assert_matches(
        op,
        random(
            (1, tokens, HEADS, 2 * SIZE),
            (1, tokens, KEY_HEADS, SIZE),
            (1, tokens, KEY_HEADS, 2 * SIZE),
        ),
    )
    assert launched == KERNELS


@pytest.mark.parametrize(
    "window, has_sinks",
    [(None, True), (1, False), (16, True), (17, False), (33, True), (1000, False)],
    ids=str,
)
def test_windows_and_sinks(window, has_sinks, launched):
    """Windows below, at and above a block, and wider than any document."""
    lengths = [1, 15, 70, 33]
    packed, tokens = PackedSequence.from_lengths(lengths), sum(lengths)
    control = PackedSequence.from_lengths([tokens])

    def op(q, k, v, *sinks, backend, packed=packed):
        options = {"window": window, "sinks": sinks[0] if sinks else None}
        return attention(q, k, v, packed, scale=0.3, backend=backend, **options)

    inputs = random(
        (1, tokens, HEADS, SIZE),
        *[(1, tokens, KEY_HEADS, SIZE)] * 2,
        *[(HEADS,)] * has_sinks,
    )
    assert_matches(op, inputs)
    assert launched == KERNELS
    if window != 1:
        leak = op(*inputs, backend="torch", packed=control) - op(*inputs, backend="triton")
        assert leak.abs().max() > 0.1


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    "window, has_sinks", [(None, False), (None, True), (17, False), (40, True)], ids=str
)
@pytest.mark.parametrize("tree", [GROUP, TURNS], ids=["group", "turns"])
def test_trees(tree, window, has_sinks, bounded, launched):
    """A query that several paths have is computed in the first: what the others leave unwritten,
    NaN here, nobody reads.
    """
    tokens, record = sum(tree.lengths), tree.record
    bucket = bucket_of(record)

    def op(q, k, v, *sinks, backend):
        options = {"window": window, "sinks": sinks[0] if sinks else None}
        packed = record
        if bounded and backend == "triton":
            packed, (q, k, v) = (
                in_bucket(record, bucket),
                (lengthened(x, bucket, 1) for x in (q, k, v)),
            )
        out = attention(q, k, v, packed, scale=0.3, backend=backend, **options)
        return out[:, :tokens]

    inputs = random(
        (1, tokens, HEADS, SIZE),
        *[(1, tokens, KEY_HEADS, SIZE)] * 2,
        *[(HEADS,)] * has_sinks,
    )
    assert_matches(op, inputs)
    assert launched == KERNELS


def test_queries_that_nobody_reads_are_not_computed():
    """But for those that share a block with others; keys are, of every path."""
    plan = plan_paths(PackedSequence.from_tree([64, 8, 40], [None, 0, 0]))
    starts = {
        of_keys: sorted(triton_native.plan_blocks(plan.record, of_keys).tolist())
        for of_keys in (False, True)
    }
    first, second = [[0, 32 * n, 72, 0] for n in range(3)], [72, 64, 104, 64]
    assert starts[False] == [*first, second, [72, 96, 104, 64]]
    assert starts[True] == [*first, *[[72, 32 * n, 104, 64] for n in range(4)]]


def test_frozen_sinks_leave_the_other_gradients_as_they_are(launched):
    packed = PackedSequence.from_lengths([15, 33])
    inputs = random((1, 48, HEADS, SIZE), *[(1, 48, KEY_HEADS, SIZE)] * 2, (HEADS,))
    for backend in ("triton", "torch"):
        gradients = []
        for trained in (True, False):
            q, k, v, sinks = (x.detach().requires_grad_() for x in inputs)
            out = attention(
                q, k, v, packed, sinks=sinks.requires_grad_(trained), window=16, backend=backend
            )
            out.square().sum().backward()
            assert (sinks.grad is not None) == trained
            gradients.append((q.grad, k.grad, v.grad))
        for with_sinks, without in zip(*gradients, strict=True):
            assert torch.equal(with_sinks, without)


def test_a_tree_along_its_paths(launched):
    """Values, and gradients that sum over the branches of a prefix."""
    packed = PackedSequence.from_tree([37, 5, 40, 1, 9], [None, 0, 0, 2, None])

    def op(q, k, v, *, backend):
        return attention(q, k, v, packed, backend=backend)

    tokens = packed.num_tokens
    assert_matches(op, random((1, tokens, HEADS, SIZE), *[(1, tokens, KEY_HEADS, SIZE)] * 2))
    assert launched == KERNELS


# NumPy's, under the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nan_stays_in_its_document(backend):
    """What is past another document's end may not come in, times zero, as NaN."""
    packed = PackedSequence.from_lengths([5, 40, 7])
    inputs = random(*[(1, 52, KEY_HEADS, SIZE)] * 3)
    is_nan = torch.zeros(52, dtype=torch.bool)
    is_nan[5:45] = True
    for x in inputs:
        x[:, is_nan] = float("nan")

    def op(q, k, v, *, backend):
        return attention(q, k, v, packed, backend=backend)

    for part in run(op, inputs, backend):
        assert part[:, ~is_nan].isfinite().all() and part[:, is_nan].isnan().all()
