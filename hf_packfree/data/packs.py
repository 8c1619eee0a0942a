"""Datasets whose items are packs: lists of whole documents that together hold at most `max_length`
tokens.

Which documents share a pack is the library `binpacking`'s decision: the longest first, each into
the emptiest pack it fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from hf_packfree.data.documents import Document
from hf_packfree.data.vision import PackedVisionCollator
from hf_packfree.errors import UnsupportedInput

_BLOCK = 1000
"""Documents that are packed together: the library's time grows with their square."""


class PackedDataset(torch.utils.data.Dataset[list[Any]]):
    """A dataset's documents in packs of at most `max_length` tokens; with `PackedVisionCollator`,
    one item is one row.

    Pass it as `Trainer(train_dataset=...)` with `per_device_train_batch_size=1`; a batch of k packs
    is a row of up to k * max_length tokens.

    Args:
        dataset: anything with `len` and `[index]`, of examples for the collator.
        lengths: tokens of each of its examples, such as `[len(collator.document(example)) for
            example in dataset]`.
        max_length: the most tokens of a pack.

    Raises:
        UnsupportedInput: an example is longer than `max_length`; documents are never cut.
        ImportError: binpacking is not installed.

    Examples:
        >>> from hf_packfree.data import PackedDataset
        >>> packs = PackedDataset(["a", "b", "c", "d"], lengths=[30, 90, 60, 10], max_length=100)
        >>> [packs[number] for number in range(len(packs))]
        [['b', 'd'], ['c', 'a']]
    """

    def __init__(self, dataset: Any, lengths: Sequence[int], max_length: int) -> None:
        self.dataset = dataset
        self.packs = packs_of(lengths, max_length)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> list[Any]:
        return [self.dataset[number] for number in self.packs[index]]


class PackedIterableDataset(torch.utils.data.IterableDataset[list[Document]]):
    """A stream's documents in packs of at most the collator's `max_length` tokens, `buffer`
    documents considered at a time.

    The processor runs here, once for each example, so in the DataLoader's worker processes where
    there are any. Documents that are too long are treated as the collator treats them.

    Args:
        stream: an iterable of examples for the collator. One of `datasets` shares itself out over
            worker processes; of any other each worker takes every n-th example.
        collator: which has a `max_length`.
        buffer: how many documents are packed together; more fill packs better and take more memory.

    Raises:
        ValueError: the collator has no `max_length`.
    """

    def __init__(
        self, stream: Iterable[Any], collator: PackedVisionCollator, *, buffer: int = 256
    ) -> None:
        if collator.max_length is None:
            raise ValueError(
                "found a collator without max_length; wanted the most tokens of a pack; pass it to "
                "the collator"
            )
        self.stream, self.collator, self.buffer = stream, collator, buffer

    def __iter__(self) -> Iterator[list[Document]]:
        examples = iter(_share_of_this_worker(self.stream))
        while batch := list(islice(examples, self.buffer)):
            documents = self.collator.fitting(self.collator.document(example) for example in batch)
            assert self.collator.max_length is not None
            for pack in packs_of(
                [len(document) for document in documents], self.collator.max_length
            ):
                yield [documents[number] for number in pack]


def packs_of(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Return which documents share a pack: lists of numbers into `lengths`, each number once.

    Args:
        lengths: tokens of each document.
        max_length: the most tokens of a pack.

    Raises:
        UnsupportedInput: a document is longer than `max_length`.
        ImportError: binpacking is not installed.
    """
    try:
        from binpacking.to_constant_volume import to_constant_volume
    except ImportError as error:
        raise ImportError(
            "found no binpacking, which packs documents; wanted it; pip install "
            "'hf_packfree[vision]'"
        ) from error
    if not lengths:
        return []
    if max(lengths) > max_length:
        number = max(range(len(lengths)), key=lengths.__getitem__)
        raise UnsupportedInput(
            f"found document {number} with {lengths[number]} tokens; wanted "
            f"max_length={max_length} at most, since documents "
            "are never cut; leave it out, or pass a larger max_length"
        )
    packs: list[list[int]] = []
    for start in range(0, len(lengths), _BLOCK):
        block = dict(enumerate(lengths[start : start + _BLOCK], start))
        packs += [list(pack) for pack in to_constant_volume(block, max_length)]
    return packs


def _share_of_this_worker(stream: Iterable[Any]) -> Iterable[Any]:
    worker = torch.utils.data.get_worker_info()
    if worker is None or isinstance(stream, torch.utils.data.IterableDataset):
        return stream
    return islice(stream, worker.id, None, worker.num_workers)
