"""Checks of a row that is a tree of shared prefixes, before anything runs."""

from __future__ import annotations

from typing import Any

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.attention import attention_route
from hf_packfree.models.base import Replacement, part_at
from hf_packfree.models.call import Call
from hf_packfree.models.state import state_of
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.tree import refuse_tree


def check_tree_call(call: Call, packed: PackedSequence) -> None:
    """Refuse a tree with media, or with an option that does not support trees.

    Args:
        call: the call of a head or text model.
        packed: the record.

    Raises:
        UnsupportedInput: there are media or such an option; the message names them.
    """
    state = state_of(call.module)
    refusals = {
        "with images, videos or audio": call.has_media,
        "under context parallelism": state.context_parallel is not None,
        "beside a multi-token prediction head that is trained": call.module.training
        and bool(state.followers),
        "with batch_invariant=True, whose samples are walked in parts": state.batch_invariant,
    }
    for where, found in refusals.items():
        if found:
            refuse_tree(packed, where)


def check_tree_layers(trunk: Any, packed: PackedSequence) -> None:
    """Refuse a tree if a layer would read its segments as documents.

    Raises:
        UnsupportedInput: there is such a layer.
    """
    if packed.tree is None:
        return
    names = {name for of_kind in state_of(trunk).mixers.values() for name in of_kind}
    mixers = [part_at(layer, name) for layer in trunk.layers for name in names]
    for part in (part for mixer in mixers if mixer is not None for part in mixer.modules()):
        if isinstance(part, Replacement) and not part.follows_trees:
            refuse_tree(packed, f"with layers of {type(part).__name__}")
    name = trunk.config._attn_implementation
    if attention_route(name) == "flash":
        raise UnsupportedInput(
            f"found a tree of shared prefixes with attn_implementation={name!r}, which knows "
            "documents alone; wanted sdpa or eager; call model.set_attn_implementation('sdpa')"
        )
