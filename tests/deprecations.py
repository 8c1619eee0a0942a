"""What upstream announces in its log counts as much as what it announces by a warning, and
warnings are errors here.
"""

from __future__ import annotations

import logging
import re

ANNOUNCES = re.compile(
    r"deprecat|will be removed|removed in (v|version|transformers)", re.IGNORECASE
)


class DeprecationsAreErrors(logging.Handler):
    """Raises DeprecationWarning where a deprecation is logged, in the call that logs it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise if the message announces a removal."""
        if ANNOUNCES.search(record.getMessage()):
            raise DeprecationWarning(f"{record.name}: {record.getMessage()}")
