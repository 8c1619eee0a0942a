"""The change itself: every module of a plan, or none."""

from __future__ import annotations

from hf_packfree.models.state import PatchState
from hf_packfree.patching.plan import Step


def swap(steps: list[Step], state: PatchState) -> None:
    """Give each module its new class and `state`; put all back if one fails."""
    done: list[Step] = []
    try:
        for step in steps:
            step.module.__class__ = step.after
            done.append(step)
            vars(step.module)["packfree"] = state
    except BaseException:
        for step in done:
            step.module.__class__ = step.before
            vars(step.module).pop("packfree", None)
        raise
