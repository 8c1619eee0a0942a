"""The modules and parameters of a model with adapters, remembered for the time of a training step.

PEFT makes thousands of modules, and in each step the Trainer walks through all of them for
`train()`, for `num_parameters()`, for the gradients to clip and for `zero_grad()`, while the GPU
has nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn
from transformers import PreTrainedModel

REBUILT = 4
"""How often the modules of a run may have changed: a model that changes with each step would be
walked through more often than without.
"""
_TABLES = "_modules", "_parameters"
# neither of the two `train` does anything where no mode changes
_PLAIN: dict[str, set[Any]] = {
    "train": {nn.Module.train, PreTrainedModel.train},
    "named_modules": {nn.Module.named_modules},
}


class Modules:
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
        self._parents = [each for each in self._attributes if each["_modules"]]
        children, own = ([each[name] for each in self._attributes] for name in _TABLES)
        # most modules have no children, or no parameters of their own
        self._empty = [table for table in (*children, *own) if not table]
        self._tables = [table for table in (*children, *own) if table]
        self._children = self._tables[: len(self._parents)]
        self._names, self._found = [*chain(*self._tables)], [*_values(self._tables)]
        self._sizes, self._types = [*map(len, self._tables)], [*map(type, self._below)]

    def holds(self) -> bool:
        """Whether the model has the same modules and parameters, by the same names."""
        # by identity: `==` of dictionaries ignores the order, and compares elements of tensors
        return (
            not any(self._empty)
            and [*map(len, self._tables)] == self._sizes
            and [*chain(*self._tables)] == self._names
            and all(map(is_, _values(self._tables), self._found))
            # `del` of a list's module binds another dictionary
            and all(map(is_, map(itemgetter("_modules"), self._parents), self._children))
            and [*map(type, self._below)] == self._types
        )

    def is_in(self, mode: bool) -> bool:
        """Whether `train(mode)` would change no module."""
        # a compiled module has its mode elsewhere
        return all(
            each.get("training") is mode and "train" not in each for each in self._attributes
        )

    def sizes(self) -> list[Any]:
        """Return what a count of parameters depends on."""
        return [(each.numel(), each.requires_grad) for _, each in self.parameters]


def _values(tables: list[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, tables))


class Remembering(nn.Module):
    """Put in front of a model's class: answers from its `Modules` while these hold, otherwise as
    the class does.
    """

    _remembered_modules: Modules | None = None
    _remembered_class: Any = None

    def train(self, mode: bool = True) -> Any:
        """As upstream's; nothing is done where nothing would change."""
        kept = _modules_of(self)
        return self if kept is not None and kept.is_in(mode) else nn.Module.train(self, mode)

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As upstream's."""
        kept = None if memo is not None or prefix or not remove_duplicate else _modules_of(self)
        if kept is not None:
            return iter(kept.modules)
        found: Iterator[Any] = nn.Module.named_modules(self, memo, prefix, remove_duplicate)
        return found

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As upstream's."""
        kept = None if prefix or not recurse or not remove_duplicate else _modules_of(self)
        if kept is not None:
            return iter(kept.parameters)
        return nn.Module.named_parameters(self, prefix, recurse, remove_duplicate)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As upstream's."""
        asked = only_trainable, exclude_embeddings
        # PEFT hands on what its models have not
        count: Any = self.__getattr__("num_parameters")
        kept = _modules_of(self)
        if kept is None:
            return int(count(*asked))
        sizes, known = kept.sizes(), kept.counts.get(asked)
        if known is None or known[0] != sizes:
            kept.counts[asked] = known = sizes, int(count(*asked))
        return known[1]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the original class."""
        return _blank, (type(self)._remembered_class,), self.__dict__


def _blank(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _modules_of(model: nn.Module) -> Modules | None:
    """Return what is kept of a model while it holds; None without."""
    # the class of a method that somebody kept may be gone, and a shallow copy has it, too
    kept: Modules | None = getattr(type(model), "_remembered_modules", None)
    return kept if kept is not None and kept.model is model and kept.holds() else None


class Remembered:
    """Puts `Remembering` in front of a model's class for a step, and takes it away."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._read = model, 0
        self._class: Any = None

    def put_on(self) -> None:
        """Begin a step, or go on in one; modules that changed since the last one are read again."""
        if isinstance(self._model, Remembering):
            return
        known = self._class
        original = None if known is None else known._remembered_class
        if original is not type(self._model) or not known._remembered_modules.holds():
            self.forget()
            self._read += 1
            if self._read <= 1 + REBUILT:
                self._class = _class_for(self._model)
        if self._class is not None:
            self._model.__class__ = self._class

    def take_off(self) -> None:
        """End a step, or one of a run that was interrupted within it."""
        # not where somebody has derived another class since
        original = vars(type(self._model)).get("_remembered_class")
        if original is not None:
            self._model.__class__ = original

    def forget(self) -> None:
        """End a run: a class is freed late, and what it remembers would be, too."""
        self.take_off()
        if self._class is not None:
            self._class._remembered_modules = None
            self._class = None


def _class_for(model: nn.Module) -> type[Remembering] | None:
    """Return the class that remembers what is in a model; None where that is not known to give the
    same answers.
    """
    if not _is_pefts(model):
        return None
    original = type(model)
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    described = {**names, "_remembered_modules": Modules(model), "_remembered_class": original}
    return type(original.__name__, (Remembering, original), described)


def _is_pefts(model: nn.Module) -> bool:
    """Whether a model is of one of PEFT's classes, around one of transformers', and no module has a
    way of its own to be switched or walked through.
    """
    # users' classes may have other ways to be copied
    if type(model).__module__ != "peft.peft_model":
        return False
    counts = getattr(getattr(model, "num_parameters", None), "__func__", None)
    own, parts = ("train", "named_parameters"), [*model.modules()]
    tables = chain.from_iterable((part._modules, part._parameters) for part in parts)
    return (
        counts is PreTrainedModel.num_parameters
        and all(getattr(type(model), name) is getattr(nn.Module, name) for name in own)
        and all(
            {getattr(type(part), name) for part in parts} <= plain
            and not any(name in vars(part) for part in parts)
            for name, plain in _PLAIN.items()
        )
        # those of scripted modules are none
        and all(isinstance(each, dict) for each in tables)
    )
