"""The peak memory of a step, and the time that its matrix products alone take on this machine."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIB = 2**20
HOW = {
    "cuda": "torch's GPU allocator: the most allocated during a step above what was allocated "
    "before it, and what CUDA graphs keep",
    "cpu": "torch's CPU allocator, every allocation and release of one more step read through "
    "torch.profiler; memory that "
    "libraries allocate by themselves is not in it",
}


def peak_mib(
    step: Callable[[], object], device: torch.device, *, has_graphs: bool = False
) -> float:
    """Run `step` and return the peak MiB of tensors during it, above those before it.

    Args:
        has_graphs: whether the step may replay CUDA graphs, whose memory is then added: in it the
            step allocates nothing.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return (peak + (_kept_by_graphs() if has_graphs else 0)) / MIB
    return _peak_of(_allocations(step)) / MIB


def _kept_by_graphs() -> int:
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if any(each["segment_pool_id"]))


def _allocations(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Return torch's CPU allocations and releases in order, from the profiler's trace."""
    profiler: Any = torch.profiler.profile
    with (
        _silent_stderr(),
        profiler(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profile,
    ):
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = [
        event
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    return sorted(found, key=lambda event: float(event["ts"]))


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Use `count` CPU threads for the block; None leaves torch's choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def name_of(device: torch.device) -> str:
    """Return the device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"{processor() or 'cpu'} (threads: {torch.get_num_threads()})"


def processor() -> str | None:
    """Return the name that Linux has for the CPU, if it has one; elsewhere None."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return None
    return found[1].strip() if found else None


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop messages that the profiler's C++ code writes to stderr."""
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


TOWERS = ("visual", "audio_tower")
"""Attributes of vision-language models for their towers."""
EXPERTS = ("gate_up_proj", "down_proj")
"""Parameters [experts, outputs, inputs] of transformers' layers of experts."""

_TURNS = {True: (2, 10), False: (0, 1)}
"""{on a GPU: (untimed, timed) runs of a product}; several on a GPU, which would finish a single run
before the host has launched the next.
"""


class Floor:
    """All `nn.Linear` layers and experts of a model, as matrix products over a number of tokens: y
    = x W', dx = dy W and dW = dy' x.

    Layers of one shape are measured once; experts are evenly loaded. Routers, which are no
    `nn.Linear`, and towers are not included.
    """

    def __init__(self, model: nn.Module, tokens: int, choices: int = 1) -> None:
        towers = {
            module
            for name, tower in model.named_modules()
            if name.endswith(TOWERS)
            for module in tower.modules()
        }
        linears = [
            module
            for module in model.modules()
            if isinstance(module, nn.Linear) and module not in towers
        ]
        self._shapes: Counter[tuple[int, ...]] = Counter(
            (module.in_features, module.out_features) for module in linears
        )
        self._shapes += Counter(_experts(model))
        self._tokens, self._choices, self._like = tokens, choices, next(model.parameters()).detach()

    @torch.no_grad()
    def seconds(self) -> float:
        """Time the products of every shape, and return the seconds for all layers."""
        return sum(count * self._once(*shape) for shape, count in self._shapes.items())

    def _once(self, fan_in: int, fan_out: int, experts: int = 0) -> float:
        sizes = self._sizes(fan_in, fan_out, experts)
        # random numbers, because products of zeros and ones run faster
        x, weight, grad = (torch.randn_like(self._like.new_empty(size)) for size in sizes)

        def multiply(turns: int) -> None:
            for _ in range(turns):
                x @ weight.mT, grad @ weight, grad.mT @ x
            self._wait()

        warm, timed = _TURNS[self._like.is_cuda]
        multiply(warm)
        began = time.perf_counter()
        multiply(timed)
        return (time.perf_counter() - began) / timed

    def _sizes(self, fan_in: int, fan_out: int, experts: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of x, W and dy of a layer; if the tokens are too few to reach all experts, for
        as many experts as they reach.
        """
        rows, experts = self._tokens, min(experts, self._tokens * self._choices)
        if not experts:
            return (rows, fan_in), (fan_out, fan_in), (rows, fan_out)
        rows = rows * self._choices // experts
        return (experts, rows, fan_in), (experts, fan_out, fan_in), (experts, rows, fan_out)

    def _wait(self) -> None:
        if self._like.is_cuda:
            torch.cuda.synchronize(self._like.device)


def _experts(model: nn.Module) -> list[tuple[int, ...]]:
    """Return (inputs, outputs, experts) for every product of a token with one of its experts."""
    weights = (getattr(module, name, None) for module in model.modules() for name in EXPERTS)
    stacks = [
        weight.shape for weight in weights if isinstance(weight, nn.Parameter) and weight.ndim == 3
    ]
    return [(fan_in, fan_out, experts) for experts, fan_out, fan_in in stacks]
