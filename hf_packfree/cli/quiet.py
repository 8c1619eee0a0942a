"""Keep libraries from writing over a table: advice on kernels, loading bars, retries; nothing that warns of harm."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHATTER = {
    "transformers.integrations.hub_kernels": ("reference PyTorch implementation",),  # packfree doctor says what is installed
    "huggingface_hub.utils._http": ("thrown while requesting", "Retrying in"),  # the error that follows says it once
}
"""{logger: parts of the messages that are left out}."""


def _keep(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in CHATTER[record.name])


@contextmanager
def quiet_libraries(*, bars: bool = True) -> Iterator[None]:
    """Hide, for the block, the messages of `CHATTER` and transformers' loading bars; without `bars` it is not imported."""
    library: Any = None
    if bars:
        from transformers.utils import logging as library
    restore = bars and library.is_progress_bar_enabled()
    for name in CHATTER:
        logging.getLogger(name).addFilter(_keep)
    if restore:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for name in CHATTER:
            logging.getLogger(name).removeFilter(_keep)
        if restore:
            library.enable_progress_bar()
