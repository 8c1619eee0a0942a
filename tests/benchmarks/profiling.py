"""One step's kernels, summed by what they are for."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

# the first that is found in the kernel's lower-case name counts
CATEGORIES = (
    (
        "attention",
        r"attn_(fwd|bwd)|flash_(fwd|bwd)|flash::|fmha|mem_?eff|attention|varlen_attn|softmax",
    ),
    ("conv", r"conv"),
    (
        "delta rule",
        r"delta|gdn|chunk_|recompute_w|wy_|solve_tril|kkt|l2norm|cumsum|tilelang|main_kernel|dqkwg|prepare_h",
    ),
    ("norm", r"norm"),
    ("swiglu", r"swiglu|silu|gated"),
    ("gemm", r"gemm|cutlass|nvjet|xmma|wgmma|matmul|grouped_mm|splitk|cublas|aten::(mm|addmm|bmm)"),
    ("elementwise add", r"functor_add|addfunctor|add_kernel|aten::add"),
    ("copy", r"copy|memcpy|memset|cat|fill|contiguous|transpose"),
    ("routing", r"index|scatter|gather|sort|topk|embedding"),
)


def category(kernel: str) -> str:
    """Return what a kernel is for."""
    lower = kernel.lower()
    return next((name for name, pattern in CATEGORIES if re.search(pattern, lower)), "other")


def profile(step: Callable[[], Any], device: str, path: Path, top: int = 40) -> dict[str, float]:
    """Run one step under the profiler; return ms by category, write and print those and the
    longest kernels.
    """
    kernels = kernels_of(step, device)
    sums: dict[str, float] = {}
    for name, ms, _ in kernels:
        sums[category(name)] = sums.get(category(name), 0.0) + ms
    sums = {"all": sum(sums.values()), **dict(sorted(sums.items(), key=lambda item: -item[1]))}
    longest = [
        {"kernel": name, "ms": ms, "calls": calls, "category": category(name)}
        for name, ms, calls in kernels[:top]
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"categories_ms": sums, "kernels": longest}, indent=1))
    for name, ms in sums.items():
        print(f"    {name:20s} {ms:9.2f} ms")
    for entry in longest:
        print(
            f"    {entry['ms']:9.2f} ms {entry['calls']:5d} x  {entry['category']:16s} "
            f"{entry['kernel'][:110]}"
        )
    return sums


def counts(step: Callable[[], Any], device: str, batches: int = 1) -> dict[str, float]:
    """Return the sum of a step's kernels, their number, and the time in which the host starts them:
    {"kernels_ms", "launches", "host_ms"}; means of so many steps, whose batches differ.
    """
    kernels = kernels_of(lambda: [step() for _ in range(batches)], device)
    host = []
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        host.append((time.perf_counter() - began) * 1e3)
    return {
        "kernels_ms": sum(ms for _, ms, _ in kernels) / batches,
        "launches": round(sum(calls for _, _, calls in kernels) / batches),
        "host_ms": median(host),
    }


def kernels_of(step: Callable[[], Any], device: str) -> list[tuple[str, float, int]]:
    """(name, ms, calls) of everything that ran on the device, the longest first; on "cpu", of
    torch's operators.
    """
    cuda = device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    found = []
    for event in profiler.key_averages():
        if event.device_type == wanted:
            us = event.self_device_time_total if cuda else event.self_cpu_time_total
            found.append((event.key, us / 1e3, event.count))
    return sorted(found, key=lambda item: -item[1])
