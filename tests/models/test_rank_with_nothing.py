"""Two processes, one of which has nothing but padding: nobody waits, and the gradient is half of the other's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_packfree import apply_patches
from tests.models.padded import padded_batch, step, worst_gradient
from tests.support import GRADIENT_TOL, tiny

ROOT = Path(__file__).parents[2]
RANK = """
import sys, torch
from hf_packfree import apply_patches
from tests.models.padded import IGNORED, padded_batch, step
from tests.support import tiny

rank, folder, options = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(apply_patches(tiny("qwen3_5_moe")), **options)
nothing = torch.zeros(2, 6, dtype=torch.long)
batch = {"input_ids": nothing, "attention_mask": nothing, "labels": nothing + IGNORED} if rank else padded_batch("right")
output, grads = step(model, batch)
assert (output.loss.item() == 0) == (rank == 1)
torch.save({name.removeprefix("module."): grad for name, grad in grads.items()}, f"{folder}/{rank}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
@pytest.mark.slow
def test_a_rank_with_nothing_stays_in_step(tmp_path, options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", RANK, str(rank), str(tmp_path), repr(options)] for rank in (0, 1)]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=240)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    alone = step(apply_patches(tiny("qwen3_5_moe")), padded_batch("right"))[1]
    for rank in (0, 1):
        doubled = {name: 2 * grad for name, grad in torch.load(tmp_path / f"{rank}.pt").items()}
        assert worst_gradient(doubled, alone) <= GRADIENT_TOL
