"""Messages of libraries while a command works, and which of them are hidden."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

CHATTER = {
    # packfree doctor says what is installed
    "transformers.integrations.hub_kernels": ("reference PyTorch implementation",),
    # of 4-bit weights on a CPU, which few run
    "bitsandbytes.backends.cpu.ops": ("gemm_4bit_forward",),
    # the error that follows says it once
    "huggingface_hub.utils._http": ("thrown while requesting", "Retrying in"),
}
"""{logger: parts of the messages that are left out}."""


@contextmanager
def logged(verbose: bool) -> Iterator[None]:
    """Show this package's log on stderr for the block."""
    logger = logging.getLogger("hf_packfree")
    level = logger.level
    if verbose:
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)


def _keep(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in CHATTER[record.name])


@contextmanager
def quiet_libraries(*, bars: bool = True, quiet: bool = True) -> Iterator[None]:
    """Hide, for the block, harmless messages and loading bars that would be written over a table,
    also our own line about a patched model; what libraries print to stdout goes to stderr, so that
    stdout has the answer alone (TileLang prints what it compiles).

    Args:
        bars: hide transformers' loading bars too, which imports transformers.
        quiet: whether to hide anything at all.
    """
    with redirect_stdout(sys.stderr), _hidden(bars) if quiet else nullcontext():
        yield


@contextmanager
def _hidden(bars: bool) -> Iterator[None]:
    library: Any = None
    said = os.environ.get("PACKFREE_QUIET")
    os.environ["PACKFREE_QUIET"] = "1"
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
        if said is None:
            del os.environ["PACKFREE_QUIET"]
        else:
            os.environ["PACKFREE_QUIET"] = said
        for name in CHATTER:
            logging.getLogger(name).removeFilter(_keep)
        if restore:
            library.enable_progress_bar()
