"""Kinds of PEFT's adapters that work on whole rows instead of tokens, which packed rows cannot
have.

Prompt learning (prompt tuning, P-tuning, prefix tuning and others) puts virtual tokens in front of
the row and drops its positions, so that the model sees one document, even if several were packed.
An activated LoRA (aLoRA) is on after a row's last invocation, which is in its last document. Lily's
routers average over all tokens of a batch, and so does VeLoRA's backward pass. Shadow calls a model
of its own before the patched one.

They are refused when a model is patched. If PEFT wraps the model later, they are found in the call
stack of a forward, because PEFT leaves no mark on the model below. So are the tasks of rows that
PEFT's Poly is given; names of adapters for each row are in hooks for the time of a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from traceback import walk_stack
from typing import Any

from torch import Tensor, nn

from hf_packfree.errors import UnsupportedInput, UnsupportedModel

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


def refuse_readers_of_the_row(module: nn.Module, rows: int) -> None:
    """Refuse a call that becomes one row if PEFT calls for adapters that read the row, or has put
    such adapters into the module that is called; and one of several `rows` if PEFT was given
    something for each: tasks of Poly, names of adapters, or scalings of X-LoRA.

    Raises:
        UnsupportedModel: a caller, or the module, has such adapters.
        UnsupportedInput: a caller is PEFT's, with `task_ids`, `adapter_names` or X-LoRA.
    """
    _refuse(module, _reads_the_row)
    for given in _callers():
        _refuse(given.get("self"), _reads_the_row)
        if rows > 1 and (name := _given_for_each_row(given, module)) is not None:
            raise UnsupportedInput(
                f"found PEFT's {name} one for each of {rows} rows, which become one row without "
                "padding; wanted rows that stay apart; pass padded='upstream' to apply_patches or "
                "PackFreeCallback"
            )


def _given_for_each_row(given: dict[str, Any], module: nn.Module) -> str | None:
    """Return what has an element for each row in PEFT's forward, whose variables are `given`, or
    None.
    """
    if given.get("task_ids") is not None:
        return "task_ids,"
    configs = getattr(given.get("self"), "peft_config", None)
    if isinstance(configs, dict) and any(_kind(one) == "XLORA" for one in configs.values()):
        return "X-LoRA, whose scalings are"
    # PEFT takes the names out of its arguments, and refuses them in training
    hooks = () if module.training else (part._forward_pre_hooks for part in module.modules())
    handed = (getattr(hook, "keywords", ()) for each in hooks for hook in each.values())
    return "adapter_names," if any("adapter_names" in names for names in handed) else None


def _callers() -> Iterator[dict[str, Any]]:
    """Yield the variables of PEFT's forwards that a call comes from."""
    if "peft" not in sys.modules:
        return
    for frame, _ in walk_stack(None):
        # with adapters disabled the model's own forward is called in place of PEFT's
        is_forward = frame.f_code.co_name == "forward"
        if is_forward and frame.f_globals.get("__name__", "").startswith("peft."):
            yield frame.f_locals


def _refuse(module: Any, finds_fault: Callable[[Any], str | None]) -> None:
    configs = getattr(module, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if fault := finds_fault(config):
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
    if getattr(velora, "init_type", None) == "batch_average":
        return (
            "VeLoRA with init_type='batch_average' (init_type='random' reads no others), whose "
            "gradients average over all tokens of a batch: packed documents would change each "
            "other's"
        )
    return _OF_ROWS.get(_kind(config))


def _kind(config: Any) -> Any:
    return getattr(config.peft_type, "value", config.peft_type)
