"""The record of a row whose documents the host does not know, and its plans, which a CUDA graph
makes on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_packfree.graphs.bucket import Bucket
from hf_packfree.graphs.capture import Pool
from hf_packfree.graphs.captured_sequence import OF_ONE_ROW, CapturedSequence, OtherPlan
from hf_packfree.packing import PackedSequence


class UnreadSequence(PackedSequence):
    """A bounded record of a row whose documents the host does not know: plans are made on the
    device, and those that need `OF_ONE_ROW` raise `OtherPlan`.
    """

    @classmethod
    def of(cls, starts: Tensor, bucket: Bucket) -> UnreadSequence:
        """Return the record of a row that fills the bucket, as by `in_bucket`.

        Args:
            starts: bool [T], where documents, and the padding, start. If the bucket does not hold
                them, the record's last document is of all that are too many, so that no kernel
                reads elsewhere.
        """
        number = (starts.cumsum(0) - 1).clamp_(0, bucket.documents - 2)
        documents = torch.arange(bucket.documents + 1, device=starts.device)
        offsets = torch.searchsorted(number, documents, out_int32=True)
        return cls(
            cu_seqlens=offsets,
            cu_seqlens_cpu=offsets,
            seq_idx=number[None].int(),
            max_seqlen=bucket.longest,
            batch_shape=(1, bucket.tokens),
            bounded=True,
        )

    def __getattribute__(self, name: str) -> Any:
        if name in OF_ONE_ROW:
            raise OtherPlan
        return super().__getattribute__(name)

    @property
    def plan_offsets(self) -> Tensor:
        """`cu_seqlens`, on the device."""
        return self.cu_seqlens


class Plans:
    """Writes the plans of a bucket's rows on the device, given where their documents start: many
    small kernels, which the host starts at once.

    Args:
        packed: the record that the plans are written into.
        bucket: that of the rows.
        pool: the memory in which plans are made.

    Raises:
        OtherPlan: a plan needs what the host alone knows.
    """

    def __init__(self, packed: CapturedSequence, bucket: Bucket, pool: Pool) -> None:
        self._packed, self._bucket = packed, bucket
        # and one more, the end of a row that fills the bucket
        size, device = bucket.tokens + 1, packed.seq_idx.device
        self._starts = torch.zeros(size, dtype=torch.bool, device=device)
        with torch.cuda.device_of(self._starts):
            # first outside of the capture, in which no kernel may be loaded
            self._write()
            with pool.capture() as self._graph:
                self._write()

    def _write(self) -> None:
        self._packed.become(UnreadSequence.of(self._starts[:-1], self._bucket))

    def write(self, starts: Tensor) -> None:
        """Write the plans of a row.

        Args:
            starts: bool [T], where documents start; T is at most the bucket's.
        """
        tokens = len(starts)
        self._starts[:tokens].copy_(starts)
        self._starts[tokens:].zero_()
        self._start_padding(tokens)
        self._replay()

    def write_for(self, packed: PackedSequence) -> None:
        """Write the plans of a row that the bucket holds."""
        starts = packed.cu_seqlens.to(self._starts.device, torch.int64, non_blocking=True)
        self._starts.zero_().index_fill_(0, starts, True)
        self._start_padding(packed.num_tokens)
        self._replay()

    def _start_padding(self, tokens: int) -> None:
        # its segments, see `filled`
        self._starts[tokens :: self._bucket.longest].fill_(True)

    def _replay(self) -> None:
        with torch.cuda.device_of(self._starts):
            self._graph.replay()


def plans_of(packed: CapturedSequence, bucket: Bucket, pool: Pool) -> Plans | None:
    """Return what writes a captured record's plans on the device; None where the host has to make
    them, as for trees.
    """
    if bucket.tree is not None:
        return None
    try:
        return Plans(packed, bucket, pool)
    except OtherPlan:
        return None
