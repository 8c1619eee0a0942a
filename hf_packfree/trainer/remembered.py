"""A model's modules and parameters, remembered for the time of a training step.

Adapters make thousands of modules, and in each step the Trainer walks through all of them for
`train()`, for `num_parameters()`, for the gradients to clip and for `zero_grad()`, while the GPU
has nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_packfree.models.base import Replacement

REBUILT = 4
"""How often a tree may have changed between steps: one that changes with each costs more than it
saves.
"""
# neither of the two `train` does anything where no mode changes
_PLAIN: dict[str, set[Any]] = {
    "train": {nn.Module.train, PreTrainedModel.train},
    "named_modules": {nn.Module.named_modules},
}
_SWITCH = itemgetter("training")


class Tree:
    """The modules and parameters of a model, and whether they are the same still.

    Attributes:
        model: the model.
        modules, parameters: what its `named_modules` and `named_parameters` yield.
        counts: {arguments of `num_parameters`: (`sizes` at that time, what it returned)}.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [*nn.Module.named_modules(model)]
        self.parameters = [*nn.Module.named_parameters(model)]
        self.counts: dict[Any, tuple[list[Any], int]] = {}
        parts = [part for _, part in self.modules]
        self._attributes, self._below = [vars(part) for part in parts], parts[1:]
        self._types = [*map(type, self._below)]
        tables = [(part._modules, part._parameters) for part in parts]
        self._children = [children for children, _ in tables if children]
        self._copies = [children.copy() for children in self._children]
        self._own = [own for _, own in tables if own]
        # most have no children, and no parameters of their own
        self._empty = [table for each in tables for table in each if not table]
        # the parameters are kept, because another object could get the identity of one that is gone
        self._names, self._found = self._own_parameters()
        self._identities, self._lengths = [*map(id, self._found)], [*map(len, self._own)]

    def holds(self) -> bool:
        """Whether the model has the same modules and parameters, by the same names."""
        if any(self._empty) or self._children != self._copies:
            return False
        # not `==` of parameters, which compares their elements
        names, found = self._own_parameters()
        return (
            [*map(type, self._below)] == self._types
            and [*map(len, self._own)] == self._lengths
            and names == self._names
            and [*map(id, found)] == self._identities
        )

    def _own_parameters(self) -> tuple[list[str], list[Any]]:
        own = self._own
        return [*chain(*own)], [*chain.from_iterable(map(dict.values, own))]

    def is_in(self, mode: bool) -> bool:
        """Whether `train(mode)` would change no module."""
        return {*map(_SWITCH, self._attributes)} == {mode}

    def walks_as_torch_does(self) -> bool:
        """Whether no module has a way of its own to be switched or walked through."""
        return all(
            {getattr(type(part), name) for part in self._below} <= plain
            and not any(name in each for each in self._attributes)
            for name, plain in _PLAIN.items()
        )

    def sizes(self) -> list[Any]:
        """Return what a count of parameters depends on."""
        return [(each.numel(), each.requires_grad) for _, each in self.parameters]


class Remembering(nn.Module):
    """Put in front of a model's class: answers from `tree` while that holds, otherwise as the class
    does.
    """

    tree: Tree
    original: type[nn.Module]

    def _tree(self) -> Tree | None:
        # a shallow copy of the model, such as a replica, has the class, too
        tree = type(self).tree
        return tree if tree.model is self and tree.holds() else None

    def train(self, mode: bool = True) -> Any:
        """As upstream's; nothing is done where nothing would change."""
        tree = self._tree()
        return self if tree is not None and tree.is_in(mode) else super().train(mode)

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As upstream's."""
        tree = None if memo is not None or prefix or not remove_duplicate else self._tree()
        if tree is None:
            found: Iterator[Any] = super().named_modules(memo, prefix, remove_duplicate)
            return found
        return iter(tree.modules)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As upstream's."""
        tree = None if prefix or not recurse or not remove_duplicate else self._tree()
        if tree is None:
            return super().named_parameters(prefix, recurse, remove_duplicate)
        return iter(tree.parameters)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the original class."""
        made: Any = super().__reduce_ex__(protocol)
        function, arguments, *state = made
        if type(self) not in arguments:
            return made
        return _blank, (self.original,), *state


def _blank(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


class _Counting(Remembering):
    """Of models that have `num_parameters`."""

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        """As upstream's."""
        # PEFT's models hand on what they have not
        own: Any = getattr(super(), "num_parameters", None)
        count: Any = own or self.__getattr__("num_parameters")
        tree = self._tree()
        if tree is None:
            return int(count(*args, **kwargs))
        asked, sizes = (args, *sorted(kwargs.items())), tree.sizes()
        known = tree.counts.get(asked)
        if known is None or known[0] != sizes:
            tree.counts[asked] = known = sizes, int(count(*args, **kwargs))
        return known[1]


class Remembered:
    """Puts `Remembering` in front of a model's class for a step, and takes it away."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._built = model, 0
        self._class: type[Remembering] | None = None

    def put_on(self) -> None:
        """Begin a step; a tree that changed since the last one is read again."""
        # the classes of patched models have few modules, and other ways to be copied
        if isinstance(self._model, (Replacement, Remembering)) or self._built > REBUILT:
            return
        if self._class is None or not self._class.tree.holds():
            self._class, self._built = _class_for(self._model), self._built + 1
        if self._class is not None:
            self._model.__class__ = self._class

    def take_off(self) -> None:
        """End a step, or one of a run that was interrupted within it."""
        if isinstance(self._model, Remembering):
            cls: Any = self._model.original
            self._model.__class__ = cls


def _class_for(model: nn.Module) -> type[Remembering] | None:
    """Return the class that remembers a model's tree; None where a module has methods of its own
    for what is remembered.
    """
    tree, original = Tree(model), type(model)
    own = ("train", "named_modules", "named_parameters")
    if not tree.walks_as_torch_does() or any(
        getattr(original, name) is not getattr(nn.Module, name) for name in own
    ):
        return None
    front = _Counting if hasattr(model, "num_parameters") else Remembering
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    described = {**names, "tree": tree, "original": original}
    return type(original.__name__, (front, original), described)
