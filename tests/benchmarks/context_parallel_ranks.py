"""The processes of `context_parallel.py`: their group, how they time a step together, and what
an exchange takes them.
"""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.exchanges import LATENCY, RATE, gather
from tests.benchmarks.timing import Clock, Results, name_of, read_lines


@dataclass
class Bench:
    """What all rows share: how they are timed, the ranks there are, and what an exchange takes."""

    clock: Clock
    backend: str
    ways: tuple[str, ...] = ("state",)
    rate: float = RATE
    latency: float = LATENCY

    @property
    def ranks(self) -> int:
        """How many processes run."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def timed(
        self,
        step: Callable[[], Any],
        *,
        together: bool = False,
        before_last: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Return "ms" and "peak_gib", of the slowest and of the fullest rank, and "loss", what the
        last step returned here; every rank makes as many steps.

        "step_gib" is what the step adds at most to what there was before it, which is the model.
        `together`: the ranks exchange within the step; otherwise one that fails in the first ones
        fails on all ranks, instead of being waited for. `before_last` is called before the last
        step, which is not timed.
        """
        on_gpu = self.clock.device == "cuda"
        before = torch.cuda.memory_allocated() / 2**30 if on_gpu else 0.0
        with nullcontext() if together else self.failing_alike():
            for _ in range(self.clock.warmup):
                step()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(self.clock.runs):
            if self.ranks > 1:
                dist.barrier()
            times.append(self.clock.once(step))
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        before_last()
        if not (loss := float(step())) < float("inf"):
            raise FloatingPointError("the step's loss is not finite")
        found = torch.tensor([statistics.median(times), peak], device=self.clock.device)
        if self.ranks > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        ms, peak = found.tolist()
        return {"ms": ms, "peak_gib": peak, "step_gib": peak - before, "runs": len(times)} | {
            "loss": loss
        }

    @contextmanager
    def failing_alike(self) -> Iterator[None]:
        """Raise on all ranks what is raised on any."""
        error = None
        try:
            yield
        except Exception as found:
            error = found
        failed = torch.tensor(float(error is not None), device=self.clock.device)
        if self.ranks > 1:
            dist.all_reduce(failed)
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("found a step that another rank could not make")

    def summed(self, own: float) -> float:
        """Return the sum of all ranks' numbers."""
        total = torch.tensor(own, dtype=torch.float64, device=self.clock.device)
        if self.ranks > 1:
            dist.all_reduce(total)
        return total.item()

    def measure_exchanges(self, sizes: tuple[int, ...] = (2**20, 2**24, 2**28)) -> dict[str, Any]:
        """Return GB/s that one rank receives, by MiB, and set `rate` and `latency` to what these
        say.
        """
        found: dict[str, dict[int, float]] = {}
        for size in sizes:
            parts = torch.zeros(
                self.ranks, size // self.ranks, dtype=torch.uint8, device=self.clock.device
            )
            out = torch.empty_like(parts)
            calls: dict[str, Callable[[], Any]] = {
                "all_to_all": lambda: dist.all_to_all_single(out, parts),
                "all_gather": lambda: gather(out.view(-1), parts[0]),
            }
            for name, call in calls.items():
                found.setdefault(name, {})[size] = (
                    self.timed(partial(_ten_times, call, out), together=True)["ms"] / 1e4
                )
        share, whole, (small, *_, large) = (self.ranks - 1) / self.ranks, found["all_to_all"], sizes
        self.rate = share * (large - small) / max(whole[large] - whole[small], 1e-9)
        self.latency = max(whole[small] - share * small / self.rate, 0.0)
        rates = {
            name: {size >> 20: share * size / s / 1e9 for size, s in one.items()}
            for name, one in found.items()
        }
        return {"gb_per_s": rates, "rate": self.rate, "latency_s": self.latency}


def _ten_times(call: Callable[[], Any], out: Tensor) -> Tensor:
    for _ in range(10):
        call()
    return out.flatten()[0]


@contextmanager
def group_of(device: str) -> Iterator[int]:
    """Join torchrun's group, if it started this process; yields the rank."""
    if "LOCAL_RANK" not in os.environ:
        yield 0
        return
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(minutes=5)
    )
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def results_of_ranks(
    out: Path, name: str, only: str = "", *, minutes: float = 1e9, resume: bool = False
) -> Results:
    """Return where this rank writes its rows: the first in `out`, others in a folder of their own
    below it.  With `resume` all ranks leave out the same rows.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    path = out / (f"rank{rank}" if rank else "") / f"{name}.jsonl"
    results = Results(path, minutes, only, resume=resume)
    if resume and ranks > 1:
        results.done = done_by_all(out, name)
        # before any rank writes
        dist.barrier()
    return results


def done_by_all(out: Path, name: str) -> set[tuple[str, str]]:
    """Return the rows that the first rank has written, and those in which another one failed:
    the same on all ranks.
    """
    rows = read_lines(out / f"{name}.jsonl")
    others = (row for path in sorted(out.glob(f"rank*/{name}.jsonl")) for row in read_lines(path))
    return {
        name_of(row)
        for row in (*rows, *(row for row in others if "error" in row))
        if "skipped" not in row
    }
