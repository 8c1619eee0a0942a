"""Plan and check, before anything changes: the modules to swap, and every reason to refuse."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_packfree.errors import ContractError, PatchConflict, UnsupportedModel
from hf_packfree.models.attention import check_attention
from hf_packfree.models.attention_interface import refuse_what_it_cannot_serve
from hf_packfree.models.base import Replacement, contract_violations, kinds_of_layers
from hf_packfree.models.fused_head import is_fused_head
from hf_packfree.models.heads import PackedHead
from hf_packfree.models.record_head import RecordHead
from hf_packfree.models.rotary import check_rope_type
from hf_packfree.models.row_adapters import refuse_adapters_of_rows
from hf_packfree.models.subclassed import in_front_of
from hf_packfree.ops.table import OPS
from hf_packfree.patching.family import Family
from hf_packfree.patching.registry import FAMILIES, family_of
from hf_packfree.patching.steps import ClassSwap, own_forward
from hf_packfree.patching.unlisted import family_for

_LEFT_ALONE = (
    "it runs a forward of its own, whose loss knows no documents: the last token of one has to "
    "predict the next one's first, unless that label is -100, as transformers' "
    "DataCollatorWithFlattening sets it; padding must have nothing to predict"
)
_LOSES = (
    "it runs a forward of its own, and transformers' hands no boundaries on to the text model: "
    "documents of packed rows read each other, unless this one hands position_ids on"
)


def plan_swaps(model: nn.Module) -> tuple[Family, list[ClassSwap]]:
    """Return the model's family and the swaps it still needs (none when it is patched already).

    Raises:
        UnsupportedModel: `model` holds no text model, or a text model that would not keep documents
            apart; the rotary embedding is of unknown type; or PEFT adapters work on whole rows.
        PatchConflict: other code already changed a module that has to be swapped, or boundaries
            would be lost on their way to the text model.
        ContractError: a layer is missing, or is not what the family's checkpoints hold.
        BackendUnavailable: the model's attention implementation is not known to keep documents
            apart.
    """
    family = family_of(model) or family_for(model)
    if family is None:
        raise UnsupportedModel(
            f"found a {type(model).__name__}, which holds no text model of a supported family; "
            "wanted one of "
            f"{', '.join(row.name for row in FAMILIES)}; `packfree models` shows the table"
        )
    refuse_adapters_of_rows(model)
    refuse_lost_boundaries(model, family)
    pairs, optional = family.pairs(), family.optional_swaps()
    needed = {before: after for before, after in pairs.items() if before not in optional}
    _check_seams(model, needed)
    steps = [*_steps(model, pairs, optional), *_head_steps(model, family)]
    for trunk in trunks(model, family):
        if family.made_from_upstream:
            refuse_what_it_cannot_serve(model, trunk)
        _check_mixers(trunk, family, pairs)
        _check_contracts(model, trunk, pairs)
        check_attention(trunk.config)
        check_rope_type(trunk.config)
    return family, steps


def trunks(model: nn.Module, family: Family) -> Iterator[Any]:
    """Yield the family's text models inside `model`, swapped or not."""
    cls = family.trunk_class()
    return (module for module in model.modules() if isinstance(module, cls))


def op_sizes(model: nn.Module, family: Family) -> dict[str, int]:
    """Return the sizes that backends check, by name, from the mixers and towers of a model; see
    `Target.sizes`.
    """
    ours: dict[str, Any] = {cls.__name__: cls for cls in family.pairs().values()}
    sizes: dict[str, int] = {}
    for module in model.modules():
        if type(module).__name__ in ours:
            sizes |= ours[type(module).__name__].op_sizes(module)
    return sizes


def ops_of(model: nn.Module, family: Family) -> tuple[str, ...]:
    """Return the family's ops that run in this model: those of towers only if it has towers, and
    those of the head only if it has a head.
    """
    there = {
        "layers": True,
        "head": bool(language_heads(model)),
        "towers": tower_attention_of(model, family) is not None,
    }
    return tuple(op for op in family.ops if there[OPS[op].where])


def language_heads(model: nn.Module) -> list[PackedHead]:
    """Return the patched language-model heads whose class's forward runs, not another one on the
    instance.
    """
    heads = (module for module in model.modules() if isinstance(module, PackedHead))
    return [head for head in heads if not _runs_another_forward(head)]


