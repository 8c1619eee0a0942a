"""Peak memory of one step: the GPU allocator's own count, or torch's CPU allocator read through its profiler."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
HOW = {
    "cuda": "torch's GPU allocator: the most allocated during a step above what was allocated before it",
    "cpu": "torch's CPU allocator, every allocation and release of one more step read through torch.profiler; memory that "
    "libraries allocate by themselves is not in it",
}


def ran_out(error: BaseException) -> bool:
    """Return whether memory ran out; by its text too, since only the GPU allocator's error has a class of its own."""
    texts = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def peak_mib(step: Callable[[], object], device: torch.device) -> float:
    """Run `step` and return the most MiB that tensors held meanwhile, above what they held before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    return _peak_of(_allocations(step)) / MIB


def _allocations(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Return torch's CPU allocations and releases in order, from the profiler's trace."""
    profiler: Any = torch.profiler.profile
    with _silent_stderr(), profiler(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = [event for event in events if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0]
    return sorted(found, key=lambda event: float(event["ts"]))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what the profiler's C++ half writes to stderr about itself."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _peak_of(events: list[dict[str, Any]]) -> int:
    held = peak = 0
    for event in events:
        held += int(event["args"]["Bytes"])
        peak = max(peak, held)
    return peak
