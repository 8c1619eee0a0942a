"""DDP and FSDP2 on two devices: packed gradients against those per document, dtypes, and a
checkpoint loaded unpatched.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/parallel.py --out result.json                # two GPUs, NCCL
    torchrun ... tests/benchmarks/parallel.py --out result.json --shape exact --backend delta_rule=torch
    torchrun ... tests/benchmarks/parallel.py --out result.json --shape exact --backend auto --half
    torchrun ... tests/benchmarks/parallel.py --out result.json --device cpu

`--shape exact` has the published models' heads, so that the kernels run that train them: in fp32
ours beside torch's delta rule, in half precision everything that "auto" chooses.

Every rank trains on packed rows of its own documents, with activation checkpointing and SGD, for
three steps; rank 0 has kept what one unpatched model makes of each of the same documents alone.
Writes a JSON result; the exit code is 0 if all is within its limit. Needs torch, transformers and
accelerate, and no pytest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import accelerate
import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_packfree import apply_patches, patch_report
from hf_packfree.errors import PatchConflict
from tests.benchmarks.measure import backends
from tests.benchmarks.models import build as build_shape
from tests.benchmarks.shapes import SHAPES
from tests.integrations.compare import (
    RATE,
    in_steps,
    labelled,
    overall,
    per_document,
    rows,
    targets,
    worst,
)
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    put_upstream_in_torch,
    relative_rms,
    slow_decay,
    tiny,
)

KEPT_IN_FP32 = ("A_log", "dt_bias")


@dataclass(frozen=True)
class Setting:
    """What every way is measured with: the device of this rank, `backend` of apply_patches, a
    shape or the tiny model.
    """

    device: torch.device
    backend: str
    shape: str

    def fresh(self) -> Any:
        """Return the seeded model, fp32, slow decay, unpatched."""
        if self.shape == "tiny":
            return tiny().to(self.device)
        return slow_decay(build_shape(SHAPES[self.shape], "cpu", torch.float32)).to(self.device)

    def model(self, patched: bool) -> Any:
        """Return it with activation checkpointing."""
        model = self.fresh()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return apply_patches(model, backend=backends(self.backend)) if patched else model


@dataclass
class Result:
    """What one way of wrapping measured.

    Attributes:
        gradients: worst relative RMS of any parameter's gradient in any step; in half precision, of
            all of them together, since single gradients are mostly rounding there.
        allowed: what it may be: the exactness tests' limit, or twice what half precision rounds per
            document.
        control: the same of an unpatched model on the same rows; says nothing of the tiny model in
            half precision, whose rounding is as large as its leak.
        checkpoint: relative RMS of logits, the saved checkpoint loaded unpatched against training
            per document.
        dtypes: of A_log and dt_bias: kept, as seen inside a forward, as an unpatched model shows
            them there, and saved.
        after: when patching comes after the wrapping: the gradients' error again, or the name of
            the refusal.
    """

    gradients: float
    allowed: float
    control: float
    checkpoint: float
    dtypes: dict[str, list[str]]
    after: float | str
    failures: list[str] = field(default_factory=list)

    def judge(self, exact: bool, control: float) -> None:
        """Note everything that is not as promised; `control`: how many times what is allowed the
        leak has to be.
        """
        if not self.gradients <= self.allowed:
            self.failures.append(
                f"gradients off by {self.gradients:.1e}, allowed {self.allowed:.1e}"
            )
        if not self.control >= control * self.allowed:
            self.failures.append(f"blind: the unpatched model is off by {self.control:.1e} only")
        if isinstance(self.after, float) and not self.after <= self.allowed:
            self.failures.append(f"patched after wrapping, gradients are off by {self.after:.1e}")
        if exact and not self.checkpoint <= LOGIT_TOL:
            self.failures.append(f"the checkpoint's logits are off by {self.checkpoint:.1e}")
        if self.dtypes["seen"] != self.dtypes["unpatched sees"]:
            wanted = self.dtypes["unpatched sees"]
            self.failures.append(
                f"A_log and dt_bias are {self.dtypes['seen']}, in an unpatched model {wanted}"
            )
        if {*self.dtypes["kept"], *self.dtypes["saved"]} != {"float32"}:
            self.failures.append(
                f"A_log and dt_bias are kept in {self.dtypes['kept']}, saved in "
                f"{self.dtypes['saved']}"
            )


@dataclass(frozen=True)
class Way:
    """One way to wrap: `wrap(model)` returns what is called; `half` where its forward rounds to
    bfloat16.
    """

    wrap: Callable[[Any, torch.device], Any]
    half: bool = False


def ddp(model: Any, device: torch.device) -> Any:
    return DistributedDataParallel(model)


def fsdp2(model: Any, device: torch.device, policy: MixedPrecisionPolicy | None = None) -> Any:
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2_bf16(model: Any, device: torch.device) -> Any:
    return fsdp2(
        model, device, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )


def accelerate_ddp(model: Any, device: torch.device) -> Any:
    return _accelerator(device).prepare(model)


def accelerate_ddp_bf16(model: Any, device: torch.device) -> Any:
    return _accelerator(device, mixed_precision="bf16").prepare(model)


def accelerate_fsdp2(model: Any, device: torch.device) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    layers = ["Qwen3_5DecoderLayer"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=layers,
    )
    # with an optimizer, as the library demands of FSDP2; our loop steps itself
    return _accelerator(device, fsdp_plugin=plugin).prepare(
        model, torch.optim.SGD(model.parameters(), RATE)
    )[0]


def _accelerator(device: torch.device, **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # which otherwise remembers how the last one was sharded
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    return Accelerator(cpu=device.type == "cpu", **options)


WAYS = {
    "ddp": Way(ddp),
    "fsdp2": Way(fsdp2),
    "fsdp2 bf16": Way(fsdp2_bf16, half=True),
    "accelerate ddp": Way(accelerate_ddp),
    "accelerate ddp bf16": Way(accelerate_ddp_bf16, half=True),
    "accelerate fsdp2": Way(accelerate_fsdp2),
}


def train(
    wrapped: Any, batches: list[list[dict[str, Any]]], counts: list[int]
) -> list[dict[str, torch.Tensor]]:
    """Return every step's gradients of the token-weighted mean loss over all ranks, whole and on
    the CPU.
    """
    kept = []
    for step, count in zip(batches, counts):
        wrapped.zero_grad(set_to_none=True)
        for batch in step:
            loss = wrapped(**batch, use_cache=False, num_items_in_batch=count).loss
            # the wrappers average over ranks, the count is of all ranks
            (loss * dist.get_world_size()).backward()
        kept.append({name: _whole(p.grad) for name, p in _named(wrapped) if p.grad is not None})
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter -= RATE * parameter.grad
    return kept


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def _named(wrapped: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name.removeprefix("module."), p) for name, p in wrapped.named_parameters()]


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move a batch; numbers stay."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def batches_of(rank: int, device: torch.device, packed: bool) -> list[list[dict[str, Any]]]:
    """Return, per step, this rank's documents: one packed row, or each in a batch of its own."""
    collate = transformers.DataCollatorWithFlattening()
    steps = [step[rank :: dist.get_world_size()] for step in in_steps(labelled())]
    parts = [[step] if packed else [[item] for item in step] for step in steps]
    return [[on_device(dict(collate(rows(part))), device) for part in step] for step in parts]


