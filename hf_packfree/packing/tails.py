"""Padding at a row's end that reads as documents of one token each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_packfree.packing.claims import Kept


def join_padding_tails(
    starts: Tensor, kept: Kept, same_token: Callable[[Tensor, int], Tensor], is_padding: Callable[[int], bool]
) -> tuple[Tensor, list[int]]:
    """Make one segment of a row's tail of one-token documents that all hold the same token: that is padding.

    Collators pad positions with zeros, which reads as a document per pad, and positions cannot tell the two apart: equal
    tokens can.  A one-token document has no next token to learn, so joining equal ones changes no language model's loss.
    Also returns the first place of every tail.
    """
    places, row = kept.places, kept.row
    row_ends = torch.cat((kept.new_row.nonzero()[:, 0], torch.tensor([len(places) - 1])))
    joined, tails = starts.clone(), []
    for end in row_ends.tolist():
        if end == 0 or not starts[end] or row[end] != row[end - 1]:
            continue
        if not starts[end - 1]:  # a single one is told by its token alone
            tails += [end] if is_padding(int(places[end])) else []
            continue
        long = (~starts[: end + 1]).nonzero()
        first = int(long[-1]) + 1 if long.numel() else 0
        first = max(first, int((row == row[end]).nonzero()[0]))
        same = same_token(places[first : end + 1], int(places[end]))
        other = (~same).nonzero()
        tail = first + (int(other[-1]) + 1 if other.numel() else 0)
        joined[tail + 1 : end + 1] = False
        tails += [tail] if tail < end else []
    return joined, tails
