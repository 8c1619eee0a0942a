"""Upstream's lazy module aliases: its class mapping lists each of them, and some cannot be loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType


class LenientAliases:
    """Until `restore()`, an alias of transformers whose target cannot be imported lists as empty instead of raising.

    transformers 5.13 to 5.20 alias image processors that need torchvision, and list all modules while a model is built
    under a class mapping.  Aliases have no classes of ours, so an empty list loses nothing.
    """

    def __init__(self) -> None:
        self._listings: dict[ModuleType, Callable[[], list[str]]] = {
            module: vars(module)["__dir__"]
            for name, module in list(sys.modules.items())
            if name.startswith("transformers.") and isinstance(module, ModuleType) and "__dir__" in vars(module)
        }
        for module, listing in self._listings.items():
            vars(module)["__dir__"] = partial(_names_if_importable, listing)

    def restore(self) -> None:
        """Give every alias its own listing back; doing it twice changes nothing more."""
        while self._listings:
            module, listing = self._listings.popitem()
            vars(module)["__dir__"] = listing


def _names_if_importable(listing: Callable[[], list[str]]) -> list[str]:
    try:
        return listing()
    except ImportError:
        return []
