"""Which projections of a model are called in place of being fused, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_packfree.graphs.settings import embedding_of
from hf_packfree.models.base import Replacement
from hf_packfree.models.fused_layer import FusedDecoderLayer
from hf_packfree.models.peft_lora import is_lora
from hf_packfree.models.plain_layers import SWIGLU, why_mlp_is_called
from hf_packfree.models.state import PatchState
from hf_packfree.models.unfused import SHARDED, is_compiled, is_projection, why_not_fused
from hf_packfree.patching.family import Family
from hf_packfree.patching.plan import trunks
from hf_packfree.patching.sharding import is_fsdp1, is_fsdp2

FLAT = "FSDP1's flat parameters"


def called_in_words(called: dict[str, int]) -> str:
    """Return the sentence about projections that run their own forward."""
    kinds = ", ".join(f"{count} with {kind}" for kind, count in called.items())
    return f"projections called as they are, exact but not fused: {kinds}"


def called_projections(
    model: nn.Module, family: Family, state: PatchState, x: torch.Tensor
) -> dict[str, int]:
    """Count the projections of decoder layers that are not fused, by reason; modules inside a
    projection are not counted apart.
    """
    found = _called_alone(model, family, state, x)
    for layer in (part for trunk in trunks(model, family) for part in trunk.modules()):
        for members, why in _fused_together(layer):
            kinds = [found.get(member) or _bias(member) for member in members]
            if why is None and any(kinds):
                why = "one beside them that is called"
            found |= {one: kind or why for one, kind in zip(members, kinds, strict=True)}
    return dict(sorted(Counter(kind for kind in found.values() if kind).items()))


def _called_alone(
    model: nn.Module, family: Family, state: PatchState, x: torch.Tensor
) -> dict[nn.Module, str | None]:
    """Return why projections are not fused for what they are themselves."""
    found: dict[nn.Module, str | None] = {}
    compiled, gathered = inside(model, is_compiled), inside(model, is_fsdp2)
    flat = inside(model, is_fsdp1)
    left: list[Any] = list(trunks(model, family))
    embeddings = [embedding_of(trunk) for trunk in left]
    while left:
        module = left.pop()
        kind = _kind(module, x, adapters=not state.batch_invariant)
        if module in compiled and is_projection(module):
            kind = "torch.compile"
        elif module in flat and is_projection(module):
            kind = FLAT
        if kind is not None and not (kind.endswith(SHARDED) and module in gathered):
            found[module] = kind
        elif not is_lora(module):
            left += (child for child in module.children() if child not in embeddings)
    return found


def _fused_together(layer: Any) -> Iterator[tuple[list[nn.Module], str | None]]:
    """Yield the projections of a layer that are fused together or not at all, and why they are
    called for what holds them, or None.
    """
    if isinstance(layer, FusedDecoderLayer):
        yield _members(layer.mlp, SWIGLU), why_mlp_is_called(layer.mlp, layer)
    if isinstance(layer, Replacement) and layer.inputs and layer.joins_inputs:
        read = _members(layer, layer.inputs)
        yield read, None
        for part in layer.children():
            if is_projection(part) and part not in read:
                yield [part], None


def _members(module: Any, names: Sequence[str]) -> list[nn.Module]:
    """Return the projections of these names; none where one is missing, as in experts."""
    found = [module._modules.get(name) for name in names]
    return found if all(map(is_projection, found)) else []


def _bias(module: nn.Module) -> str | None:
    return "a bias" if type(module) is nn.Linear and module.bias is not None else None


def inside(model: nn.Module, is_one: Callable[[Any], bool]) -> set[nn.Module]:
    """Return the modules for which `is_one` holds, and all modules inside them."""
    return {inner for part in model.modules() if is_one(part) for inner in part.modules()}


@contextmanager
def as_under_autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Switch autocast to `dtype` on for the block, for reports on a run under autocast; with None
    nothing changes.

    Not by `torch.autocast`, which asks a GPU whether it supports bfloat16: nothing is computed
    here.
    """
    if dtype is None or not torch.amp.is_autocast_available(device):
        yield
        return
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def _kind(module: Any, x: torch.Tensor, *, adapters: bool) -> str | None:
    """Return the reason of `why_not_fused`, or None; it says so if the module would be fused under
    autocast, as a Trainer uses it.
    """
    kind, device = why_not_fused(module, x, adapters=adapters), x.device.type
    if kind is None:
        return None
    with as_under_autocast(device, torch.bfloat16):
        fused = why_not_fused(module, x, adapters=adapters) is None
    return f"{kind} (fused under autocast in bfloat16)" if fused else kind
