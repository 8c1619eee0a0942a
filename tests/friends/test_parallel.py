"""Two processes on the CPU: the same script that runs on GPUs, one way of wrapping at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.friends.marks import friend
from tests.support import CONTROL, GRADIENT_TOL

ROOT = Path(__file__).resolve().parents[2]
EITHER = "works, patched before wrapping or after"
LAYERS = "works, patched before sharding; after it too, unless the text model itself is sharded: then `PatchConflict`"


def launch(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this repository as two processes and return what it said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=400, env=environment)


def measured(way: str, folder: Path) -> dict:
    """Return what tests/gpu/parallel.py measured for one way."""
    out = folder / "result.json"
    done = launch("tests/gpu/parallel.py", "--device", "cpu", "--out", str(out), "--ways", way)
    assert out.exists(), done.stderr[-4000:]
    return json.loads(out.read_text())["ways"][way]


def check(way, folder, record_property) -> None:
    result = measured(way, folder)
    record_property("error", result["gradients"])
    record_property("control", result["control"])
    assert result["failures"] == []
    assert result["gradients"] <= GRADIENT_TOL and result["control"] >= CONTROL * GRADIENT_TOL
    assert result["after"] <= GRADIENT_TOL, "patched after wrapping"
    assert result["checkpoint"] <= 1e-5, "the checkpoint, loaded unpatched"
    assert result["dtypes"] == dict.fromkeys(("kept", "seen", "stock sees", "saved"), ["float32"])


@friend("torch", "DistributedDataParallel, activation checkpointing, checkpoint loaded unpatched", EITHER)
def test_ddp(tmp_path, record_property):
    check("ddp", tmp_path, record_property)


@friend("torch", "FSDP2 (`fully_shard`), activation checkpointing, checkpoint loaded unpatched", LAYERS)
def test_fsdp2(tmp_path, record_property):
    check("fsdp2", tmp_path, record_property)


@friend("torch", "FSDP2 in bfloat16: `A_log`, `dt_bias`", "works; kept and saved in fp32, computed with as upstream does")
def test_fsdp2_keeps_the_decay_in_fp32(tmp_path, record_property):
    result = measured("fsdp2 bf16", tmp_path)
    record_property("error", result["gradients"])
    assert result["failures"] == []
    assert result["gradients"] <= result["allowed"], "twice the rounding of stock documents, one by one"
    assert result["dtypes"]["kept"] == result["dtypes"]["saved"] == ["float32"]
    assert result["dtypes"]["seen"] == result["dtypes"]["stock sees"]


@friend("accelerate", "own loop, DDP", EITHER)
def test_accelerate(tmp_path, record_property):
    check("accelerate ddp", tmp_path, record_property)


@friend("torch", "FSDP2 (`fully_shard`), activation checkpointing, checkpoint loaded unpatched", LAYERS)
def test_a_sharded_trunk_is_refused(tmp_path):
    import torch
    from torch.distributed.fsdp import fully_shard

    from hf_packfree import apply_patches
    from hf_packfree.errors import PatchConflict
    from tests.support import tiny

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny()
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(model.model, mesh=mesh)
        with pytest.raises(PatchConflict, match="fully_shard"):
            apply_patches(model)
    finally:
        torch.distributed.destroy_process_group()
