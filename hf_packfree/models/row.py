"""Conversion between the caller's batch [B, S] and the row [1, T]: arguments to the row, outputs to
the batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.call import Call, of_media
from hf_packfree.models.rotary import has_sections
from hf_packfree.packing import PackedSequence, repad, unpad


def positions_for(trunk: Any, position_ids: Tensor | None) -> Tensor | None:
    """Return positions in a shape that the text model `trunk` takes: [B, S], or with mRoPE a stack
    [3 or 4, B, S].

    Raises:
        UnsupportedInput: the rows of a stack differ, and the model has one position per token.
    """
    if position_ids is None or position_ids.ndim == 2:
        return position_ids
    if position_ids.ndim == 1:
        return position_ids[None]
    if has_sections(trunk):
        return position_ids
    if not bool((position_ids == position_ids[:1]).all()):
        raise UnsupportedInput(
            f"found {len(position_ids)} rows of position_ids that differ for "
            f"{type(trunk).__name__}, which has one position a "
            "token; wanted position_ids (B, S); pass the text positions alone"
        )
    return position_ids[0]


def row_positions(position_ids: Tensor | None, packed: PackedSequence) -> Tensor:
    """Return the row's positions: [1, T], or [3 or 4, 1, T] if `position_ids` are a stack."""
    if position_ids is None:
        return packed.position_ids()
    rows, tokens = packed.batch_shape
    stack = (
        position_ids.expand(*position_ids.shape[:-2], rows, tokens)
        if position_ids.ndim > 1
        else position_ids[None]
    )
    if stack.ndim == 2:
        return unpad(stack.expand(rows, tokens), packed)
    return unpad(stack.movedim(0, -1), packed).movedim(-1, 0)


def row_of_each(arguments: dict[str, Any], packed: PackedSequence) -> dict[str, Any]:
    """Return the arguments without `attention_mask`, and with every tensor [B, S, ...], such as
    ids, embeddings and weights per token, unpadded to the row [1, T, ...]. Arguments of media are
    unchanged.
    """
    rows = {
        name
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.shape[:2] == packed.batch_shape
    }
    return {
        name: unpad(value, packed) if name in rows and not of_media(name) else value
        for name, value in arguments.items()
        if name != "attention_mask"
    }


def restore_layers(output: Any, packed: PackedSequence, *, count_all: bool = True) -> None:
    """Change an output's hidden states and router logits, if there are any, from the row's to the
    batch's shape, in place.

    Args:
        count_all: whether to return router logits of padding too, because upstream's auxiliary loss
            counts all tokens if it gets no mask; otherwise only those of real tokens.
    """
    if output.get("hidden_states") is not None:
        layers = output.hidden_states
        output.hidden_states = tuple(
            None if layer is None else repad(layer, packed) for layer in layers
        )
    if output.get("router_logits") is not None:
        whole = partial(_repad_rows, packed=packed) if count_all else packed.select_real
        output.router_logits = tuple(whole(layer) for layer in output.router_logits)


def _repad_rows(layer: Tensor, packed: PackedSequence) -> Tensor:
    """Return the router logits of the batch, [B*S, E], from those of the row, [T, E]."""
    return repad(layer[None], packed).flatten(0, 1)


def as_requested(output: Any, call: Call, config: Any) -> Any:
    """Return a model's output as a `ModelOutput` or as a tuple, by the call's `return_dict`, or
    else the configuration's.
    """
    by_name = call.get("return_dict")
    return (
        output
        if (getattr(config, "return_dict", True) if by_name is None else by_name)
        else output.to_tuple()
    )
