"""CUDA graphs of the kernels that run on other GPUs than Hopper, and of other families' layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from hf_packfree import patch_report
from hf_packfree.ops.attention import varlen
from hf_packfree.packing import PackedSequence
from tests.benchmarks.family_shapes import FAMILY_SHAPES
from tests.gpu.checks import TRIAL, gpu, spans
from tests.gpu.small import packed_row, small
from tests.gpu.test_graphs import ROWS, model_of, step, without
from tests.gpu.test_trees import switch
from tests.integrations.marks import needs
from tests.support import checkpoint_layers, gradients, relative_rms, runner_of

pytestmark = [*gpu, pytest.mark.skipif(TRIAL, reason="CUDA graphs need a GPU")]


def of_family(name: str, layers: int, **options: Any) -> Callable[[], Any]:
    shape = FAMILY_SHAPES[name]
    experts = {"num_local_experts": min(16, shape.sizes.get("num_local_experts", 0))}
    sizes = {**shape.sizes, "vocab_size": 1024, **experts, **options}
    few = replace(shape, layers=layers, sizes=sizes)
    return lambda: small(few, cuda_graphs="auto", unpacked="native")


def of_backend(**backend: str) -> Callable[[], Any]:
    return lambda: model_of(backend=backend)


def recomputed() -> Any:
    model = model_of(backend={"delta_rule": "fla"})
    checkpoint_layers(model)
    return model


def loaded_with_flash() -> Any:
    """A model whose rows without a graph run in a flash attention of transformers' interface."""

    def by_torch(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **words: Any):
        offsets = words["cu_seq_lens_q"]
        packed = PackedSequence.from_lengths(offsets.diff().tolist(), device=query.device)
        heads = (x.transpose(1, 2) for x in (query, key, value))
        return varlen.attend(*heads, packed, scale=words["scaling"]), None

    AttentionInterface.register("torch_flash", by_torch)
    model = model_of(backend={"attention": "varlen"})
    model.config._attn_implementation_internal = "torch_flash"
    return model


_SCAN = needs("mamba_ssm")
MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "FLA's delta rule": (of_backend(delta_rule="fla"), ()),
    "FLA's delta rule, recomputed": (recomputed, ()),
    "torch's varlen attention": (of_backend(attention="varlen"), ()),
    "a flash attention": (loaded_with_flash, ()),
    "Kimi Linear": (of_family("kimi", 4), ()),
    # as published, a document says more of itself than its layers add
    "Granite 4.0 H": (of_family("granite4h", 10, embedding_multiplier=1.0), _SCAN),
    "Nemotron-H": (of_family("nemotronh", 13), _SCAN),
    "LFM2": (of_family("lfm2", 12), ()),
    "Llama": (of_family("llama", 3), ()),
    "gpt-oss": (of_family("gptoss", 2), ()),
}
LEAK = 0.05
"""What the control makes of a row at least, relative RMS; on an H200 from 0.06 on."""


@pytest.fixture(autouse=True)
def in_one_order() -> Iterator[None]:
    """Flash attention and mamba-ssm add up gradients in one order, instead of in any."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, (_, marks) in MODELS.items()])
def model(request) -> Any:
    """A model whose rows were captured."""
    found = MODELS[request.param][0]()
    for lengths in ROWS * 2:
        step(found, lengths)
    return found


def run_plainly(model: Any, lengths: Any, tokens: Tensor) -> Tensor:
    """Run a row as it is, not in a bucket, without a graph."""
    switch(model, "never")
    out = step(model, lengths, tokens=tokens)
    switch(model, "auto")
    return out


def gradients_of(model: Any, run: Any, lengths: Any, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a row's hidden states and all gradients."""
    model.zero_grad(set_to_none=True)
    return run(model, lengths, seed), gradients(model)


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(relative_rms(found[name], one, floor=1e-3) for name, one in wanted.items())


def test_packings_in_turns(record, model):
    """Each row has the bits of its bucket without a graph, and its gradients have."""
    replayed = runner_of(model).replayed
    for number, lengths in enumerate(ROWS * 2):
        values, grads = gradients_of(model, step, lengths, number)
        wanted, others = gradients_of(model, without, lengths, number)
        record(f"{lengths[:3]}, values", relative_rms(values, wanted), 0.0)
        record(f"{lengths[:3]}, gradients", worst(grads, others), 0.0)
    assert runner_of(model).replayed == replayed + 2 * len(ROWS), patch_report(model).cuda_graphs


def test_rows_in_a_bucket_are_those_without(record, model):
    """With the same bits, where these run the same kernels; beside what documents get that reach each
    other, the control.
    """
    loaded = model.config._attn_implementation
    limit = 0.0 if loaded in ("sdpa", "eager") else LEAK / 5
    for lengths in ROWS:
        tokens, _ = packed_row(model, lengths)
        wanted = run_plainly(model, lengths, tokens)
        error = relative_rms(step(model, lengths, tokens=tokens), wanted)
        record(f"{lengths[:3]}", error, limit)
        if len(lengths) > 1:
            leaking = run_plainly(model, (sum(lengths),), tokens)
            assert relative_rms(leaking, wanted) > LEAK


def test_influence_is_zero(record, model):
    """Another document's tokens change nothing in a graph, whatever row was before. mamba-ssm's
    decays are differences of sums over all documents of a chunk, in a graph and without.
    """
    lengths, runs = ROWS[1], {"in a graph": step, "without": without}
    replayed = runner_of(model).replayed
    tokens, _ = packed_row(model, lengths)
    before = {name: run(model, lengths, tokens=tokens) for name, run in runs.items()}
    for begin, end in spans(lengths)[-4:-1]:
        step(model, ROWS[0])
        other = tokens.clone()
        other[:, begin:end] = (other[:, begin:end] + 1) % 500
        found = {}
        for name, run in runs.items():
            after = run(model, lengths, tokens=other)
            assert relative_rms(after[:, begin:end], before[name][:, begin:end]) > LEAK
            after[:, begin:end] = before[name][:, begin:end]
            found[name] = relative_rms(after, before[name])
        record(f"influence of {begin}:{end}", found["in a graph"], found["without"])
    assert runner_of(model).replayed == replayed + 7, patch_report(model).cuda_graphs
