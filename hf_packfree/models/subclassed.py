"""Heads of a class of the user's own: patching makes a subclass of ours and theirs."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from hf_packfree.models.base import replacements
from hf_packfree.models.base_head import Head


@functools.cache
def in_front_of(ours: Any, theirs: Any) -> type[Head]:
    """Return the class of a head of the user's: `ours` in front of `theirs`, under the name of
    `theirs`.

    Args:
        ours: the class that `heads_of` has for a class of upstream's.
        theirs: a subclass of that class of upstream's, whose forward is upstream's.
    """
    names = {
        "__module__": theirs.__module__,
        "__qualname__": theirs.__qualname__,
        "__doc__": theirs.__doc__,
    }
    return type(
        theirs.__name__,
        (ours, theirs),
        {**names, "packfree_users_class": theirs, "__reduce_ex__": _reduce_in_front},
    )


def users_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return the user's class of a head if `cls` is what `in_front_of` made for it."""
    return vars(cls).get("packfree_users_class")


def _reduce_in_front(head: Any, protocol: Any) -> Any:
    """Pickle and copy by the two classes, since nobody can import the one made of them."""
    cls: Any = type(head)
    get_state = getattr(head, "__getstate__", lambda: head.__dict__)
    return (
        _blank_in_front,
        (cls.packfree_home, cls.__bases__[0].__qualname__, users_class(cls)),
        get_state(),
    )


def _blank_in_front(home: str, name: str, theirs: Any) -> Any:
    cls: Any = in_front_of(replacements(home)[name], theirs)
    return cls.__new__(cls)
