"""The table of what is supported."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_packfree.versions import VERSIONS

if TYPE_CHECKING:
    from hf_packfree.patching.registry import Family


@dataclass(frozen=True)
class Supported:
    """One supported family.

    Attributes:
        name: as in `packfree verify NAME`.
        transformers: the releases it is in.
        swaps: {class that is swapped: why}.
        heads: transformers' classes around the text model that are patched with it.
    """

    name: str
    transformers: str
    swaps: dict[str, str]
    heads: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)


def supported_models() -> tuple[Supported, ...]:
    """Return the table of swaps, with the heads that the installed transformers has."""
    from hf_packfree.patching.registry import FAMILIES

    return tuple(Supported(row.name, f">={VERSIONS['transformers'].floor}", dict(row.swaps), _heads(row)) for row in FAMILIES)


def _heads(family: Family) -> tuple[str, ...]:
    return tuple(name for name in import_module(family.upstream).__all__ if "For" in name)
