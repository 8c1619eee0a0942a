"""What one input form says about a batch: which tokens are real, and which document each belongs to.

Shapes: B rows, S tokens of a row.  Everything here is on the host: boundaries are decided before kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError, UnsupportedInput

BLOCKED = -1e4
"""An additive mask blocks a key at or below this; 0 lets it through; anything between is a bias."""


@dataclass(frozen=True, eq=False)
class Kept:
    """The tokens that no claim calls padding, found once for all of them.

    Attributes:
        places: int64 [M] into the flattened [B*S].
        row: int64 [M], the row of each.
        new_row: bool [M - 1], whether the next one is of another row.
        gaps: whether padding lies between them, before or behind.
        width: S.
    """

    places: Tensor
    row: Tensor
    new_row: Tensor
    gaps: bool
    width: int

    @classmethod
    def of(cls, real: Tensor) -> Kept:
        """Read bool [B, S]."""
        gaps, width = not bool(real.all()), real.shape[1]
        places = real.reshape(-1).nonzero()[:, 0] if gaps else torch.arange(real.numel())
        if len(real) == 1:
            row, new_row = torch.zeros_like(places), torch.zeros(max(len(places) - 1, 0), dtype=torch.bool)
        else:
            row = places // width
            new_row = row.diff() != 0
        return cls(places, row, new_row, gaps, width)

    def take(self, values: Tensor) -> Tensor:
        """Return [M] of [B, S]."""
        return values.reshape(-1)[self.places] if self.gaps else values.reshape(-1)


@dataclass(frozen=True, eq=False)
class BoundarySpec:
    """The document structure one input form describes.

    Attributes:
        form: the argument's name, for messages.
        real: bool [B, S]; False where the form says a token is padding.  None: it says so of none.
        values: int64 [B, S], or None when the form says nothing about documents.
        step: what `values` grows by from a token to the next one of its document: 1 for positions, 0 for numbers.
    """

    form: str
    real: Tensor | None = None
    values: Tensor | None = None
    step: int = 0

    def starts(self, kept: Kept) -> Tensor | None:
        """Return bool [M]: which of the kept tokens is the first of its document."""
        if self.values is None:
            return None
        grown = kept.take(self.values).diff()
        goes_on = grown == self.step
        if self.step and kept.gaps:  # positions that also count the padding in between
            goes_on |= grown == kept.places.diff()
        fresh = torch.ones(len(kept.places), dtype=torch.bool)
        fresh[1:] = kept.new_row | ~goes_on
        return fresh


def parse_position_ids(position_ids: Tensor, shape: tuple[int, int]) -> BoundarySpec | None:
    """Read `position_ids`: a document goes on as long as its positions grow by one.

    Args:
        position_ids: [S], [B or 1, S], or a stack [4, B or 1, S] whose first row is the text's, or [3, B or 1, S]
            (mRoPE), which speaks of documents only where all three rows are equal.
    """
    text = position_ids
    if position_ids.ndim == 3:
        rows = position_ids.shape[0]
        if rows not in (3, 4):
            raise _misshapen("position_ids", position_ids, shape, "(B, S), (3, B, S) or (4, B, S)")
        if rows == 3 and not bool((position_ids == position_ids[:1]).all()):
            return None  # images or videos: see `refuse_packed_mrope`
        text = position_ids[0]
    if text.ndim == 1:
        text = text[None]
    if text.ndim != 2 or text.shape[1] != shape[1] or text.shape[0] not in (1, shape[0]):
        raise _misshapen("position_ids", position_ids, shape, "(B, S), (3, B, S) or (4, B, S)")
    values = text.detach().to("cpu", torch.int64).expand(shape)
    return BoundarySpec("position_ids", None, values, step=1)


def refuse_jumps(claims: Sequence[BoundarySpec], kept: Kept) -> None:
    """Refuse positions that rise by more than one within a padded row, where nothing else speaks of documents.

    That may be one document with a gap, as transformers reads it there, or the next one's later part.
    """
    speaking = [claim for claim in claims if claim.values is not None]
    if not kept.gaps or [claim.form for claim in speaking] != ["position_ids"]:
        return
    assert speaking[0].values is not None
    grown = kept.take(speaking[0].values).diff()
    jumps = (grown > 1) & (grown != kept.places.diff()) & ~kept.new_row
    if bool(jumps.any()):
        row, place = divmod(int(kept.places[1:][jumps][0]), kept.width)
        raise BoundaryError(
            f"found position_ids that jump ahead within a padded row, by {int(grown[jumps][0])} at row {row}, token {place}; "
            "wanted positions that grow by one within a document and restart with the next; pass seq_idx too, which says where "
            "documents start"
        )


def refuse_packed_mrope(position_ids: Tensor, real: Tensor) -> None:
    """Refuse three rows of mRoPE positions in which a second document starts.

    Within a document the first row, time, never falls; where it does among `real` tokens (bool [B, S]) a document
    starts, and nothing says reliably where the others do.
    """
    if position_ids.ndim != 3 or position_ids.shape[0] != 3:
        return
    place = real.reshape(-1).nonzero()[:, 0]
    time = position_ids[0].detach().to("cpu").expand(real.shape).reshape(-1)[place]
    same_row = (place // real.shape[1]).diff() == 0
    if bool(((time.diff() < 0) & same_row).any()):
        raise UnsupportedInput(
            "found image or video positions (mRoPE, three rows that differ) that fall within a row: several documents; "
            "wanted text alone, since packed rows with images are not supported yet; pass such documents one by one, padded"
        )


def parse_cu_seqlens(form: str, cu_seqlens: Tensor, shape: tuple[int, int], device: torch.device) -> BoundarySpec:
    """Read `cu_seq_lens_q` or `_k`: int32 [N+1] offsets into the flattened batch; empty documents drop out."""
    total = shape[0] * shape[1]
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        found = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else repr(cu_seqlens)
        raise BoundaryError(f"found {form} {found}; wanted a torch.int32 tensor [N+1]; call .to(torch.int32)")
    if cu_seqlens.device != device:
        raise BoundaryError(
            f"found {form} on {cu_seqlens.device}; wanted it on {device}, where the tokens are; move it with .to()"
        )
    offsets = cu_seqlens.detach().to("cpu", torch.int64)
    if offsets.numel() < 2 or offsets[0] != 0 or offsets[-1] != total or bool((offsets.diff() < 0).any()):
        raise BoundaryError(
            f"found {form}={_short(offsets)}; wanted offsets that start at 0, never decrease and end at {total}, the "
            "tokens of the batch; give a padding tail a segment of its own"
        )
    values = torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff()).view(shape)
    if bool((values[1:, 0] == values[:-1, -1]).any()):
        raise BoundaryError(
            f"found {form}={_short(offsets)} with a document that runs from one row of {shape[1]} tokens into the "
            "next; wanted an offset at the start of every row; flatten the batch to one row, or split the document"
        )
    return BoundarySpec(form, None, values)


def parse_seq_idx(seq_idx: Tensor, shape: tuple[int, int]) -> BoundarySpec:
    """Read `seq_idx`: an integer [B, S] that changes at every document's start; below 0 is padding."""
    if seq_idx.is_floating_point() or tuple(seq_idx.shape) != shape:
        raise _misshapen("seq_idx", seq_idx, shape, "an integer (B, S)")
    values = seq_idx.detach().to("cpu", torch.int64)
    return BoundarySpec("seq_idx", values >= 0, values)


