"""Keep libraries from talking over a table: advice on kernels, loading bars, retries; nothing that warns of harm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

CHATTER = {
    "transformers.integrations.hub_kernels": ("reference PyTorch implementation",),  # packfree doctor says what is installed
    "huggingface_hub.utils._http": ("thrown while requesting", "Retrying in"),  # the error that follows says it once
}
"""{logger: what messages hold that are left out}."""


@contextmanager
def quiet_libraries(*, bars: bool = True) -> Iterator[None]:
    """Hide, for the block, the messages of `CHATTER` and, for which transformers is imported, its loading bars."""
    filters = [(logging.getLogger(name), _without(words)) for name, words in CHATTER.items()]
    for logger, keep in filters:
        logger.addFilter(keep)
    try:
        with _no_bars() if bars else nullcontext():
            yield
    finally:
        for logger, keep in filters:
            logger.removeFilter(keep)


@contextmanager
def _no_bars() -> Iterator[None]:
    import transformers

    bars: Any = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _without(words: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not any(word in record.getMessage() for word in words)
