"""Measurement of a tiny copy of a model whose family is not listed, before the model is patched.

Requirements for packed rows: every attention layer calls our attention function once; no document
changes another; each document gets its results alone, which would fail for a window or positions
that are not arguments of the attention call; a row of one document is upstream's bit for bit.
Padded rows run in our layers if they give upstream's results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_packfree.errors import in_short
from hf_packfree.models.attention_interface import NAME, InterfaceAttention
from hf_packfree.models.state import PatchState
from hf_packfree.patching.family import Family
from hf_packfree.patching.options import Options
from hf_packfree.patching.plan import plan_swaps
from hf_packfree.patching.selfcheck import LIMIT, as_if_nothing_were_loading, tiny
from hf_packfree.patching.shrunk import WINDOW
from hf_packfree.patching.steps import carry_out
from hf_packfree.patching.unlisted import refusal, text_model

LENGTHS = (5, WINDOW, 1, 3 * WINDOW + 1, WINDOW + 1, 2)
_STRONG = 1.5
"""Standard deviation of the tiny copy's weights, times the square root of a layer's inputs: large
enough that a leak shows in the outputs.
"""


@dataclass(frozen=True)
class WhyInexact:
    """Why packed rows of a family are not exact, and why padded rows are left to upstream; None if
    they are exact, or run in our layers.
    """

    packed: str | None
    padded: str | None = None


_found: dict[str, WhyInexact] = {}
"""{class and options of a tiny copy: what was measured}."""


def check_unlisted(family: Family, model: Any, options: Options) -> Options:
    """Measure the tiny copy of a family that is not listed, once per process.

    Returns:
        The options, with `padded="upstream"` if our layers would not give upstream's results for
        padded rows.

    Raises:
        UnsupportedModel: packed rows of the copy are not exact, or no copy can be built.
    """
    if family.listed:
        return options
    key = f"{family.upstream}.{family.trunk} {sorted(family.tiny.items())}"
    if key not in _found:
        with as_if_nothing_were_loading(), torch.no_grad():
            _found[key] = _measured(family)
    found = _found[key]
    reason = found.packed or (found.padded if options.drops_padding else None)
    if reason is not None:
        raise refusal(family.name, text_model(model), reason)
    return replace(options, padded="upstream") if found.padded else options


def _measured(family: Family) -> WhyInexact:
    try:
        model = tiny(family, strength=_STRONG)
    except Exception as error:
        # configurations raise errors of many classes for sizes that they refuse
        return WhyInexact(f"no tiny copy of it can be built and measured ({in_short(error)})")
    try:
        return _of(model, PatchState(mixers=family.mixers_by_kind))
    except Exception as error:
        return WhyInexact(f"its tiny copy fails ({in_short(error)})")


def _of(model: Any, state: PatchState) -> WhyInexact:
    parts = [torch.arange(n)[None] * 37 % 113 + 3 for n in LENGTHS]
    alone = [_run(model, input_ids=part) for part in parts]
    rows = {side: _padded(parts, left=side == "left") for side in ("right", "left")}
    upstreams = {side: _run(model, **given) for side, given in rows.items()}
    carry_out(plan_swaps(model)[1], state)
    if not all(torch.equal(_run(model, input_ids=p), one) for p, one in zip(parts, alone)):
        return WhyInexact("rows of one document are not bit for bit transformers'")
    if (reason := _why_not_packed(model, torch.cat(parts, 1), torch.cat(alone, 1))) is not None:
        return WhyInexact(reason)
    for side, given in rows.items():
        real = given["attention_mask"].bool()
        if (error := _off(_run(model, **given)[real], upstreams[side][real])) > LIMIT:
            return WhyInexact(None, f"documents padded on the {side} change by {error:.0e}")
    return WhyInexact(None)


def _why_not_packed(model: Any, ids: Tensor, alone: Tensor) -> str | None:
    layers = [part for part in model.modules() if isinstance(part, InterfaceAttention)]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with _calls() as calls:
        packed = _run(model, input_ids=ids, position_ids=positions)
    if set(calls).isdisjoint(map(id, layers)):
        return "its layers hand no keywords to their attention, so that boundaries are lost"
    if any(calls.count(id(layer)) != 1 for layer in layers):
        return f"its {len(layers)} attention layers attend {len(calls)} times"
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    for parity in (0, 1):
        kept = number % 2 != parity
        changed = torch.where(kept, ids, ids % 113 + 1)
        after = _run(model, input_ids=changed, position_ids=positions)
        if (error := _off(after[:, kept], packed[:, kept])) > LIMIT:
            return f"documents of a packed row change each other by {error:.0e}"
    if (error := _off(packed, alone)) > LIMIT:
        return (
            f"packed documents of a tiny copy differ from the same alone by {error:.0e}: masks or "
            "positions say more than its attention is called with"
        )
    return None


def _run(model: Any, **given: Tensor) -> Tensor:
    output = model(**given, use_cache=False)
    found: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return found


def _padded(parts: list[Tensor], *, left: bool) -> dict[str, Tensor]:
    longest = max(LENGTHS)
    ids, mask = (torch.zeros(len(parts), longest, dtype=torch.int64) for _ in range(2))
    for row, part in enumerate(parts):
        place = slice(longest - part.shape[1], None) if left else slice(part.shape[1])
        ids[row, place], mask[row, place] = part, 1
    return {"input_ids": ids, "attention_mask": mask}


def _off(found: Tensor, wanted: Tensor) -> float:
    """Return the relative RMS, infinity instead of NaN."""
    error = float((found - wanted).norm() / wanted.norm())
    return error if error == error else float("inf")


@contextmanager
def _calls() -> Iterator[list[int]]:
    """Collect the ids of attention layers that call our attention function during the block."""
    entry: Any = ALL_ATTENTION_FUNCTIONS[NAME]
    found: list[int] = []

    def count(module: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(id(module.layer))
        return entry(module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(NAME, count)
    try:
        yield found
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, entry)
