"""What the collator and its data sets refuse by name, and rows that the model must never refuse."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from hf_packfree import apply_patches
from hf_packfree.data import PackedDataset, PackedIterableDataset, PackedVisionCollator
from hf_packfree.errors import UnsupportedInput
from tests.data.processors import example, image_part, picture, vision_processor
from tests.data.test_vision_collator import record_of
from tests.support import gradients
from tests.vision import tiny_vision

PROCESSOR = vision_processor()
PAD = PROCESSOR.tokenizer.pad_token_id
documents = some.lists(
    some.lists(some.sampled_from([PAD, 20, 21]), min_size=1, max_size=4), min_size=1, max_size=6
)


@given(documents, some.sampled_from([None, 1, 2, 3, 8, 16]))
@settings(deadline=None)
def test_positions_and_offsets_of_a_row_agree(given, multiple):
    """Also where documents before the tail look like it."""
    collator = PackedVisionCollator(PROCESSOR, pad_to_multiple_of=multiple)
    row = collator([{"input_ids": ids} for ids in given])
    record, told = record_of(row), row["cu_seq_lens_q"].diff().tolist()
    assert len(told) == 1 if record is None else record.lengths == told
    lengths = [len(ids) for ids in given]
    long = [number for number, length in enumerate(lengths) if length > 1]
    assert [told[number] for number in long] == [lengths[number] for number in long]
    assert sum(told) - sum(lengths) == -sum(lengths) % (multiple or 1)


@pytest.mark.parametrize("ids", [[[20, 21, 22], [PAD]], [[20, 21], [PAD], [PAD]], [[PAD], [PAD]]])
def test_a_document_of_one_pad_token_before_the_tail_runs(ids):
    """It predicts nothing, so that the loss is that of the others."""
    model = apply_patches(tiny_vision("qwen3_5"))

    def loss(given, **options):
        row = PackedVisionCollator(PROCESSOR, **options)([{"input_ids": one} for one in given])
        return model(**row, num_items_in_batch=torch.tensor(2)).loss

    found = loss(ids, pad_to_multiple_of=16)
    others = [one for one in ids if one != [PAD]]
    wanted = loss(others).item() if others else 0.0
    assert found.item() == pytest.approx(wanted, abs=1e-6)
    found.backward()
    assert all(torch.isfinite(grad).all() for grad in gradients(model).values())


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": -5},
        {"max_length": 0},
        {"max_length": "x"},
        {"max_length": 2.5},
        {"max_length": True},
        {"pad_to_multiple_of": -4},
        {"pad_to_multiple_of": 0},
        {"pad_to_multiple_of": 2.5},
    ],
)
def test_options_out_of_range(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"found {name}=.*; wanted a whole number of at least 1"):
        PackedVisionCollator(PROCESSOR, **options)


def test_keywords_that_the_collator_sets_itself():
    with pytest.raises(ValueError, match="found tokenize in chat_template_kwargs"):
        PackedVisionCollator(PROCESSOR, chat_template_kwargs={"tokenize": False})


IDS = [5, 6, 7]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"labels": [5, 6]}, "found 2 labels for 3 input_ids"),
        ({"attention_mask": [1] * 4}, "found 4 attention_mask for 3 input_ids"),
        ({"input_ids": [5.9, 6.0]}, "found 5.9.* in input_ids; wanted whole numbers"),
        ({"labels": [5.0, float("nan"), 6.0]}, "found nan in labels"),
        ({"input_ids": ["a", "b"]}, "found input_ids that make no tensor"),
        ({"input_ids": [5, None]}, "found input_ids that make no tensor"),
        ({"input_ids": 5}, "found input_ids=5"),
        ({"input_ids": [[5, 6], [7]]}, "found input_ids that make no tensor"),
        ({"pixel_values": 3.0}, "found pixel_values=3.0"),
        ({"image_grid_thw": [[1, 2], [3]]}, "found image_grid_thw that make no tensor"),
        ({"attention_mask": [1, 0, 1]}, "found padding inside a document, at token 1"),
        ({"position_ids": [0, 1, 0]}, "found position_ids of several documents in one example"),
        ({"position_ids": torch.tensor([[0, 0, 1]])}, "found position_ids of several documents"),
        ({"seq_lengths": [2, 1]}, "found seq_lengths of several documents"),
        ({"cu_seq_lens_q": [0, 2, 3]}, "found cu_seq_lens_q of several documents"),
        ({"cu_seq_lens_k": [0, 2, 3]}, "found cu_seq_lens_k of several documents"),
        ({"attention_mask": [1, 1, 2]}, r"found \[0, 1, 2\] in attention_mask: several documents"),
        ({"attention_mask": [0, 0, -10000]}, r"found \[-10000, 0\] in attention_mask"),
        ({"seq_idx": np.array([0, 0, 1])}, "found seq_idx of several documents"),
        ({"segment_ids": [0, 0, 1]}, "found segment_ids of several documents"),
        ({"text_position_ids": [[0, 1, 0]]}, "found text_position_ids of several documents"),
        ({"cu_seqlens": np.array([0, 2, 3])}, "found cu_seqlens of several documents"),
        ({"seq_lens": [2, 1]}, "found seq_lens of several documents"),
        ({"completion_mask": [0, 0, 1]}, "found completion_mask without labels"),
    ],
)
def test_outputs_that_fit_no_document(wrong, said):
    with pytest.raises(UnsupportedInput, match=said):
        PackedVisionCollator(PROCESSOR)([{"input_ids": IDS} | wrong])


@pytest.mark.parametrize(
    "beside",
    [
        {"position_ids": [4, 5, 6]},
        {"seq_lengths": [3]},
        {"cu_seq_lens_q": [0, 3]},
        {"seq_idx": [[7, 7, 7]]},
        {"position_ids": None, "seq_lengths": None},
        {"attention_mask": [2, 2, 2]},
        {"completion_mask": [0, 0, 1], "labels": [-100, -100, 7]},
        {"segment_ids": [1, 1, 1], "cu_seqlens": [0, 3], "seq_lens": 3},
        {"doc_id": 3, "document_ids": ["a", "b"], "sample_idx": [4, 5], "seq_lens": None},
    ],
)
def test_one_document_may_say_so(beside):
    row = PackedVisionCollator(PROCESSOR)([{"input_ids": IDS} | beside, {"input_ids": IDS}])
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 6]


def test_an_assistant_mask_of_another_length():
    collator = PackedVisionCollator(PROCESSOR, assistant_only_loss=True)
    with pytest.raises(UnsupportedInput, match="found 2 assistant_masks for 3 input_ids"):
        collator([{"input_ids": IDS, "assistant_masks": [0, 1]}])


@pytest.mark.filterwarnings("default")
def test_a_template_that_marks_nothing_of_the_assistants():
    """Otherwise every label is -100, the loss 0, and training goes on."""
    unmarked = vision_processor()
    unmarked.chat_template = re.sub(r"{%-? (end)?generation -?%}", "", unmarked.chat_template)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for processor, refuses in ((PROCESSOR, False), (unmarked, True)):
        collator = PackedVisionCollator(processor, assistant_only_loss=True)
        assert (collator([{"messages": turns[:1]}])["labels"] == -100).all()
        if refuses:
            silent = [turns[0], turns[1] | {"content": ""}]
            assert (collator([{"messages": silent}])["labels"] == -100).all()
            with pytest.raises(UnsupportedInput, match="assistant_masks mark no token"):
                collator([{"messages": turns}])
        else:
            assert (collator([{"messages": turns}])["labels"] != -100).any()


def test_whole_numbers_of_any_type_are_taken():
    given = {"input_ids": np.array([5.0, 6.0]), "attention_mask": torch.ones(2)}
    assert PackedVisionCollator(PROCESSOR)([given])["input_ids"].tolist() == [[5, 6]]


USER = {"role": "user"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"messages": []}, r"found messages=\[\]; wanted a list of one message at least"),
        ({"messages": None}, "found messages=None"),
        ({"messages": "hello"}, "found messages='hello'"),
        ({"messages": [[USER]]}, "found messages="),
        ({"messages": [USER | {"content": [{"text": "a"}]}]}, "found the content .*its type"),
        ({"messages": [USER | {"content": ["a"]}]}, "found the content"),
        ({"messages": [USER | {"content": {"type": "text", "text": "a"}}]}, "found the content"),
        ({"messages": [USER | {"content": 5}]}, "found the content 5"),
        ({"images": "a.png"}, r"found images='a.png'; wanted a list.*\[image\]"),
        ({"images": {"path": "a.png"}}, "found images="),
    ],
)
def test_messages_that_are_none(wrong, said):
    with pytest.raises(UnsupportedInput, match=said):
        PackedVisionCollator(PROCESSOR)([example("a") | wrong])


def test_one_picture_has_a_column_of_its_own():
    one = example({"type": "image"}, "a")
    with pytest.raises(UnsupportedInput, match="found images=5; .*name the column 'image'"):
        PackedVisionCollator(PROCESSOR)([one | {"images": 5}])
    row = PackedVisionCollator(PROCESSOR)([one | {"image": picture(16, 24)}])
    wanted = PackedVisionCollator(PROCESSOR)([example(image_part(), "a")])
    assert torch.equal(row["pixel_values"], wanted["pixel_values"])


class TestDataset:
    @pytest.mark.parametrize("count", [2, 4])
    def test_lengths_are_one_for_each_example(self, count):
        with pytest.raises(UnsupportedInput, match=f"found {count} lengths for 3 examples"):
            PackedDataset("abc", [10] * count, max_length=100)

    @pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
    def test_lengths_may_be_an_array(self, kind):
        packs = PackedDataset("abcd", kind([30, 90, 60, 10]), np.int64(100))
        assert [*packs] == [["b", "d"], ["c", "a"]]

    @pytest.mark.parametrize("wrong", [0, -3, 2.5, None, "x"])
    def test_a_length_is_a_whole_number(self, wrong):
        with pytest.raises(ValueError, match=r"found lengths\[1\]=.*; wanted a whole number"):
            PackedDataset("abc", [10, wrong, 10], max_length=100)
        with pytest.raises(ValueError, match="found max_length="):
            PackedDataset("abc", [10, 10, 10], max_length=wrong)

    def test_a_pack_that_is_longer_than_was_told(self):
        """Lengths that are too small would make rows of any size."""
        collator = PackedVisionCollator(PROCESSOR)
        packs = PackedDataset([{"input_ids": [5] * 60}] * 3, [30] * 3, max_length=100)
        with pytest.raises(UnsupportedInput, match="found a pack of 180 tokens; wanted .*=100"):
            collator([packs[0]])
        row = collator([PackedDataset([{"input_ids": [5] * 60}] * 3, [60] * 3, 180)[0]])
        assert row["input_ids"].shape == (1, 180)


class Plain(torch.utils.data.IterableDataset):
    """A stream that gives every worker all of it."""

    def __iter__(self):
        return iter([{"input_ids": [20 + number] * 9} for number in range(24)])


class Shared(Plain):
    """A stream that gives every worker its own part."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        for number, one in enumerate(super().__iter__()):
            if worker is None or number % worker.num_workers == worker.id:
                yield one


