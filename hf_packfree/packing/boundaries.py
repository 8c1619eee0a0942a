"""Parsing of the input formats: which tokens each calls real, and where documents start.

Shapes: B rows, S tokens of a row, M real tokens. Everything here runs on the host, before any
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError, UnsupportedInput
from hf_packfree.packing.batch import Batch

UNCUT = "accelerator_config={'dispatch_batches': False}"
"""The argument of a Trainer with which accelerate leaves batches whole."""
_CUT = (
    f"if they came from a stream, accelerate cut them to the batch's rows: pass {UNCUT} to "
    "TrainingArguments"
)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class RealTokens:
    """The tokens that no input format calls padding.

    Attributes:
        indices: int64 [M] into the flattened [B*S].
        row: int64 [M], the row of each real token.
        row_changes: bool [M - 1], whether the next real token is in another row.
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
        indices = (
            real.reshape(-1).nonzero()[:, 0]
            if has_padding
            else torch.arange(real.numel(), device="cpu")
        )
        if len(real) == 1:
            row = torch.zeros_like(indices)
            row_changes = row[1:] != 0
        else:
            row = indices // row_length
            row_changes = row.diff() != 0
        return cls(indices, row, row_changes, has_padding, row_length)

    def select(self, values: Tensor) -> Tensor:
        """Return the values [M] of the real tokens from [B, S]."""
        return values.reshape(-1)[self.indices] if self.has_padding else values.reshape(-1)

    @property
    def after_holes(self) -> Tensor:
        """bool [M - 1], whether padding lies between a real token and the next one of its row."""
        return (self.indices.diff() > 1) & ~self.row_changes

    def position_of(self, token: int) -> tuple[int, int]:
        """Return the row of the n-th real token, and its index in that row."""
        return divmod(int(self.indices[token]), self.row_length)


@dataclass(frozen=True, eq=False)
class BoundarySpec:
    """The documents that one input format describes.

    Attributes:
        name: the argument's name, for messages.
        real: bool [B, S], False for padding; None when this format does not mark padding.
        values: int64 [B, S], positions or document numbers; None when this format does not separate
            documents.
        step: by how much `values` grows from a token to the next one of its document: 1 for
            positions, 0 for numbers.
        covers: the kinds of layers for which upstream reads padding from this format.
        as_upstream: whether upstream reads this format as we do when every row holds one document.
    """

    name: str
    real: Tensor | None = None
    values: Tensor | None = None
    step: int = 0
    covers: frozenset[str] = frozenset()
    as_upstream: bool = True

    @property
    def by_positions(self) -> bool:
        """Whether positions separate the documents; padding tokens have positions too."""
        return self.step == 1

    def document_starts(self, tokens: RealTokens) -> Tensor | None:
        """Return bool [M], True for the first real token of each document."""
        if self.values is None:
            return None
        growth = tokens.select(self.values).diff()
        continues = growth == self.step
        # positions may also count the padding between two real tokens
        if self.step and tokens.has_padding:
            continues |= growth == tokens.indices.diff()
        starts = torch.ones_like(tokens.indices, dtype=torch.bool)
        starts[1:] = tokens.row_changes | ~continues
        return starts

    def unclear_starts(self, tokens: RealTokens) -> Tensor | None:
        """Return bool [M], True where positions restart after padding inside a row, but not at 0;
        None where none do.

        Such positions are ambiguous: generation from right-padded prompts has them within a
        document, rows of cut documents at the start of one.
        """
        if not self.step or not tokens.has_padding:
            return None
        starts = self.document_starts(tokens)
        assert starts is not None and self.values is not None
        unclear = starts & (tokens.select(self.values) != 0)
        unclear[:1] = False
        unclear[1:] &= tokens.after_holes
        return unclear if bool(unclear.any()) else None


def parse_cu_seqlens(
    name: str, cu_seqlens: Tensor, shape: tuple[int, int], device: torch.device
) -> BoundarySpec:
    """Parse `cu_seq_lens_q` or `_k`: int32 [N+1], offsets in tokens of the flattened batch; empty
    documents are dropped. Raises `BoundaryError` where it is anything else, or a document runs over
    the end of a row.
    """
    total = shape[0] * shape[1]
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dtype != torch.int32
        or cu_seqlens.ndim != 1
    ):
        found = (
            f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            if isinstance(cu_seqlens, Tensor)
            else repr(cu_seqlens)
        )
        raise BoundaryError(
            f"found {name} {found}; wanted a torch.int32 tensor [N+1]; call .to(torch.int32)"
        )
    if cu_seqlens.device != device:
        raise BoundaryError(
            f"found {name} on {cu_seqlens.device}; wanted it on {device}, where the tokens are; "
            "move it with .to()"
        )
    offsets = cu_seqlens.detach().to("cpu", torch.int64)
    if (
        offsets.numel() < 2
        or offsets[0] != 0
        or offsets[-1] != total
        or bool((offsets.diff() < 0).any())
    ):
        trailing = "give trailing padding a segment of its own"
        raise BoundaryError(
            f"found {name}={_short(offsets)}; wanted offsets that start at 0, never decrease and "
            f"end at {total}, the tokens of the batch; "
            f"{_CUT if offsets.numel() == shape[0] else trailing}"
        )
    values = torch.from_numpy(
        np.repeat(np.arange(offsets.numel() - 1), offsets.diff().numpy())
    ).view(shape)
    if bool((values[1:, 0] == values[:-1, -1]).any()):
        raise BoundaryError(
            f"found {name}={_short(offsets)} with a document that runs from one row of {shape[1]} "
            "tokens into the next; wanted an offset at the start of every row; flatten the batch "
            "to one row, or split the document"
        )
    return BoundarySpec(name, None, values)


