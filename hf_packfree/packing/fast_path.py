"""A fast path for the two common batches: boundaries with few operations, because the GPU waits for
them.

The inputs of one row without a mask are compared on its device, and only the documents' offsets are
copied to the host. Of padded rows of one document each, only the 0/1 mask is read. For malformed,
ambiguous or contradictory inputs the functions return None, and `resolve_boundaries` then parses
every input and raises its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_packfree.packing.boundaries import goes_back_inside
from hf_packfree.packing.compiling import is_transformed
from hf_packfree.packing.record import Integers

Meanwhile = Callable[[Tensor, Tensor], None]
"""Called when the host is about to wait for the starts of a row's documents, with these: bool [T],
once on the tokens' device and once on the host, where they are yet to arrive.
"""
_INTEGERS = (torch.int64, torch.int32)
_MASKS = (*_INTEGERS, torch.bool, torch.float32)


def offsets_of_one_row(
    tokens: int,
    device: torch.device,
    cu_seqlens: Sequence[Tensor],
    seq_idx: Tensor | None,
    position_ids: Tensor | None,
    meanwhile: Meanwhile | None = None,
) -> Tensor | None:
    """Return int64 [N+1] on the host, the offsets of the documents of one row.

    None where an input is malformed, two inputs disagree, or there is no input; where the row ends
    in a one-token document, which may be padding; and where only positions are given and they go
    back into the middle of the document before.

    Args:
        tokens: of the row.
        device: of the tokens, and of every other input.
        cu_seqlens: those of `cu_seq_lens_q` and `_k` that were passed, int32 [N+1].
        seq_idx: integers [1, tokens].
        position_ids: integers [1, tokens].
        meanwhile: called with the starts; where this returns None, they may be wrong.
    """
    given = [*cu_seqlens, *(tensor for tensor in (seq_idx, position_ids) if tensor is not None)]
    if (
        tokens < 2
        or not given
        or not all(isinstance(tensor, Tensor) and tensor.device == device for tensor in given)
    ):
        return None
    starts: list[Tensor] = []
    valid: list[Tensor] = []
    for offsets in cu_seqlens:
        if offsets.dtype != torch.int32 or offsets.ndim != 1 or len(offsets) < 2:
            return None
        valid.append(
            (offsets[0] == 0) & (offsets[-1] == tokens) & (offsets[1:] >= offsets[:-1]).all()
        )
        marks = torch.zeros(tokens + 1, dtype=torch.bool, device=device)
        starts.append(marks.index_fill_(0, offsets.clamp(0, tokens).long(), True)[:-1])
    for values, step in ((seq_idx, 0), (position_ids, 1)):
        if values is None:
            continue
        if values.dtype not in _INTEGERS or tuple(values.shape) != (1, tokens):
            return None
        starts.append(torch.nn.functional.pad(values[0].long().diff() != step, (1, 0), value=True))
    if seq_idx is not None:
        valid.append((seq_idx >= 0).all())
    first, *others = starts
    valid += [(other == first).all() for other in others]
    valid.append(~first[-1])
    # no marks at all if any input is invalid
    marks = first & torch.stack(valid).all()
    alone = position_ids[0] if position_ids is not None and len(given) == 1 else None
    return _on_the_host(marks, alone, tokens, meanwhile)


def _on_the_host(
    marks: Tensor, positions: Tensor | None, tokens: int, meanwhile: Meanwhile | None
) -> Tensor | None:
    """Return int64 [N+1] on the host, the offsets of documents that start where `marks` is True;
    None if it is nowhere True, or if positions go back into the middle of the document before.

    The marks are copied to the host, which waits once: finding the starts on the device would take
    three such waits.

    Args:
        marks: bool [tokens], on the tokens' device.
        positions: integers [tokens] where only positions separate documents, else None.
        tokens: of the row.
        meanwhile: see `offsets_of_one_row`.
    """
    copied = marks
    if positions is not None:
        # if all documents start at the same position, none starts inside the one before
        others = (marks & (positions != positions[0])).any()
        copied = torch.cat([marks, others[None]])
    host = _copy(copied, marks, meanwhile)
    found = host[:tokens].nonzero()[:, 0]
    if positions is not None and host[-1] and _any_goes_back_inside(positions, found):
        return None
    return torch.nn.functional.pad(found, (0, 1), value=tokens) if len(found) else None


def _copy(copied: Tensor, marks: Tensor, meanwhile: Meanwhile | None) -> Tensor:
    """Return `copied` on the host; `meanwhile` runs before the host waits for it."""
    if meanwhile is None:
        return copied.to("cpu")
    on_gpu = marks.is_cuda
    host = torch.empty(copied.shape, dtype=copied.dtype, device="cpu", pin_memory=on_gpu)
    host.copy_(copied, non_blocking=on_gpu)
    arrived = torch.cuda.current_stream(marks.device).record_event() if on_gpu else None
    meanwhile(marks, host[: len(marks)])
    if arrived is not None:
        arrived.synchronize()
    return host


def _any_goes_back_inside(positions: Tensor, found: Tensor) -> bool:
    host = positions.to("cpu")
    return bool(goes_back_inside(host[found], host[found - 1]).any())


def rows_of_mask(mask: Tensor) -> tuple[Integers, Tensor] | None:
    """Return the lengths of the rows' documents, int64 [N], and their tokens' indices in the
    flattened batch, int64 [T].

    Both are on the host. None for a mask with other values than 0 and 1 or of a rare dtype, with
    padding inside a document, without padding, or without real tokens; and under torch.func, whose
    tensors numpy cannot read.

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
    indices = np.flatnonzero(real)
    return (lengths, torch.from_numpy(indices)) if 0 < len(indices) < real.size else None
