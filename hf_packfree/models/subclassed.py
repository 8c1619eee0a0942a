"""Heads whose class is a subclass of upstream's, written by the user: patching derives a class from
ours and the user's.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from hf_packfree.models.base import replacements
from hf_packfree.models.base_head import Head


@functools.cache
def in_front_of(ours: Any, theirs: Any) -> type[Head]:
    """Return the patched class for a head of the user's class: `ours` in front of `theirs`, with
    the name of `theirs`.

    Args:
        ours: the class that `heads_of` returns for upstream's head.
        theirs: the user's subclass of upstream's head, whose forward is upstream's.
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
    """Return the user's class if `in_front_of` returned `cls` for that class, else None."""
    return vars(cls).get("packfree_users_class")


def _reduce_in_front(head: Any, protocol: Any) -> Any:
    """Pickle and copy by the two base classes, since the class derived from them cannot be
    imported.
    """
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
