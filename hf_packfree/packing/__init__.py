"""The record of document boundaries, the input formats it is read from, unpad and repad.  Needs torch and numpy alone."""

from hf_packfree.packing.compiling import uncompiled
from hf_packfree.packing.inputs import resolve_boundaries
from hf_packfree.packing.keywords import PackingInputs, to_hf_kwargs
from hf_packfree.packing.lazy_padding import lazy_repad
from hf_packfree.packing.padding import repad, unpad, with_left_pad_tokens
from hf_packfree.packing.record import PackedSequence, chunk_plan

__all__ = [
    "PackedSequence",
    "PackingInputs",
    "chunk_plan",
    "lazy_repad",
    "repad",
    "resolve_boundaries",
    "to_hf_kwargs",
    "uncompiled",
    "unpad",
    "with_left_pad_tokens",
]
