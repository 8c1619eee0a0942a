"""Compile what rows of two GPUs run, all at once and before them, into the caches that
TILELANG_CACHE_DIR and TRITON_CACHE_DIR name.

    torchrun --standalone --nproc-per-node 4 -m tests.benchmarks.context_parallel_kernels

On any number of GPUs; the processes exchange nothing. Each takes a share of the kernels: the heads
of the 2B and of the 9B shape, on one GPU and as a rank that others hand states to.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

import torch

from tests.benchmarks.batches import Load
from tests.benchmarks.context_parallel import one_gpu, predicted
from tests.benchmarks.context_parallel_cases import Case
from tests.benchmarks.context_parallel_ranks import Bench
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.timing import Clock

WORK = [(shape, shared) for shared in (False, True) for shape in ("2b", "9b")]


def compile_for(shape: str, shared: bool, device: str, tiny: bool) -> None:
    """Make a few steps of four layers."""
    lengths = (60, 50, 40) if tiny else (5000, 2500, 692)
    wanted = replace(SHAPES["tiny" if tiny else shape], layers=4)
    bench = Bench(Clock(device, warmup=1, runs=1), "auto")
    for documents in (lengths, (sum(lengths),)):
        case = Case("kernels", wanted, "documents", Load(documents), checkpointing=False)
        model = case.built(device)
        if shared:
            predicted(bench, case, "state", 2, model)
        else:
            one_gpu(bench, case, model)


def main() -> None:
    """Compile this process's share."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="as of the scripts that measure; nothing is written")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    rank, world = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    for shape, shared in WORK[rank::world]:
        began = time.monotonic()
        compile_for(shape, shared, options.device, options.tiny)
        what = "a rank among others" if shared else "one GPU"
        print(f"{shape}, {what}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
