"""What each fast path is worth: training steps with all of them, and with one of them off, timed in
turns on a GPU.

    python -m tests.benchmarks.ablation --out DIR [--only REGEX]
    python -m tests.benchmarks.ablation --out DIR --device cpu --tiny     # a trial of the script itself

A step is the trunk's forward and backward, bf16, without optimizer, or those of head and loss.
Rows go to DIR/ablation.jsonl, after a line that says machine and source: the workload, what was
off, the median in ms, and the ratio to the step with nothing off, both timed in the same turns.
`python -m tests.benchmarks.report --write` makes the table of docs/performance.md from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hf_packfree.graphs import parts
from hf_packfree.graphs.ahead import Ahead
from hf_packfree.graphs.unread import Plans
from hf_packfree.models import peft_lora
from hf_packfree.models.run_options import CudaGraphs
from hf_packfree.models.state import Kernels, find_state
from hf_packfree.ops import launch
from hf_packfree.ops.delta_rule import even_segments
from hf_packfree.ops.fused import joined_linear, lora
from hf_packfree.ops.loss import OP as LOSS
from hf_packfree.ops.loss import linear_cross_entropy
from hf_packfree.ops.loss.scaled import scaled
from hf_packfree.packing import inputs
from tests.benchmarks.batches import Load, step_of
from tests.benchmarks.machine import machine
from tests.benchmarks.models import Variant, variant_of
from tests.benchmarks.run_all import source
from tests.benchmarks.shapes import SHAPES, TOKENS, batch_lengths, fixed_lengths, log_normal_lengths
from tests.benchmarks.timing import Clock, parser_of, rounded
from tests.support import runner_of

Off = Callable[[nn.Module], AbstractContextManager[Any]]


def _launcher(model: nn.Module) -> AbstractContextManager[Any]:
    def ask(
        kernel: Any,
        grid: tuple[int, ...],
        device: int,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        kernel[grid](*arguments, **constants)

    return mock.patch.object(launch, "_launch", ask)


@contextmanager
def _fast_path(model: nn.Module) -> Iterator[None]:
    with mock.patch.object(inputs, "offsets_of_one_row", lambda *given: None):
        with mock.patch.object(inputs, "rows_of_mask", lambda mask: None):
            yield


@contextmanager
def _attention(model: nn.Module) -> Iterator[None]:
    """Torch's varlen attention instead of ours."""
    state = find_state(model)
    assert state is not None
    other = replace(state, cuda_half=Kernels({**state.cuda_half, "attention": "varlen"}))
    ours = [part for part in model.modules() if vars(part).get("packfree") is state]
    for part in ours:
        vars(part)["packfree"] = other
    try:
        yield
    finally:
        for part in ours:
            vars(part)["packfree"] = state


def _spare_columns(model: nn.Module) -> AbstractContextManager[Any]:
    """What a layer with adapters reads is copied next to their h."""
    append_h = joined_linear._append_h
    return mock.patch.object(joined_linear, "_append_h", lambda x, h, padded: append_h(x, h, None))


@contextmanager
def _three_parts(model: nn.Module) -> Iterator[None]:
    """fp32 adapters on bf16 activations are multiplied in TF32, and norms have no spare columns."""
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with mock.patch.object(lora, "on_tensor_cores", lambda x: False):
            with mock.patch.object(peft_lora, "on_tensor_cores", lambda x: False):
                yield
    finally:
        torch.set_float32_matmul_precision(allowed)


def _ahead(model: nn.Module) -> AbstractContextManager[Any]:
    """Graphs are replayed when the host has read where documents start."""
    return mock.patch.object(Ahead, "pays", lambda ahead: False)


def _plans(model: nn.Module) -> AbstractContextManager[Any]:
    """The host launches the kernels of plans one by one."""
    return mock.patch.object(Plans, "_replay", Plans._write)


def _whole_documents(model: nn.Module) -> AbstractContextManager[Any]:
    """Documents are walked whole in CUDA graphs."""
    return _captured_with(model, even_segments, "segment_size", lambda *sizes: None)


