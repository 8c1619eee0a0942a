"""Every input format a packed batch can have, by name."""

from __future__ import annotations

import torch

from tests.support import Batch, documents

INT32 = torch.int32


def one_row(lengths) -> dict[str, torch.Tensor]:
    """The boundaries of one row of these documents: `position_ids` and `seq_idx` [1, S],
    `cu_seqlens` [N+1].
    """
    return {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(INT32),
        "seq_idx": torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None].to(INT32),
    }


def block_mask(seq_idx: torch.Tensor) -> torch.Tensor:
    """bool [B, 1, S, S] of `seq_idx` [B, S]: same document, not later, not padding (below 0)."""
    same = (seq_idx[:, :, None] == seq_idx[:, None, :]) & (seq_idx >= 0)[:, None, :]
    return same.tril()[:, None]


def additive(mask: torch.Tensor) -> torch.Tensor:
    """The same mask as float32: 0 where it lets through, the lowest number elsewhere."""
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def _positions(row, lengths):
    return {"position_ids": row["position_ids"]}


def _cu_seqlens(row, lengths):
    return {"cu_seq_lens_q": row["cu_seqlens"], "cu_seq_lens_k": row["cu_seqlens"]}


def _flash(row, lengths):
    """The four keywords of flash attention."""
    return {**_cu_seqlens(row, lengths), "max_length_q": max(lengths), "max_length_k": max(lengths)}


def _seq_idx(row, lengths):
    return {"seq_idx": row["seq_idx"]}


def _indexed_mask(row, lengths):
    return {"attention_mask": row["seq_idx"].long() + 1}


def _block_mask(row, lengths):
    return {"attention_mask": block_mask(row["seq_idx"])}


def _additive_block_mask(row, lengths):
    return {"attention_mask": additive(block_mask(row["seq_idx"]))}


def _stacked(count):
    return lambda row, lengths: {"position_ids": row["position_ids"][None].expand(count, -1, -1)}


def _ones(row, lengths):
    return {"attention_mask": torch.ones_like(row["position_ids"])}


def _starts_above_zero(row, lengths):
    positions = row["position_ids"].clone()
    positions[:, : lengths[0]] += 7
    return {"position_ids": positions}


def _all(*formats):
    """Several formats in one call."""
    return lambda row, lengths: {
        name: value for one in formats for name, value in one(row, lengths).items()
    }


ROW_FORMATS = {
    "positions": _positions,
    "positions_4rows": _stacked(4),
    "positions_3rows": _stacked(3),
    "positions_3rows_flash": _all(_stacked(3), _flash),
    "cu_seq_lens": _cu_seqlens,
    "cu_seq_lens_q": lambda row, lengths: {"cu_seq_lens_q": row["cu_seqlens"]},
    "seq_idx": _seq_idx,
    "all_flash": _all(_positions, _flash, _seq_idx),
    "flash_without_seq_idx": _all(_positions, _flash),
    "ones_and_positions": _all(_positions, _ones),
    "ones_and_all_flash": _all(_positions, _flash, _seq_idx, _ones),
    "ones_and_cu_seq_lens": _all(lambda row, lengths: {"cu_seq_lens_q": row["cu_seqlens"]}, _ones),
    "ones_and_seq_idx": _all(_seq_idx, _ones),
    "indexed_mask": _indexed_mask,
    "indexed_mask_and_positions": _all(_indexed_mask, _positions),
    "block_mask": _block_mask,
    "block_mask_and_positions": _all(_block_mask, _positions),
    "additive_block_mask": _additive_block_mask,
    "starts_above_zero": _starts_above_zero,
}
"""Formats of one row without padding; those with three or four rows of positions need a family
that takes them.
"""


def row_batch(input_format: str, lengths, seed: int = 1) -> Batch:
    """One row of documents in the named format."""
    parts, row = documents(lengths, seed=seed), one_row(lengths)
    ends = row["cu_seqlens"].tolist()
    spans = [(0, torch.arange(a, b)) for a, b in zip(ends, ends[1:])]
    inputs = {
        "input_ids": torch.cat(parts)[None],
        "use_cache": False,
        **ROW_FORMATS[input_format](row, lengths),
    }
    return Batch(parts, inputs, spans)


def padded_rows(
    rows, side: str = "right", extra: int = 3
) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Several rows of documents, padded: the bare batch, document numbers from 1 (0: padding), and
    positions.

    Args:
        rows: the lengths of each row's documents.
        side: of the padding.
        extra: padding of the longest row, in tokens.
    """
    width = max(map(sum, rows)) + extra
    parts = documents([n for row in rows for n in row])
    ids, numbers, positions = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    spans, queue = [], iter(parts)
    for index, row in enumerate(rows):
        at = 0 if side == "right" else width - sum(row)
        for number, length in enumerate(row, 1):
            span = torch.arange(at, at + length)
            ids[index, span], numbers[index, span], positions[index, span] = (
                next(queue),
                number,
                torch.arange(length),
            )
            spans.append((index, span))
            at += length
    return Batch(parts, {"input_ids": ids, "use_cache": False}, spans), numbers, positions


ROWS = ((5, 64, 3), (1, 70), (2, 2, 66, 1))

ROWS_FORMATS = {
    "indexed": lambda numbers, positions: {"attention_mask": numbers},
    "indexed_left": lambda numbers, positions: {"attention_mask": numbers},
    "indexed_and_positions": lambda numbers, positions: {
        "attention_mask": numbers,
        "position_ids": positions,
    },
    "mask_and_positions": lambda numbers, positions: {
        "attention_mask": (numbers > 0).long(),
        "position_ids": positions,
    },
    "seq_idx": lambda numbers, positions: {"seq_idx": (numbers - 1).to(INT32)},
    "block_mask": lambda numbers, positions: {"attention_mask": block_mask(numbers - 1)},
    "positions_zero_tail": lambda numbers, positions: {"position_ids": positions},
    "cu_seq_lens_with_tails": lambda numbers, positions: {"cu_seq_lens_q": _cu_seqlens_of(numbers)},
}
"""Formats of several rows; in the last two, padding is a segment like the others."""


def rows_batch(input_format: str, rows=ROWS) -> Batch:
    """Several rows in the named format."""
    batch, numbers, positions = padded_rows(rows, "left" if "left" in input_format else "right")
    return Batch(
        batch.documents,
        {**batch.inputs, **ROWS_FORMATS[input_format](numbers, positions)},
        batch.places,
    )


def _cu_seqlens_of(numbers: torch.Tensor) -> torch.Tensor:
    flat = (numbers + 100 * torch.arange(len(numbers))[:, None]).reshape(-1)
    return torch.cat(
        [torch.tensor([0]), flat.diff().nonzero()[:, 0] + 1, torch.tensor([flat.numel()])]
    ).to(INT32)