def parse_seq_idx(seq_idx: Tensor, shape: tuple[int, int]) -> BoundarySpec:
    """Parse `seq_idx`: integers [B, S] that change where a document starts; below 0 is padding.
    Raises `BoundaryError` for another dtype or shape.
    """
    if seq_idx.dtype not in _INTEGERS or tuple(seq_idx.shape) != shape:
        raise wrong_shape("seq_idx", seq_idx, shape, "an integer (B, S)")
    values = seq_idx.detach().to("cpu", torch.int64)
    return BoundarySpec("seq_idx", values >= 0, values)


def parse_position_ids(position_ids: Tensor, shape: tuple[int, int]) -> BoundarySpec | None:
    """Parse `position_ids`: a document goes on as long as its positions grow by one. Raises
    `BoundaryError` for another shape, fractions or half precision; None where they mark no
    documents.

    Args:
        position_ids: [S], [B or 1, S], or a stack [4, B or 1, S] whose first row holds the text
            positions, or [3, B or 1, S] (mRoPE), which marks documents only where all three rows
            are equal.
    """
    given = position_ids.detach().to("cpu")
    if position_ids.ndim == 3:
        rows = position_ids.shape[0]
        if rows not in (3, 4):
            raise wrong_shape("position_ids", position_ids, shape, "(B, S), (3, B, S) or (4, B, S)")
        # positions of images or videos: see `hf_packfree.packing.mrope_rows`
        if rows == 3 and not bool((given == given[:1]).all()):
            # fractions are valid there: some processors count time in seconds
            _whole_positions(given.floor() if given.is_floating_point() else given)
            return None
        given = given[0]
    text = _whole_positions(given)
    if text.ndim == 1:
        text = text[None]
    if text.ndim != 2 or text.shape[1] != shape[1] or text.shape[0] not in (1, shape[0]):
        raise wrong_shape("position_ids", position_ids, shape, "(B, S), (3, B, S) or (4, B, S)")
    return BoundarySpec("position_ids", None, text.expand(shape), step=1)


def _whole_positions(given: Tensor) -> Tensor:
    """Return positions on the host as int64; refuse fractions, and half precision, which rounds
    them.
    """
    whole = (
        given.to(torch.int64) if given.dtype in (*_INTEGERS, torch.float32, torch.float64) else None
    )
    if whole is None or not torch.equal(whole.to(given.dtype), given):
        raise BoundaryError(
            "found position_ids of "
            f"{given.dtype}{'' if whole is None else ' that are no whole numbers'}; wanted "
            "integers, which count the tokens of a document; build them with torch.arange"
        )
    return whole


