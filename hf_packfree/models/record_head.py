"""Heads whose upstream forward passes no keywords to their model: here the model gets the record as
a keyword.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hf_packfree.models.call import Call
from hf_packfree.models.head_loss import OfCall
from hf_packfree.models.heads import PackedHead


class RecordHead(PackedHead):
    """Put in front of a causal language model whose forward passes no keywords to the model
    below.
    """

    endings = ("Mamba2ForCausalLM",)

    def _forward_as_row(self, upstream: Any, call: Call) -> Any:
        return super()._forward_as_row(partial(_run, upstream), call)


def _run(upstream: Any, head: Any, **arguments: Any) -> Any:
    record = arguments.get("packed_sequence")
    return upstream(head if record is None else HeadWithRecord(head, record), **arguments)


class HeadWithRecord(OfCall):
    """A head during one call, whose model is called with the record as an additional keyword."""

    def __init__(self, head: Any, record: Any) -> None:
        super().__init__(head)
        prefix = head.base_model_prefix
        vars(self)[prefix] = partial(getattr(head, prefix), packed_sequence=record)
