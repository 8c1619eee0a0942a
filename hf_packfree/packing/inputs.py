"""From whatever input format the caller has to one record: every format is parsed, and all must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryConflict, BoundaryError
from hf_packfree.packing.boundaries import (
    BoundarySpec,
    RealTokens,
    check_mask_shape,
    join_trailing_padding,
    parse_block_diagonal_mask,
    parse_cu_seqlens,
    parse_padding_mask,
    parse_position_ids,
    parse_seq_idx,
    refuse_jumps,
)
from hf_packfree.packing.fast_path import offsets_of_one_row, rows_of_mask
from hf_packfree.packing.mrope import check_rows, refuse_packed_mrope
from hf_packfree.packing.record import Integers, PackedSequence

HF_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Upstream's keyword names for packing; spelled in this file and nowhere else."""

_FOREIGN = {"cu_seqlens": "cu_seq_lens_q", "cu_seqlens_q": "cu_seq_lens_q", "max_seqlen": "max_length_q"}


@dataclass(frozen=True, eq=False)
class PackingInputs:
    """The arguments of a forward that can describe documents, as passed; None where one was not passed.

    Shapes: B rows, S tokens of a row, N documents.

    Attributes:
        position_ids: integers [S], [B or 1, S], or a stack of 3 or 4 such rows.
        attention_mask: [B, S], 0/1 or indexed (1, 1, 2, 2, 0); [B or 1, heads or 1, S, S], block-diagonal, bool or additive;
            anything else belongs to upstream.
        cu_seq_lens_q, cu_seq_lens_k: int32 [N+1], offsets in tokens of the flattened batch.
        max_length_q, max_length_k: tokens of the longest document, or more.
        seq_idx: integers [B, S], the document of every token; below 0 is padding.
    """

    position_ids: Tensor | None = None
    attention_mask: Any = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    max_length_q: int | Tensor | None = None
    max_length_k: int | Tensor | None = None
    seq_idx: Tensor | None = None

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any], *, position_ids: Tensor | None, attention_mask: Any) -> PackingInputs:
        """Pop upstream's packing keywords from `kwargs`, so that layers below receive the record alone.

        Raises:
            BoundaryError: a keyword in another library's spelling was passed, which upstream would ignore.
        """
        for foreign, ours in _FOREIGN.items():
            if kwargs.get(foreign) is not None:
                raise BoundaryError(f"found the keyword {foreign}; wanted {ours}, as transformers spells it; rename it")
        return cls(position_ids, attention_mask, **{name: kwargs.pop(name, None) for name in HF_KEYWORDS})

    @property
    def named(self) -> bool:
        """Whether boundaries were passed under upstream's packing keywords."""
        return any(value is not None for value in (self.cu_seq_lens_q, self.cu_seq_lens_k, self.seq_idx))


def to_hf_kwargs(packed: PackedSequence) -> Mapping[str, Any]:
    """Return the record as the keywords that transformers' flash attention reads."""
    cu_seqlens, longest = packed.cu_seqlens, packed.max_seqlen
    return dict(zip(HF_KEYWORDS, (cu_seqlens, cu_seqlens, longest, longest, packed.seq_idx), strict=True))


def is_indexed_mask(mask: Any) -> bool:
    """Whether a mask numbers the documents (2-D, 1, 1, 2, 2, 0), which upstream would read as a padding mask."""
    return isinstance(mask, Tensor) and mask.ndim == 2 and mask.dtype != torch.bool and bool((mask > 1).any())


