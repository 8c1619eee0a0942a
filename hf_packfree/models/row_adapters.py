"""Kinds of PEFT's adapters that work on whole rows instead of tokens, which packed rows cannot
have.

Prompt learning (prompt tuning, P-tuning, prefix tuning and others) puts virtual tokens in front of
the row and drops its positions, so that the model sees one document, even if several were packed.
An activated LoRA (aLoRA) is on after a row's last invocation, which is in its last document. Lily's
routers average over all tokens of a batch, and so does VeLoRA's backward pass. Shadow calls a model
of its own before the patched one.

They are refused when a model is patched. If PEFT wraps the model later, they are found in the call
stack of a forward, because PEFT leaves no mark on the model below, or in the layers of a text model
that is called without PEFT. So are the tasks of rows that PEFT's Poly is given; names of adapters
for each row are in hooks for the time of a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from traceback import walk_stack
from typing import Any

from torch import Tensor, nn

from hf_packfree.errors import UnsupportedInput, UnsupportedModel
from hf_packfree.packing import PackedSequence

_OF_ROWS = {
    "LILY": (
        "Lily, whose routers average over all tokens of a batch: packed documents would change "
        "each other"
    ),
    "SHADOW": (
        "Shadow, whose own model is called before the patched one, with position_ids and a mask "
        "alone: packed documents would read each other"
    ),
}
"""{PEFT's name of a method: what is wrong with it for packed rows, in words}."""
_AVERAGES = (
    "VeLoRA with init_type='batch_average' (init_type='random' reads no others), whose gradients "
    "average over all tokens of a batch: packed documents would change each other's"
)


def refuse_adapters_of_rows(model: nn.Module) -> None:
    """Refuse a model with adapters that work on whole rows, in any of its modules.

    Raises:
        UnsupportedModel: the model has such adapters.
    """
    for module in model.modules():
        _refuse(module, _learns_prompts)
        _refuse(module, _reads_the_row)


def refuse_prompts_from_above(inputs_embeds: Tensor | None) -> None:
    """Refuse a call with embeddings if PEFT calls for prompt learning, which turns the ids of a row
    into embeddings.

    Raises:
        UnsupportedModel: a caller is PEFT's, with prompt learning.
    """
    if inputs_embeds is not None:
        for given in _callers():
            _refuse(given.get("self"), _learns_prompts)


def refuse_readers_of_the_row(module: nn.Module, packed: PackedSequence) -> None:
    """Refuse a call that becomes one row if PEFT calls for adapters that read the row, or has put
    such adapters into the module that is called; and one whose shape changes on the way if PEFT has
    something for each of its rows or tokens: tasks of Poly, names of adapters, scalings of X-LoRA,
    or the tokens that EVA starts from.

    Raises:
        UnsupportedModel: a caller, or the module, has such adapters.
        UnsupportedInput: a caller is PEFT's, with `task_ids`, `adapter_names`, X-LoRA or EVA.
    """
    _refuse(module, _reads_the_row)
    callers = list(_callers())
    if not callers and not hasattr(module, "peft_config"):
        _refuse_if(_layers_that_read_the_row(module))
    several = packed.batch_shape[0] > 1
    name = _adapters_of_rows(module) if callers and several else None
    for given in callers:
        _refuse(given.get("self"), _reads_the_row)
        if several and given.get("task_ids") is not None:
            name = "task_ids"
        if name is None and (several or packed.indices is not None):
            name = _given_for_each_token(given)
        if name is not None:
            raise UnsupportedInput(
                f"found PEFT's {name} for a batch {packed.batch_shape}, which becomes one row "
                "without padding; wanted rows that stay as they are; pass padded='upstream' to "
                "apply_patches or PackFreeCallback, and packed rows one at a time, without padding"
            )


def _adapters_of_rows(module: nn.Module) -> str | None:
    """Return "adapter_names" if PEFT was given a name for each row in this call, or None."""
    # PEFT takes the names out of its arguments, and refuses them in training
    hooks = () if module.training else (part._forward_pre_hooks for part in module.modules())
    handed = (getattr(hook, "keywords", ()) for each in hooks for hook in each.values())
    return "adapter_names" if any("adapter_names" in names for names in handed) else None


def _given_for_each_token(given: dict[str, Any]) -> str | None:
    configs = getattr(given.get("self"), "peft_config", None)
    if isinstance(configs, dict) and any(_kind(one) == "XLORA" for one in configs.values()):
        return "X-LoRA with scalings"
    # EVA's; without the function its hooks take all tokens that layers get
    chooses = given.get("prepare_layer_inputs_fn") is not None
    return "EVA with a choice of tokens" if chooses else None


def _callers() -> Iterator[dict[str, Any]]:
    """Yield the variables of PEFT's forwards, and of EVA's functions, that a call comes from."""
    if "peft" not in sys.modules:
        return
    for frame, _ in walk_stack(None):
        module = frame.f_globals.get("__name__", "")
        # with adapters disabled the model's own forward is called in place of PEFT's
        is_forward = frame.f_code.co_name == "forward" and module.startswith("peft.")
        if is_forward or module == "peft.tuners.lora.eva":
            yield frame.f_locals


def _refuse(module: Any, finds_fault: Callable[[Any], str | None]) -> None:
    configs = getattr(module, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        _refuse_if(finds_fault(config))


def _refuse_if(fault: str | None) -> None:
    if fault is not None:
        raise UnsupportedModel(
            f"found PEFT's {fault}; wanted adapters that work token by token, such as LoRA; "
            "use those, or train without hf_packfree, one document per row"
        )


def _learns_prompts(config: Any) -> str | None:
    if not getattr(config, "is_prompt_learning", False):
        return None
    return (
        f"{_kind(config)}, which puts virtual tokens in front of a row and drops position_ids: "
        "packed documents would read each other"
    )


def _reads_the_row(config: Any) -> str | None:
    if getattr(config, "alora_invocation_tokens", None) is not None:
        return (
            "activated LoRA (alora_invocation_tokens), which is on after the last invocation of a "
            "row: in all but the last of packed documents it would be off"
        )
    velora = getattr(config, "velora_config", None)
    if _averages(getattr(velora, "init_type", None)):
        return _AVERAGES
    return _OF_ROWS.get(_kind(config))


def _averages(init_type: str | None) -> bool:
    # once, or in every forward
    return init_type is not None and init_type.startswith("batch_average")


def _layers_that_read_the_row(module: nn.Module) -> str | None:
    """Return what is wrong with PEFT's layers inside a module, or None.

    A text model is called without PEFT's forward, and without the module that PEFT leaves its
    configs on, by who wants hidden states.
    """
    if "peft" not in sys.modules:
        return None
    parts: list[Any] = [module]
    # a third of the time of `modules()`, in every such forward
    for part in parts:
        # a submodule may be None
        own = vars(part) if part is not None else {}
        if below := own.get("_modules"):
            parts.extend(below.values())
            if "lily_router" in below:
                return _OF_ROWS["LILY"]
            if any(map(_averages, own.get("lora_velora_init_type", {}).values())):
                return _AVERAGES
    return None


def _kind(config: Any) -> Any:
    return getattr(config.peft_type, "value", config.peft_type)
