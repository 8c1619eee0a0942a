"""The change itself: every module of a plan, or none."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_packfree.models.state import PatchState

_ASIDE = "packfree_forward_before"


@dataclass(frozen=True)
class Step:
    """One module to swap: its name in the model, its class before and after."""

    name: str
    module: nn.Module
    before: type[nn.Module]
    after: type[nn.Module]


def swap(steps: list[Step], state: PatchState) -> None:
    """Give each module its new class and `state`; put all back if one fails.

    A forward that the plan let pass on an instance is its old class's: it would hide the new one, and waits aside.
    """
    done: list[Step] = []
    try:
        for step in steps:
            done.append(step)
            if "forward" in vars(step.module):
                vars(step.module)[_ASIDE] = vars(step.module).pop("forward")
            step.module.__class__ = step.after
            vars(step.module)["packfree"] = state
    except BaseException:
        put_back(done)
        raise


def put_back(steps: list[Step]) -> None:
    """Give each module back its class, and what else it had."""
    for step in steps:
        step.module.__class__ = step.before
        vars(step.module).pop("packfree", None)
        if _ASIDE in vars(step.module):
            vars(step.module)["forward"] = vars(step.module).pop(_ASIDE)
