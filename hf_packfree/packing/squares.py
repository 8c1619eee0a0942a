"""What a 4-D mask says about a batch: blocks on its diagonal are documents.

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError
from hf_packfree.packing.claims import Claim

BLOCKED = -1e4
"""An additive mask blocks a key at or below this; 0 lets it through; anything between is a bias."""


def claim_of_square(mask: Tensor, shape: tuple[int, int]) -> Claim:
    """Read a 4-D mask [B or 1, heads or 1, S, S], bool or additive: blocks on the diagonal are documents.

    A mask in which every token sees the one before it describes one document and may be of any kind; one that cuts a
    row into documents must be block-diagonal and causal, because nothing else reaches the linear layers.
    """
    _check_values(mask)
    of_heads = mask if mask.dtype == torch.bool else (mask == 0 if mask.is_floating_point() else mask != 0)
    allowed = of_heads[:, 0].expand(shape[0], -1, -1)
    if bool((_edges(of_heads) != _edges(of_heads[:, :1])).any()):
        raise BoundaryError(
            "found a 4-D attention_mask whose heads see different documents; wanted the same boundaries in every head, since "
            "the linear layers have one; pass a mask of (B, 1, S, S), or the boundaries as position_ids"
        )
    real = allowed.diagonal(dim1=1, dim2=2)
    number = torch.zeros(shape, dtype=torch.int64, device=mask.device)
    for row in range(shape[0]):
        kept = real[row].nonzero()[:, 0]
        number[row, kept[1:]] = (~allowed[row, kept[1:], kept[:-1]]).cumsum(0)
    if bool((number > 0).any()):
        block = (number[:, :, None] == number[:, None, :]) & real[:, None, :]
        wanted = block.tril()
        wrong = (of_heads != wanted[:, None]) & real[:, None, :, None]
        if bool(wrong.any()) or _has_bias(mask):
            raise BoundaryError(
                "found a 4-D attention_mask that cuts rows into documents but is not block-diagonal and causal; wanted each "
                "token to see its own document up to itself; pass the boundaries as position_ids instead"
            )
    return Claim("attention_mask", real.to("cpu"), number.to("cpu"))


def _edges(allowed: Tensor) -> Tensor:
    """Whether each token sees itself and the one before: bool [B, heads, 2, S], the second of the first token False."""
    last = torch.nn.functional.pad(allowed.diagonal(-1, 2, 3), (1, 0))
    return torch.stack((allowed.diagonal(0, 2, 3), last), 2)


def _check_values(mask: Tensor) -> None:
    if not mask.is_floating_point():
        return
    if bool(mask.isnan().any()) or bool(((mask == 0) | (mask == 1)).all() & (mask == 1).any()):
        raise BoundaryError(
            f"found a 4-D attention_mask of {mask.dtype} with {'NaN' if bool(mask.isnan().any()) else 'zeros and ones'}; "
            "wanted bool, or an additive one with 0 for what a token sees and a large negative number elsewhere; call .bool() "
            "on it"
        )


def _has_bias(mask: Tensor) -> bool:
    return mask.is_floating_point() and bool(((mask != 0) & (mask > BLOCKED)).any())
