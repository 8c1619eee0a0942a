"""Packed rows of documents with images, videos and audio, for any Trainer: the collator, and
datasets of packs; and rows of samples that share prefixes.
"""

from hf_packfree.data.examples import Document
from hf_packfree.data.packs import PackedDataset, PackedIterableDataset
from hf_packfree.data.prefixes import PrefixRow, pack_prefixes
from hf_packfree.data.vision import PackedVisionCollator

__all__ = [
    "Document",
    "PackedDataset",
    "PackedIterableDataset",
    "PackedVisionCollator",
    "PrefixRow",
    "pack_prefixes",
]
