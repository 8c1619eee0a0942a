"""What each input format describes: which tokens are real, and where documents start.

Shapes: B rows, S tokens of a row, M real tokens.  Everything here runs on the host, before any kernel; a 4-D mask alone is
read on its own device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError

BLOCKED = -1e4
"""An additive mask blocks a key at or below this value; 0 lets it through; anything between is a bias."""


@dataclass(frozen=True, eq=False)
class RealTokens:
    """The tokens that no input format calls padding.

    Attributes:
        indices: int64 [M] into the flattened [B*S].
        row: int64 [M], the row of each.
        row_changes: bool [M - 1], whether the next one is in another row.
        has_padding: whether there is padding anywhere in the batch.
        row_length: S.
    """

    indices: Tensor
    row: Tensor
    row_changes: Tensor
    has_padding: bool
    row_length: int

    @classmethod
    def from_mask(cls, real: Tensor) -> RealTokens:
        """Build from a mask: bool [B, S], True for real tokens."""
        has_padding, row_length = not bool(real.all()), real.shape[1]
        indices = real.reshape(-1).nonzero()[:, 0] if has_padding else torch.arange(real.numel())
        if len(real) == 1:
            row, row_changes = torch.zeros_like(indices), torch.zeros(max(len(indices) - 1, 0), dtype=torch.bool)
        else:
            row = indices // row_length
            row_changes = row.diff() != 0
        return cls(indices, row, row_changes, has_padding, row_length)

    def select(self, values: Tensor) -> Tensor:
        """Return the values [M] of the real tokens from [B, S]."""
        return values.reshape(-1)[self.indices] if self.has_padding else values.reshape(-1)

    def position_of(self, token: int) -> tuple[int, int]:
        """Return the row of the n-th real token, and its index in that row."""
        return divmod(int(self.indices[token]), self.row_length)


@dataclass(frozen=True, eq=False)
class BoundarySpec:
    """The documents that one input format describes.

    Attributes:
        name: the argument's name, for messages.
        real: bool [B, S], False for padding; None when this format does not mark padding.
        values: int64 [B, S], positions or document numbers; None when this format does not separate documents.
        step: by how much `values` grows from a token to the next one of its document: 1 for positions, 0 for numbers.
    """

    name: str
    real: Tensor | None = None
    values: Tensor | None = None
    step: int = 0

    def document_starts(self, tokens: RealTokens) -> Tensor | None:
        """Return bool [M], True for the first real token of each document."""
        if self.values is None:
            return None
        growth = tokens.select(self.values).diff()
        continues = growth == self.step
        # positions may also count the padding between two real tokens
        if self.step and tokens.has_padding:
            continues |= growth == tokens.indices.diff()
        starts = torch.ones(len(tokens.indices), dtype=torch.bool)
        starts[1:] = tokens.row_changes | ~continues
        return starts


def parse_cu_seqlens(name: str, cu_seqlens: Tensor, shape: tuple[int, int], device: torch.device) -> BoundarySpec:
    """Parse `cu_seq_lens_q` or `_k`: int32 [N+1], offsets in tokens of the flattened batch; empty documents are dropped."""
    total = shape[0] * shape[1]
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        found = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else repr(cu_seqlens)
        raise BoundaryError(f"found {name} {found}; wanted a torch.int32 tensor [N+1]; call .to(torch.int32)")
    if cu_seqlens.device != device:
        raise BoundaryError(
            f"found {name} on {cu_seqlens.device}; wanted it on {device}, where the tokens are; move it with .to()"
        )
    offsets = cu_seqlens.detach().to("cpu", torch.int64)
    if offsets.numel() < 2 or offsets[0] != 0 or offsets[-1] != total or bool((offsets.diff() < 0).any()):
        raise BoundaryError(
            f"found {name}={_short(offsets)}; wanted offsets that start at 0, never decrease and end at {total}, the "
            "tokens of the batch; give trailing padding a segment of its own"
        )
    values = torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff()).view(shape)
    if bool((values[1:, 0] == values[:-1, -1]).any()):
        raise BoundaryError(
            f"found {name}={_short(offsets)} with a document that runs from one row of {shape[1]} tokens into the "
            "next; wanted an offset at the start of every row; flatten the batch to one row, or split the document"
        )
    return BoundarySpec(name, None, values)


def parse_seq_idx(seq_idx: Tensor, shape: tuple[int, int]) -> BoundarySpec:
    """Parse `seq_idx`: integers [B, S] that change where a document starts; below 0 is padding."""
    if seq_idx.is_floating_point() or tuple(seq_idx.shape) != shape:
        raise _wrong_shape("seq_idx", seq_idx, shape, "an integer (B, S)")
    values = seq_idx.detach().to("cpu", torch.int64)
    return BoundarySpec("seq_idx", values >= 0, values)


def parse_position_ids(position_ids: Tensor, shape: tuple[int, int]) -> BoundarySpec | None:
    """Parse `position_ids`: a document goes on as long as its positions grow by one.

    Args:
        position_ids: [S], [B or 1, S], or a stack [4, B or 1, S] whose first row holds the text positions, or
            [3, B or 1, S] (mRoPE), which marks documents only where all three rows are equal.
    """
    text = position_ids
    if position_ids.ndim == 3:
        rows = position_ids.shape[0]
        if rows not in (3, 4):
            raise _wrong_shape("position_ids", position_ids, shape, "(B, S), (3, B, S) or (4, B, S)")
        # positions of images or videos: see `hf_packfree.packing.mrope`
        if rows == 3 and not bool((position_ids == position_ids[:1]).all()):
            return None
        text = position_ids[0]
    if text.ndim == 1:
        text = text[None]
    if text.ndim != 2 or text.shape[1] != shape[1] or text.shape[0] not in (1, shape[0]):
        raise _wrong_shape("position_ids", position_ids, shape, "(B, S), (3, B, S) or (4, B, S)")
    values = text.detach().to("cpu", torch.int64).expand(shape)
    return BoundarySpec("position_ids", None, values, step=1)


def refuse_jumps(specs: Sequence[BoundarySpec], tokens: RealTokens) -> None:
    """Refuse positions that rise by more than one within a padded row, when nothing else marks documents.

    Such a row may hold one document with a gap, as transformers reads it, or two documents.
    """
    separating = [spec for spec in specs if spec.values is not None]
    if not tokens.has_padding or [spec.name for spec in separating] != ["position_ids"]:
        return
    assert separating[0].values is not None
    growth = tokens.select(separating[0].values).diff()
    jumps = ((growth > 1) & (growth != tokens.indices.diff()) & ~tokens.row_changes).nonzero()[:, 0]
    if jumps.numel():
        row, token = tokens.position_of(int(jumps[0]) + 1)
        raise BoundaryError(
            f"found position_ids that jump ahead within a padded row, by {int(growth[jumps[0]])} at row {row}, token {token}; "
            "wanted positions that grow by one within a document and restart with the next; pass seq_idx too, which marks "
            "where documents start"
        )


def check_mask_shape(mask: Tensor, shape: tuple[int, int]) -> None:
    """Refuse a mask whose shape is neither [B, S] nor [B or 1, heads or 1, S, S]."""
    per_pair = mask.ndim == 4 and mask.shape[0] in (1, shape[0]) and tuple(mask.shape[2:]) == (shape[1], shape[1])
    if tuple(mask.shape) != shape and not per_pair:
        raise _wrong_shape("attention_mask", mask, shape, "(B, S), or (B, 1, S, S)")


def parse_padding_mask(mask: Tensor, shape: tuple[int, int]) -> BoundarySpec:
    """Parse a 2-D mask [B, S]: 0/1 marks padding; an indexed mask (1, 1, 2, 2, 0) also numbers the documents."""
    values = mask.detach().to("cpu")
    if values.dtype == torch.bool:
        return BoundarySpec("attention_mask", values)
    whole = values.to(torch.int64)
    if bool((whole < 0).any()) or not torch.equal(whole.to(values.dtype), values):
        raise BoundaryError(
            f"found a 2-D attention_mask with values from {values.min().item()} to {values.max().item()}; wanted 0 "
            "and 1, or 0 for padding and 1, 2, 3 ... for documents; an additive mask has to be 4-D"
        )
    return BoundarySpec("attention_mask", whole > 0, whole if int(whole.max()) > 1 else None)


def parse_block_diagonal_mask(mask: Tensor, shape: tuple[int, int]) -> BoundarySpec:
    """Parse a 4-D mask [B or 1, heads or 1, S, S], bool or additive: blocks on its diagonal are documents.

    A mask in which every token sees the one before it describes one document and may be of any kind; one that cuts a
    row into documents must be block-diagonal and causal, because nothing else reaches the linear layers.
    """
    _check_mask_values(mask)
    of_heads = mask if mask.dtype == torch.bool else (mask == 0 if mask.is_floating_point() else mask != 0)
    allowed = of_heads[:, 0].expand(shape[0], -1, -1)
    if bool((_near_diagonal(of_heads) != _near_diagonal(of_heads[:, :1])).any()):
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
        wanted = ((number[:, :, None] == number[:, None, :]) & real[:, None, :]).tril()
        wrong = (of_heads != wanted[:, None]) & real[:, None, :, None]
        biased = mask.is_floating_point() and bool(((mask != 0) & (mask > BLOCKED)).any())
        if biased or bool(wrong.any()):
            raise BoundaryError(
                "found a 4-D attention_mask that cuts rows into documents but is not block-diagonal and causal; wanted each "
                "token to see its own document up to itself; pass the boundaries as position_ids instead"
            )
    return BoundarySpec("attention_mask", real.to("cpu"), number.to("cpu"))


def _near_diagonal(allowed: Tensor) -> Tensor:
    """Whether each token sees itself and the token before it: bool [B, heads, 2, S]; the first token has none before it."""
    before = torch.nn.functional.pad(allowed.diagonal(-1, 2, 3), (1, 0))
    return torch.stack((allowed.diagonal(0, 2, 3), before), 2)


def _check_mask_values(mask: Tensor) -> None:
    if not mask.is_floating_point():
        return
    if bool(mask.isnan().any()) or bool(((mask == 0) | (mask == 1)).all() & (mask == 1).any()):
        raise BoundaryError(
            f"found a 4-D attention_mask of {mask.dtype} with {'NaN' if bool(mask.isnan().any()) else 'zeros and ones'}; "
            "wanted bool, or an additive one with 0 for what a token sees and a large negative number elsewhere; call .bool() "
            "on it"
        )


def join_trailing_padding(
    starts: Tensor, tokens: RealTokens, same_token: Callable[[Tensor, int], Tensor], is_padding: Callable[[int], bool]
) -> tuple[Tensor, list[int]]:
    """Join a row's trailing one-token documents into one segment where they all hold the same token: that is padding.

    Collators pad positions with zeros, which looks like one document per pad token; only the tokens, being equal, show that
    it is padding.  A one-token document has no next token to predict, so joining equal ones changes no language model's loss.

    Args:
        starts: bool [M], where documents start.
        tokens: the real tokens.
        same_token, is_padding: see `resolve_boundaries`.

    Returns:
        starts: bool [M], after joining.
        padding: the numbers, of M, of the tokens at which trailing padding starts.
    """
    indices, row = tokens.indices, tokens.row
    row_ends = torch.cat((tokens.row_changes.nonzero()[:, 0], torch.tensor([len(indices) - 1])))
    joined, padding = starts.clone(), []
    for end in row_ends.tolist():
        if end == 0 or not starts[end] or row[end] != row[end - 1]:
            continue
        # a single token has no equals to compare with: it is padding if it is the padding token
        if not starts[end - 1]:
            padding += [end] if is_padding(int(indices[end])) else []
            continue
        longer = (~starts[: end + 1]).nonzero()
        first = int(longer[-1]) + 1 if longer.numel() else 0
        first = max(first, int((row == row[end]).nonzero()[0]))
        other = (~same_token(indices[first : end + 1], int(indices[end]))).nonzero()
        tail = first + (int(other[-1]) + 1 if other.numel() else 0)
        joined[tail + 1 : end + 1] = False
        padding += [tail] if tail < end else []
    return joined, padding


def _wrong_shape(name: str, found: Tensor, shape: tuple[int, int], wanted: str) -> BoundaryError:
    return BoundaryError(
        f"found {name} {found.dtype} {list(found.shape)}; wanted {wanted} with B={shape[0]} rows and S={shape[1]} "
        f"tokens as in the input; build {name} from the same batch as input_ids"
    )


def _short(values: Tensor) -> str:
    shown = values.tolist()
    return str(shown) if len(shown) <= 8 else f"[{', '.join(map(str, shown[:4]))}, ..., {shown[-2]}, {shown[-1]}]"
