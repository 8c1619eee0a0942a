"""DeepSpeed's ZeRO in two processes on the CPU, and what it leaves of a model without DeepSpeed."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from hf_packfree import MTPOptions, apply_patches, patch_report
from hf_packfree.errors import ContractError
from hf_packfree.graphs.settings import Settings, why_not
from hf_packfree.models.unfused import ZERO3
from tests.integrations.compare import (
    RATE,
    in_steps,
    labelled,
    packed,
    per_document,
    targets,
    worst,
)
from tests.integrations.marks import integration, needs
from tests.integrations.test_fused_where_wrapped import PROJECTIONS
from tests.mtp.heads import WEIGHT, build, gradients_in_loop, worst_gradient
from tests.ranks import two_ranks
from tests.support import CONTROL, GRADIENT_TOL, tiny

LAYERS = {"classes": ["Qwen3_5DecoderLayer"]}
# {what runs: the stage of ZeRO, and further options of it}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "unpatched": (3, {}),
    "stage 3": (3, {}),
    # each decoder layer gathered at once
    "stage 3, layers": (3, {"leaf_module": LAYERS}),
    "head": (3, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 2, bf16": (2, {}),
}


def every_kind(rank: int, folder: str) -> dict[str, tuple[list[dict[str, torch.Tensor]], Any]]:
    """Return, of each kind, the gradients of its steps, and what `patch_report` says is called in
    place of being fused.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("gloo")
    return {kind: train(rank, folder, kind) for kind in KINDS}


def train(rank: int, folder: str, kind: str) -> tuple[list[dict[str, torch.Tensor]], Any]:
    """Load, with ZeRO-3 the weights sharded from the start, as the Trainer does, then patch, then
    train.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_grad
    from transformers.integrations import HfDeepSpeedConfig

    stage, options = KINDS[kind]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **options},
        "bf16": {"enabled": kind.endswith("bf16")},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    kept_alive = HfDeepSpeedConfig(config)
    head = MTPOptions(depth=2, weight=WEIGHT) if kind == "head" else None
    model = Qwen3_5ForCausalLM.from_pretrained(f"{folder}/{'head' if head else 'tiny'}").train()
    # sharded while loading
    assert (model.model.layers[0].linear_attn.A_log.numel() == 0) == (stage == 3)
    if kind != "unpatched":
        apply_patches(model, mtp=head)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=kept_alive.config)
    kept = []
    for step in in_steps(labelled()):
        count = sum(targets(labels) for _, labels in step)
        loss = engine(**packed(step[rank::2]), num_items_in_batch=count).loss * 2
        engine.backward(loss)
        kept.append({name: safe_get_full_grad(p).clone() for name, p in model.named_parameters()})
        engine.step()
    called = patch_report(model).called if kind != "unpatched" else None
    engine.destroy()
    return kept, called


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, tuple[list[dict[str, torch.Tensor]], Any]]:
    """What the first process found, of every kind."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny().save_pretrained(folder / "tiny")
    build(depth=2).save_pretrained(folder / "head")
    ((first, _),) = two_ranks(every_kind, [(str(folder),)], folder)
    return first


@pytest.fixture(scope="module")
def wanted() -> list[dict[str, torch.Tensor]]:
    """Gradients of documents one by one."""
    return per_document(tiny(), in_steps(labelled()))


@integration("DeepSpeed", "ZeRO-3, weights sharded while loading")
@needs("deepspeed")
def test_zero3(found, wanted, record_property):
    """Its hooks gather the weights of each projection, and so each is called."""
    (patched, called), (unpatched, _) = found["stage 3"], found["unpatched"]
    record_property("error", error := worst(patched, wanted))
    record_property("control", control := worst(unpatched, wanted))
    assert error <= GRADIENT_TOL and control >= CONTROL * GRADIENT_TOL
    assert called == {ZERO3: PROJECTIONS}


@integration("DeepSpeed", "ZeRO-1 and 2; ZeRO-3, the decoder layers its `leaf_module`", "all fused")
@needs("deepspeed")
@pytest.mark.parametrize("kind", ["stage 1", "stage 2", "stage 3, layers"])
def test_zero_runs_fused_layers(found, wanted, record_property, kind):
    grads, called = found[kind]
    record_property("error", error := worst(grads, wanted))
    assert error <= GRADIENT_TOL and called == {}


@integration("DeepSpeed", "ZeRO-2, bf16 of fp32 weights that its optimizer holds", "all fused")
@needs("deepspeed")
def test_zero_in_bf16_rounds_as_upstream_does(found, wanted):
    """Gradients are no farther from fp32 than those of documents one by one in bf16."""
    grads, called = found["stage 2, bf16"]
    alone = worst(per_document(tiny().bfloat16(), in_steps(labelled())), wanted)
    assert worst(grads, wanted) <= 1.3 * alone and called == {}


@integration("DeepSpeed", "ZeRO-3, multi-token prediction head")
@needs("deepspeed")
def test_zero3_trains_a_multi_token_head(found, record_property):
    """All gradients of the model and its head, whose loss needs the language modelling head's
    weight once more.
    """
    alone = gradients_in_loop(in_steps(labelled())[0])
    record_property("error", error := worst_gradient(found["head"][0][0], alone))
    assert error <= GRADIENT_TOL


def test_a_sharded_parameter_is_measured_by_what_it_stands_for():
    """As ZeRO-3 leaves it: empty, with its shape beside it."""
    model = tiny()
    layer = model.model.layers[0].linear_attn
    for parameter in (layer.A_log, layer.dt_bias, layer.conv1d.weight, layer.norm.weight):
        parameter.ds_shape, parameter.data = parameter.shape, parameter.data.new_empty(0)
    assert patch_report(apply_patches(model)).patched
    model = tiny()
    layer = model.model.layers[0].linear_attn
    layer.A_log.ds_shape, layer.A_log.data = torch.Size([7]), layer.A_log.data.new_empty(0)
    with pytest.raises(ContractError, match="A_log is \\(7,\\)"):
        apply_patches(model)


class OfAModule(OrderedDict[str, Any]):
    """As ZeRO-3's parameters, which cannot be copied."""

    def __init__(self, parent_module: Any) -> None:
        super().__init__(parent_module._parameters)


def test_graphs_are_not_captured_of_gathered_weights():
    """A model's settings are copied before it is asked whether it can be captured."""
    model = apply_patches(tiny())
    for part in model.modules():
        part._parameters = OfAModule(part)
    assert Settings(model.model).hold()
    model.model.norm.weight.ds_shape = model.model.norm.weight.shape
    assert why_not(model.model) == "DeepSpeed's ZeRO-3 gathers its weights"