@pytest.mark.filterwarnings("ignore:'pin_memory'")
class TestStream:
    collator = PackedVisionCollator(PROCESSOR, max_length=40)

    def read(self, stream, workers=2, **options):
        """The documents that a loader gives, in order of their tokens."""
        packs = PackedIterableDataset(stream, self.collator, **options)
        rows = torch.utils.data.DataLoader(packs, num_workers=workers, collate_fn=self.collator)
        parts = [row["input_ids"][0].split(row["cu_seq_lens_q"].diff().tolist()) for row in rows]
        return sorted(part.tolist() for row in parts for part in row)

    @pytest.mark.parametrize(("stream", "shared_out"), [(Plain(), False), (Shared(), True)])
    def test_every_document_comes_once(self, stream, shared_out):
        wanted = [one["input_ids"] for one in Plain()]
        assert self.read(stream, shared_out=shared_out) == wanted
        assert self.read(stream, workers=1) == self.read(stream, workers=0) == wanted

    @pytest.mark.parametrize("kind", ["map-style", "iterable", "iterable of one shard"])
    def test_of_datasets_only_an_iterable_one_shares_itself_out(self, kind):
        stream = pytest.importorskip("datasets").Dataset.from_list(list(Plain()))
        if kind != "map-style":
            stream = stream.to_iterable_dataset(num_shards=1 if "one shard" in kind else 4)
        assert self.read(stream) == [one["input_ids"] for one in Plain()]

    def test_control_told_wrongly_they_do_not(self):
        assert len(self.read(Plain(), shared_out=True)) == 48

    def test_several_workers_and_nobody_knows(self, monkeypatch):
        # a loader whose processes fail waits ten seconds for them, in whatever test comes later
        one_of_two = SimpleNamespace(id=0, num_workers=2)
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: one_of_two)
        with pytest.raises(UnsupportedInput, match="found a Plain and several worker processes"):
            self.read(Plain(), workers=0)

    @pytest.mark.parametrize("buffer", [0, -1, 1.5, None])
    def test_a_buffer_of_no_documents(self, buffer):
        with pytest.raises(ValueError, match="found buffer=.*; wanted a whole number"):
            PackedIterableDataset([], self.collator, buffer=buffer)
        with pytest.raises(ValueError, match="found shared_out='yes'"):
            PackedIterableDataset([], self.collator, shared_out="yes")

    def test_an_iterator_is_read_once(self):
        packs = PackedIterableDataset(iter(Plain()), self.collator)
        assert sum(len(pack) for pack in packs) == 24
        with pytest.raises(UnsupportedInput, match="iterator that was read before"):
            list(packs)
        packs = PackedIterableDataset(Plain(), self.collator)
        assert [sum(len(pack) for pack in packs) for _ in range(2)] == [24, 24]

    def test_epochs_reach_the_stream(self):
        made = pytest.importorskip("datasets").Dataset.from_list(list(Plain()))
        stream = made.to_iterable_dataset().shuffle(seed=3, buffer_size=24)
        packs = PackedIterableDataset(stream, self.collator)
        orders = []
        for epoch in (0, 1, 0):
            packs.set_epoch(epoch)
            orders.append([int(one.input_ids[0]) for pack in packs for one in pack])
        assert orders[0] == orders[2] != orders[1] and sorted(orders[0]) == sorted(orders[1])
        PackedIterableDataset([], self.collator).set_epoch(1)
