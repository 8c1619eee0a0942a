"""Build one record from all input formats that the caller passes, which must agree."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryConflict, BoundaryError
from hf_packfree.packing.batch import Batch
from hf_packfree.packing.boundaries import (
    UNCUT,
    BoundarySpec,
    RealTokens,
    join_trailing_padding,
    parse_cu_seqlens,
    parse_position_ids,
    parse_seq_idx,
    refuse_branches,
    refuse_holes,
    refuse_jumps,
    refuse_unclear,
)
from hf_packfree.packing.fast_path import Meanwhile, offsets_of_one_row, rows_of_mask
from hf_packfree.packing.foreign import parse_foreign
from hf_packfree.packing.keywords import PackingInputs
from hf_packfree.packing.masks import EVERYWHERE, parse_masks
from hf_packfree.packing.mrope_rows import check_rows, refuse_packed_mrope
from hf_packfree.packing.padding import lengths_of
from hf_packfree.packing.record import Integers, PackedSequence
from hf_packfree.packing.tree_keywords import resolve_tree


def resolve_boundaries(
    inputs: PackingInputs,
    batch: Batch,
    *,
    drop_padding: bool = False,
    drop_all: bool = False,
    cached: bool = False,
    generates: bool = False,
    meanwhile: Meanwhile | None = None,
) -> PackedSequence | None:
    """Build the record of a batch, or return None where upstream is exact without one.

    Args:
        inputs: what the caller passed.
        batch: the tokens.
        drop_padding: also build a record for rows of one document whose padding, at either end, is
            in a 0/1 mask.
        drop_all: also build a record for a batch of nothing but padding, whose mean loss upstream
            computes as NaN.
        cached: the call continues or fills a cache: rows of one document are upstream's however
            their mask looks.
        generates: the call only generates next tokens: positions that restart after padding inside
            a row, but not at 0, continue their document, as in transformers' generation from
            right-padded prompts.
        meanwhile: called with the starts of one row's documents, which may be wrong where the
            record has others; not called for other batches.

    Returns:
        None when every row holds one document and upstream reads the padding from the same inputs.
        With `drop_padding`, None only when there is no padding to drop. A batch of nothing but
        padding becomes, with `drop_all` or where upstream reads it otherwise, one token in a
        padding segment.

    Raises:
        BoundaryError: an input is malformed.
        BoundaryConflict: two inputs disagree.
        UnsupportedInput: padding inside a document of a packed batch; or see `resolve_tree`.
    """
    shape, device = batch.shape, batch.device
    if inputs.tree or not inputs.given:
        return _tree(inputs, shape, device) if inputs.tree else None
    _refuse_no_rows(shape)
    offsets = _offsets_of_one_row(inputs, shape, device, meanwhile)
    if offsets is not None:
        lengths = offsets.diff()
        _check_max_length(inputs, int(lengths.max()))
        return (
            None
            if len(lengths) == 1
            else PackedSequence.from_lengths(lengths, device=device, batch_shape=shape)
        )
    rows = _rows_of_mask(inputs, shape) if drop_padding else None
    if rows is not None:
        sizes, indices = rows
        return PackedSequence.from_lengths(
            sizes, device=device, batch_shape=shape, indices=indices, plain=True
        )
    check_rows(inputs.position_ids)
    specs = _parse(inputs, shape, device, cached)
    real = _real(specs, shape)
    tokens = RealTokens.from_mask(real)
    refuse_jumps(specs, tokens)
    if tokens.indices.numel() == 0:
        upstreams = _is_plain(specs, real, 0, cached=cached) and (cached or not drop_all)
        return None if upstreams or real.numel() == 0 else _nothing_but_padding(shape, device)
    starts, longest, padding, unclear = _agree(specs, tokens, batch)
    if inputs.position_ids is not None and not any(spec.name == "position_ids" for spec in specs):
        refuse_packed_mrope(inputs.position_ids, shape, tokens, starts)
    _check_max_length(inputs, longest)
    starts = _row_starts(tokens) if starts is None else starts
    lengths = lengths_of(starts)
    if unclear is not None and not generates:
        refuse_unclear(unclear, tokens)
    plain = _is_plain(specs, real, len(lengths), cached=cached)
    if plain and (cached or not (drop_padding and _pads_row_ends(real))):
        return None
    refuse_holes(starts, tokens)
    return PackedSequence.from_lengths(
        lengths,
        device=device,
        batch_shape=shape,
        indices=tokens.indices if tokens.has_padding else None,
        padding_segments=(starts.cumsum(0) - 1)[padding].tolist(),
        plain=plain,
    )


def _refuse_no_rows(shape: tuple[int, int]) -> None:
    if not shape[0]:
        raise BoundaryError(
            "found a batch of no rows; wanted one or more; if accelerate cut it from one row of "
            f"several documents, as dispatch_batches with split_batches does, pass {UNCUT} to "
            "TrainingArguments"
        )


def _tree(inputs: PackingInputs, shape: tuple[int, int], device: torch.device) -> PackedSequence:
    known = {*inputs.tree, "position_ids", "attention_mask"}
    others = [name for name in inputs.given if name not in known]
    positions, mask = inputs.position_ids, inputs.attention_mask
    return resolve_tree(inputs.tree, positions, mask, others, shape, device)


def _offsets_of_one_row(
    inputs: PackingInputs,
    shape: tuple[int, int],
    device: torch.device,
    meanwhile: Meanwhile | None,
) -> Tensor | None:
    if shape[0] != 1 or inputs.attention_mask is not None or inputs.foreign:
        return None
    both = [
        inputs.cu_seq_lens_q,
        None if inputs.cu_seq_lens_k is inputs.cu_seq_lens_q else inputs.cu_seq_lens_k,
    ]
    given = [offsets for offsets in both if offsets is not None]
    positions = inputs.position_ids
    return offsets_of_one_row(shape[1], device, given, inputs.seq_idx, positions, meanwhile)


def _rows_of_mask(inputs: PackingInputs, shape: tuple[int, int]) -> tuple[Integers, Tensor] | None:
    mask = inputs.attention_mask
    others = (inputs.position_ids, inputs.max_length_q, inputs.max_length_k)
    alone = not inputs.named and all(given is None for given in others)
    return (
        rows_of_mask(mask)
        if alone and isinstance(mask, Tensor) and tuple(mask.shape) == shape
        else None
    )


def _parse(
    inputs: PackingInputs, shape: tuple[int, int], device: torch.device, cached: bool
) -> list[BoundarySpec]:
    specs: list[BoundarySpec | None] = []
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        offsets = getattr(inputs, name)
        if offsets is not None and not (specs and offsets is inputs.cu_seq_lens_q):
            specs.append(parse_cu_seqlens(name, offsets, shape, device))
    if inputs.seq_idx is not None:
        specs.append(parse_seq_idx(inputs.seq_idx, shape))
    if inputs.position_ids is not None:
        specs.append(parse_position_ids(inputs.position_ids, shape))
    specs += parse_masks(inputs.attention_mask, shape, cached=cached)
    found = [spec for spec in specs if spec is not None]
    return found + parse_foreign(inputs.foreign, found, shape)


def _real(specs: list[BoundarySpec], shape: tuple[int, int]) -> Tensor:
    """bool [B, S]: the tokens that no format calls padding."""
    real = torch.ones(shape, dtype=torch.bool, device="cpu")
    for spec in specs:
        real = real if spec.real is None else real & spec.real
    return real


def _agree(
    specs: list[BoundarySpec], tokens: RealTokens, batch: Batch
) -> tuple[Tensor | None, int | None, list[int], Tensor | None]:
    """Return the document starts on which all input formats agree, the longest document, padding
    and unclear starts.

    Trailing one-token documents of the same token are padding. Where only positions separate them
    they become one segment; where offsets, `seq_idx` or a mask do, each stays a segment of its own.

    Returns:
        starts: bool [M], None when no format separates documents.
        longest: the length of the longest document in tokens, None when no format separates
            documents.
        padding: the numbers, of M, of the tokens at which padding segments start.
        unclear: bool [M], see `BoundarySpec.unclear_starts`; None where another format decides, or
            there are none.
    """
    agreed: tuple[BoundarySpec, Tensor] | None = None
    longest: int | None = None
    padding: list[int] = []
    unclear: Tensor | None = None
    # positions come last: by positions alone, padding tokens look like documents
    for spec in sorted(specs, key=lambda spec: spec.by_positions):
        starts, unclear = spec.document_starts(tokens), spec.unclear_starts(tokens)
        if starts is not None and unclear is not None:
            starts = (
                starts & ~unclear if agreed is None else torch.where(unclear, agreed[1], starts)
            )
            unclear = unclear if agreed is None else None
        if starts is None or (agreed is not None and torch.equal(agreed[1], starts)):
            continue
        longest = min(int(lengths_of(starts).max()), longest or len(tokens.indices))
        joined, firsts = join_trailing_padding(starts, tokens, batch)
        if spec.by_positions:
            starts, padding = joined, firsts
        elif agreed is None:
            padding = sorted([*firsts, *(starts & ~joined).nonzero()[:, 0].tolist()])
        if agreed is not None and not torch.equal(agreed[1], starts):
            raise _conflict(agreed[0], spec, int((agreed[1] != starts).nonzero()[0, 0]), tokens)
        agreed = agreed or (spec, starts)
    _refuse_branches(agreed, padding, tokens)
    return (None if agreed is None else agreed[1]), longest, padding, unclear


def _refuse_branches(
    agreed: tuple[BoundarySpec, Tensor] | None, padding: list[int], tokens: RealTokens
) -> None:
    if agreed is not None and agreed[0].by_positions:
        spec, starts = agreed
        assert spec.values is not None
        refuse_branches(tokens.select(spec.values), starts, padding, tokens)


def _pads_row_ends(real: Tensor) -> bool:
    """Whether there is padding, and only at the ends of rows: upstream's linear layers read padding
    inside a row as tokens.
    """
    return not bool(real.all()) and bool(
        ((~real[:, :-1] & real[:, 1:]).sum(1) + real[:, 0] <= 1).all()
    )


def _nothing_but_padding(shape: tuple[int, int], device: torch.device) -> PackedSequence:
    first = torch.zeros(1, dtype=torch.int64, device="cpu")
    return PackedSequence.from_lengths(
        [1], device=device, batch_shape=shape, indices=first, padding_segments=[0], plain=True
    )


def _row_starts(tokens: RealTokens) -> Tensor:
    return torch.nn.functional.pad(tokens.row_changes, (1, 0), value=True)


def _is_plain(specs: list[BoundarySpec], real: Tensor, num_documents: int, *, cached: bool) -> bool:
    """Whether upstream is exact on this batch: one document per row, and masks tell all layers
    which tokens are padding.

    With a cache, only the linear layers' masks were read.
    """
    if num_documents != int(real.any(1).sum()) or not all(spec.as_upstream for spec in specs):
        return False
    agreeing = [
        spec.covers for spec in specs if spec.real is not None and torch.equal(spec.real, real)
    ]
    return cached or bool(real.all()) or frozenset().union(*agreeing) == EVERYWHERE


def _check_max_length(inputs: PackingInputs, longest: int | None) -> None:
    for name, given in inputs.longest().items():
        if longest is None:
            raise BoundaryError(f"found {name}={given} alone; wanted cu_seq_lens_q too; pass both")
        if given < longest:
            raise BoundaryConflict(
                f"found {name}={given} with a document of {longest} tokens; wanted at least "
                f"{longest}; build {name} from the same lengths as the boundaries"
            )


def _conflict(
    one: BoundarySpec, other: BoundarySpec, number: int, tokens: RealTokens
) -> BoundaryConflict:
    row, token = tokens.position_of(number)
    return BoundaryConflict(
        f"found {one.name} and {other.name} in disagreement: a document starts at row {row}, token "
        f"{token} in one of them and not in the other; wanted the same boundaries in both; pass "
        "one of them alone, or build both from the same lengths"
    )
