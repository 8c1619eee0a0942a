"""Packed and padding-free training of hybrid linear-attention models, exact and fast."""

from hf_packfree._version import __version__

__all__ = ["__version__"]
