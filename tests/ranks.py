"""Two processes that hold a model together: one program for all cases, which divides before it computes anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def two_ranks(work: Callable[..., Any], cases: Iterable[tuple[Any, ...]], folder: Path) -> list[tuple[Any, Any]]:
    """Return, for each case, what `work(rank, *case)` returned on rank 0 and on rank 1 of a gloo group of its own.

    Args:
        work: a function of a module's top level; what it returns is saved by torch.
        cases: its arguments after the rank.
        folder: an empty one.
    """
    cases = list(cases)
    torch.save(cases, folder / "cases.pt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.ranks", work.__module__, work.__name__, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [tuple(torch.load(folder / f"{case}-{rank}.pt") for rank in (0, 1)) for case in range(len(cases))]


def main() -> int:
    """Be both ranks, and return whether the other one failed."""
    module, name, folder = sys.argv[1:]
    work, cases = getattr(import_module(module), name), torch.load(f"{folder}/cases.pt")
    other = os.fork()  # which is safe as long as no thread was started: so what both need is loaded once
    rank = 0 if other else 1
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}  # as torchrun says it, with an address
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # that nobody calls: the group is there already
    torch.set_num_threads(1)
    for index, case in enumerate(cases):
        store = f"file://{folder}/store-{index}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        torch.save(work(rank, *case), f"{folder}/{index}-{rank}.pt")
        torch.distributed.destroy_process_group()
    return os.waitpid(other, 0)[1] != 0 if other else 0


if __name__ == "__main__":
    sys.exit(main())
