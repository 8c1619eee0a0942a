"""What a pack is: the record, boundaries from any input form, unpad and repad.  Needs torch and numpy alone."""

from hf_packfree.packing.compiling import uncompiled
from hf_packfree.packing.forms import Forms, read_forms, says_padding_only, to_hf_kwargs
from hf_packfree.packing.on_read import padded_on_read
from hf_packfree.packing.padding import repad, unpad, with_leads
from hf_packfree.packing.record import PackedSequence, pieces

__all__ = [
    "Forms",
    "PackedSequence",
    "padded_on_read",
    "pieces",
    "read_forms",
    "repad",
    "says_padding_only",
    "to_hf_kwargs",
    "uncompiled",
    "unpad",
    "with_leads",
]
