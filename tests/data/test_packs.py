"""Packs: every document once, whole, and never more tokens than allowed; streams give the rows
that lists give.
"""

from __future__ import annotations

import builtins

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from hf_packfree.data import PackedDataset, PackedIterableDataset, PackedVisionCollator
from hf_packfree.data.packs import packs_of
from hf_packfree.errors import UnsupportedInput
from tests.data.processors import example, image_part, vision_processor

EXAMPLES = [
    example("a " * (1 + number % 5), *[image_part(seed=number)] * (number % 3))
    for number in range(24)
]
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory'")


@given(some.lists(some.integers(1, 100), max_size=40), some.integers(100, 300))
def test_every_document_is_in_one_pack_that_holds_it(lengths, max_length):
    packs = packs_of(lengths, max_length)
    assert sorted(sum(packs, [])) == list(range(len(lengths)))
    sizes = [sum(lengths[number] for number in pack) for pack in packs]
    assert all(0 < size <= max_length for size in sizes)
    assert len(packs) <= max(1, 2 * sum(lengths) // max_length + 1), (
        "two packs that fit into one were left apart"
    )


def test_many_documents_are_packed_in_blocks():
    packs = packs_of([30, 70] * 1500, 100)
    assert len(packs) == 1500 and sorted(sum(packs, [])) == list(range(3000))


def test_a_dataset_of_packs_fills_rows():
    collator = PackedVisionCollator(vision_processor(), max_length=100)
    lengths = [len(collator.document(one)) for one in EXAMPLES]
    packs = PackedDataset(EXAMPLES, lengths, max_length=100)
    rows = list(torch.utils.data.DataLoader(packs, collate_fn=collator))
    sizes = [row["input_ids"].shape[1] for row in rows]
    assert sum(sizes) == sum(lengths) and max(sizes) <= 100
    assert len(rows) == -(-sum(lengths) // 100) or sum(sizes) / (100 * len(rows)) > 0.8
    assert sum(len(row["cu_seq_lens_q"]) - 1 for row in rows) == len(EXAMPLES)


def test_too_long_a_document_is_refused():
    with pytest.raises(UnsupportedInput, match="document 1 with 200 tokens.*max_length=100"):
        PackedDataset("abc", [30, 200, 10], max_length=100)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_a_stream_is_packed_as_it_comes(kind, workers):
    collator = PackedVisionCollator(vision_processor(), max_length=100)
    stream = EXAMPLES
    if kind == "datasets":
        made = pytest.importorskip("datasets").Dataset.from_list(
            [{"input_ids": [20 + number] * 12} for number in range(24)]
        )
        stream = made.to_iterable_dataset(num_shards=2)
    packs = PackedIterableDataset(stream, collator, buffer=8)
    rows = list(
        torch.utils.data.DataLoader(packs, batch_size=1, num_workers=workers, collate_fn=collator)
    )
    parts = [row["input_ids"][0].split(row["cu_seq_lens_q"].diff().tolist()) for row in rows]
    found = sorted(tuple(part.tolist()) for row in parts for part in row)
    wanted = sorted(tuple(collator.document(one).input_ids.tolist()) for one in stream)
    assert found == wanted and max(row["input_ids"].shape[1] for row in rows) <= 100
    assert len(rows) < len(EXAMPLES) / 2


def test_a_stream_leaves_long_documents_out():
    collator = PackedVisionCollator(vision_processor(), max_length=20, overlong="drop")
    rows = [
        collator([pack])
        for pack in PackedIterableDataset([*EXAMPLES, example("a " * 30)], collator)
    ]
    assert (
        collator.dropped
        == sum(len(PackedVisionCollator(collator.processor).document(one)) > 20 for one in EXAMPLES)
        + 1
    )
    assert rows and max(row["input_ids"].shape[1] for row in rows) <= 20
    with pytest.raises(ValueError, match="without max_length"):
        PackedIterableDataset(EXAMPLES, PackedVisionCollator(collator.processor))


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *more):
        if name.startswith("binpacking"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install binpacking"):
        packs_of([1], 2)