def refuse_jumps(specs: Sequence[BoundarySpec], tokens: RealTokens) -> None:
    """Refuse, by `BoundaryError`, positions that rise by more than one within a padded row, when
    nothing else marks documents.

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
            f"found position_ids that jump ahead within a padded row, by {int(growth[jumps[0]])} "
            f"at row {row}, token {token}; wanted positions that grow by one within a document and "
            "restart with the next; pass seq_idx too, which marks where documents start"
        )


def refuse_branches(
    positions: Tensor, starts: Tensor, padding: Sequence[int], tokens: RealTokens
) -> None:
    """Refuse, by `BoundaryError`, positions that go back into the middle of the document before,
    where only positions separate documents.

    That may be a branch of a tree, such as of rollouts that share a prompt, or a document whose
    beginning was cut off.

    Args:
        positions: int64 [M], of the real tokens.
        starts: bool [M], where they start documents.
        padding: the numbers, of M, of the tokens at which trailing padding starts.
        tokens: the real tokens.
    """
    firsts = starts.nonzero()[:, 0]
    branches = goes_back_inside(positions[firsts], positions[firsts - 1])
    branches[1:] &= ~tokens.row_changes[firsts[1:] - 1] & ~tokens.after_holes[firsts[1:] - 1]
    found = [first for first in firsts[branches].tolist() if first not in padding]
    if found:
        row, token = tokens.position_of(found[0])
        raise BoundaryError(
            "found position_ids that go back into the middle of the document before, from "
            f"{int(positions[found[0] - 1])} to {int(positions[found[0]])} at row {row}, token "
            f"{token}: a branch of a tree, or a document without its beginning; wanted positions "
            "that restart where a document starts; pass seq_idx too for documents, and "
            "packed_sequence=PackedSequence.from_tree(segment_lengths, parents) for a tree"
        )


def goes_back_inside(firsts: Tensor, before: Tensor) -> Tensor:
    """Return bool [N], whether documents of a row start inside the one before by their positions.

    Args:
        firsts: int64 [N], the position at which each starts.
        before: int64 [N], the last position of the document before; the first entry is not read.
    """
    inside = torch.zeros_like(firsts, dtype=torch.bool)
    inside[1:] = (firsts[1:] > firsts[:-1]) & (firsts[1:] <= before[1:])
    return inside


def refuse_unclear(unclear: Tensor, tokens: RealTokens) -> None:
    """Refuse, by `BoundaryError`, positions that restart after padding inside a row at another
    value than 0, see `BoundarySpec.unclear_starts`.
    """
    row, token = tokens.position_of(int(unclear.nonzero()[0, 0]))
    raise BoundaryError(
        f"found position_ids that restart after padding, but not at 0, at row {row}, token "
        f"{token}; wanted 0 there for a new document, or positions that go on for the same one; "
        "pass seq_idx too, which marks where documents start"
    )


def refuse_holes(starts: Tensor, tokens: RealTokens) -> None:
    """Refuse, by `UnsupportedInput`, padding inside a document of a packed batch: upstream's
    recurrent state decays over these tokens, ours would not.
    """
    holes = (tokens.after_holes & ~starts[1:]).nonzero()[:, 0]
    if holes.numel():
        row, token = tokens.position_of(int(holes[0]))
        raise UnsupportedInput(
            f"found padding inside a document of a packed batch, after row {row}, token {token}; "
            "wanted padding between documents and at the ends of rows; pass documents with holes "
            "in a batch of their own, one per row, with a 0/1 mask"
        )


def join_trailing_padding(
    starts: Tensor, tokens: RealTokens, batch: Batch
) -> tuple[Tensor, list[int]]:
    """Join a row's trailing one-token documents into one padding segment where they all hold the
    same token.

    Collators pad positions with zeros, which looks like one document per pad token; only the
    tokens, being equal, show that it is padding. A one-token document has no next token to predict,
    so joining equal ones changes no language model's loss.

    Args:
        starts: bool [M], where documents start.
        tokens: the real tokens.
        batch: the tokens of all rows.

    Returns:
        starts: bool [M], after joining.
        padding: the numbers, of M, of the tokens at which trailing padding starts.
    """
    indices, row = tokens.indices, tokens.row
    row_ends = torch.nn.functional.pad(
        tokens.row_changes.nonzero()[:, 0], (0, 1), value=len(indices) - 1
    )
    joined, padding = starts.clone(), []
    for end in row_ends.tolist():
        if end == 0 or not starts[end] or row[end] != row[end - 1]:
            continue
        # a single trailing token is padding only if it is the padding token: there is no other to
        # compare it with
        if not starts[end - 1]:
            padding += [end] if batch.is_padding(int(indices[end])) else []
            continue
        longer = (~starts[: end + 1]).nonzero()
        first = int(longer[-1]) + 1 if longer.numel() else 0
        first = max(first, int((row == row[end]).nonzero()[0]))
        other = (~batch.equal(indices[first : end + 1], int(indices[end]))).nonzero()
        tail = first + (int(other[-1]) + 1 if other.numel() else 0)
        joined[tail + 1 : end + 1] = False
        padding += [tail] if tail < end else []
    return joined, padding


def integers_of(value: Any) -> Tensor | None:
    """Return integers, given as a tensor or lists, as int64 on the host; None if anything else is
    given.
    """
    try:
        given = torch.as_tensor(value, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return None
    return None if given.is_floating_point() or given.is_complex() else given.to(torch.int64)


def wrong_shape(name: str, found: Tensor, shape: tuple[int, int], wanted: str) -> BoundaryError:
    """Return the error for a tensor whose shape does not fit the batch's (B, S)."""
    return BoundaryError(
        f"found {name} {found.dtype} {list(found.shape)}; wanted {wanted} with B={shape[0]} rows "
        f"and S={shape[1]} tokens as in the input; build {name} from the same batch as input_ids"
    )


def _short(values: Tensor) -> str:
    shown = values.tolist()
    return (
        str(shown)
        if len(shown) <= 8
        else f"[{', '.join(map(str, shown[:4]))}, ..., {shown[-2]}, {shown[-1]}]"
    )
