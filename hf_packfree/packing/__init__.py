"""What a pack is: the record, boundaries from any input form, unpad and repad.  Needs torch alone."""

from hf_packfree.packing.record import PackedSequence

__all__ = ["PackedSequence"]
