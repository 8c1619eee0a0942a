"""Records that arrive whole where something walks through a layer's arguments."""

from __future__ import annotations

from typing import Any, TypeVar

_Record = TypeVar("_Record")


def opaque(cls: type[_Record]) -> type[_Record]:
    """Let a dataclass no longer say that it is one; `replaced` stands for `dataclasses.replace`.

    FSDP2 builds every dataclass among the arguments of a layer that it wraps anew, and all that is
    in it, dicts too: what layers share by it, each would make for itself.
    """
    del cls.__dataclass_fields__  # type: ignore[attr-defined]
    return cls


def replaced(record: _Record, **changes: Any) -> _Record:
    """Return an `opaque` record with other values of some fields, which are not checked."""
    # a captured one refuses to be read
    fields = {name: getattr(record, name) for name in vars(record)}
    return type(record)(**{**fields, **changes})
