"""Peak memory of this process or its GPU.

On Linux the peak is VmHWM of /proc/self/status: unlike `getrusage`, whose ru_maxrss starts at the parent's peak, it belongs
to this process alone.  Elsewhere ru_maxrss is all there is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

MIB = 2**20
_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Remembers what is held when it is made; `above()` is how far memory rose over that since."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated() / MIB if self._cuda else resident_mib()

    def above(self) -> float:
        """Return MiB: the highest point so far above the start."""
        peak = torch.cuda.max_memory_allocated() / MIB if self._cuda else peak_resident_mib()
        return max(peak - self._before, 0.0)


def resident_mib() -> float:
    """Return the memory this process holds now, in MiB (its peak so far where that cannot be known)."""
    return _from_status("VmRSS") if _STATUS.exists() else peak_resident_mib()


def peak_resident_mib() -> float:
    """Return the most memory this process ever held, in MiB."""
    if _STATUS.exists():
        return _from_status("VmHWM")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def _from_status(field: str) -> float:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found.group(1)) / 1024 if found else 0.0
