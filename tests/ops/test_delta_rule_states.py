"""States between documents' parts, and documents cut into segments: against the recurrence, and
the document whole, in fp64.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from hf_packfree.ops.delta_rule import (
    gated_delta_rule,
    gated_delta_rule_with_states,
    recurrent_gated_delta_rule_with_states,
)
from hf_packfree.ops.delta_rule.segments import Segments, fold, plan_segments, walk_segments
from hf_packfree.ops.delta_rule.torch_chunked import TorchScans
from hf_packfree.ops.fla_support import CHUNK
from hf_packfree.packing import PackedSequence
from tests.ops.test_delta_rule import make_inputs
from tests.support import relative_rms, values_and_gradients

EXACT = 1e-10
SLOW = 0.002
"""Of a log decay: what a document begins with is worth 0.7 of itself after 350 tokens."""


def with_state(lengths, heads=1, groups=2, sizes=(8, 12)):
    """q, k, v, g, beta and a state for each document, fp64; q and k have norm 1; decays and
    writes so weak that states live.
    """
    inputs = make_inputs(lengths, heads, groups, *sizes, decay=SLOW)
    inputs[4] /= 20
    inputs[:2] = (normalize(x, dim=-1) for x in inputs[:2])
    return [*inputs, torch.randn(len(lengths), heads * groups, *sizes, dtype=torch.float64) / 3]


NAMES = ("out", "final_state", "q", "k", "v", "g", "beta", "initial_state")


def assert_same(found, wanted, tolerance=EXACT, names=NAMES):
    for name, a, b in zip(names, found, wanted, strict=True):
        assert a.shape == b.shape
        error = relative_rms(a, b, floor=1e-300 if b.abs().max() > 1e-12 else 1.0)
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "lengths", [[1, 2, 63, 64, 65, 130], [130, 65, 64, 63, 2, 1], [200]], ids=str
)
def test_states_match_the_recurrence(lengths):
    inputs, packed = with_state(lengths), PackedSequence.from_lengths(lengths)
    wanted = values_and_gradients(
        lambda *x: recurrent_gated_delta_rule_with_states(*x, packed), inputs
    )
    for dtype, tolerance in {torch.float64: EXACT, torch.float32: 5e-6}.items():
        found = values_and_gradients(
            lambda *x: gated_delta_rule_with_states(*x[:5], packed, x[5]),
            [x.to(dtype) for x in inputs],
        )
        assert {x.dtype for x in found} == {dtype}
        assert_same(found, wanted, tolerance)


def test_no_state_given_is_a_state_of_zero():
    lengths = [70, 3]
    inputs, packed = with_state(lengths)[:5], PackedSequence.from_lengths(lengths)
    out, final = gated_delta_rule_with_states(*inputs, packed)
    assert torch.equal(out, gated_delta_rule(*inputs, packed))
    again, same = gated_delta_rule_with_states(*inputs, packed, torch.zeros_like(final))
    assert torch.equal(out, again) and torch.equal(final, same)


@pytest.mark.parametrize("at", [1, 31, 32, 33, 64, 99])
def test_a_document_cut_in_two_gets_what_it_gets_whole(at):
    """The state goes over, and its gradient back; 100 tokens between documents that stay whole."""
    lengths, parts = [40, 100, 3], [40, at, 100 - at, 3]
    inputs = with_state(lengths)
    whole, cut = PackedSequence.from_lengths(lengths), PackedSequence.from_lengths(parts)

    def by_parts(*x):
        states = torch.stack([x[5][0], x[5][1], torch.zeros_like(x[5][1]), x[5][2]])
        _, final = gated_delta_rule_with_states(*x[:5], cut, states, qk_l2norm=False)
        states = torch.stack([x[5][0], x[5][1], final[1], x[5][2]])
        out, final = gated_delta_rule_with_states(*x[:5], cut, states, qk_l2norm=False)
        return out, final[torch.tensor([0, 2, 3])]

    wanted = values_and_gradients(
        lambda *x: gated_delta_rule_with_states(*x[:5], whole, x[5], qk_l2norm=False), inputs
    )
    assert_same(values_and_gradients(by_parts, inputs), wanted)


def assert_cut_equals_whole(pieces, **sizes):
    lengths = [sum(parts) for parts in pieces]
    inputs, packed = with_state(lengths, **sizes)[:5], PackedSequence.from_lengths(lengths)
    segments = Segments.of(packed, pieces)
    found, wanted = (
        values_and_gradients(call, inputs)
        for call in (
            lambda *x: walk_segments(*x, segments, TorchScans()),
            lambda *x: gated_delta_rule(*x, packed, qk_l2norm=False),
        )
    )
    assert_same(found, wanted, names=("out", "q", "k", "v", "g", "beta"))


@pytest.mark.parametrize("place", range(5))
def test_a_cut_at_every_chunk_is_exact(place):
    """Of a document of five chunks and a bit, between others."""
    parts = [(place + 1) * CHUNK, (4 - place) * CHUNK, 7] if place < 4 else [5 * CHUNK, 7]
    assert_cut_equals_whole([[30], [part for part in parts if part], [65]])


@settings(max_examples=20)
@given(data=st.data())
def test_any_cut_of_any_documents_is_exact(data):
    """Every document ends in a segment of any length, after some of whole chunks."""
    parts = st.tuples(
        st.lists(st.integers(1, 3).map(lambda chunks: chunks * CHUNK), max_size=3),
        st.integers(1, 2 * CHUNK),
    )
    pieces = data.draw(
        st.lists(parts.map(lambda found: [*found[0], found[1]]), min_size=1, max_size=3)
    )
    assert_cut_equals_whole(
        pieces,
        heads=data.draw(st.integers(1, 2)),
        sizes=data.draw(st.sampled_from([(4, 4), (5, 9)])),
    )


def test_cutting_forgets_nothing():
    """The control: the first segment's values reach the last segment's output; from states of
    zero they would not.
    """
    pieces = [[2 * CHUNK, 2 * CHUNK, 2 * CHUNK]]
    packed, inputs = PackedSequence.from_lengths([6 * CHUNK]), with_state([6 * CHUNK])
    inputs[2].requires_grad_()
    segments = Segments.of(packed, pieces)
    out = walk_segments(*inputs[:5], segments, TorchScans())
    (reached,) = torch.autograd.grad(out[:, -CHUNK:].sum(), inputs[2])
    assert reached[:, :CHUNK].abs().max() > 1e-3
    forgetful = gated_delta_rule(*inputs[:5], segments.record, qk_l2norm=False)
    assert relative_rms(forgetful[:, 2 * CHUNK :], out[:, 2 * CHUNK :]) > 0.1


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_fold_is_one_step_after_the_other(reverse):
    transition, addend, given = (torch.randn(4, 2, 3, n, dtype=torch.float64) for n in (3, 5, 5))
    firsts = torch.tensor([0, 1, 4], dtype=torch.int32)
    found = fold(transition, addend, given[:2], firsts, reverse=reverse)
    assert torch.equal(found[[0, 3 if reverse else 1]], given[:2])
    a, b, c = (3, 2, 1) if reverse else (1, 2, 3)
    step = transition.mT if reverse else transition
    second = step[a] @ given[1] + addend[a]
    torch.testing.assert_close(found[b], second, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[c], step[b] @ second + addend[b], rtol=1e-12, atol=1e-12)
    nothing = fold(transition, addend, None, firsts, reverse=reverse)
    assert not nothing[[0, 3 if reverse else 1]].any()


def cut_of(lengths, parallel=8):
    found = plan_segments(PackedSequence.from_lengths(lengths), parallel)
    return found and [lengths_of(found, n) for n in range(len(lengths))]


def lengths_of(segments, document):
    first, end = segments.firsts[document : document + 2].tolist()
    return list(segments.record.lengths[first:end])


def test_the_plan_fills_the_gpu():
    assert cut_of([32768]) == [[4096] * 8]
    assert cut_of([32768], parallel=4) == [[8192] * 4]
    assert cut_of([32768 - 5]) == [[4096] * 7 + [4091]]
    assert cut_of([32768], parallel=66) == [[1024] * 32]
    assert cut_of([16384, 500, 16000]) == [[4096] * 4, [500], [4032, 4032, 3968, 3968]]


@pytest.mark.parametrize(
    "lengths, parallel",
    [
        ([4000], 8),
        ([2000] * 16, 8),
        ([20000] * 8, 8),
        ([512] * 64, 8),
        ([32768], 1),
        ([20000] + [10] * 64, 8),
    ],
    ids=[
        "short",
        "many",
        "as many as run at once",
        "many short",
        "one at a time",
        "too many states to keep",
    ],
)
def test_what_gains_nothing_stays_whole(lengths, parallel):
    assert plan_segments(PackedSequence.from_lengths(lengths), parallel) is None


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 40000), min_size=1, max_size=8), parallel=st.integers(1, 33))
def test_any_plan_covers_its_documents_in_whole_chunks(lengths, parallel):
    packed = PackedSequence.from_lengths(lengths)
    segments = plan_segments(packed, parallel)
    if segments is None:
        return
    assert segments.record.num_segments > len(lengths)
    for number, length in enumerate(lengths):
        *before, last = lengths_of(segments, number)
        assert sum(before) + last == length and last > 0
        assert all(size % CHUNK == 0 for size in before)
    forward, backward = segments.chunks.tolist()
    first, last = segments.firsts[:-1].tolist(), (segments.firsts[1:] - 1).tolist()
    for number, length in enumerate(segments.record.lengths):
        chunks = -(-length // CHUNK)
        assert forward[number] == (0 if number in last else chunks)
        assert backward[number] == (0 if number in first else chunks)
