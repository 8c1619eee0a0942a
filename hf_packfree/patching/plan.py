"""Plan and check: what would be swapped, and everything that speaks against it, before anything changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_packfree.errors import ContractError, PatchConflict, UnsupportedModel
from hf_packfree.models.attention import check_attention
from hf_packfree.models.base import broken_promises
from hf_packfree.patching.registry import FAMILIES, Family, family_of
from hf_packfree.patching.steps import Step


def plan_swaps(model: nn.Module) -> tuple[Family, list[Step]]:
    """Return the model's family and the swaps it still needs (none when it is patched already).

    Raises:
        UnsupportedModel: no supported text model is inside.
        PatchConflict: something else already changed the model where a swap is needed.
        ContractError: a layer is missing, or is not what the family's checkpoints hold.
        BackendUnavailable: the model's attention implementation is not known to keep documents apart.
    """
    family = family_of(model) if isinstance(model, nn.Module) else None
    if family is None:
        raise UnsupportedModel(
            f"found a {type(model).__name__}, which holds no text model of a supported family; wanted one of "
            f"{', '.join(row.name for row in FAMILIES)}; `packfree models` shows the table"
        )
    pairs, spared = family.pairs(), family.optional_swaps()
    needed = {before: after for before, after in pairs.items() if before not in spared}
    _check_seams(model, needed)
    steps = [*_steps(model, needed), *_optional_steps(model, spared)]
    for trunk in trunks(model, family):
        _check_trunk(trunk, pairs)
        check_attention(trunk.config)
    return family, steps


def trunks(model: nn.Module, family: Family) -> Iterator[nn.Module]:
    """Yield the family's text models inside `model`, swapped or not."""
    return (module for module in model.modules() if isinstance(module, family.trunk_class()))


def _steps(model: nn.Module, pairs: dict[type[nn.Module], type[nn.Module]]) -> Iterator[Step]:
    originals = {after: before for before, after in pairs.items()}
    for name, module in model.named_modules():
        if type(module) in pairs:
            yield Step(name, module, type(module), pairs[type(module)])
        elif type(module) in originals and "packfree" not in vars(module):  # swapped while loading, without a trunk
            yield Step(name, module, originals[type(module)], type(module))


def _optional_steps(model: nn.Module, pairs: dict[type[nn.Module], type[nn.Module]]) -> Iterator[Step]:
    """A head or layer of another class, or with a forward of its own instance, is left alone: the record reaches it too."""
    for name, module in model.named_modules():
        if type(module) in pairs and "forward" not in vars(module):
            yield Step(name, module, type(module), pairs[type(module)])


def _check_seams(model: nn.Module, pairs: dict[type[nn.Module], type[nn.Module]]) -> None:
    known = {*pairs, *pairs.values()}
    for name, module in model.named_modules():
        if not isinstance(module, tuple(pairs)):
            continue
        where = name or "the model itself"
        if type(module) not in known:
            raise PatchConflict(
                f"found {where} as a {type(module).__name__} from {type(module).__module__}, a class put on top of "
                "upstream's (FSDP2's fully_shard does that, so do parametrizations and subclasses); wanted upstream's own; "
                "call apply_patches(model) first, wrap afterwards"
            )
        if type(module) in pairs and "forward" in vars(module) and not _is_bound_alone(module):
            raise PatchConflict(
                f"found {where} with a forward of its own instance ({_who(module)}), which would bypass the swap; wanted the "
                "class's; call apply_patches(model) first, or load the model under register_patches()"
            )


def _is_bound_alone(module: Any) -> bool:
    """Whether the instance's forward is its class's: transformers' `kernelize` leaves that where it has no kernel."""
    forward = vars(module)["forward"]
    return getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module


def _who(module: object) -> str:
    if hasattr(module, "_hf_hook"):
        return "an accelerate hook: device_map or offloading"
    return "another library patched it"


def _check_trunk(trunk: Any, pairs: dict[type[nn.Module], type[nn.Module]]) -> None:
    ours: dict[str, Any] = {cls.__name__: cls for cls in pairs.values()}
    kinds = {"linear_attention": "GatedDeltaNet", "full_attention": "Attention"}
    for kind, ending in kinds.items():
        wanted = list(trunk.config.layer_types)[: trunk.config.num_hidden_layers].count(kind)
        found = [module for module in trunk.modules() if type(module).__name__ in ours
                 and type(module).__name__.endswith(ending)]
        if len(found) != wanted:
            raise ContractError(
                f"found {len(found)} {ending} layers in {type(trunk).__name__}, its config says {wanted} of {kind}; wanted "
                "each of them, since one that is not swapped leaks; undo what replaced them, or report the model"
            )
    for module in trunk.modules():
        sizes_of = getattr(ours.get(type(module).__name__), "checkpoint_sizes", None)
        if sizes_of is not None and (broken := broken_promises(module, sizes_of)):
            raise ContractError(
                f"found a {type(module).__name__} unlike its family's checkpoints: {'; '.join(broken)}; wanted the sizes "
                "of the config; undo what changed the layer, or report the release"
            )
