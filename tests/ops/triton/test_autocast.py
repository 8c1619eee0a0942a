"""Whole models under bf16 autocast on the Triton kernels, packed, against stock models on the same
documents alone: no farther from fp32 than these, and no layer is called.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_packfree import apply_patches
from hf_packfree.models.state import Kernels
from tests.input_formats import row_batch
from tests.integrations.marks import needs
from tests.support import random_weights, relative_rms, run, run_alone, tiny

pytestmark = pytest.mark.filterwarnings("default")

BATCH = row_batch("positions", (5, 1, 8, 2))
FUSED = Kernels(fused="triton")


@pytest.fixture
def called(monkeypatch):
    """Every linear layer that is called, by name."""
    seen, forward = [], nn.Linear.forward
    monkeypatch.setattr(
        nn.Linear, "forward", lambda layer, x: seen.append(layer) or forward(layer, x)
    )
    return seen


def lora(model, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    settings = {
        "r": 4,
        "lora_alpha": 6,
        "init_lora_weights": False,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
    }
    found = get_peft_model(model, LoraConfig(**settings | options))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape))
    return found


MODELS = {
    "full, fp32 weights": lambda: tiny(),
    "LoRA, bf16 base": lambda: lora(tiny().bfloat16()),
    "LoRA, fp32 base": lambda: lora(tiny()),
    "LoRA with dropout in evaluation": lambda: lora(tiny(), lora_dropout=0.5).eval(),
    "DoRA, bf16 base": lambda: lora(tiny().bfloat16(), use_dora=True),
    "DoRA, fp32 base": lambda: lora(tiny(), use_dora=True),
}


def on_kernels(model):
    for module in apply_patches(model).modules():
        if "packfree" in vars(module):
            vars(module)["packfree"] = replace(vars(module)["packfree"], elsewhere=FUSED)
    return model


def under_autocast(function, *arguments, dtype=torch.bfloat16):
    """Call under autocast, backward pass included; results in fp32."""
    with torch.autocast("cpu", dtype):
        parts, grads = function(*arguments)
    return [part.float() for part in parts], {name: grad.float() for name, grad in grads.items()}


def sizes(found, wanted):
    """The relative RMS of all logits, and the median parameter gradient's."""
    (parts, grads), (alone, of_alone) = found, wanted
    each = sorted(relative_rms(grads[name], of_alone[name]) for name in of_alone)
    return relative_rms(torch.cat(parts), torch.cat(alone)), each[len(each) // 2]


@needs("peft")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", MODELS)
def test_as_near_to_fp32_as_stock_and_no_layer_is_called(name, checkpointing, called, launched):
    weights = random_weights(BATCH, 128)
    stock = MODELS[name]()
    wanted = run_alone(copy.deepcopy(stock).float(), BATCH, weights)
    of_stock = sizes(under_autocast(run_alone, stock, BATCH, weights), wanted)
    model = on_kernels(MODELS[name]())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    called.clear()
    found = sizes(under_autocast(run, model, BATCH, weights), wanted)
    assert len(called) <= 1, "the head alone"
    assert {"add_norm_backward", "swiglu_backward"} <= launched
    # slow decay makes much of every rounding: from seed to seed the ratio varies from 0.6 to 1.9
    assert all(a <= 2 * b for a, b in zip(found, of_stock, strict=True)), (found, of_stock)
