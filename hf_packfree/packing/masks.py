"""Parsing of masks: 2-D masks give padding and maybe documents, 4-D masks the documents on their
diagonal.

Shapes: B rows, S tokens of a row.  2-D masks are read on the host, 4-D ones on their own device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError
from hf_packfree.packing.boundaries import BoundarySpec, wrong_shape

BLOCKED = -1e4
"""An additive mask blocks a key whose value is at most this, or this far below the highest value of
its row.
"""

FAINT = -20.0
"""A value more than this below the highest of its row, but above `BLOCKED`, neither lets a token
through nor blocks it.
"""

EVERYWHERE = frozenset({"attention", "linear"})
_LINEAR = ("linear_attention", "conv")


def parse_masks(mask: Any, shape: tuple[int, int], *, cached: bool = False) -> list[BoundarySpec]:
    """Parse an `attention_mask`: a tensor, or transformers' dict of tensors by kind of layer; other
    objects are ignored.

    Args:
        cached: the call has a cache: a 4-D mask of one document per row may then be of any kind.

    Raises:
        BoundaryError: a mask is malformed.
    """
    if isinstance(mask, Tensor):
        return [_parse("attention_mask", mask, shape, EVERYWHERE, cached)]
    if not isinstance(mask, Mapping):
        return []
    specs = []
    for key, one in mask.items():
        name, kind = f"attention_mask[{key!r}]", "linear" if key in _LINEAR else "attention"
        if one is None:
            continue
        if not isinstance(one, Tensor) or (kind == "linear" and one.ndim != 2):
            found = list(one.shape) if isinstance(one, Tensor) else type(one).__name__
            raise BoundaryError(
                f"found {name} {found}; wanted "
                f"{'a tensor (B, S)' if kind == 'linear' else 'a tensor'} or None; pass the 2-D "
                "mask that the dict was made from"
            )
        spec = _parse(name, one, shape, frozenset({kind}), cached)
        # which attention functions take a 2-D mask, upstream knows
        specs.append(
            replace(spec, as_upstream=False) if one.ndim == 2 and kind == "attention" else spec
        )
    # without a mask, eager attention is not causal
    if not any("attention" in spec.covers for spec in specs):
        specs.append(BoundarySpec("attention_mask", as_upstream=False))
    return specs


def is_one_document(mask: Any) -> bool:
    """Whether a mask, read before, says nothing but that every row is one document without padding:
    None, a 2-D mask without a zero, a 4-D one in which every token sees all tokens up to itself
    alike, or a dict of these.
    """
    if isinstance(mask, Mapping):
        # without a mask, eager attention is not causal
        given = [one for name, one in mask.items() if one is not None or name not in _LINEAR]
        return all(one is not None and is_one_document(one) for one in given)
    if not isinstance(mask, Tensor):
        return mask is None
    if mask.ndim == 2:
        return bool((mask != 0).all())
    allowed, biased = _read_pairs("attention_mask", mask)
    return not biased and torch.equal(allowed, torch.ones_like(allowed).tril())


def _parse(
    name: str, mask: Tensor, shape: tuple[int, int], covers: frozenset[str], cached: bool
) -> BoundarySpec:
    per_pair = (
        mask.ndim == 4
        and mask.shape[0] in (1, shape[0])
        and tuple(mask.shape[2:]) == (shape[1], shape[1])
    )
    if tuple(mask.shape) != shape and not per_pair:
        raise wrong_shape(name, mask, shape, "(B, S), or (B, 1, S, S)")
    if mask.ndim == 2:
        return _parse_padding(name, mask, covers)
    return _parse_blocks(name, mask, shape, cached)


def _parse_padding(name: str, mask: Tensor, covers: frozenset[str]) -> BoundarySpec:
    """Parse a 2-D mask [B, S]: 0/1 marks padding; an indexed mask (1, 1, 2, 2, 0) also numbers the
    documents.

    Raises:
        BoundaryError: a value is negative or no whole number.
    """
    values = mask.detach().to("cpu")
    if values.dtype == torch.bool:
        return BoundarySpec(name, values, covers=covers)
    whole = values.to(torch.int64)
    if bool((whole < 0).any()) or not torch.equal(whole.to(values.dtype), values):
        raise BoundaryError(
            f"found a 2-D {name} with values from {values.min().item()} to {values.max().item()}; "
            "wanted 0 "
            "and 1, or 0 for padding and 1, 2, 3 ... for documents; an additive mask has to be 4-D"
        )
    if int(whole.max()) <= 1:
        return BoundarySpec(name, whole > 0, covers=covers)
    return BoundarySpec(name, whole > 0, whole, as_upstream=False)


def _parse_blocks(name: str, mask: Tensor, shape: tuple[int, int], cached: bool) -> BoundarySpec:
    """Parse a 4-D mask [B or 1, heads or 1, S, S], bool or additive: blocks on its diagonal are
    documents.

    The mask has to be block-diagonal and causal, because linear layers can follow nothing else. An
    additive mask with one document per row and no padding may also hold a bias for earlier tokens,
    which upstream's attention applies.

    Raises:
        BoundaryError: the mask is neither, or heads see different documents.
    """
    of_heads, biased = _read_pairs(name, mask)
    allowed = of_heads[:, 0].expand(shape[0], -1, -1)
    if bool((_near_diagonal(of_heads) != _near_diagonal(of_heads[:, :1])).any()):
        raise BoundaryError(
            f"found a 4-D {name} whose heads see different documents; wanted the same boundaries "
            "in every head, since the linear layers have one; pass a mask of (B, 1, S, S), or the "
            "boundaries as position_ids"
        )
    real = allowed.diagonal(dim1=1, dim2=2)
    number = torch.zeros(shape, dtype=torch.int64, device=mask.device)
    for row in range(shape[0]):
        kept = real[row].nonzero()[:, 0]
        number[row, kept[1:]] = (~allowed[row, kept[1:], kept[:-1]]).cumsum(0)
    additive, cut = mask.is_floating_point(), bool((number > 0).any())
    if cut or not cached:
        _refuse_seen_padding(name, of_heads, real)
        if additive and not cut and bool(real.all()):
            _refuse_looking_ahead(name, of_heads)
        else:
            _refuse_other_than_blocks(name, of_heads, number, real, biased=biased, cut=cut)
    covers = frozenset({"attention"})
    return BoundarySpec(
        name, real.to("cpu"), number.to("cpu"), covers=covers, as_upstream=additive or cached
    )


def _refuse_seen_padding(name: str, of_heads: Tensor, real: Tensor) -> None:
    seen = (of_heads.any(1).any(1) & ~real).nonzero().tolist()
    if seen:
        raise BoundaryError(
            f"found a 4-D {name} in which a token is seen but does not see itself, at row "
            f"{seen[0][0]}, token {seen[0][1]}; wanted each token to see itself, or nobody to see "
            "a padding token; invert a mask that is True where it blocks"
        )


def _refuse_looking_ahead(name: str, of_heads: Tensor) -> None:
    if bool(of_heads.triu(1).any()):
        raise BoundaryError(
            f"found a 4-D {name} in which a token sees later ones; wanted a causal one, since the "
            "linear layers are causal; drop it, or pass a mask of (B, S)"
        )


def _refuse_other_than_blocks(
    name: str, of_heads: Tensor, number: Tensor, real: Tensor, *, biased: bool, cut: bool
) -> None:
    wanted = ((number[:, :, None] == number[:, None, :]) & real[:, None, :]).tril()
    wrong = (of_heads != wanted[:, None]) & real[:, None, :, None]
    if biased or bool(wrong.any()):
        found = (
            "cuts rows into documents" if cut else "is bool" if bool(real.all()) else "has padding"
        )
        raise BoundaryError(
            f"found a 4-D {name} that {found} but is not block-diagonal and causal; wanted each "
            "token to see its own document up to itself; pass the boundaries as position_ids "
            "instead"
        )


def _near_diagonal(allowed: Tensor) -> Tensor:
    """Return bool [B, heads, 2, S]: whether each token sees itself, and whether it sees the token
    before; False for the first token, which has none before it.
    """
    before = torch.nn.functional.pad(allowed.diagonal(-1, 2, 3), (1, 0))
    return torch.stack((allowed.diagonal(0, 2, 3), before), 2)


def _read_pairs(name: str, mask: Tensor) -> tuple[Tensor, bool]:
    """Return which keys each token sees, bool in the mask's shape, and whether it sees some of
    them more than others.
    """
    if mask.dtype == torch.bool:
        return mask, False
    if not mask.is_floating_point():
        if bool(((mask != 0) & (mask != 1)).any()):
            raise _unreadable(name, mask, "other integers than 0 and 1")
        return mask != 0, False
    values = mask.detach().to(torch.promote_types(mask.dtype, torch.float32))
    if bool(values.isnan().any()) or bool((values == torch.inf).any()):
        raise _unreadable(name, mask, "NaN or infinity")
    zeros, ones = values == 0, values == 1
    if bool((zeros | ones).all() & zeros.any() & ones.any()):
        raise _unreadable(name, mask, "zeros and ones")
    # softmax depends on differences only: a row lets keys through whose values are near its highest
    top = values.amax(-1, keepdim=True)
    allowed = values > (top + BLOCKED).clamp(min=BLOCKED)
    faint = allowed & (values < top + FAINT)
    if bool(_near_diagonal(faint).any()):
        raise _unreadable(name, mask, "values that neither let through nor block")
    return allowed, bool((allowed & (values != top)).any())


def _unreadable(name: str, mask: Tensor, found: str) -> BoundaryError:
    return BoundaryError(
        f"found a 4-D {name} of {mask.dtype} with {found}; wanted bool, or an additive one with 0 "
        "for what a token sees and a "
        f"number of {BLOCKED:.0f} or less elsewhere; call .bool() on a mask of zeros and ones"
    )
