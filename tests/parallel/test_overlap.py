"""What a rank computes while an exchange is under way, and which exchanges it starts: one
process plays a rank of several.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_packfree import PackedSequence, apply_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.ops import conv as convolution
from hf_packfree.ops.conv import torch_native
from hf_packfree.ops.conv_delta_rule import conv_delta_rule
from hf_packfree.ops.delta_rule import OP as DELTA_RULE
from hf_packfree.ops.delta_rule import gated_delta_rule, gated_delta_rule_with_states
from hf_packfree.packing import shard_row
from hf_packfree.parallel import ContextParallel
from tests.benchmarks.exchanges import Alone, exchanging
from tests.parallel.ranks import batch_of, in_way
from tests.support import checkpoint_layers, tiny

HEADS, SIZES, TAPS = (3, 3), (4, 4), 4
CHANNELS = 36


class Recorded(Alone):
    """Exchanges of one rank, which are recorded when they start and when they are waited for."""

    def __init__(self, rank: int, events: list) -> None:
        super().__init__(rank, 3)
        self.events = events

    def _all_gather(self, out, part, group, async_op):
        return self._started(super()._all_gather(out, part, group, async_op))

    def _all_to_all(self, out, parts, group, async_op):
        return self._started(super()._all_to_all(out, parts, group, async_op))

    def _started(self, work):
        self.events.append("sent")
        return Waited(work, self.events)


class Waited:
    """An exchange whose end is recorded."""

    def __init__(self, work, events) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        self.events.append("came")
        self.work.wait()


class RecordedScans:
    """What walks documents in PyTorch, recorded with their lengths."""

    def __init__(self, events: list) -> None:
        self.events, self.scans = events, DELTA_RULE.backends["torch"].scans
        self.prepare, self.summarize = self.scans.prepare, self.scans.summarize
        self.summarize_gradient = self.scans.summarize_gradient

    def walk(self, saved, before, segments):
        self.events.append(("walk", segments.record.lengths))
        return self.scans.walk(saved, before, segments)

    def walk_back(self, saved, before, d_out, d_after, segments):
        self.events.append(("walk back", segments.record.lengths))
        return self.scans.walk_back(saved, before, d_out, d_after, segments)


def recorded(events, what, run):
    """Record how many tokens are convolved, or their gradients."""

    def call(x, *args, **options):
        events.append((what, x.shape[1]))
        return run(x, *args, **options)

    return call


def given_to(way: str, rank: int, world: int, lengths: list[int], taps: int = TAPS) -> tuple:
    """Return what an operation of the delta rule takes, of leaves of one rank."""
    torch.manual_seed(0)
    local = in_way(shard_row(PackedSequence.from_lengths(lengths), rank, world), delta_rule=way)
    x, weight = (
        torch.randn(1, local.num_tokens, CHANNELS).requires_grad_(),
        torch.randn(CHANNELS, taps).requires_grad_(),
    )
    g, beta = ((-torch.rand(1, local.num_tokens, HEADS[1])).requires_grad_() for _ in range(2))
    return x, weight, g, beta, local, HEADS, SIZES


def events_of(way: str, lengths: list[int], rank: int) -> tuple[list, list]:
    """Return what happened forward and backward."""
    events: list = []
    conv, back = (
        recorded(events, "conv", convolution.OP.backends["torch"].run),
        recorded(events, "conv back", torch_native._backward),
    )
    rule = DELTA_RULE.backends["torch"]
    recorded_scans = replace(rule, scans=RecordedScans(events))
    with (
        exchanging(Recorded(rank, events)),
        patch.dict(DELTA_RULE.backends, {"torch": recorded_scans}),
        patch.dict(
            convolution.OP.backends, {"torch": replace(convolution.OP.backends["torch"], run=conv)}
        ),
        patch.object(torch_native, "_backward", back),
    ):
        out = conv_delta_rule(*given_to(way, rank, 3, lengths))
        forward = len(events)
        out.sum().backward()
    return events[:forward], events[forward:]


@pytest.mark.parametrize(
    ("rank", "forward", "backward"),
    [
        (0, [("walk", [8]), "came"], ["came", ("walk back", [8])]),
        (
            1,
            [("walk", [5, 1]), "came", ("walk", [2])],
            [("walk back", [2, 5]), "came", ("walk back", [1])],
        ),
        (2, ["came", ("walk", [8])], [("walk back", [8]), "came"]),
    ],
)
def test_documents_that_do_not_wait_for_their_state_are_walked_before_it_comes(
    rank, forward, backward
):
    """Of three ranks that hold [8], [2, 5, 1] and [8] tokens of three documents."""
    # the first tokens of a shard that read the three before it, and these
    again = {0: 3, 1: 5, 2: 4}[rank]
    convolved = ["sent", ("conv", 8), "came", ("conv", again)]
    back = [("conv back", again), "sent", ("conv back", 8), "came"]
    found = events_of("state", [10, 5, 9], rank)
    assert found == ([*convolved, "sent", *forward], ["sent", *backward, *back])


def test_nothing_is_sent_where_no_document_is_cut():
    found = events_of("state", [8, 8, 8], 1)
    assert found == ([("conv", 8), ("walk", [8])], [("walk back", [8]), ("conv back", 8)])


def test_a_filter_of_one_tap_reads_no_tokens_before_a_shard():
    x, weight, *others = given_to("state", 1, 3, [10, 5, 9], taps=1)
    with exchanging(Alone(1, 3)) as alone:
        found = conv_delta_rule(x, weight, *others)
        # the states'
        assert alone.calls == 1
        wanted = conv_delta_rule(x, torch.nn.functional.pad(weight, (1, 0)), *others)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("expanded", [False, True])
def test_a_gradient_that_others_read_too_stays_as_it_is(expanded):
    """As of a mixer that adds its convolution's input to the result."""
    x, weight, *_, packed = given_to("state", 1, 3, [10, 5, 9])[:5]
    residual = torch.zeros_like(x).requires_grad_()
    gradient = torch.ones(1, 1, 1).expand(x.shape) if expanded else torch.rand(x.shape)
    given = gradient.clone()
    with exchanging(Alone(1, 3)):
        out = convolution.causal_conv1d(x, weight, packed) + residual
        out.backward(gradient)
        q, *_ = convolution.qkv_conv(x, weight, packed, HEADS, SIZES)
        q.backward(gradient[..., :12].unflatten(-1, (3, 4)))
    assert torch.equal(residual.grad, given) and torch.equal(gradient, given)


