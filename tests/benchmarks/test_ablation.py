"""Switching a fast path off changes how a step runs, never what it computes, and is undone."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import ablation
from tests.benchmarks.batches import Load, step_of
from tests.benchmarks.models import Variant, variant_of
from tests.benchmarks.shapes import SHAPES
from tests.integrations.marks import needs


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


@needs("peft")
@pytest.mark.filterwarnings("default:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("off", ablation.ADAPTERS)
def test_the_loss_with_adapters_is_the_same(adapted, off):
    step = step_of(adapted.base_model, [Load((5, 30, 1)).inputs(adapted.config.vocab_size, "cpu")])
    wanted = step()
    with ablation.ADAPTERS[off](adapted):
        assert torch.equal(step(), wanted)
