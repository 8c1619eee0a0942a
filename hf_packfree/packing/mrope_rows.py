"""What mRoPE positions of three or four rows tell about documents.

The rows for time, height and width do not show all boundaries; a first row of text positions, or
another input format, does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryConflict, BoundaryError, UnsupportedInput
from hf_packfree.packing.boundaries import RealTokens

_COUNTS_TO = {torch.float16: 2048, torch.bfloat16: 256}


def is_text(position_ids: Tensor | None) -> bool:
    """Whether positions are one number per token: none, 2-D, or a stack whose last three rows
    are equal.
    """
    if position_ids is None or position_ids.ndim < 3:
        return True
    rows = position_ids[-3:]
    return bool((rows == rows[:1]).all())


def check_rows(position_ids: Any) -> None:
    """Refuse positions in half precision, and four rows whose first is not one of text positions.

    Args:
        position_ids: see `PackingInputs`.

    Raises:
        BoundaryError: the positions are one of these.
    """
    if not isinstance(position_ids, Tensor):
        return
    if position_ids.dtype in _COUNTS_TO:
        raise BoundaryError(
            f"found position_ids of {position_ids.dtype}, which counts to "
            f"{_COUNTS_TO[position_ids.dtype]} only; wanted integers, or torch.float32; keep them "
            "out of casts to the training dtype, or leave them to the model"
        )
    if position_ids.ndim != 3 or position_ids.shape[0] != 4:
        return
    text, time = position_ids[0], position_ids[1]
    # read as text positions, the temporal row looks like one-token documents in each image, where
    # it does not grow
    stops, differ = text.diff() == 0, (position_ids[2:] != time).any(0)[:, 1:]
    if bool((text == time).all() & (stops & differ).any()):
        raise BoundaryError(
            "found position_ids of 4 rows, the first of which is the temporal row of mRoPE again; "
            "wanted the text positions "
            "there: 0, 1, 2 ... in each document; build them with torch.arange per document"
        )


def refuse_packed_mrope(
    position_ids: Tensor, shape: tuple[int, int], tokens: RealTokens, starts: Tensor | None
) -> None:
    """Refuse three differing rows of mRoPE positions in which a document starts that nothing else
    marks.

    Within a document the first row, time, falls only after a video whose seconds take more
    positions than its height and width, in families that number so; those two rise there. Where
    time falls otherwise a document starts, and so it does where all three are 0 again, as behind a
    document of one token. Documents numbered on from the one before them show no start.

    Args:
        position_ids: [3, B or 1, S]; those of other shapes are not looked at.
        shape: (B, S).
        tokens: the real tokens.
        starts: bool [M], where documents start by the other input formats; None when none separates
            documents.

    Raises:
        UnsupportedInput: no other format separates documents, and there are several in a row.
        BoundaryConflict: time falls inside a document of another format.
    """
    if position_ids.ndim != 3 or position_ids.shape[0] != 3:
        return
    rows = [tokens.select(row.detach().to("cpu").expand(shape)) for row in position_ids]
    time, height, width = (row.diff() for row in rows)
    falls = (time < 0) & ~((height > 0) & (width > 0)) & ~tokens.row_changes
    zeros = (torch.stack(rows)[:, 1:] == 0).all(0) & ~tokens.row_changes
    if starts is None and bool((falls | zeros).any()):
        raise UnsupportedInput(
            "found image or video positions (mRoPE, three rows that differ) that fall, or are 0 "
            "again, within a row: several documents, whose boundaries they cannot show; wanted the "
            "boundaries too; put the text positions, which restart with each document, in front "
            "as a fourth row, or pass cu_seq_lens_q or seq_idx too"
        )
    inside = (falls if starts is None else falls & ~starts[1:]).nonzero()
    if inside.numel():
        row, token = tokens.position_of(int(inside[0]) + 1)
        raise BoundaryConflict(
            f"found mRoPE position_ids that fall at row {row}, token {token}, inside a document by "
            "the other inputs; wanted "
            "time that falls at starts of documents; build the positions of each document by itself"
        )