def measure(way: Way, setting: Setting, folder: Path) -> Result:
    """Train the three steps in this way and compare."""
    counts = [sum(targets(labels) for _, labels in step) for step in in_steps(labelled())]
    rank, device, error = dist.get_rank(), setting.device, overall if way.half else worst
    exact, reference = trained_per_document(setting)

    wrapped, unpatched = (way.wrap(setting.model(patched), device) for patched in (True, False))
    seen, unpatched_seen = dtypes_seen(wrapped), dtypes_seen(unpatched)
    found = train(wrapped, batches_of(rank, device, packed=True), counts)
    rounded = error(train(unpatched, batches_of(rank, device, packed=False), counts), exact)
    leaking = train(
        way.wrap(setting.model(False), device), batches_of(rank, device, packed=True), counts
    )

    checkpoint = save_and_compare(wrapped, reference, setting, folder)
    kept = [p.dtype for name, p in _named(wrapped) if name.endswith(KEPT_IN_FP32)]
    dtypes = {
        "kept": kept,
        "seen": seen,
        "unpatched sees": unpatched_seen,
        "saved": saved_dtypes(folder),
    }
    result = Result(
        gradients=error(found, exact),
        allowed=2 * rounded if way.half else GRADIENT_TOL,
        control=error(leaking, exact),
        checkpoint=checkpoint,
        dtypes={
            key: sorted({str(d).removeprefix("torch.") for d in value})
            for key, value in dtypes.items()
        },
        after=patched_after(way, setting, counts, lambda found: error(found, exact)),
    )
    result.judge(
        exact=not way.half, control=CONTROL if not way.half else 0 if setting.shape == "tiny" else 5
    )
    return result


