"""From whatever the caller has to one record: every claim about boundaries is read, and all must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryConflict, BoundaryError
from hf_packfree.packing.boundaries import (
    BoundarySpec,
    Kept,
    check_mask_shape,
    join_padding_tails,
    parse_block_diagonal_mask,
    parse_cu_seqlens,
    parse_padding_mask,
    parse_position_ids,
    parse_seq_idx,
    refuse_jumps,
    refuse_packed_mrope,
)
from hf_packfree.packing.fast_path import offsets_of_one_row, rows_of_mask
from hf_packfree.packing.record import Integers, PackedSequence

HF_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Upstream's keyword names for packing; spelled in this file and nowhere else."""

_FOREIGN = {"cu_seqlens": "cu_seq_lens_q", "cu_seqlens_q": "cu_seq_lens_q", "max_seqlen": "max_length_q"}


@dataclass(frozen=True, eq=False)
class PackingInputs:
    """Everything a caller can say about documents, as given (None: not said)."""

    position_ids: Tensor | None = None
    attention_mask: Any = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    max_length_q: int | Tensor | None = None
    max_length_k: int | Tensor | None = None
    seq_idx: Tensor | None = None

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any], *, position_ids: Tensor | None, attention_mask: Any) -> PackingInputs:
        """Move upstream's packing keywords out of `kwargs`, so that they go no further in this spelling.

        Raises:
            BoundaryError: a keyword of another library's spelling was given, which nothing would read.
        """
        for foreign, ours in _FOREIGN.items():
            if kwargs.get(foreign) is not None:
                raise BoundaryError(f"found the keyword {foreign}; wanted {ours}, as transformers spells it; rename it")
        return cls(position_ids, attention_mask, **{name: kwargs.pop(name, None) for name in HF_NAMES})

    @property
    def named(self) -> bool:
        """Whether boundaries were passed under upstream's packing keywords."""
        return any(value is not None for value in (self.cu_seq_lens_q, self.cu_seq_lens_k, self.seq_idx))


def to_hf_kwargs(packed: PackedSequence) -> Mapping[str, Any]:
    """Spell the record the way transformers' flash attention reads it."""
    cu_seqlens, longest = packed.cu_seqlens, packed.max_seqlen
    return dict(zip(HF_NAMES, (cu_seqlens, cu_seqlens, longest, longest, packed.seq_idx), strict=True))


def resolve_boundaries(
    inputs: PackingInputs,
    shape: tuple[int, int],
    device: torch.device,
    same_token: Callable[[Tensor, int], Tensor],
    *,
    drop_padding: bool = False,
    is_padding: Callable[[int], bool] = lambda place: False,
) -> PackedSequence | None:
    """Build the one record, or return None where upstream is exact as it is.

    Args:
        inputs: what the caller said.
        shape: (B, S), rows and tokens of a row.
        device: where the tokens are.
        drop_padding: make a record for rows of one document too whose padding, at either end, is in a 0/1 mask.
        is_padding: given one place, says whether the token there is the one that pads.
        same_token: given int64 [M] places in the flattened batch and one place, says which hold the same input.

    Returns:
        None when every row holds one document and its padding, if any, is in a 0/1 or 4-D mask.  With `drop_padding`
        None when there is none to drop; a batch of nothing but padding is then one token of padding.

    Raises:
        BoundaryError: a form is malformed.
        BoundaryConflict: two inputs disagree.
    """
    offsets = _offsets_of_one_row(inputs, shape, device)
    if offsets is not None:
        lengths = offsets.diff()
        _check_longest(inputs, int(lengths.max()))
        return None if len(lengths) == 1 else PackedSequence.from_lengths(lengths, device=device, batch_shape=shape)
    rows = _rows_of_mask(inputs, shape) if drop_padding else None
    if rows is not None:
        sizes, places = rows
        return PackedSequence.from_lengths(sizes, device=device, batch_shape=shape, indices=places, plain=True)
    claims = _claims(inputs, shape, device)
    real = torch.ones(shape, dtype=torch.bool)
    for claim in claims:
        real = real if claim.real is None else real & claim.real
    if inputs.position_ids is not None and not any(claim.form == "position_ids" for claim in claims):
        refuse_packed_mrope(inputs.position_ids, real)
    kept = Kept.of(real)
    refuse_jumps(claims, kept)
    drop_padding = drop_padding and _can_drop(inputs, real)
    if kept.places.numel() == 0:
        return _nothing(shape, device) if drop_padding else None
    starts, longest, tails = _agree(claims, kept, same_token, is_padding)
    _check_longest(inputs, longest)
    starts = _row_starts(kept) if starts is None else starts
    lengths = _lengths(starts)
    plain = _is_plain(inputs, claims, real, lengths.numel())
    if plain and not drop_padding:
        return None
    return PackedSequence.from_lengths(
        lengths,
        device=device,
        batch_shape=shape,
        indices=kept.places if kept.gaps else None,
        padding_segments=(starts.cumsum(0) - 1)[tails].tolist(),
        plain=plain,
    )