def tower_attention_of(model: nn.Module, family: Family) -> Any:
    """Return the first attention layer of the model's towers, swapped or not, or None."""
    names = {tower.attention for tower in family.towers}
    classes = tuple(before for before in family.pairs() if before.__name__ in names)
    return next((module for module in model.modules() if isinstance(module, classes)), None)


def _steps(
    model: nn.Module,
    pairs: dict[type[nn.Module], type[nn.Module]],
    optional: Container[type[nn.Module]],
) -> Iterator[ClassSwap]:
    """Yield the swaps of a model. Optional layers of another class, or with a forward on the
    instance, are left unpatched: the record still reaches their mixers.
    """
    for name, module in model.named_modules():
        before = type(module)
        if before in pairs and not (before in optional and "forward" in vars(module)):
            yield ClassSwap(name, module, before, pairs[before])


def _head_steps(model: nn.Module, family: Family) -> Iterator[ClassSwap]:
    pairs = family.head_pairs()
    for name, module in model.named_modules():
        if (after := head_swap(module, pairs)) is not None:
            yield ClassSwap(name, module, type(module), after)


def head_swap(module: nn.Module, pairs: Mapping[Any, Any]) -> type[nn.Module] | None:
    """Return our class for a module that is a head of upstream's class, or of a subclass that
    inherits its forward; None for other modules.

    Args:
        pairs: `Family.head_pairs`.
    """
    cls: Any = type(module)
    before = next((base for base in cls.__mro__ if base in pairs), None)
    if (
        before is None
        or isinstance(module, Replacement)
        or not _lets_ours_run(module)
        or cls.forward is not before.forward
    ):
        return None
    return pairs[before] if cls is before else in_front_of(pairs[before], cls)


def _lets_ours_run(module: Any) -> bool:
    """Whether no forward on the instance would bypass our head; the class's own and TRL's fused
    forward do not count, since ours replaces them.
    """
    forward = own_forward(module)
    return forward is None or is_fused_head(forward)


def unpatched_heads(model: nn.Module, family: Family) -> dict[str, str]:
    """Return {class name: remark} for language models' heads that stay unpatched because their
    class or instance has another forward.
    """
    pairs: dict[Any, Any] = family.head_pairs()
    heads = tuple(before for before, ours in pairs.items() if issubclass(ours, PackedHead))
    losing = tuple(_losing_heads(family))
    found = (module for module in model.modules() if isinstance(module, heads))
    return {
        type(module).__name__: _LOSES if isinstance(module, losing) else _LEFT_ALONE
        for module in found
        if _runs_another_forward(module)
    }


def refuse_lost_boundaries(model: nn.Module, family: Family) -> None:
    """Refuse heads that would stay unpatched and hand no boundaries on to their text model.

    Raises:
        PatchConflict: there is such a head.
    """
    pairs = _losing_heads(family)
    for module in model.modules():
        before: Any = next((head for head in pairs if isinstance(module, head)), None)
        if before is None or isinstance(module, Replacement) or head_swap(module, pairs):
            continue
        raise PatchConflict(
            f"found a {type(module).__name__} with a forward of its own, and transformers' forward "
            f"of {before.__name__} hands no boundaries on to the text model: packed rows would "
            "leak; wanted the class's own forward, in which they are handed on here; call "
            "apply_patches(model) before something wraps it, or, if yours hands position_ids on, "
            f"apply_patches(model.{before.base_model_prefix})"
        )


def _losing_heads(family: Family) -> dict[type[nn.Module], type[nn.Module]]:
    """Return {upstream's class: ours} for heads whose upstream forward hands no boundaries on."""
    pairs = family.head_pairs().items()
    return {before: ours for before, ours in pairs if issubclass(ours, RecordHead)}


def _runs_another_forward(module: Any) -> bool:
    return is_bypassed(module) or not isinstance(module, Replacement)


def is_bypassed(module: Any) -> bool:
    """Whether a forward on the instance, such as Liger's fused loss, runs instead of the class's.
    Those of accelerate, for offloading and mixed precision, call the class's and do not count, nor
    does the class's own.
    """
    if own_forward(module) is None or hasattr(module, "_hf_hook"):
        return False
    around = getattr(vars(module).get("_original_forward"), "__func__", None)
    return around is not type(module).forward


