"""Types of rotary embedding: with fixed frequencies, or with frequencies that depend on the longest
position of a call, which all documents of a row would share.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_packfree.errors import UnsupportedInput, UnsupportedModel
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.parallel.collectives import largest_of_ranks

FIXED = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Types whose rotation of a token depends only on that token's position; a test compares the table
with every type of the installed release.
"""
BY_LONGEST = frozenset({"dynamic", "longrope"})
"""Types whose rotation of all tokens changes once the longest position of a call is above a
limit.
"""
_ATTENTION = {"full_attention", "sliding_attention"}
"""The kinds of layers for which a config may give parameters of their own."""


def has_sections(trunk: Any) -> bool:
    """Whether a text model's rotary embedding has sections for time, height and width (mRoPE), so
    that positions may be [3, B, S].
    """
    sections = getattr(trunk.config, "rope_parameters", None) or {}
    # some text models have no `rotary_emb`, or name it otherwise
    rotary = getattr(trunk, "rotary_emb", None)
    return hasattr(rotary, "mrope_section") or "mrope_section" in sections


def cos_and_sin(trunk: Any, x: Tensor, positions: Tensor) -> Any:
    """Return cos and sin from a text model's rotary embedding for positions [1, T] or [3, 1, T], in
    x's dtype and on its device.

    With mRoPE, transformers 5.17 only takes [3, 1, T]; other releases expand [1, T] themselves.
    """
    one = positions.ndim == 2 and has_sections(trunk)
    return trunk.rotary_emb(x, positions.expand(3, -1, -1) if one else positions)


def rope_type(config: Any) -> str:
    """Return the type of a text config's rotary embedding. If layers have different types: an
    unknown one, else one that depends on the longest position, else any.
    """
    types = [str(given.get("rope_type")) for given in _by_layer(config)]
    return max(types, key=lambda name: (name not in FIXED, name not in BY_LONGEST))


def _by_layer(config: Any) -> list[Any]:
    """Return the parameters of a config's rotary embeddings, one dict for each kind of layer if
    kinds differ; kinds without positions, and models in which no layer attends, count as the
    default type.
    """
    plain = {"rope_type": "default"}
    given = getattr(config, "rope_parameters", None) or plain
    kinds = set(getattr(config, "layer_types", None) or ()) & given.keys()
    alike = plain if given.keys() <= _ATTENTION else given
    return [given[kind] or plain for kind in kinds] or [alike]


def has_fixed_frequencies(config: Any) -> bool:
    """Whether the rotation of a token depends only on that token's position."""
    return rope_type(config) in FIXED


def check_rope_type(config: Any) -> None:
    """Refuse a type of rotary embedding that is neither in `FIXED` nor in `BY_LONGEST`.

    Raises:
        UnsupportedModel: the type is unknown, so that its frequencies may depend on the whole row.
    """
    known = FIXED | BY_LONGEST
    if rope_type(config) not in known:
        raise UnsupportedModel(
            f"found rope_type={rope_type(config)!r}, whose frequencies may depend on the whole "
            "row; wanted one of "
            f"{', '.join(sorted(known))}; change config.rope_parameters, or report the type"
        )


@uncompiled
def check_longest_position(config: Any, packed: PackedSequence, position_ids: Tensor) -> None:
    """Refuse a row whose longest document would change the frequencies of the others, and one that
    ranks share whose longest document would have other frequencies on some ranks.

    Args:
        config: the text model's.
        packed: the record of the row.
        position_ids: integers of any shape, all positions that the rotary embedding gets on this
            rank; read on the host.

    Raises:
        UnsupportedInput: the longest position is past the limit.
        UnsupportedModel: see `check_rope_type`.
    """
    check_rope_type(config)
    if packed.num_segments == 1 and not packed.is_shard:
        return
    limit, kind = _limit(config)
    found = int(largest_of_ranks(position_ids.max(), packed)) + 1
    if found > limit and packed.is_shard:
        raise UnsupportedInput(
            f"found a document that ends at position {found:,} in a row that {packed.ranks} ranks "
            f"share, and rope_type={kind!r}, which would rotate each rank's tokens by the longest "
            f"position that it holds; wanted documents of at most {limit:,} tokens in such rows; "
            "leave context_parallel out for longer ones"
        )
    if found > limit:
        raise UnsupportedInput(
            f"found a document that ends at position {found:,} in a row of {packed.num_segments}, "
            f"and rope_type={kind!r}, which would rotate every other document by that "
            f"length too; wanted documents of at most {limit:,} tokens in packed rows; pass longer "
            "ones in rows of their own"
        )


def _limit(config: Any) -> tuple[int, str]:
    """Return the number of positions up to which a document has the frequencies of short ones in
    every layer, and the type of rotary embedding that says so.
    """
    limits: list[tuple[int, str]] = []
    for given in _by_layer(config):
        kind = given["rope_type"]
        if kind == "longrope":
            limits.append((int(given["original_max_position_embeddings"]), kind))
        elif kind in BY_LONGEST:
            # in a call of exactly max_position_embeddings, upstream keeps the frequencies of a
            # longer call before
            limits.append((int(config.max_position_embeddings) - 1, kind))
    return min(limits)
