"""The two common batches, read with few operations, because the GPU waits meanwhile.

One row without a mask, of which every form says the same, is read where it lies: whole tensors need not come to the host then,
only the number of documents and their first tokens.  Of rows of one document, a 0/1 mask is all there is to read.  Whatever is
malformed, in doubt or in conflict is left to the general reading, which has the words for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_packfree.packing.compiling import is_transformed
from hf_packfree.packing.record import Integers

_WHOLE = (torch.int64, torch.int32)
_MASKS = (*_WHOLE, torch.bool, torch.float32)


def offsets_of_one_row(
    tokens: int, device: torch.device, offsets: Sequence[Tensor], numbers: Tensor | None, positions: Tensor | None
) -> Tensor | None:
    """Return int64 [N+1] offsets of the documents on the host, or None where the general reading has to look.

    That is where a form is not what it should be, where two differ, and where the row ends in a document of one token, which
    may be padding.

    Args:
        tokens: of the row.
        device: where they are, and where everything else has to be.
        offsets: `cu_seq_lens_q` and `_k`, int32 [N+1], as far as they were given.
        numbers: `seq_idx`, [1, tokens].
        positions: [1, tokens].
    """
    given = [*offsets, *(form for form in (numbers, positions) if form is not None)]
    if tokens < 2 or not given or not all(isinstance(form, Tensor) and form.device == device for form in given):
        return None
    starts: list[Tensor] = []
    sound: list[Tensor] = []
    for ends in offsets:
        if ends.dtype != torch.int32 or ends.ndim != 1 or len(ends) < 2:
            return None
        sound.append((ends[0] == 0) & (ends[-1] == tokens) & (ends[1:] >= ends[:-1]).all())
        marks = torch.zeros(tokens + 1, dtype=torch.bool, device=device)
        starts.append(marks.index_fill_(0, ends.clamp(0, tokens).long(), True)[:-1])
    for form, step in ((numbers, 0), (positions, 1)):
        if form is None:
            continue
        if form.dtype not in _WHOLE or tuple(form.shape) != (1, tokens):
            return None
        starts.append(torch.nn.functional.pad(form[0].long().diff() != step, (1, 0), value=True))
    if numbers is not None:
        sound.append((numbers >= 0).all())
    first, *others = starts
    sound += [(other == first).all() for other in others]
    sound.append(~first[-1])
    places = (first & torch.stack(sound).all()).nonzero()[:, 0].to("cpu")  # none where anything is unsound
    return torch.nn.functional.pad(places, (0, 1), value=tokens) if len(places) else None


def rows_of_mask(mask: Tensor) -> tuple[Integers, Tensor] | None:
    """Return the lengths of the rows' documents, int64 [N], and their tokens' places in the flattened batch, int64 [T].

    Both on the host; None where the general reading has to look: a mask of other values than 0 and 1, of a rare dtype, a hole
    within a document, or no padding, or nothing else; and where torch.func holds tensors that numpy cannot read.

    Args:
        mask: [B, S].
    """
    if mask.numel() == 0 or mask.dtype not in _MASKS or mask.is_neg() or is_transformed():
        return None
    host = mask.detach().to("cpu").numpy()
    real = host != 0
    if not np.array_equal(real, host):
        return None
    lengths = np.count_nonzero(real, axis=1)
    lengths, rises = lengths[lengths > 0], real[:, 1:] > real[:, :-1]
    if np.count_nonzero(rises) + np.count_nonzero(real[:, 0]) != len(lengths):
        return None
    places = np.flatnonzero(real)
    return (lengths, torch.from_numpy(places)) if 0 < len(places) < real.size else None