@cache
def trained_per_document(setting: Setting) -> tuple[list[dict[str, torch.Tensor]], Any]:
    """Return every step's gradients, on the CPU, and the model, of an unpatched one on one
    device.
    """
    model, device = setting.fresh(), setting.device
    steps = [
        [(ids.to(device), labels.to(device)) for ids, labels in step]
        for step in in_steps(labelled())
    ]
    kept = per_document(model, steps)
    return [{name: gradient.cpu() for name, gradient in step.items()} for step in kept], model


def dtypes_seen(wrapped: Any) -> list[torch.dtype]:
    """Return a list that fills with the dtypes of A_log and dt_bias inside forwards."""
    seen: list[torch.dtype] = []
    for name, module in wrapped.named_modules():
        # runs within the layer's forward, after its parameters were gathered
        if name.endswith("linear_attn.norm"):
            layer = wrapped.get_submodule(name.removesuffix(".norm"))
            module.register_forward_pre_hook(
                lambda *_, layer=layer: seen.extend([layer.A_log.dtype, layer.dt_bias.dtype])
            )
    return seen


def save_and_compare(wrapped: Any, reference: Any, setting: Setting, folder: Path) -> float:
    """Save what was trained, load it unpatched, and return how far its logits are from training
    per document's.
    """
    whole = get_model_state_dict(
        wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        named = {name.removeprefix("module."): value for name, value in whole.items()}
        setting.fresh().save_pretrained(folder, state_dict=named)
    dist.barrier()
    loaded = type(reference).from_pretrained(folder).to(setting.device)
    assert not patch_report(loaded).patched
    ids = labelled()[3][0][None].to(setting.device)
    with torch.no_grad():
        return relative_rms(loaded(input_ids=ids).logits, reference.eval()(input_ids=ids).logits)


def saved_dtypes(folder: Path) -> list[torch.dtype]:
    """The dtypes of A_log and dt_bias in the checkpoint."""
    from safetensors.torch import load_file

    return [
        value.dtype
        for name, value in load_file(folder / "model.safetensors").items()
        if name.endswith(KEPT_IN_FP32)
    ]


def patched_after(way: Way, setting: Setting, counts: list[int], error: Any) -> float | str:
    """Return the error of gradients when patching comes last, or the name of the refusal."""
    wrapped = way.wrap(setting.model(False), setting.device)
    try:
        apply_patches(wrapped, backend=backends(setting.backend))
    except PatchConflict as refusal:
        return type(refusal).__name__
    return float(
        error(train(wrapped, batches_of(dist.get_rank(), setting.device, packed=True), counts))
    )


def main() -> int:
    """Run every way, write the result, and return 0 if all hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON result goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--backend", default="torch", help="for apply_patches; torch is exact in fp32 everywhere"
    )
    parser.add_argument("--shape", choices=("tiny", "exact"), default="tiny")
    parser.add_argument("--ways", nargs="*", choices=tuple(WAYS), default=None)
    parser.add_argument("--half", action="store_true", help="the ways in half precision alone")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # a reference for which nothing tunes
        put_upstream_in_torch(SimpleNamespace(setattr=setattr))
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    # accelerate shards on accelerators only
    ways = options.ways or [
        name for name in WAYS if device.type == "cuda" or name != "accelerate fsdp2"
    ]
    ways = [name for name in ways if WAYS[name].half or not options.half]
    setting = Setting(device, options.backend, options.shape)
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [own]
        dist.broadcast_object_list(folders)
        results: dict[str, Result] = {}
        for name in ways:
            results[name] = measure(WAYS[name], setting, Path(folders[0]) / name.replace(" ", "-"))
            # after each, so that one that breaks does not take the others along
            if rank == 0:
                options.out.write_text(report(results, ways, setting))
        dist.barrier()
    if rank == 0:
        print(options.out.read_text())
    dist.destroy_process_group()
    return 1 if any(result.failures for result in results.values()) else 0


def report(results: dict[str, Result], ways: list[str], setting: Setting) -> str:
    """Return the result as JSON; it passed if every way was measured and holds."""
    passed = len(results) == len(ways) and not any(result.failures for result in results.values())
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    found: dict[str, Any] = {
        "machine": _device_name(setting.device),
        "processes": dist.get_world_size(),
        "date": today,
    }
    found |= {"backend": setting.backend, "shape": setting.shape}
    kinds = (torch.float32, torch.bfloat16)
    runs = {
        str(kind): dict(patch_report(setting.model(True).to(kind)).implementations)
        for kind in kinds
    }
    found["implementations"] = {
        kind.removeprefix("torch."): implementations for kind, implementations in runs.items()
    }
    found["versions"] = {
        module.__name__: module.__version__ for module in (torch, transformers, accelerate)
    }
    found["ways"] = {name: asdict(result) for name, result in results.items()}
    return json.dumps(found | {"passed": passed}, indent=1) + "\n"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
