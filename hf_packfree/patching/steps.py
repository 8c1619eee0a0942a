"""The steps of a plan: each changes one module and can be undone; all are carried out or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from hf_packfree.errors import PatchConflict
from hf_packfree.models.state import PatchState
from hf_packfree.packing.marks import ADDED, FORWARD_BEFORE, FUSED_HEAD, VERL_EXPECTED


class Change(Protocol):
    """One change to a model."""

    def carry_out(self, state: PatchState) -> None:
        """Make the change, and note what `undo` needs."""

    def undo(self) -> None:
        """Restore everything as it was before, and drop the notes."""

    def lift(self) -> None:
        """Take the change back temporarily, until `restore`."""

    def restore(self) -> None:
        """Make the lifted change again."""


@dataclass(frozen=True)
class ClassSwap:
    """A swap of one module's class: the module's name in the model, and the class before and
    after.
    """

    name: str
    module: nn.Module
    before: type[nn.Module]
    after: type[nn.Module]

    def carry_out(self, state: PatchState) -> None:
        """Give the module its new class and `state`.

        A forward on the instance, which the plan accepts only if it is the old class's, would
        bypass the new class: it is kept in a mark.
        """
        if "forward" in vars(self.module):
            FORWARD_BEFORE.put(self.module, vars(self.module).pop("forward"))
        self.restore()
        vars(self.module)["packfree"] = state

    def undo(self) -> None:
        """Restore the module's class, and its forward on the instance."""
        # ours, which somebody has set on the instance since
        if is_bound_alone(self.module):
            del vars(self.module)["forward"]
        self.lift()
        vars(self.module).pop("packfree", None)
        FUSED_HEAD.take(self.module)
        VERL_EXPECTED.take(self.module)
        if (forward := FORWARD_BEFORE.take(self.module)) is not None:
            vars(self.module)["forward"] = forward

    def lift(self) -> None:
        """Set the module's class to the one before."""
        self.module.__class__ = self.before

    def restore(self) -> None:
        """Set the module's class to the one after."""
        self.module.__class__ = self.after


def is_bound_alone(module: Any) -> bool:
    """Whether the forward on the instance is its class's own: transformers' `kernelize` sets it
    where it has no kernel, and TRL, Lightning and accelerate where they set another for a while.
    """
    forward = vars(module).get("forward")
    return getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module


def own_forward(module: Any) -> Any:
    """Return a forward on the instance that is not its class's own, or None."""
    return None if is_bound_alone(module) else vars(module).get("forward")


@runtime_checkable
class Joins(Protocol):
    """A child module with callbacks for being added to and removed from its parent."""

    def join(self, parent: nn.Module) -> None:
        """Called once the child is in place."""

    def leave(self, parent: nn.Module) -> None:
        """Called before the child is removed."""


@dataclass(frozen=True)
class AddModule:
    """The addition of a child: its name in the model, the parent, the parent's attribute, and the
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
        """Remove the child."""
        if self.attribute in (ADDED.of(self.parent) or {}):
            self.lift()

    def lift(self) -> None:
        """Remove the child, and the mark on the parent that it is ours."""
        if isinstance(self.module, Joins):
            self.module.leave(self.parent)
        added = ADDED.take(self.parent) or {}
        del self.parent._modules[self.attribute], added[self.attribute]
        if added:
            ADDED.put(self.parent, added)

    def restore(self) -> None:
        """Put the child in place, and mark it on the parent as ours."""
        self.parent.add_module(self.attribute, self.module)
        ADDED.put(self.parent, {**(ADDED.of(self.parent) or {}), self.attribute: self.module})
        if isinstance(self.module, Joins):
            self.module.join(self.parent)


def plan_addition(model: nn.Module, name: str, module: nn.Module) -> list[AddModule]:
    """Return the step that adds `module` to `model` under the dotted `name`, or no step if a module
    of ours is there already.

    Raises:
        PatchConflict: the name is taken by something that is not ours.
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
        PatchConflict: an added module was replaced by another one.
    """
    for where, parent in list(model.named_modules()):
        for attribute, module in (ADDED.of(parent) or {}).items():
            name = f"{where}.{attribute}".lstrip(".")
            found: Any = getattr(parent, attribute, None)
            if not (found is module or _is_copy(found, module)):
                raise PatchConflict(
                    f"found {name} as a {type(found).__name__} where a {type(module).__name__} was "
                    "added; wanted that very module; put it back, or keep the patches"
                )
            yield AddModule(name, parent, attribute, found)


def _is_copy(found: object, module: nn.Module) -> bool:
    """Whether a child can be removed in the place of the one that was added: PEFT's
    `modules_to_save` trains a copy, and puts it there when it merges.
    """
    return type(found) is type(module) and isinstance(found, Joins)


def carry_out(steps: Iterable[Change], state: PatchState) -> None:
    """Carry out every step; undo all, the last first, if one fails."""
    done: list[Change] = []
    try:
        for step in steps:
            done.append(step)
            step.carry_out(state)
    except BaseException:
        undo(done)
        raise


def undo(steps: Sequence[Change]) -> None:
    """Undo every step, the last first."""
    for step in reversed(steps):
        step.undo()


@contextmanager
def lifted(steps: Sequence[Change]) -> Iterator[None]:
    """Run the block without the steps' changes, and make them again afterwards."""
    for step in reversed(steps):
        step.lift()
    try:
        yield
    finally:
        for step in steps:
            step.restore()
