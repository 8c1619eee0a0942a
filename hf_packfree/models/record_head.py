"""Heads whose own forward hands no keywords to their model: the record goes past it."""

from __future__ import annotations

from functools import partial
from typing import Any

from hf_packfree.models.call import Call
from hf_packfree.models.head_loss import OfCall
from hf_packfree.models.heads import PackedHead


class RecordHead(PackedHead):
    """Put in front of such a causal language model; nothing else of it differs."""

    endings = ("Mamba2ForCausalLM",)

    def _forward_as_row(self, upstream: Any, call: Call) -> Any:
        return super()._forward_as_row(partial(_run, upstream), call)


def _run(upstream: Any, head: Any, **arguments: Any) -> Any:
    record = arguments.get("packed_sequence")
    return upstream(head if record is None else HeadWithRecord(head, record), **arguments)


class HeadWithRecord(OfCall):
    """A head during one call, but for its model, which gets the record, too."""

    def __init__(self, head: Any, record: Any) -> None:
        super().__init__(head)
        prefix = head.base_model_prefix
        vars(self)[prefix] = partial(getattr(head, prefix), packed_sequence=record)


__all__ = ["RecordHead"]
