"""Between the caller's [B, S] and the row [1, T]: arguments on the way in, what was asked for on the way out."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from hf_packfree.packing import PackedSequence, repad, unpad


def row_positions(position_ids: Tensor | None, packed: PackedSequence) -> Tensor:
    """Return the row's positions in the shape upstream was given: [1, T], or [3 or 4, 1, T]."""
    if position_ids is None:
        return packed.position_ids()
    rows, tokens = packed.batch_shape
    stack = position_ids.expand(*position_ids.shape[:-2], rows, tokens) if position_ids.ndim > 1 else position_ids[None]
    if stack.ndim == 2:
        return unpad(stack.expand(rows, tokens), packed)
    return unpad(stack.movedim(0, -1), packed).movedim(-1, 0)


def row_of_each(arguments: dict[str, Any], packed: PackedSequence) -> dict[str, Any]:
    """Return the arguments with every tensor [B, S, ...] as its row [1, T, ...]: ids, embeddings, weights per token."""
    return {
        name: unpad(value, packed) if isinstance(value, Tensor) and value.shape[:2] == packed.batch_shape else value
        for name, value in arguments.items()
    }


def restore_layers(output: Any, packed: PackedSequence, *, count_all: bool = True) -> None:
    """Put the caller's [B, S] back into the layers' states and router logits that a call asked for, in place.

    Router logits hold real tokens alone unless `count_all`: who gets them without a mask counts every row.
    """
    if output.get("hidden_states") is not None:
        layers = output.hidden_states
        output.hidden_states = tuple(None if layer is None else repad(layer, packed) for layer in layers)
    if output.get("router_logits") is not None:
        whole = partial(_repad_rows, packed=packed) if count_all else packed.real
        output.router_logits = tuple(whole(layer) for layer in output.router_logits)


def _repad_rows(layer: Tensor, packed: PackedSequence) -> Tensor:
    """Return [B*S, E] of the row's [T, E]."""
    return repad(layer[None], packed).flatten(0, 1)
