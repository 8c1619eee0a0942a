"""Checks of a record that comes with a call, before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_packfree.errors import BoundaryConflict, BoundaryError
from hf_packfree.models.call import Call
from hf_packfree.packing import PackedSequence, PackingInputs, resolve_boundaries, uncompiled

_BUILD = "build it by PackedSequence.from_lengths, of the lengths of all documents of the batch"


def check_record(call: Call, record: Any, inputs: PackingInputs) -> None:
    """Refuse a record that is not of the call's batch, or that other keywords contradict. Masks
    and positions are not read, which would wait for the GPU; nor is anything in a compiled graph,
    which the numbers of tokens would be constants of.

    Args:
        call: the call of a head or text model, of the caller or of the module above.
        record: the value of `packed_sequence`, without a tree.
        inputs: the call's other arguments that can describe documents.

    Raises:
        BoundaryError: it is no record, or one of another batch.
        BoundaryConflict: it and another keyword tell of different documents.
    """
    if torch.compiler.is_compiling():
        return
    if not isinstance(record, PackedSequence):
        raise BoundaryError(
            f"found packed_sequence of type {type(record).__name__}; wanted a PackedSequence; "
            f"{_BUILD}"
        )
    if not call.has_batch:
        return
    found = tuple(call.batch.shape)
    if found not in (record.batch_shape, (1, record.num_tokens)):
        raise BoundaryError(
            f"found packed_sequence of a batch of shape {record.batch_shape} with tokens of shape "
            f"{found}; wanted one of all tokens, padding included; {_BUILD}, with batch_shape=(B, "
            "S) for several rows"
        )
    if inputs.named:
        _compare(record, inputs, call)


@uncompiled
def _compare(record: PackedSequence, inputs: PackingInputs, call: Call) -> None:
    padded = record.indices is not None
    # other libraries' words are compared with transformers', such as positions
    positions = inputs.position_ids if inputs.foreign else None
    mask = inputs.attention_mask if padded else None
    others = replace(inputs, position_ids=positions, attention_mask=mask)
    read = resolve_boundaries(others, call.batch, drop_padding=padded)
    rows, tokens = call.batch.shape
    if (list(read.lengths) if read is not None else [tokens] * rows) != list(record.lengths):
        raise BoundaryConflict(
            f"found packed_sequence and {', '.join(others.given)} in disagreement; wanted the same "
            "documents in both; pass one of them alone, or build both from the same lengths"
        )