def _whole_backward(model: nn.Module) -> AbstractContextManager[Any]:
    """The backward pass is one CUDA graph."""
    return _captured_with(model, parts, "PARTS", 1)


@contextmanager
def _captured_with(model: nn.Module, module: Any, name: str, value: Any) -> Iterator[None]:
    """Replay CUDA graphs that were captured, once, with another value of something."""
    runner = runner_of(model)
    graphs = _CAPTURED.setdefault(runner, {}).setdefault(name, {})
    with (
        mock.patch.object(module, name, value),
        mock.patch.object(runner.captures, "graphs", graphs),
    ):
        yield


_CAPTURED: WeakKeyDictionary[Any, dict[str, dict[Any, Any]]] = WeakKeyDictionary()


def _scaled_gradients(model: Any) -> AbstractContextManager[Any]:
    """torch multiplies the gradients of head and loss by the loss's own."""
    others = replace(LOSS.backends["triton"], scaled=scaled)
    return mock.patch.dict(LOSS.backends, {"triton": others})


@contextmanager
def _all(model: nn.Module) -> Iterator[None]:
    """Everything off that is the host's."""
    with _launcher(model), _fast_path(model):
        yield


HOST: Mapping[str, Off] = {
    "nothing": lambda model: nullcontext(),
    "cached launcher": _launcher,
    "packing's fast path": _fast_path,
    "launcher and fast path": _all,
}
GPU: Mapping[str, Off] = {"nothing": HOST["nothing"], "our attention": _attention}
ADAPTERS: Mapping[str, Off] = {
    "nothing": HOST["nothing"],
    "cached launcher": _launcher,
    "spare columns": _spare_columns,
    "three parts of fp32 adapters": _three_parts,
}


GRAPHS: Mapping[str, Off] = {
    "nothing": HOST["nothing"],
    "replay ahead": _ahead,
    "graph of plans": _plans,
    "backward pass in parts": _whole_backward,
}
LONG: Mapping[str, Off] = {
    "nothing": HOST["nothing"],
    "segments in graphs": _whole_documents,
    "backward pass in parts": _whole_backward,
}
HEAD: Mapping[str, Off] = {"nothing": HOST["nothing"], "scaled gradients": _scaled_gradients}


class Work(NamedTuple):
    """A step: which batch, what is switched off, layers (None: all), adapters' dtype or none,
    whether in CUDA graphs, and whether the host waits for the device after it.
    """

    name: str
    layers: int | None
    load: Load
    off: Mapping[str, Off]
    lora: str = ""
    graphs: CudaGraphs = "never"
    waits: bool = False

    @property
    def model(self) -> tuple[int | None, str, CudaGraphs]:
        """What the model depends on."""
        return self.layers, self.lora, self.graphs


