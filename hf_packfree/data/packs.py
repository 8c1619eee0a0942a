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

from hf_packfree.data.examples import Document, Pack, check_whole
from hf_packfree.data.vision import PackedVisionCollator
from hf_packfree.errors import UnsupportedInput

_BLOCK = 1000
"""Documents that `binpacking` packs at a time: its time grows with the square of their number."""


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
        UnsupportedInput: an example is longer than `max_length` (documents are never cut), or there
            are not as many lengths as examples. The collator raises it too, if a pack is longer
            than its lengths add up to.
        ValueError: a length, or `max_length`, is no whole number of at least 1.
        ImportError: binpacking is not installed.

    Examples:
        >>> from hf_packfree.data import PackedDataset
        >>> packs = PackedDataset(["a", "b", "c", "d"], lengths=[30, 90, 60, 10], max_length=100)
        >>> [packs[number] for number in range(len(packs))]
        [['b', 'd'], ['c', 'a']]
    """

    def __init__(self, dataset: Any, lengths: Sequence[int], max_length: int) -> None:
        if len(lengths) != len(dataset):
            raise UnsupportedInput(
                f"found {len(lengths)} lengths for {len(dataset)} examples; wanted one for each, "
                "since what has none would be left out; pass [len(collator.document(example)) for "
                "example in dataset]"
            )
        self.dataset, self.max_length = dataset, max_length
        self.packs = packs_of(lengths, max_length)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> list[Any]:
        return Pack((self.dataset[number] for number in self.packs[index]), self.max_length)


class PackedIterableDataset(torch.utils.data.IterableDataset[list[Document]]):
    """A stream's documents in packs of at most the collator's `max_length` tokens, `buffer`
    documents considered at a time.

    The processor runs once for each example when the dataset is read, in the DataLoader's worker
    processes if there are any. Documents that are too long are raised or dropped, as the collator's
    `overlong` says.

    Args:
        stream: an iterable of examples for the collator. An `IterableDataset` of `datasets` splits
            itself over worker processes; of any other stream each of n workers takes every n-th
            example.
        collator: turns examples into documents; needs a `max_length`.
        buffer: how many documents are packed together; more fill packs better and take more memory.
        shared_out: whether the stream gives each worker process other examples. Required for
            torch's `IterableDataset` with several workers, which may or may not.

    Raises:
        ValueError: the collator has no `max_length`, or `buffer` is no whole number of at least 1.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        collator: PackedVisionCollator,
        *,
        buffer: int = 256,
        shared_out: bool | None = None,
    ) -> None:
        if collator.max_length is None:
            raise ValueError(
                "found a collator without max_length; wanted the most tokens of a pack; pass it to "
                "the collator"
            )
        if shared_out not in (None, True, False):
            raise ValueError(f"found shared_out={shared_out!r}; wanted True or False; pass one")
        self.stream, self.collator = stream, collator
        self.buffer, self.shared_out = check_whole("buffer", buffer), shared_out
        self._begun = False

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the stream, if that has a `set_epoch`; streams of `datasets` shuffle
        by it.
        """
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Document]]:
        """Yield packs.

        Raises:
            UnsupportedInput: a document is longer than `max_length` and the collator's `overlong`
                is "raise"; the stream is an iterator that was read before, or torch's
                `IterableDataset` with several workers and without `shared_out`.
        """
        examples = iter(self._share_of_this_worker())
        while batch := list(islice(examples, self.buffer)):
            documents = self.collator.fitting(self.collator.document(example) for example in batch)
            assert self.collator.max_length is not None
            for pack in packs_of(
                [len(document) for document in documents], self.collator.max_length
            ):
                yield [documents[number] for number in pack]

    def _share_of_this_worker(self) -> Iterable[Any]:
        if isinstance(self.stream, Iterator) and self._begun:
            raise UnsupportedInput(
                f"found a {type(self.stream).__name__} that was read before, of which the rest is "
                "no epoch; wanted a stream that starts again; pass a list, a data set or an object "
                "whose __iter__ begins anew"
            )
        self._begun = True
        worker = torch.utils.data.get_worker_info()
        if worker is None or worker.num_workers == 1 or self._is_shared_out():
            return self.stream
        return islice(self.stream, worker.id, None, worker.num_workers)

    def _is_shared_out(self) -> bool:
        """Whether the stream itself gives each worker process other examples."""
        if self.shared_out is not None:
            return self.shared_out
        # not `Dataset`, the map-style class of that library, which gives every process all examples
        of_datasets = any(
            kind.__name__ == "IterableDataset" and kind.__module__.startswith("datasets.")
            for kind in type(self.stream).__mro__
        )
        if not of_datasets and isinstance(self.stream, torch.utils.data.IterableDataset):
            raise UnsupportedInput(
                f"found a {type(self.stream).__name__} and several worker processes, of which it "
                "may give each the same examples or other ones; wanted to know, since documents "
                "would be repeated or lost; pass PackedIterableDataset(..., shared_out=True) if it "
                "reads torch.utils.data.get_worker_info(), else shared_out=False"
            )
        return of_datasets


def packs_of(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Return which documents share a pack: lists of numbers into `lengths`, each number once.

    Args:
        lengths: tokens of each document.
        max_length: the most tokens of a pack.

    Raises:
        UnsupportedInput: a document is longer than `max_length`.
        ValueError: a length or `max_length` is not whole, or below 1.
        ImportError: binpacking is not installed.
    """
    max_length = check_whole("max_length", max_length)
    lengths = [check_whole(f"lengths[{number}]", one) for number, one in enumerate(_plain(lengths))]
    try:
        from binpacking.to_constant_volume import to_constant_volume
    except ImportError as error:
        raise ImportError(
            "found no binpacking, which packs documents; wanted it; pip install binpacking"
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


def _plain(lengths: Sequence[int]) -> Sequence[int]:
    """Return the lengths of an array or a tensor as Python's numbers; others unchanged."""
    return lengths.tolist() if hasattr(lengths, "tolist") else lengths
