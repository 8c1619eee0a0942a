"""The record of document boundaries, the input formats it is read from, unpad and repad. Needs
torch and numpy alone.
"""

from hf_packfree.packing.batch import Batch
from hf_packfree.packing.chunks import chunk_plan
from hf_packfree.packing.compiling import uncompiled
from hf_packfree.packing.inputs import resolve_boundaries
from hf_packfree.packing.keywords import PackingInputs, to_hf_kwargs
from hf_packfree.packing.lazy import lazy_repad
from hf_packfree.packing.padding import repad, unpad, with_left_pad_tokens
from hf_packfree.packing.record import PackedSequence
from hf_packfree.packing.shard import (
    RowShard,
    pad_row,
    refuse_shard,
    shard_of,
    shard_row,
    with_history,
    without_row,
)

__all__ = [
    "Batch",
    "PackedSequence",
    "PackingInputs",
    "RowShard",
    "chunk_plan",
    "lazy_repad",
    "pad_row",
    "refuse_shard",
    "repad",
    "resolve_boundaries",
    "shard_of",
    "shard_row",
    "to_hf_kwargs",
    "uncompiled",
    "unpad",
    "with_history",
    "with_left_pad_tokens",
    "without_row",
]
