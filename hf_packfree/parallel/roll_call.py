"""A roll call of a group's ranks through the store by which they found each other. The store
answers where an exchange would wait, or fail without naming a rank.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hf_packfree.errors import RankLost

_PATIENCE = timedelta(seconds=5)
"""How long ranks wait for each other's answers after an exchange failed, because it fails on all
ranks, but not at the same time.
"""


def refuse_missing_ranks(group: Any) -> None:
    """Wait for all ranks of a group, before their first exchange.

    A rank's answer stays in the store: a rank that patches its model again, alone, does not wait
    for the others.

    Raises:
        RankLost: some ranks do not answer within `init_process_group`'s timeout, whatever the
            group's timeout is.
    """
    patience = _store_of(group).timeout
    if whom := _silent_ranks(group, "here", patience):
        size = dist.get_world_size(group)
        raise RankLost(
            f"found {size} ranks that share each row, and no answer within "
            f"{patience.total_seconds():g} s from {whom}; wanted all of them in every forward; "
            "look at what was written there last, and start all again; where one is only slow, "
            "pass a longer timeout: init_process_group(timeout=...), "
            "TrainingArguments(ddp_timeout=...)"
        )


def refuse_lost_ranks(group: Any, error: Exception) -> None:
    """Raise with the names of the ranks that are gone after an exchange failed; return if all ranks
    answer.

    Raises:
        RankLost: some ranks do not answer.
    """
    patience = min(_PATIENCE, _store_of(group).timeout / 2)
    if whom := _silent_ranks(group, "failed", patience):
        size = dist.get_world_size(group)
        raise RankLost(
            f"found an exchange of {size} ranks that failed, and no answer within "
            f"{patience.total_seconds():g} s from {whom}; wanted all of them in every exchange; "
            "look at what was written there last, or at the error above where this rank failed "
            "alone and the others wait, and start all again"
        ) from error


def _store_of(group: Any) -> Any:
    of_all: Any = dist.group.WORLD
    return (group or of_all).get_group_store()


def _silent_ranks(group: Any, question: str, patience: timedelta) -> str:
    """Answer the roll call, and return which ranks do not answer, in words; "" if all do."""
    store, ranks = _store_of(group), dist.get_process_group_ranks(group)
    keys = [f"hf_packfree/{question}/{rank}" for rank in ranks]
    try:
        store.set(keys[dist.get_rank(group)], "yes")
        try:
            store.wait(keys, patience)
        except RuntimeError:
            return ", ".join(
                f"rank {number}" + (f" ({rank} of all)" if number != rank else "")
                for number, (rank, key) in enumerate(zip(ranks, keys, strict=True))
                if not store.check([key])
            )
    except RuntimeError:
        return "the process that keeps the group's store (torchrun, or rank 0 of all)"
    return ""