def _offsets_of_one_row(inputs: PackingInputs, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    if shape[0] != 1 or inputs.attention_mask is not None:
        return None
    both = [inputs.cu_seq_lens_q, None if inputs.cu_seq_lens_k is inputs.cu_seq_lens_q else inputs.cu_seq_lens_k]
    given = [offsets for offsets in both if offsets is not None]
    return offsets_of_one_row(shape[1], device, given, inputs.seq_idx, inputs.position_ids)


def _rows_of_mask(inputs: PackingInputs, shape: tuple[int, int]) -> tuple[Integers, Tensor] | None:
    mask = inputs.attention_mask
    alone = inputs.position_ids is None and not inputs.named and inputs.max_length_q is None and inputs.max_length_k is None
    return rows_of_mask(mask) if alone and isinstance(mask, Tensor) and tuple(mask.shape) == shape else None


def _can_drop(inputs: PackingInputs, real: Tensor) -> bool:
    """Whether a 2-D mask marks padding at the ends of rows; a hole within a document is not padding: it lets time pass."""
    mask = inputs.attention_mask
    padded = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(real.all())
    return padded and bool(((~real[:, :-1] & real[:, 1:]).sum(1) + real[:, 0] <= 1).all())


def _nothing(shape: tuple[int, int], device: torch.device) -> PackedSequence:
    first = torch.zeros(1, dtype=torch.int64)
    return PackedSequence.from_lengths([1], device=device, batch_shape=shape, indices=first, padding_segments=[0], plain=True)


def is_indexed_mask(mask: Any) -> bool:
    """Whether a mask numbers the documents (2-D, 1, 1, 2, 2, 0), which upstream would read as a padding mask."""
    return isinstance(mask, Tensor) and mask.ndim == 2 and mask.dtype != torch.bool and bool((mask > 1).any())


def _claims(inputs: PackingInputs, shape: tuple[int, int], device: torch.device) -> list[BoundarySpec]:
    for name in ("seq_idx", "position_ids", "attention_mask"):
        given = getattr(inputs, name)
        if isinstance(given, (list, tuple)):
            raise BoundaryError(f"found {name} as a {type(given).__name__}; wanted a tensor; call torch.tensor on it")
    found: list[BoundarySpec | None] = []
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        offsets = getattr(inputs, name)
        if offsets is not None and not (found and offsets is inputs.cu_seq_lens_q):
            found.append(parse_cu_seqlens(name, offsets, shape, device))
    if inputs.seq_idx is not None:
        found.append(parse_seq_idx(inputs.seq_idx, shape))
    if inputs.position_ids is not None:
        found.append(parse_position_ids(inputs.position_ids, shape))
    if isinstance(inputs.attention_mask, Tensor):
        check_mask_shape(inputs.attention_mask, shape)
        read = parse_padding_mask if inputs.attention_mask.ndim == 2 else parse_block_diagonal_mask
        found.append(read(inputs.attention_mask, shape))
    return [claim for claim in found if claim is not None]


def _agree(
    claims: list[BoundarySpec], kept: Kept, same_token: Callable[[Tensor, int], Tensor], is_padding: Callable[[int], bool]
) -> tuple[Tensor | None, int | None, list[int]]:
    """Return bool [M], the document starts that all claims share, the longest document they speak of, and their tails.

    The first two are None when no claim speaks of documents.  Tails are the first places of segments that are padding:
    what positions pad becomes one segment, what offsets or numbers tell apart stays apart and counts as padding too.
    """
    agreed: tuple[BoundarySpec, Tensor] | None = None
    longest: int | None = None
    tails: list[int] = []
    for claim in sorted(claims, key=lambda claim: claim.form == "position_ids"):  # last, because others say more
        starts = claim.starts(kept)
        if starts is None:
            continue
        if agreed is not None and torch.equal(agreed[1], starts):
            continue
        longest = min(int(_lengths(starts).max()), longest or len(kept.places))
        joined, firsts = join_padding_tails(starts, kept, same_token, is_padding)
        if claim.form == "position_ids":
            starts, tails = joined, firsts
        elif agreed is None:
            tails = sorted([*firsts, *(starts & ~joined).nonzero()[:, 0].tolist()])
        if agreed is not None and not torch.equal(agreed[1], starts):
            raise _conflict(agreed[0], claim, int((agreed[1] != starts).nonzero()[0, 0]), kept)
        agreed = agreed or (claim, starts)
    return (None if agreed is None else agreed[1]), longest, tails


def _row_starts(kept: Kept) -> Tensor:
    return torch.cat((torch.ones(1, dtype=torch.bool), kept.new_row))


def _lengths(starts: Tensor) -> Tensor:
    return torch.cat((starts.nonzero()[:, 0], torch.tensor([starts.numel()]))).diff()


def _is_plain(inputs: PackingInputs, claims: list[BoundarySpec], real: Tensor, num_documents: int) -> bool:
    """Whether upstream is exact on this batch: one document per row, and padding only where its own mask says so."""
    if num_documents != int(real.any(1).sum()):
        return False
    masks = [claim for claim in claims if claim.form == "attention_mask"]
    agreed = any(mask.real is not None and torch.equal(mask.real, real) for mask in masks)
    mask = inputs.attention_mask
    numbered = isinstance(mask, Tensor) and mask.ndim == 2 and masks[0].values is not None
    return (agreed and not numbered) or bool(real.all())


def _check_longest(inputs: PackingInputs, longest: int | None) -> None:
    for name in ("max_length_q", "max_length_k"):
        given = getattr(inputs, name)
        if given is None:
            continue
        if longest is None:
            raise BoundaryError(f"found {name}={int(given)} alone; wanted cu_seq_lens_q beside it; pass both")
        if int(given) < longest:
            raise BoundaryConflict(
                f"found {name}={int(given)} beside a document of {longest} tokens; wanted at least {longest}; "
                f"build {name} from the same lengths as the boundaries"
            )


def _conflict(one: BoundarySpec, other: BoundarySpec, number: int, kept: Kept) -> BoundaryConflict:
    row, token = int(kept.row[number]), int(kept.places[number]) - int(kept.row[number]) * kept.width
    return BoundaryConflict(
        f"found {one.form} and {other.form} in disagreement: at row {row}, token {token} one starts a document and the "
        "other goes on; wanted the same boundaries in both; pass one of them alone, or build both from the same lengths"
    )
