"""Groups of processes that hold a model together: one program for all cases, which divides
before it computes anything.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
TIMEOUT = timedelta(seconds=60)
"""Of a collective operation in which some rank does not take part: what hangs ends by this,
however many cases there are.
"""
LAST_RESORT = 20 * 60
"""Seconds after which all processes end: far more than a machine takes on which much else runs."""


def on_ranks(
    work: Callable[..., Any],
    cases: Iterable[tuple[Any, ...]],
    folder: Path,
    worlds: Sequence[int] = (2,),
) -> list[tuple[Any, ...]]:
    """Return, for each case, what `work(rank, *case)` returned on every rank of gloo groups of
    their own, group after group.

    Args:
        work: a function of a module's top level; what it returns is saved by torch.
        cases: its arguments after the rank.
        folder: an empty one.
        worlds: the sizes of groups that work side by side; 1 for a process that works alone.
    """
    cases = list(cases)
    torch.save((cases, members_of(worlds)), folder / "cases.pt")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "tests.ranks", work.__module__, work.__name__, str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LAST_RESORT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    numbers = range(sum(worlds))
    return [
        tuple(torch.load(folder / f"{case}-{number}.pt") for number in numbers)
        for case in range(len(cases))
    ]


two_ranks = partial(on_ranks, worlds=(2,))


def members_of(worlds: Sequence[int]) -> list[tuple[str, int, int]]:
    """Return (group, rank, size of the group) of every process."""
    return [
        (str(group), rank, world) for group, world in enumerate(worlds) for rank in range(world)
    ]


def main() -> int:
    """Be all processes, and return whether another one failed."""
    module, name, folder = sys.argv[1:]
    work, (cases, members) = getattr(import_module(module), name), torch.load(f"{folder}/cases.pt")
    # which every process would look through at the end of every `Trainer.train()`
    gc.freeze()
    number, children = 0, []
    for other in range(1, len(members)):
        # which is safe as long as no thread was started: so what all need is loaded once
        child = os.fork()
        if not child:
            number, children = other, []
            break
        children.append(child)
    group, rank, world = members[number]
    # as torchrun says it, with an address
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    # that nobody calls: the group is there already
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    torch.set_num_threads(1)
    for index, case in enumerate(cases):
        store = f"file://{folder}/store-{index}-{group}"
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world, timeout=TIMEOUT
        )
        torch.save(work(rank, *case), f"{folder}/{index}-{number}.pt")
        torch.distributed.destroy_process_group()
    return any([os.waitpid(child, 0)[1] for child in children])


if __name__ == "__main__":
    sys.exit(main())
