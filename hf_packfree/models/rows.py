"""Between the caller's [B, S] and the row [1, T]: arguments on the way in, what was asked for on the way out."""

from __future__ import annotations

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


def restore_layers(output: Any, packed: PackedSequence) -> None:
    """Put the caller's [B, S] back into the layers' states and router logits that a call asked for, in place."""
    if output.get("hidden_states") is not None:
        layers = output.hidden_states
        output.hidden_states = tuple(None if layer is None else repad(layer, packed) for layer in layers)
    if output.get("router_logits") is not None:
        output.router_logits = tuple(repad(layer[None], packed).flatten(0, 1) for layer in output.router_logits)