def workloads(tiny: bool) -> Iterator[Work]:
    """Yield the steps."""
    both = {**HOST, **GPU}
    if tiny:
        row = Load(tuple(log_normal_lengths(400, longest=100, shortest=5)))
        yield Work("2b-32k-packed", None, row, both)
        yield Work("2b-32k-lora", None, row, ADAPTERS, "fp32")
        padded = Load(tuple(batch_lengths(4, 64, 0.5)), "padded")
        yield Work("2b-8x2048-padded", None, padded, both)
        return
    yield Work("2b-4k-packed", None, Load(tuple(fixed_lengths(4096, 500))), HOST)
    for name, tokens in {"2b-2k-lora": 2048, "2b-4k-lora": 4096}.items():
        row = Load(tuple(log_normal_lengths(tokens)))
        yield Work(f"{name}, in graphs", None, row, GRAPHS, "fp32", "auto")
        yield Work(
            f"{name}, in graphs, waiting after each", None, row, GRAPHS, "fp32", "auto", True
        )
    for name, tokens in {"2b-2k": 2048, "2b-4k": 4096, "2b-8k": 8192}.items():
        row = Load((tokens * 7 // 8, tokens // 16, tokens // 16))
        yield Work(f"{name}, a long document, in graphs", None, row, LONG, graphs="auto")
    for name, tokens in {"2b-32k-lora": TOKENS, "2b-4k-lora": 4096}.items():
        yield Work(name, None, Load(tuple(log_normal_lengths(tokens))), ADAPTERS, "fp32")
    yield Work("2b-8x2048-padded", None, Load(tuple(batch_lengths(8, 2048, 0.34)), "padded"), both)
    yield Work("2b-32k-packed", None, Load(tuple(log_normal_lengths(TOKENS))), both)
    yield Work("2b-32k, one document", None, Load((TOKENS,), "record"), GPU)
    for size in (500, 64):
        few = Load(tuple(fixed_lengths(4096, size)))
        yield Work(f"2b-8layers-4k, documents of {size}", 8, few, both)
    many, uneven = (*fixed_lengths(TOKENS, 8000),), (*[1000] * 16, 16000)
    yield Work("2b-8layers-32k, documents of 8000", 8, Load(many, "record"), GPU)
    name = "2b-8layers-32k, documents of 1000 and one of 16000"
    yield Work(name, 8, Load(uneven, "record"), GPU)


def main() -> None:
    """Time the chosen workloads."""
    options = parser_of(__doc__).parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(options.device, warmup=4, least=5.0, longest=20.0, shortest=500.0)
    write(
        options.out,
        {**machine(options.device), "source": source(), "script": "tests.benchmarks.ablation"},
    )
    found = [work for work in workloads(options.tiny) if re.search(options.only, work.name)]
    for kind in dict.fromkeys(work.model for work in found):
        shape, (layers, lora, graphs) = SHAPES["tiny" if options.tiny else "2b"], kind
        shape = shape if layers is None else replace(shape, layers=layers)
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        variant = Variant(lora=lora, cuda_graphs=graphs)
        with variant_of(shape, variant, options.device, dtype) as model:
            for work in (work for work in found if work.model == kind):
                inputs = work.load.inputs(model.config.vocab_size, clock.device)
                step = step_of(model.base_model, [inputs])
                step = waiting(step) if work.waits else step
                for row in compare(work.name, model, step, work.off, clock):
                    write(options.out, row)
            del model
    for tokens in (2048, 8192):
        name = f"head and loss, {tokens} tokens"
        # on a CPU there is no kernel to be without
        if options.device == "cuda" and re.search(options.only, name):
            for row in compare(name, None, head_and_loss(tokens), HEAD, clock):
                write(options.out, row)


def waiting(step: Callable[[], Any]) -> Callable[[], Any]:
    """Return the step with a wait for the GPU at its end."""

    def run() -> None:
        step()
        torch.cuda.synchronize()

    return run


def head_and_loss(tokens: int) -> Callable[[], Any]:
    """Return forward and backward of the 2B shape's head and loss."""
    x, weight = (
        torch.randn(count, 2048, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for count in (tokens, 248320)
    )
    targets = torch.randint(len(weight), (tokens,), device="cuda")

    def step() -> None:
        loss = linear_cross_entropy(x, weight, targets, backend="triton") / tokens
        torch.autograd.grad(loss, [x, weight])

    return step


def compare(
    name: str, model: Any, step: Callable[[], Any], off: Mapping[str, Off], clock: Clock
) -> Iterator[dict[str, Any]]:
    """Yield a row for each fast path that is switched off, timed in turns."""

    def without(switch: Off) -> Callable[[], Any]:
        def run() -> Any:
            with switch(model):
                return step()

        return run

    timings = clock.in_turns([without(switch) for switch in off.values()])
    for what, timing in zip(off, timings):
        yield rounded(
            {
                "workload": name,
                "off": what,
                **timing,
                "ratio": timing["ms"] / timings[0]["ms"],
                "ratio_of_best": timing["ms_min"] / timings[0]["ms_min"],
            }
        )


def write(out: Path, row: dict[str, Any]) -> None:
    """Append a row and print it."""
    with (out / "ablation.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
