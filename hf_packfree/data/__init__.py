"""Packed rows of documents with images, videos and audio, for any Trainer: the collator, and
datasets of whole packs.
"""

from hf_packfree.data.packs import PackedDataset, PackedIterableDataset
from hf_packfree.data.vision import PackedVisionCollator

__all__ = ["PackedDataset", "PackedIterableDataset", "PackedVisionCollator"]
