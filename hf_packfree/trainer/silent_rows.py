"""Warnings of a Trainer whose rows hold several documents, and which hands the model nothing that
tells them apart.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import DataCollatorWithFlattening, Trainer

logger = logging.getLogger("hf_packfree")
_TAKES_LENGTHS = {
    "train_dataset": "set padding_free=True in TRL's SFTConfig",
    "eval_dataset": "leave eval_packing=True out of TRL's SFTConfig or add packing=True",
}
"""{data set: settings with which its rows keep their documents apart}."""
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
        if _has_packed_rows(trainer, name) and _drops_lengths(collator):
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


def _has_packed_rows(trainer: Trainer | None, name: str) -> bool:
    """Whether a data set of a trainer's, or one of several, holds rows that were packed."""
    given = getattr(trainer, name, None)
    several = given.values() if isinstance(given, dict) else [given]
    # where TRL's `pack_dataset` keeps the lengths of a row's documents
    return any("seq_lengths" in (getattr(each, "column_names", None) or ()) for each in several)


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
