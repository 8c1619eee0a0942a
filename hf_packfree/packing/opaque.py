"""Dataclasses that code which walks through a layer's arguments, such as FSDP2's, passes on
whole.
"""

from __future__ import annotations

from typing import Any, TypeVar

_Record = TypeVar("_Record")


def opaque(cls: type[_Record]) -> type[_Record]:
    """Hide from `dataclasses` that a class is a dataclass; use `replaced` instead of
    `dataclasses.replace`.

    FSDP2 rebuilds every dataclass among the arguments of a layer that it wraps, with all its
    fields, dicts too: every layer would then have plans of its own instead of sharing the record's.
    """
    del cls.__dataclass_fields__  # type: ignore[attr-defined]
    return cls


def replaced(record: _Record, **changes: Any) -> _Record:
    """Return an `opaque` record with other values of some fields, which are not checked."""
    # a captured one refuses to be read
    fields = {name: getattr(record, name) for name in vars(record)}
    return type(record)(**{**fields, **changes})
