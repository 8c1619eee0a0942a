"""The change itself: every module of a plan, or none."""

from __future__ import annotations

from typing import Any

from hf_packfree.models.state import PatchState
from hf_packfree.patching.plan import Step


def swap(steps: list[Step], state: PatchState) -> None:
    """Give each module its new class and `state`; put all back if one fails.

    A forward that the plan let pass on an instance is its old class's: it would hide the new one, and goes.
    """
    done: list[tuple[Step, Any]] = []
    try:
        for step in steps:
            done.append((step, vars(step.module).pop("forward", None)))
            step.module.__class__ = step.after
            vars(step.module)["packfree"] = state
    except BaseException:
        for step, forward in done:
            step.module.__class__ = step.before
            vars(step.module).pop("packfree", None)
            if forward is not None:
                vars(step.module)["forward"] = forward
        raise