def _check_seams(model: nn.Module, pairs: dict[type[nn.Module], type[nn.Module]]) -> None:
    known = {*pairs, *pairs.values()}
    for name, module in model.named_modules():
        if not isinstance(module, tuple(pairs)):
            continue
        where = name or "the model itself"
        if type(module) not in known:
            raise PatchConflict(
                f"found {where} as a {type(module).__name__} from {type(module).__module__}, a "
                "class put on top of upstream's (FSDP2's fully_shard does that, so do "
                "parametrizations and subclasses); wanted upstream's own; call "
                "apply_patches(model) first, wrap afterwards, or give a family of your own a row "
                "(docs/adding_a_family.md)"
            )
        if type(module) in pairs and own_forward(module) is not None:
            raise PatchConflict(
                f"found {where} with a forward of its own instance ({_who(module)}), which would "
                "bypass the swap; wanted the class's; call apply_patches(model) first, or load "
                "the model under register_patches()"
            )


def _who(module: object) -> str:
    if hasattr(module, "_hf_hook"):
        return "an accelerate hook: device_map or offloading"
    return "another library patched it"


def _check_mixers(
    trunk: Any, family: Family, pairs: dict[type[nn.Module], type[nn.Module]]
) -> None:
    """Refuse a text model in which a layer is unknown, or has other mixers than the config says:
    mixers that are not swapped leak.
    """
    kinds = kinds_of_layers(trunk.config)
    if len(kinds) != len(trunk.layers):
        raise ContractError(
            f"found {len(trunk.layers)} layers in {type(trunk).__name__}, its config says "
            f"{len(kinds)}; wanted the same "
            "number; change config.num_hidden_layers and config.layer_types with the layers"
        )
    names, known = {mixer.cls for mixer in family.mixers}, {*pairs, *pairs.values()}
    for number, (kind, layer) in enumerate(zip(kinds, trunk.layers, strict=True)):
        if not any(_is_one_of(part, family.layers, family.upstream) for part in layer.modules()):
            raise ContractError(
                f"found layers.{number} as a {type(layer).__name__}; wanted a "
                f"{' or a '.join(family.layers)}, or a wrapper of one, since others may not hand "
                "the record to their mixer, which leaks then; undo what replaced the layer"
            )
        rows = [mixer for mixer in family.mixers if mixer.kind == kind]
        known_kind = kind in family.mixers_by_kind
        mixers = [
            type(part).__name__
            for part in layer.modules()
            if type(part) in known and type(part).__name__ in names
        ]
        if not known_kind or sorted(mixers) != sorted(mixer.cls for mixer in rows):
            wanted = " and ".join(f"a {mixer.cls} at {mixer.path}" for mixer in rows)
            wanted = wanted or ("no mixer" if known_kind else "a kind that the table has")
            raise ContractError(
                f"found {' and '.join(mixers) or 'no known mixer'} in layers.{number}, which the "
                f"config says is {kind!r}; wanted {wanted}, since what mixes tokens unpatched "
                "leaks; undo what replaced it, or report the model"
            )


def _is_one_of(module: nn.Module, names: tuple[str, ...], upstream: str) -> bool:
    """Whether a module is of one of these classes of the module `upstream`, or of a subclass."""
    return any(cls.__name__ in names and cls.__module__ == upstream for cls in type(module).__mro__)


def _check_contracts(
    model: nn.Module, trunk: nn.Module, pairs: dict[type[nn.Module], type[nn.Module]]
) -> None:
    ours: dict[str, Any] = {cls.__name__: cls for cls in pairs.values()}
    for module in trunk.modules():
        sizes_of = getattr(ours.get(type(module).__name__), "checkpoint_sizes", None)
        if sizes_of is not None and (broken := contract_violations(module, sizes_of)):
            if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
                raise PatchConflict(
                    f"found a {type(module).__name__} of whose parameters this rank has a part, "
                    f"in FullyShardedDataParallel with use_orig_params=True ({'; '.join(broken)}); "
                    "wanted whole ones, to compare them with the config; call "
                    "apply_patches(model) first, wrap afterwards"
                )
            raise ContractError(
                f"found a {type(module).__name__} unlike its family's checkpoints: "
                f"{'; '.join(broken)}; wanted its family's, of the config's sizes; undo what "
                "changed the layer (leave what PEFT wrapped out of target_modules), or report the "
                "release"
            )
