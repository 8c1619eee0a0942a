"""Warnings of a Trainer whose rows hold several documents, and which hands the model nothing that
tells them apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import DataCollatorWithFlattening, Trainer

logger = logging.getLogger("hf_packfree")
_TAKES_LENGTHS = {
    "train_dataset": "set padding_free=True in TRL's SFTConfig",
    "eval_dataset": "leave eval_packing=True out of TRL's SFTConfig or add packing=True",
}
"""{data set: settings with which its rows keep their documents apart}."""
_BOUNDARIES = {"position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "seq_lengths"}
"""Columns that tell the documents of a row apart, as transformers and TRL write them."""
_WORDS = ("return_position_ids", "return_flash_attn_kwargs", "return_seq_idx")


def warn_of_rows_without_boundaries(args: Any, trainer: Trainer | None) -> None:
    """Warn of rows that mix documents: TRL's wrapped ones, rows packed beforehand whose lengths the
    collator drops, and flattened rows without a word of their documents.
    """
    packs = getattr(args, "packing", False) or getattr(args, "eval_packing", False)
    if packs and getattr(args, "packing_strategy", None) == "wrapped":
        logger.warning(
            "found packing_strategy='wrapped', whose rows are cut from the text of all documents "
            "and say nothing of where these start, so that they read each other; wanted documents "
            "apart; set packing_strategy='bfd', or 'bfd_split', which keeps the ends of documents "
            "longer than max_length"
        )
    collator = getattr(trainer, "data_collator", None)
    for name, mend in _TAKES_LENGTHS.items():
        # where TRL's `pack_dataset` keeps the lengths of a row's documents
        if "seq_lengths" in _columns(trainer, name) and _drops_lengths(collator):
            logger.warning(
                "found rows of several documents, by the column seq_lengths of %s, and a %s that "
                "drops it, so that they read each other; wanted documents apart; %s, or pass the "
                "documents before they were packed",
                name,
                type(collator).__name__,
                mend,
            )
    if _says_nothing(collator):
        logger.warning(
            "found a %s with return_position_ids=False, whose rows say nothing of where documents "
            "start, so that they read each other; wanted documents apart; leave it out, or set "
            "return_seq_idx=True or return_flash_attn_kwargs=True",
            type(collator).__name__,
        )


def warn_of_removed_columns(trainer: Trainer) -> None:
    """Warn of columns that tell a row's documents apart and that the Trainer removes before its
    collator sees them; for a Trainer that has made its data loader.
    """
    kept = getattr(trainer, "_signature_columns", None)
    if kept is None:
        return
    for name in _TAKES_LENGTHS:
        said = _BOUNDARIES & _columns(trainer, name)
        if "seq_lengths" in said and _drops_lengths(trainer.data_collator):
            # of which the other warning tells
            continue
        if said and not said & {*kept}:
            logger.warning(
                "found the column %s of %s, which tells the documents of a row apart and which the "
                "Trainer removes before the collator sees it: the documents read each other, "
                "unless a mask keeps them apart; wanted the column; set "
                "remove_unused_columns=False and take a collator that reads it, or pass the "
                "documents before they were packed",
                min(said),
                name,
            )


def _columns(trainer: Trainer | None, name: str) -> set[str]:
    """Return the columns of a trainer's data set, or of several in a dictionary."""
    given = getattr(trainer, name, None)
    several = given.values() if isinstance(given, dict) else [given]
    return {column for each in several for column in _columns_of(each)}


def _columns_of(dataset: Any) -> Iterable[str]:
    if isinstance(dataset, list) and dataset and isinstance(dataset[0], Mapping):
        return dataset[0]
    return getattr(dataset, "column_names", None) or ()


def _drops_lengths(collator: Any) -> bool:
    """Whether a collator of TRL's or transformers' drops the lengths of a row's documents."""
    # TRL's reads them to make positions
    reads = any(getattr(collator, name, False) for name in ("padding_free", "return_position_ids"))
    reads = reads and not isinstance(collator, DataCollatorWithFlattening)
    return _is_known(collator) and not reads


def _says_nothing(collator: Any) -> bool:
    """Whether it is transformers' collator of rows, told to say nothing of their documents."""
    flattens = _is_known(collator) and isinstance(collator, DataCollatorWithFlattening)
    return flattens and not any(getattr(collator, name, False) for name in _WORDS)


def _is_known(collator: Any) -> bool:
    """Whether a collator is no subclass, which may say more."""
    return type(collator).__module__.split(".")[0] in ("transformers", "trl")
