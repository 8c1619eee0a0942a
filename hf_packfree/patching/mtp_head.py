"""The step that adds a multi-token prediction head to a model; and `add_mtp` and `remove_mtp`,
which only add or remove it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from hf_packfree.errors import PatchConflict, UnsupportedModel
from hf_packfree.models.heads import PackedHead
from hf_packfree.models.state import PatchState
from hf_packfree.mtp.attached import AttachedHead
from hf_packfree.mtp.checkpoint import head_tensors
from hf_packfree.mtp.head import shapes_of
from hf_packfree.mtp.head_options import MTPOptions
from hf_packfree.patching.announce import warn_once
from hf_packfree.patching.family import Family
from hf_packfree.patching.plan import trunks
from hf_packfree.patching.registry import family_of
from hf_packfree.patching.steps import (
    AddModule,
    Change,
    ClassSwap,
    additions,
    carry_out,
    plan_addition,
    undo,
)

Model = TypeVar("Model", bound=nn.Module)
NAME = "mtp"


def plan_head(model: nn.Module, family: Family, options: MTPOptions | None) -> list[Change]:
    """Return the steps that add the head; none if the model has it already, or `options` is None.

    Raises:
        UnsupportedModel: the family's checkpoints have no such head, or the model has no language
            modelling head.
        MissingHead: see `read_head`.
        PatchConflict: the model has a head with other options, something else of this name, or
            PEFT's adapters, with which a trained head would not be saved.
    """
    if options is None:
        return []
    where, owner = owner_of(model, family)
    name = f"{where}.{NAME}".lstrip(".")
    there: Any = getattr(owner, NAME, None)
    # PEFT's `modules_to_save` wraps the head
    found = getattr(there, "original_module", there)
    if isinstance(found, AttachedHead):
        if found.options != options:
            raise PatchConflict(
                f"found {name} with {found.options}; wanted {options}; call remove_mtp(model) "
                "before choosing again"
            )
        _refuse_frozen(there, name, options)
        return []
    if options.train:
        _refuse_with_adapters(model, name)
    head = read_head(owner, family, options)
    return [*_swaps(head, name, family), *plan_addition(model, name, head)]


_RECIPE = (
    "get_peft_model(model, LoraConfig(..., modules_to_save=['mtp'], exclude_modules=r'mtp\\..*'))"
)


def _refuse_with_adapters(model: nn.Module, name: str) -> None:
    """Refuse to train a head next to PEFT's adapters: trainers then save only adapters, not the
    head.
    """
    if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        raise PatchConflict(
            f"found PEFT's adapters in the model, which are saved alone, and {name} to train "
            "with them, which every checkpoint would lose; wanted the head there before the "
            f"adapters; call apply_patches(model, mtp='train') first, then {_RECIPE}, or pass "
            "mtp='keep'"
        )


def _refuse_frozen(head: nn.Module, name: str, options: MTPOptions) -> None:
    """Refuse to train a frozen head: PEFT freezes modules that its config does not name."""
    learns = not options.detach or any(part.requires_grad for part in head.parameters())
    if options.train and not learns:
        raise PatchConflict(
            f"found {name} frozen, and mtp to train; wanted a head that learns, whole or by "
            f"adapters; call {_RECIPE}, or pass mtp='keep' from the start"
        )


def _swaps(head: nn.Module, name: str, family: Family) -> list[ClassSwap]:
    pairs = family.pairs()
    parts = ((part, module) for part, module in head.named_modules() if type(module) in pairs)
    return [
        ClassSwap(f"{name}.{part}", module, type(module), pairs[type(module)])
        for part, module in parts
    ]


def add_while_loading(
    owner: Any, around: nn.Module, family: Family, options: MTPOptions, state: PatchState
) -> None:
    """Add the head to a language model that is being built and takes in its text model;
    transformers loads the weights.

    Args:
        owner: the parent; models that are no language models get no head.
        around: the child that `owner` gets: the text model, or the vision-language model around it.
        state: the text model's.

    Raises:
        MissingHead: the checkpoint does not hold the head, the whole head and nothing but the head.
    """
    # adding the head to the owner calls this function, too
    adding = isinstance(around, AttachedHead)
    known: Any = _language_models(family)
    if adding or NAME in owner._modules or not isinstance(owner, known):
        return
    if not family.predicts_ahead:
        warn_once(
            f"checkpoints of {family.name} carry no multi-token prediction head: "
            f"{type(owner).__name__} gets none"
        )
        return
    tensors = None if options.from_scratch else head_tensors(str(owner.config.name_or_path))
    trunk = next(trunks(around, family))
    head = AttachedHead(trunk, 1 if tensors is None else max(tensors.layers, 1), options)
    if tensors is not None:
        tensors.check(shapes_of(head))
        head.read_from(tensors)
    carry_out([*_swaps(head, NAME, family), *plan_addition(owner, NAME, head)], state)


def _language_models(family: Family) -> tuple[type[nn.Module], ...]:
    return tuple(
        before for before, ours in family.head_pairs().items() if issubclass(ours, PackedHead)
    )


def owner_of(model: nn.Module, family: Family) -> tuple[str, Any]:
    """Return name and module of the language model (text model and language modelling head), the
    parent of `mtp`.

    Raises:
        UnsupportedModel: see `plan_head`.
    """
    if not family.predicts_ahead:
        raise UnsupportedModel(
            f"found a model of the family {family.name}, whose checkpoints carry no multi-token "
            "prediction head; wanted Qwen3.5 or Qwen3-Next; leave mtp out"
        )
    for name, module in model.named_modules():
        if isinstance(module, _language_models(family)):
            return name, module
    raise UnsupportedModel(
        f"found a {type(model).__name__} without a language modelling head; wanted one, which "
        "predicts for the multi-token "
        "prediction head too; load the model as AutoModelForCausalLM, or leave mtp out"
    )


def read_head(owner: Any, family: Family, options: MTPOptions) -> AttachedHead:
    """Return the head for a model, with the weights of a checkpoint or random ones.

    Raises:
        MissingHead: the checkpoint does not hold the head, the whole head and nothing but the head,
            in the model's sizes.
    """
    trunk, weight = next(trunks(owner, family)), owner.lm_head.weight
    if options.from_scratch:
        with torch.device("meta"):
            head = AttachedHead(trunk, 1, options)
        head.to(weight.dtype).to_empty(device=weight.device)
        for module in head.modules():
            trunk._init_weights(module)
        return head
    tensors = head_tensors(options.checkpoint or str(getattr(owner, "name_or_path", "")))
    with torch.device("meta"):
        head = AttachedHead(trunk, max(tensors.layers, 1), options)
    found = tensors.read(shapes_of(head))
    head.read_from(tensors)
    # a head that is only kept stays in its dtype, to be saved byte for byte
    dtype = weight.dtype if options.train else None
    head.load_state_dict(
        {name: part.to(weight.device, dtype) for name, part in found.items()}, assign=True
    )
    head.requires_grad_(options.train)
    return head


def add_mtp(model: Model, checkpoint: str | os.PathLike[str] | None = None) -> Model:
    """Add the frozen head that the model's checkpoint carries, and return the same model;
    `save_pretrained` then writes it.

    The same head as by `apply_patches(model, mtp="keep")`, without patching the model.

    Args:
        model: a Qwen3.5 or Qwen3-Next model with its language modelling head.
        checkpoint: folder or hub id to read the head from; the model's own checkpoint if not given.

    Raises:
        UnsupportedModel: the family's checkpoints have no such head, or the model has no language
            modelling head.
        MissingHead: the checkpoint lacks tensors of the head.
        PatchConflict: the model has a head with other options, or another module named `mtp`. After
            any error nothing was changed.
    """
    family = family_of(model)
    if family is None:
        raise UnsupportedModel(
            f"found a {type(model).__name__}; wanted a Qwen3.5 or Qwen3-Next model; pass the model "
            "itself"
        )
    steps = plan_head(model, family, MTPOptions(train=False, checkpoint=checkpoint))
    carry_out([step for step in steps if isinstance(step, AddModule)], PatchState())
    return model


def remove_mtp(model: nn.Module) -> nn.Module | None:
    """Remove the head and return it, with its weights; None if the model has none.

    Raises:
        PatchConflict: another module has replaced the head.
    """
    steps = [step for step in additions(model) if isinstance(step.module, AttachedHead)]
    undo(steps)
    return steps[0].module if steps else None


def refuse_trained_head(steps: Iterable[Change]) -> None:
    """Refuse to remove a head in training together with the patches, because its weights would be
    lost.

    Raises:
        PatchConflict: the steps contain such a head.
    """
    for head in (step.module for step in steps if isinstance(step, AddModule)):
        if isinstance(head, AttachedHead) and head.options.train:
            raise PatchConflict(
                "found a multi-token prediction head in training, whose weights would be gone; "
                "wanted it saved and taken away "
                "first; call head = remove_mtp(model), then remove_patches(model)"
            )
