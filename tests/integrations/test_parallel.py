"""Two processes on the CPU: what the script for GPUs measures there, all ways of wrapping in one
run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.integrations.marks import integration
from tests.ranks import two_ranks
from tests.support import CONTROL, GRADIENT_TOL

ROOT = Path(__file__).resolve().parents[2]
EITHER = "works, patched before wrapping or after"
LAYERS = (
    "works, patched before sharding; after it too, unless the text model itself is sharded: then "
    "`PatchConflict`"
)


def launch(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this repository as two processes and return what it said."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(ROOT / script),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=400, env=environment
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return what every way measured, which run once."""
    work = tmp_path_factory.mktemp("ranks")
    ((first, _),) = two_ranks(every_way, [(str(work),)], work)
    return first


def every_way(rank: int, folder: str) -> dict[str, dict[str, object]]:
    """What `tests/benchmarks/parallel.py` measures on a CPU, where accelerate shards nothing."""
    from tests.benchmarks.parallel import WAYS, Setting, measure

    setting = Setting(torch.device("cpu"), "torch", "tiny")
    ways = {name: way for name, way in WAYS.items() if name != "accelerate fsdp2"}
    return {
        name: asdict(measure(way, setting, Path(folder) / name.replace(" ", "-")))
        for name, way in ways.items()
    }


def check(result, record_property) -> None:
    record_property("error", result["gradients"])
    record_property("control", result["control"])
    assert result["failures"] == []
    assert result["gradients"] <= GRADIENT_TOL and result["control"] >= CONTROL * GRADIENT_TOL
    assert result["after"] <= GRADIENT_TOL, "patched after wrapping"
    assert result["checkpoint"] <= 1e-5, "the checkpoint, loaded unpatched"
    assert result["dtypes"] == dict.fromkeys(
        ("kept", "seen", "unpatched sees", "saved"), ["float32"]
    )


@integration(
    "torch",
    "DistributedDataParallel, activation checkpointing, checkpoint loaded unpatched",
    EITHER,
)
def test_ddp(results, record_property):
    check(results["ddp"], record_property)


@integration(
    "torch", "FSDP2 (`fully_shard`), activation checkpointing, checkpoint loaded unpatched", LAYERS
)
def test_fsdp2(results, record_property):
    check(results["fsdp2"], record_property)


@integration(
    "torch",
    "FSDP2 in bfloat16: `A_log`, `dt_bias`",
    "works; kept and saved in fp32, computed with as upstream does",
)
def test_fsdp2_keeps_the_decay_in_fp32(results, record_property):
    result = results["fsdp2 bf16"]
    record_property("error", result["gradients"])
    assert result["failures"] == []
    assert result["gradients"] <= result["allowed"], (
        "twice the rounding of unpatched documents alone"
    )
    assert result["dtypes"]["kept"] == result["dtypes"]["saved"] == ["float32"]
    assert result["dtypes"]["seen"] == result["dtypes"]["unpatched sees"]


@integration("accelerate", 'own loop, DDP, `mixed_precision="bf16"`', EITHER)
def test_accelerate_in_half_precision(results, record_property):
    result = results["accelerate ddp bf16"]
    record_property("error", result["gradients"])
    record_property("control", result["control"])
    assert result["failures"] == []
    assert result["gradients"] <= result["allowed"], (
        "twice the rounding of unpatched documents alone"
    )
    assert result["control"] > 5 * result["allowed"] and result["after"] <= result["allowed"]


@integration("accelerate", "own loop, DDP", EITHER)
def test_accelerate(results, record_property):
    check(results["accelerate ddp"], record_property)


@integration("accelerate", "own loop, FSDP2 plugin, two GPUs", LAYERS)
@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices; accelerate shards on no CPU"
)
def test_two_gpus(tmp_path, record_property):
    out = tmp_path / "result.json"
    done = launch("tests/benchmarks/parallel.py", "--out", str(out))
    assert out.exists(), done.stderr[-4000:]
    report = json.loads(out.read_text())
    assert report["passed"], report
    check(report["ways"]["accelerate fsdp2"], record_property)


@integration(
    "torch", "FSDP2 (`fully_shard`), activation checkpointing, checkpoint loaded unpatched", LAYERS
)
def test_a_sharded_trunk_is_refused(tmp_path):
    from torch.distributed.fsdp import fully_shard

    from hf_packfree import apply_patches
    from hf_packfree.errors import PatchConflict
    from tests.support import tiny

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = tiny()
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(model.model, mesh=mesh)
        with pytest.raises(PatchConflict, match="fully_shard"):
            apply_patches(model)
    finally:
        torch.distributed.destroy_process_group()