@pytest.mark.parametrize("way", DELTA_RULE.across_ranks.ways)
def test_values_keep_their_dtype(way):
    _, _, g, beta, packed, *_ = given_to(way, 1, 3, [10, 5, 9])
    q, k, v = torch.randn(3, *g.shape, 4)
    with exchanging(Alone(1, 3)):
        assert gated_delta_rule(q, k, v.bfloat16(), g, beta, packed).dtype == torch.bfloat16


def test_states_of_a_part_of_a_row_are_refused():
    """Its first document began before it, with a state that nobody gave."""
    _, _, g, beta, packed, *_ = given_to("state", 1, 3, [10, 5, 9])
    q, k, v = torch.randn(3, *g.shape, 4)
    with pytest.raises(UnsupportedInput, match="rank's part of a row given to the delta rule with"):
        gated_delta_rule_with_states(q, k, v, g, beta, packed)


def test_gates_travel_while_what_is_convolved_is_put_in_order():
    forward, backward = events_of("heads", [10, 5, 9], 1)
    assert forward == ["sent", "sent", "came", "came", ("conv", 24), "sent", "came"]
    assert backward == ["sent", "came", ("conv back", 24), "sent", "sent", "came", "came"]


class Late(Alone):
    """Exchanges of one rank that take place when they are waited for, as late as they can on a
    GPU; listed by kind and size.
    """

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.started: list = []
        self.under_way = 0

    def _all_gather(self, out, part, group, async_op):
        self.started.append(("gather", part.numel(), part.dtype))
        return Transfer(self, out, part)

    def _all_to_all(self, out, parts, group, async_op):
        self.started.append(("all to all", parts.numel(), parts.dtype))
        return Transfer(self, out, parts)


class Transfer:
    """What it sends has to stay there as it was until then, and what it brings to be there; it
    keeps neither.
    """

    def __init__(self, late: Late, out, part) -> None:
        out.fill_(torch.nan if out.is_floating_point() else -1)
        self.late, self.memory = late, [StorageWeakRef(x.untyped_storage()) for x in (out, part)]
        self.brought, self.sent = (x.data_ptr() for x in (out, part))
        self.content, self.copies = (
            ctypes.string_at(self.sent, part.nbytes),
            out.nbytes // part.nbytes,
        )
        late.under_way += 1

    def wait(self) -> None:
        assert not any(memory.expired() for memory in self.memory)
        assert ctypes.string_at(self.sent, len(self.content)) == self.content
        ctypes.memmove(self.brought, self.content * self.copies, len(self.content) * self.copies)
        self.late.under_way -= 1


@pytest.mark.parametrize("way", DELTA_RULE.across_ranks.ways)
@pytest.mark.parametrize("rank", range(3))
def test_nothing_is_read_before_it_comes_nor_freed_or_changed_before_it_went(way, rank):
    def outcome(exchanges):
        given = given_to(way, rank, 3, [10, 5, 9])
        with exchanging(exchanges):
            out = conv_delta_rule(*given)
            return [out, *torch.autograd.grad(out.square().sum(), given[:4])]

    late = Late(rank, 3)
    found, wanted = outcome(late), outcome(Alone(rank, 3))
    assert len(late.started) in (4, 6) and late.under_way == 0
    assert all(map(torch.equal, found, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("world", "ways"),
    [
        (2, {"gdn": "heads", "attention": "heads"}),
        (2, {"gdn": "state"}),
        (3, {"gdn": "state", "attention": "gather"}),
    ],
)
def test_all_ranks_start_the_same_exchanges_in_the_same_order(world, ways, recomputed):
    """Whatever they hold: NCCL would wait for ever, or mix them up. Routers' statistics are
    exchanged beside layers' own.
    """
    model = tiny("qwen3_5_moe").train()
    if recomputed:
        checkpoint_layers(model, False)
    # several cuts, one document, a rank of padding alone
    for lengths in ([5, 1, 20, 9, 1, 12], [48], [7, 1]):
        batch, started = batch_of(lengths, 0) | {"output_router_logits": True}, []
        for rank in range(world):
            with exchanging(Late(rank, world)) as late:
                apply_patches(model, context_parallel=ContextParallel(None, **ways))
                loss = model(**batch).loss
                loss.backward()
            assert loss.isfinite() and late.under_way == 0
            started.append(late.started)
        assert len(started[0]) > 10
        assert started == started[:1] * world
