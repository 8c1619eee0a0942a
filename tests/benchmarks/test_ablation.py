"""Switching a fast path off changes how a step runs, never what it computes, and is undone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_packfree.models import peft_lora
from hf_packfree.ops.delta_rule import even_segments
from hf_packfree.ops.fused import lora
from hf_packfree.ops.loss import OP as LOSS
from hf_packfree.ops.loss.scaled import scaled, triton_scaled
from tests.benchmarks import ablation
from tests.benchmarks.batches import Load, step_of
from tests.benchmarks.models import Variant, variant_of
from tests.benchmarks.shapes import SHAPES
from tests.integrations.marks import needs
from tests.support import runner_of


@pytest.fixture(scope="module")
def model():
    with variant_of(SHAPES["tiny"], Variant(), "cpu", torch.float32) as model:
        yield model


@pytest.fixture(scope="module")
def adapted():
    with variant_of(SHAPES["tiny"], Variant(lora="fp32"), "cpu", torch.float32) as model:
        yield model


@pytest.mark.parametrize("input_format", ["collator", "padded"])
@pytest.mark.parametrize("off", {**ablation.HOST, **ablation.GPU})
def test_the_loss_is_the_same(model, off, input_format):
    step = step_of(
        model.base_model, [Load((5, 30, 1), input_format).inputs(model.config.vocab_size, "cpu")]
    )
    wanted = step()
    with {**ablation.HOST, **ablation.GPU}[off](model):
        assert torch.equal(step(), wanted)
    assert torch.equal(step(), wanted)


def test_documents_are_whole_in_graphs_of_their_own(model):
    runner, longest = runner_of(model), (8192, 16, 8192, 8)
    graphs, cut = runner.captures.graphs, even_segments.segment_size(*longest)
    others = []
    for _ in range(2):
        with ablation.LONG["segments in graphs"](model):
            assert even_segments.segment_size(*longest) is None
            others.append(runner.captures.graphs)
    assert others[0] is others[1] is not graphs
    assert runner.captures.graphs is graphs and even_segments.segment_size(*longest) == cut


@needs("peft")
@pytest.mark.filterwarnings("default:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("off", ablation.ADAPTERS)
def test_the_loss_with_adapters_is_the_same(adapted, off):
    step = step_of(adapted.base_model, [Load((5, 30, 1)).inputs(adapted.config.vocab_size, "cpu")])
    wanted = step()
    with ablation.ADAPTERS[off](adapted):
        assert torch.equal(step(), wanted)


@needs("peft")
def test_without_three_parts_a_norm_has_no_spare_columns(adapted, monkeypatch):
    """As h is in fp32 then: what is timed pays for none."""
    for module in (lora, peft_lora):
        monkeypatch.setattr(module, "on_tensor_cores", lambda x: True)
    layers = [layer for layer in adapted.modules() if peft_lora.is_lora(layer)][:1]
    x = torch.zeros(3, layers[0].in_features, dtype=torch.bfloat16)
    wanted = peft_lora.spare_columns_for(layers, x)
    with ablation.ADAPTERS["three parts of fp32 adapters"](adapted):
        assert peft_lora.spare_columns_for(layers, x) == 0
    assert peft_lora.spare_columns_for(layers, x) == wanted > 0


def test_without_its_kernel_torch_multiplies_gradients_by_the_losss():
    ours = LOSS.backend("triton")
    with ablation.HEAD["scaled gradients"](None):
        assert LOSS.backend("triton") == replace(ours, scaled=scaled)
    assert LOSS.backend("triton") is ours and ours.scaled is triton_scaled
