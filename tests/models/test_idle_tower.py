"""Two processes, one of which has no images, or no video: nobody waits, and the gradient is the mean of both alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_packfree import apply_patches
from tests.models.padded import worst_gradient
from tests.support import GRADIENT_TOL
from tests.vision import document, image, packed_batch, tiny_vision, video

ROOT = Path(__file__).parents[2]
ROWS = {
    "text": [document(9, seed=1), document(14, seed=2)],
    "images": [document(5, image(4, 4), 3, seed=3), document(8, seed=4)],
    "all": [document(3, image(4, 6), 2, video(2, 4, 4), 3, seed=5), document(4, seed=6)],
}
RANK = """
import sys, torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from hf_packfree import apply_patches
from tests.models.test_idle_tower import step
from tests.vision import tiny_vision

rank, folder, wrapper, rows, frozen = int(sys.argv[1]), *sys.argv[2:4], sys.argv[4].split(), sys.argv[5] == "frozen"
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = apply_patches(tiny_vision("qwen3_5"))
model.model.visual.requires_grad_(not frozen)
if wrapper == "FSDP2":
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for part in (*model.model.visual.blocks, *model.model.language_model.layers, model.get_input_embeddings(), model):
        fully_shard(part, mesh=mesh)
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
for _ in range(2):
    grads = step(model, rows[rank])
grads = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
torch.save({name.removeprefix("module."): grad for name, grad in grads.items()}, f"{folder}/{rank}.pt")
torch.distributed.destroy_process_group()
"""


def step(model, rows: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a fixed functional of a row's logits."""
    from hf_packfree.models.mrope import rope_source
    from tests.support import gradients

    inner = getattr(model, "module", model)
    batch = packed_batch("4 rows", ROWS[rows], rope_source(inner.config))
    batch.pixels = [{kind: pixels.detach() for kind, pixels in own.items()} for own in batch.pixels]
    model.zero_grad(set_to_none=True)
    batch.call(model).logits.pow(2).mean().backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("wrapper", "rows", "frozen"),
    [
        ("DDP", "images text", False), ("FSDP2", "images text", False), ("FSDP2", "all images", False),
        ("FSDP2", "text all", True),
    ],
)
@pytest.mark.slow
def test_a_rank_without_media_stays_in_step(tmp_path, wrapper, rows, frozen):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    more = [wrapper, rows, "frozen" if frozen else "trained"]
    commands = [[sys.executable, "-c", RANK, str(rank), str(tmp_path), *more] for rank in (0, 1)]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=240)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    model = apply_patches(tiny_vision("qwen3_5"))
    model.model.visual.requires_grad_(not frozen)
    each = [step(model, row) for row in rows.split()]
    names = each[0].keys() | each[1].keys()
    wanted = {name: sum(grads[name] for grads in each if name in grads) / 2 for name in names}
    for rank in (0, 1):
        assert worst_gradient(torch.load(tmp_path / f"{rank}.pt"), wanted) <= GRADIENT_TOL


def test_one_process_runs_no_idle_tower():
    model = apply_patches(tiny_vision("qwen3_5"))
    assert not any("visual" in name for name in step(model, "text"))
