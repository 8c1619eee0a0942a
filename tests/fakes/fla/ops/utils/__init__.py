"""Index helpers."""

from fla.ops.utils.index import prepare_chunk_indices

__all__ = ["prepare_chunk_indices"]