def resolve_boundaries(
    inputs: PackingInputs,
    shape: tuple[int, int],
    device: torch.device,
    same_token: Callable[[Tensor, int], Tensor],
    *,
    drop_padding: bool = False,
    is_padding: Callable[[int], bool] = lambda index: False,
) -> PackedSequence | None:
    """Build the one record, or return None where upstream is exact without it.

    Args:
        inputs: what the caller passed.
        shape: (B, S), rows and tokens of a row.
        device: of the tokens.
        same_token: called with int64 [M] indices into the flattened [B*S] and one index more; returns bool [M] on the host,
            True for the tokens equal to that one.
        drop_padding: also build a record for rows of one document whose padding, at either end, is in a 0/1 mask.
        is_padding: called with one index; returns whether that token is the padding token.

    Returns:
        None when every row holds one document and its padding, if any, is in a 0/1 or 4-D mask.  With `drop_padding` None
        only when there is none to drop; a batch of nothing but padding then becomes one token in a padding segment.

    Raises:
        BoundaryError: an input is malformed.
        BoundaryConflict: two inputs disagree.
    """
    offsets = _offsets_of_one_row(inputs, shape, device)
    if offsets is not None:
        lengths = offsets.diff()
        _check_max_length(inputs, int(lengths.max()))
        return None if len(lengths) == 1 else PackedSequence.from_lengths(lengths, device=device, batch_shape=shape)
    rows = _rows_of_mask(inputs, shape) if drop_padding else None
    if rows is not None:
        sizes, indices = rows
        return PackedSequence.from_lengths(sizes, device=device, batch_shape=shape, indices=indices, plain=True)
    check_rows(inputs.position_ids)
    specs = _parse(inputs, shape, device)
    real = torch.ones(shape, dtype=torch.bool)
    for spec in specs:
        real = real if spec.real is None else real & spec.real
    tokens = RealTokens.from_mask(real)
    refuse_jumps(specs, tokens)
    drop_padding = drop_padding and _pads_row_ends(inputs, real)
    if tokens.indices.numel() == 0:
        return _nothing_but_padding(shape, device) if drop_padding else None
    starts, longest, padding = _agree(specs, tokens, same_token, is_padding)
    if inputs.position_ids is not None and not any(spec.name == "position_ids" for spec in specs):
        refuse_packed_mrope(inputs.position_ids, shape, tokens, starts)
    _check_max_length(inputs, longest)
    starts = _row_starts(tokens) if starts is None else starts
    lengths = _lengths(starts)
    plain = _is_plain(inputs, specs, real, lengths.numel())
    if plain and not drop_padding:
        return None
    return PackedSequence.from_lengths(
        lengths,
        device=device,
        batch_shape=shape,
        indices=tokens.indices if tokens.has_padding else None,
        padding_segments=(starts.cumsum(0) - 1)[padding].tolist(),
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
    others = (inputs.position_ids, inputs.max_length_q, inputs.max_length_k)
    alone = not inputs.named and all(given is None for given in others)
    return rows_of_mask(mask) if alone and isinstance(mask, Tensor) and tuple(mask.shape) == shape else None


def _parse(inputs: PackingInputs, shape: tuple[int, int], device: torch.device) -> list[BoundarySpec]:
    for name in ("seq_idx", "position_ids", "attention_mask"):
        given = getattr(inputs, name)
        if isinstance(given, (list, tuple)):
            raise BoundaryError(f"found {name} as a {type(given).__name__}; wanted a tensor; call torch.tensor on it")
    specs: list[BoundarySpec | None] = []
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        offsets = getattr(inputs, name)
        if offsets is not None and not (specs and offsets is inputs.cu_seq_lens_q):
            specs.append(parse_cu_seqlens(name, offsets, shape, device))
    if inputs.seq_idx is not None:
        specs.append(parse_seq_idx(inputs.seq_idx, shape))
    if inputs.position_ids is not None:
        specs.append(parse_position_ids(inputs.position_ids, shape))
    if isinstance(inputs.attention_mask, Tensor):
        check_mask_shape(inputs.attention_mask, shape)
        parse_mask = parse_padding_mask if inputs.attention_mask.ndim == 2 else parse_block_diagonal_mask
        specs.append(parse_mask(inputs.attention_mask, shape))
    return [spec for spec in specs if spec is not None]


def _agree(
    specs: list[BoundarySpec],
    tokens: RealTokens,
    same_token: Callable[[Tensor, int], Tensor],
    is_padding: Callable[[int], bool],
) -> tuple[Tensor | None, int | None, list[int]]:
    """Return the document starts that all input formats share, the longest document, and where trailing padding starts.

    Trailing one-token documents of the same token are padding.  Where only positions separate them they become one segment;
    where offsets, `seq_idx` or a mask do, each stays a segment of its own.

    Returns:
        starts: bool [M], None when no format separates documents.
        longest: in tokens, None when no format separates documents.
        padding: the numbers, of M, of the tokens at which padding segments start.
    """
    agreed: tuple[BoundarySpec, Tensor] | None = None
    longest: int | None = None
    padding: list[int] = []
    # positions come last, because they alone cannot tell padding from documents
    for spec in sorted(specs, key=lambda spec: spec.name == "position_ids"):
        starts = spec.document_starts(tokens)
        if starts is None or (agreed is not None and torch.equal(agreed[1], starts)):
            continue
        longest = min(int(_lengths(starts).max()), longest or len(tokens.indices))
        joined, firsts = join_trailing_padding(starts, tokens, same_token, is_padding)
        if spec.name == "position_ids":
            starts, padding = joined, firsts
        elif agreed is None:
            padding = sorted([*firsts, *(starts & ~joined).nonzero()[:, 0].tolist()])
        if agreed is not None and not torch.equal(agreed[1], starts):
            raise _conflict(agreed[0], spec, int((agreed[1] != starts).nonzero()[0, 0]), tokens)
        agreed = agreed or (spec, starts)
    return (None if agreed is None else agreed[1]), longest, padding


def _pads_row_ends(inputs: PackingInputs, real: Tensor) -> bool:
    """Whether a 2-D mask marks padding at the ends of rows only: linear layers see a hole as tokens that passed."""
    mask = inputs.attention_mask
    padded = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(real.all())
    return padded and bool(((~real[:, :-1] & real[:, 1:]).sum(1) + real[:, 0] <= 1).all())


def _nothing_but_padding(shape: tuple[int, int], device: torch.device) -> PackedSequence:
    first = torch.zeros(1, dtype=torch.int64)
    return PackedSequence.from_lengths(
        [1], device=device, batch_shape=shape, indices=first, padding_segments=[0], plain=True
    )


def _row_starts(tokens: RealTokens) -> Tensor:
    return torch.cat((torch.ones(1, dtype=torch.bool), tokens.row_changes))


def _lengths(starts: Tensor) -> Tensor:
    return torch.cat((starts.nonzero()[:, 0], torch.tensor([starts.numel()]))).diff()


def _is_plain(inputs: PackingInputs, specs: list[BoundarySpec], real: Tensor, num_documents: int) -> bool:
    """Whether upstream is exact on this batch: one document per row, and every padding token masked by its own mask."""
    if num_documents != int(real.any(1).sum()):
        return False
    masks = [spec for spec in specs if spec.name == "attention_mask"]
    agreed = any(mask.real is not None and torch.equal(mask.real, real) for mask in masks)
    mask = inputs.attention_mask
    indexed = isinstance(mask, Tensor) and mask.ndim == 2 and masks[0].values is not None
    return (agreed and not indexed) or bool(real.all())


def _check_max_length(inputs: PackingInputs, longest: int | None) -> None:
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


def _conflict(one: BoundarySpec, other: BoundarySpec, number: int, tokens: RealTokens) -> BoundaryConflict:
    row, token = tokens.position_of(number)
    return BoundaryConflict(
        f"found {one.name} and {other.name} in disagreement: a document starts at row {row}, token {token} in one of them and "
        "not in the other; wanted the same boundaries in both; pass one of them alone, or build both from the same lengths"
    )