def parse_padding_mask(mask: Tensor, shape: tuple[int, int]) -> BoundarySpec:
    """Read a 2-D mask: 0/1 says what is padding; numbers above 1 also say which document (1, 1, 2, 2, 0)."""
    values = mask.detach().to("cpu")
    if values.dtype == torch.bool:
        return BoundarySpec("attention_mask", values)
    whole = values.to(torch.int64)
    if bool((whole < 0).any()) or not torch.equal(whole.to(values.dtype), values):
        raise BoundaryError(
            f"found a 2-D attention_mask with values from {values.min().item()} to {values.max().item()}; wanted 0 "
            "and 1, or 0 for padding and 1, 2, 3 ... for documents; an additive mask has to be 4-D"
        )
    if int(whole.max()) <= 1:
        return BoundarySpec("attention_mask", whole > 0)
    return BoundarySpec("attention_mask", whole > 0, whole)


def parse_block_diagonal_mask(mask: Tensor, shape: tuple[int, int]) -> BoundarySpec:
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
    return BoundarySpec("attention_mask", real.to("cpu"), number.to("cpu"))


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


def check_mask_shape(mask: Tensor, shape: tuple[int, int]) -> None:
    """Refuse a mask that fits no known form of a batch without a cache."""
    rows, tokens = shape
    if mask.ndim == 2 and tuple(mask.shape) == shape:
        return
    if mask.ndim == 4 and mask.shape[0] in (1, rows) and tuple(mask.shape[2:]) == (tokens, tokens):
        return
    raise _misshapen("attention_mask", mask, shape, "(B, S), or (B, 1, S, S)")


def _misshapen(form: str, found: Tensor, shape: tuple[int, int], wanted: str) -> BoundaryError:
    return BoundaryError(
        f"found {form} {found.dtype} {list(found.shape)}; wanted {wanted} with B={shape[0]} rows and S={shape[1]} "
        f"tokens as in the input; build {form} from the same batch as input_ids"
    )


def _short(values: Tensor) -> str:
    shown = values.tolist()
    return str(shown) if len(shown) <= 8 else f"[{', '.join(map(str, shown[:4]))}, ..., {shown[-2]}, {shown[-1]}]"
