"""What a plan is made of: steps that each change one module and can be undone, carried out all
or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from hf_packfree.errors import PatchConflict
from hf_packfree.models.state import PatchState
from hf_packfree.packing.marks import ADDED, FORWARD_BEFORE, FUSED_HEAD, VERL_EXPECTED


class Step(Protocol):
    """One change to a model."""

    def carry_out(self, state: PatchState) -> None:
        """Make the change, and note what undoing needs."""

    def undo(self) -> None:
        """Leave everything as it was before, notes included."""

    def lift(self) -> None:
        """Take the change away for a while."""

    def restore(self) -> None:
        """Bring back what was lifted."""


@dataclass(frozen=True)
class ClassSwap:
    """One module's class: its name in the model, the class before and after."""

    name: str
    module: nn.Module
    before: type[nn.Module]
    after: type[nn.Module]

    def carry_out(self, state: PatchState) -> None:
        """Give the module its new class and `state`.

        A forward on the instance that the plan accepts is its old class's: it would bypass the new
        one, and is kept aside.
        """
        if "forward" in vars(self.module):
            FORWARD_BEFORE.put(self.module, vars(self.module).pop("forward"))
        self.restore()
        vars(self.module)["packfree"] = state

    def undo(self) -> None:
        """Give the module back its class, and what else it had."""
        self.lift()
        vars(self.module).pop("packfree", None)
        FUSED_HEAD.take(self.module)
        VERL_EXPECTED.take(self.module)
        if (forward := FORWARD_BEFORE.take(self.module)) is not None:
            vars(self.module)["forward"] = forward

    def lift(self) -> None:
        """Give the module its class before."""
        self.module.__class__ = self.before

    def restore(self) -> None:
        """Give the module its class after."""
        self.module.__class__ = self.after


@runtime_checkable
class Joins(Protocol):
    """A child that has to know when it gets a parent and when it loses it."""

    def join(self, parent: nn.Module) -> None:
        """Called once the child is in place."""

    def leave(self, parent: nn.Module) -> None:
        """Called before it is taken away."""


@dataclass(frozen=True)
class AddModule:
    """A child that a module gets: its name in the model, the parent, the attribute there, the
    child.
    """

    name: str
    parent: nn.Module
    attribute: str
    module: nn.Module

    def carry_out(self, state: PatchState) -> None:
        """Add the child."""
        self.restore()

    def undo(self) -> None:
        """Take exactly this child away."""
        if self.attribute in (ADDED.of(self.parent) or {}):
            self.lift()

    def lift(self) -> None:
        """Take the child away, and the note that it is ours."""
        if isinstance(self.module, Joins):
            self.module.leave(self.parent)
        added = ADDED.take(self.parent) or {}
        del self.parent._modules[self.attribute], added[self.attribute]
        if added:
            ADDED.put(self.parent, added)

    def restore(self) -> None:
        """Put the child in place, and note on the parent that it is ours."""
        self.parent.add_module(self.attribute, self.module)
        ADDED.put(self.parent, {**(ADDED.of(self.parent) or {}), self.attribute: self.module})
        if isinstance(self.module, Joins):
            self.module.join(self.parent)


def plan_addition(model: nn.Module, name: str, module: nn.Module) -> list[AddModule]:
    """Return the step that adds `module` to `model` under the dotted `name`, or none where a module
    was added there already.

    Raises:
        PatchConflict: something that is not ours has the name.
    """
    where, _, attribute = name.rpartition(".")
    parent = model.get_submodule(where)
    if attribute in (ADDED.of(parent) or {}):
        return []
    if hasattr(parent, attribute):
        raise PatchConflict(
            f"found {name} taken by a {type(getattr(parent, attribute)).__name__}; wanted the name "
            f"free for the {type(module).__name__} to add; rename or remove what has it"
        )
    return [AddModule(name, parent, attribute, module)]


def additions(model: nn.Module) -> Iterator[AddModule]:
    """Yield the additions in force, each checked to be undoable.

    Raises:
        PatchConflict: something else has taken the place of a module that was added.
    """
    for where, parent in list(model.named_modules()):
        for attribute, module in (ADDED.of(parent) or {}).items():
            name, found = f"{where}.{attribute}".lstrip("."), getattr(parent, attribute, None)
            if found is not module:
                raise PatchConflict(
                    f"found {name} as a {type(found).__name__} where a {type(module).__name__} was "
                    "added; wanted that very module; put it back, or keep the patches"
                )
            yield AddModule(name, parent, attribute, module)


def carry_out(steps: Iterable[Step], state: PatchState) -> None:
    """Carry out every step; undo all, the last first, if one fails."""
    done: list[Step] = []
    try:
        for step in steps:
            done.append(step)
            step.carry_out(state)
    except BaseException:
        undo(done)
        raise


def undo(steps: Sequence[Step]) -> None:
    """Undo every step, the last first."""
    for step in reversed(steps):
        step.undo()


@contextmanager
def lifted(steps: Sequence[Step]) -> Iterator[None]:
    """Run the block without the steps' changes, and bring them back afterwards."""
    for step in reversed(steps):
        step.lift()
    try:
        yield
    finally:
        for step in steps:
            step.restore()
