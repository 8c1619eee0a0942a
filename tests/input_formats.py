"""Every input form a packed batch can have, by name."""

from __future__ import annotations

import torch

from tests.support import Batch, documents

INT32 = torch.int32


def one_row(lengths) -> dict[str, torch.Tensor]:
    """The facts of one row of these documents."""
    return {
        "positions": torch.cat([torch.arange(n) for n in lengths])[None],
        "offsets": torch.tensor([0, *lengths]).cumsum(0).to(INT32),
        "numbers": torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None].to(INT32),
    }


def block_mask(numbers: torch.Tensor) -> torch.Tensor:
    """bool [B, 1, S, S]: same document, not later, not padding (number 0 is a document; below 0 padding)."""
    same = (numbers[:, :, None] == numbers[:, None, :]) & (numbers >= 0)[:, None, :]
    return same.tril()[:, None]


def flash(facts, lengths) -> dict[str, object]:
    """The four flash keywords."""
    offsets = facts["offsets"]
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": max(lengths), "max_length_k": max(lengths)}


def _positions(facts, lengths):
    return {"position_ids": facts["positions"]}


def _additive(facts, lengths):
    mask = block_mask(facts["numbers"])
    return {"attention_mask": torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)}


def _starts_above_zero(facts, lengths):
    positions = facts["positions"].clone()
    positions[:, : lengths[0]] += 7
    return {"position_ids": positions}


ROW_FORMATS = {
    "positions": _positions,
    "positions_4rows": lambda f, n: {"position_ids": f["positions"][None].expand(4, -1, -1)},
    "positions_3rows": lambda f, n: {"position_ids": f["positions"][None].expand(3, -1, -1)},
    "positions_3rows_flash": lambda f, n: {"position_ids": f["positions"][None].expand(3, -1, -1), **flash(f, n)},
    "cu_seq_lens": lambda f, n: {"cu_seq_lens_q": f["offsets"], "cu_seq_lens_k": f["offsets"]},
    "cu_seq_lens_q": lambda f, n: {"cu_seq_lens_q": f["offsets"]},
    "seq_idx": lambda f, n: {"seq_idx": f["numbers"]},
    "all_flash": lambda f, n: {**_positions(f, n), **flash(f, n), "seq_idx": f["numbers"]},
    "flash_without_seq_idx": lambda f, n: {**_positions(f, n), **flash(f, n)},
    "ones_and_positions": lambda f, n: {**_positions(f, n), "attention_mask": torch.ones_like(f["positions"])},
    "ones_and_all_flash": lambda f, n: {
        **_positions(f, n), **flash(f, n), "seq_idx": f["numbers"], "attention_mask": torch.ones_like(f["positions"])
    },
    "ones_and_cu_seq_lens": lambda f, n: {"cu_seq_lens_q": f["offsets"], "attention_mask": torch.ones_like(f["positions"])},
    "ones_and_seq_idx": lambda f, n: {"seq_idx": f["numbers"], "attention_mask": torch.ones_like(f["positions"])},
    "indexed_mask": lambda f, n: {"attention_mask": f["numbers"].long() + 1},
    "indexed_mask_and_positions": lambda f, n: {"attention_mask": f["numbers"].long() + 1, **_positions(f, n)},
    "square_mask": lambda f, n: {"attention_mask": block_mask(f["numbers"])},
    "square_mask_and_positions": lambda f, n: {"attention_mask": block_mask(f["numbers"]), **_positions(f, n)},
    "square_additive": _additive,
    "starts_above_zero": _starts_above_zero,
}
"""PackingInputs of one row without padding; those with three or four rows of positions need a family that takes them."""


def row_batch(form: str, lengths, seed: int = 1) -> Batch:
    """One row of documents in the named form."""
    parts, facts = documents(lengths, seed=seed), one_row(lengths)
    ends = facts["offsets"].tolist()
    places = [(0, torch.arange(a, b)) for a, b in zip(ends, ends[1:])]
    inputs = {"input_ids": torch.cat(parts)[None], "use_cache": False, **ROW_FORMATS[form](facts, lengths)}
    return Batch(parts, inputs, places)


def padded_rows(rows, side: str = "right") -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Several rows of documents, padded: the bare batch, document numbers from 1 (0: padding), and positions."""
    width = max(map(sum, rows)) + 3
    parts = documents([n for row in rows for n in row])
    ids, numbers, positions = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    places, queue = [], iter(parts)
    for index, row in enumerate(rows):
        at = 0 if side == "right" else width - sum(row)
        for number, length in enumerate(row, 1):
            span = torch.arange(at, at + length)
            ids[index, span], numbers[index, span], positions[index, span] = next(queue), number, torch.arange(length)
            places.append((index, span))
            at += length
    return Batch(parts, {"input_ids": ids, "use_cache": False}, places), numbers, positions


def _with(batch: Batch, **more) -> Batch:
    return Batch(batch.documents, {**batch.inputs, **more}, batch.places)


ROWS = ((5, 64, 3), (1, 70), (2, 2, 66, 1))


def rows_batch(form: str, rows=ROWS) -> Batch:
    """Several rows in the named form."""
    batch, numbers, positions = padded_rows(rows, "left" if "left" in form else "right")
    forms = {
        "indexed": lambda: {"attention_mask": numbers},
        "indexed_left": lambda: {"attention_mask": numbers},
        "indexed_and_positions": lambda: {"attention_mask": numbers, "position_ids": positions},
        "mask_and_positions": lambda: {"attention_mask": (numbers > 0).long(), "position_ids": positions},
        "seq_idx": lambda: {"seq_idx": (numbers - 1).to(INT32)},
        "square": lambda: {"attention_mask": block_mask(numbers - 1)},
        "positions_zero_tail": lambda: {"position_ids": positions},
        "cu_seq_lens_with_tails": lambda: {"cu_seq_lens_q": _offsets_of(numbers)},
    }
    return _with(batch, **forms[form]())


ROWS_FORMATS = (
    "indexed", "indexed_left", "indexed_and_positions", "mask_and_positions", "seq_idx", "square", "positions_zero_tail",
    "cu_seq_lens_with_tails",
)


def _offsets_of(numbers: torch.Tensor) -> torch.Tensor:
    flat = (numbers + 100 * torch.arange(len(numbers))[:, None]).reshape(-1)
    return torch.cat([torch.tensor([0]), flat.diff().nonzero()[:, 0] + 1, torch.tensor([flat.numel()])]).to(INT32)
