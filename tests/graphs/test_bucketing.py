"""Which graphs are captured and replayed as rows come, of which nothing is computed here."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.graphs import bucketing, captures, runner
from hf_packfree.graphs.bucket import Bucket
from hf_packfree.graphs.bucketing import alike
from hf_packfree.graphs.copies import Copies
from hf_packfree.packing import PackedSequence


class Counted(captures.Captures):
    """Counts captures, of which nothing is computed."""

    captured = 0

    def capture(self, trunk, key, layers, inputs, row):
        # the longest row sizes the memory
        if all(other[0].tokens < key[0].tokens for other in self.graphs):
            self.graphs.clear()
        while len(self.graphs) >= captures.MOST:
            self.graphs.pop(next(iter(self.graphs)))
        self.bucketing.captures += 1
        self.captured += 1
        for each in alike(key, self.graphs):
            del self.graphs[each]
        self.graphs[key] = None


class Refusing(Counted):
    """Captures the rows of 128 tokens and 16 documents alone."""

    def capture(self, trunk, key, layers, inputs, row):
        if (key[0].tokens, key[0].documents) == (128, 16):
            return super().capture(trunk, key, layers, inputs, row)
        self.bucketing.captures += 1
        return self._give_up(key, "there is no room")


class Counting(runner.Runner):
    """Counts replays, of which nothing is computed, and their tokens."""

    computed = 0

    def __init__(self, captures=Counted):
        # a model that never changes
        super().__init__(torch.nn.Identity, Copies(torch.nn.Identity()), captures(), _compared=True)

    @property
    def captured(self):
        return self.captures.captured

    def _run(self, key, layers, inputs, packed):
        self.captures.last(key)
        self.replayed += 1
        self.computed += key[0].tokens
        return inputs[0]

    def take(self, *lengths, wait=False):
        packed, row = PackedSequence.from_lengths(lengths), torch.empty(1, sum(lengths))
        self._replay(None, lambda row: row, row[..., None], row, packed, wait)


@pytest.mark.parametrize(
    "rows",
    [
        # as a loader sorts them, or a curriculum does
        range(512, 4097, 5),
        # each comes twice, as where two forward passes read a batch, and never again
        [
            4097 + 256 * (n * 11 % 16) + 16 * turn
            for turn in range(16)
            for n in range(16)
            for _ in "ab"
        ],
    ],
    ids=["longer and longer", "in pairs"],
)
def test_graphs_of_one_length_do_not_use_up_the_captures(rows):
    counting = Counting()
    for tokens in rows:
        counting.take(tokens)
    assert counting.replayed >= 0.9 * len(rows)


def log_normal(number, documents, longest):
    generator = torch.Generator().manual_seed(1)
    drawn = torch.exp(0.8 * torch.randn(number, documents, generator=generator) + 6.2)
    return drawn.clamp(32, longest).int().tolist()


@pytest.mark.parametrize(
    ("documents", "longest", "captured", "computed"), [(8, 1024, 20, 1.15), (4, 2048, 30, 1.25)]
)
def test_batches_of_documents_of_many_lengths_are_replayed(documents, longest, captured, computed):
    """As TRL makes them by default. None but the first runs without a graph, whose memory would
    lie beside the graphs'; and captures, which take as long as some steps, are few.
    """
    rows, counting = log_normal(1000, documents, longest), Counting()
    for lengths in rows:
        counting.take(*lengths)
    assert counting.replayed == len(rows) - 1 and counting.captured <= captured
    assert counting.computed <= computed * sum(map(sum, rows))


def test_a_graph_is_captured_once_padding_took_as_long():
    counting = Counting()
    for _ in range(2):
        counting.take(60, 60)
    assert (counting.captured, counting.replayed) == (1, 1)
    # of 128 tokens, which are 60% more than the bucket's 80
    for number in range(1, 20):
        counting.take(40, 33)
        assert counting.captured == (1 if 0.6 * number < bucketing.CAPTURE else 2)
        assert counting.replayed_in_longer == min(number, 13)
    # one that is needed again is paid for again
    counting.captures.graphs = {
        key: None for key in counting.captures.graphs if key[0].tokens == 128
    }
    counting.take(40, 33)
    assert (counting.captured, counting.replayed_in_longer) == (2, 14)


def test_rows_that_no_graph_takes_are_captured_at_once_with_room_for_longer_ones():
    counting = Counting()
    for _ in range(2):
        counting.take(1000)
    for tokens in (2050, 2200, 2500):
        counting.take(tokens)
    assert counting.captured == 2 and counting.replayed == 4
    assert [key[0].tokens for key in counting.captures.graphs] == [2560]


def test_nothing_is_captured_before_the_optimizer_s_first_step():
    counting = Counting()
    for _ in range(4):
        counting.take(1000, wait=True)
    assert counting.captured == counting.replayed == 0
    # that row was seen
    counting.take(1000)
    assert counting.captured == counting.replayed == 1
    counting.take(2000, wait=True)
    counting.take(500, wait=True)
    # a longer one would have to be captured
    assert counting.captured == 1 and (counting.replayed, counting.replayed_in_longer) == (2, 1)


def test_a_row_whose_capture_fails_runs_in_a_longer_graph():
    refusing = Counting(Refusing)
    for _ in range(2):
        refusing.take(60, 60)
    for _ in range(40):
        refusing.take(40, 33)
    assert (
        refusing.captures.bucketing.captures,
        refusing.replayed,
        refusing.replayed_in_longer,
    ) == (
        2,
        41,
        40,
    )


def test_a_refused_bucket_is_not_tried_again():
    """With the room, that is, which it would have been given."""
    refusing = Counting(Refusing)
    for _ in range(2):
        refusing.take(60, 60)
    for _ in range(40):
        refusing.take(*[6] * 20)
    # which fits into no graph
    assert (refusing.captures.bucketing.captures, refusing.replayed) == (2, 1)
    # other settings need other memory
    refusing.captures.bucketing.start_anew()
    refusing.take(*[6] * 20)
    assert refusing.captures.bucketing.captures == 1


def test_what_is_longer_than_a_row_without_room_is_not_tried():
    counting = Counting()
    counting.captures.bucketing.no_room = 2048, "there is no room"
    for tokens in (1000, 1000, 2000, 2047, 2048, 4000, 2200, 1024, 700):
        counting.take(tokens)
    # of 1,008 and 1,024 tokens
    assert counting.captured == 2 and counting.replayed == 3
    counting.captures.bucketing.start_anew()
    counting.take(2000)
    assert counting.captured == 3


def test_a_capture_is_affordable_where_there_is_no_graph():
    """Else no row would ever be replayed again."""
    counting = Counting()
    counting.captures.bucketing.captures = bucketing.MOST
    for _ in range(2):
        counting.take(1000)
    assert counting.captured == 1
    counting.take(5000)
    assert counting.captured == 1 and counting.replayed == 1


def test_a_graph_takes_the_place_of_those_of_as_many_tokens():
    counting = Counting()
    for lengths in ((500, 524), (500, 524), (50,) * 20, (900, 100)):
        counting.take(*lengths)
    assert [key[0] for key in counting.captures.graphs] == [Bucket(1024, 32, 1024)]
    assert counting.captured == 2 and counting.replayed == 3


def test_rows_of_like_lengths_share_a_graph_before_each_has_its_own():
    buckets = [], []
    for lengths, found in zip(((2100,), (2100, 2230, 2360, 2490)), buckets, strict=True):
        counting = Counting()
        for _ in range(2):
            counting.take(4096)
        for number in range(14):
            counting.take(lengths[number % len(lengths)])
        found += [key[0].tokens for key in counting.captures.graphs]
    # 94% of padding nine times; 60% fourteen times, where each bucket had it three or four times
    assert buckets == ([4096, 2112], [4096, 2560])
