"""Liger before and after: it replaces forwards of single modules and of the head; ours stay
underneath.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening

from hf_packfree import MTPOptions, apply_patches, patch_report, remove_patches
from hf_packfree.models.plain_layers import (
    adds_one,
    epsilon,
    forward_of,
    norm_offset,
    swiglu_layers,
)
from tests.deprecations import DeprecationsAreErrors
from tests.integrations.compare import in_steps, labelled, per_document, rows, worst
from tests.integrations.marks import integration, needs
from tests.mtp import heads
from tests.support import CONTROL, gradients, put_upstream_in_torch, tiny

pytestmark = [needs("liger_kernel", "triton"), pytest.mark.filterwarnings("default")]
orders = pytest.mark.parametrize("order", ["patched before", "patched after"])
WHAT = "Liger's RMSNorm, SwiGLU and fused cross entropy"
SAYS = "both stay in force, in either order; its numbers are checked on GPUs only (`-m gpu`)"


@pytest.fixture(autouse=True)
def upstreams_classes():
    """Liger also replaces classes of upstream's module, for models yet to be built; put them
    back.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

    names = {name: getattr(upstream, name) for name in ("Qwen3_5RMSNorm", "Qwen3_5MLP")}
    yield
    for name, cls in names.items():
        setattr(upstream, name, cls)


@pytest.fixture
def announced_to_liger(monkeypatch):
    """Liger 0.8.5's forward of the head passes `past_key_values` on, which is deprecated."""
    emit = DeprecationsAreErrors.emit
    monkeypatch.setattr(
        DeprecationsAreErrors,
        "emit",
        lambda self, record: "past_key_values" in record.getMessage() or emit(self, record),
    )


def with_liger(model, order: str, **options):
    from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_qwen3_5

    if order == "patched before":
        apply_patches(model, **options)
    apply_liger_kernel_to_qwen3_5(model=model)
    return apply_patches(model, **options)


@integration("Liger", WHAT, SAYS)
@orders
def test_both_are_in_force(order):
    model = with_liger(tiny(), order)
    wanted = dict(patch_report(apply_patches(tiny())).swaps)
    # Liger's forward is on the instance: the head is Liger's alone
    del wanted["Qwen3_5ForCausalLM"]
    assert patch_report(model).swaps == wanted
    head, trunk = model, model.model
    assert "liger" in head.forward.__module__ and "liger" in trunk.norm.forward.__module__
    assert all("liger" in layer.mlp.forward.__module__ for layer in trunk.layers)
    x = torch.zeros(1, trunk.config.hidden_size)
    assert all(swiglu_layers(layer.mlp, layer, x) for layer in trunk.layers), (
        "on a GPU our kernel computes it"
    )
    assert all(adds_one(layer.input_layernorm, layer) for layer in trunk.layers), (
        "and the norm with the residual sum"
    )
    assert "liger" in trunk.layers[3].self_attn.q_norm.forward.__module__
    assert all("forward" not in vars(layer.linear_attn) for layer in trunk.layers[:3])
    assert not patch_report(remove_patches(model)).patched


@integration("Liger", "RMSNorm and SwiGLU of Llama", "both stay in force, in either order")
@orders
def test_llamas_norms_and_mlps_are_computed_in_our_layers(order, monkeypatch):
    """Also of a model that is built of Liger's classes."""
    from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama as upstream

    for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"):
        # put back after the test
        monkeypatch.setattr(upstream, name, getattr(upstream, name))
    model = tiny("llama")
    if order == "patched before":
        apply_patches(model)
    apply_liger_kernel_to_llama(model=model)
    for found in (apply_patches(model), apply_patches(tiny("llama"))):
        layers, x = found.model.layers, torch.zeros(1, found.config.hidden_size)
        for layer in layers:
            assert "liger" in forward_of(layer.mlp).__module__
            assert "liger" in forward_of(layer.input_layernorm).__module__
            assert swiglu_layers(layer.mlp, layer, x) is not None
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                assert norm_offset(norm, layer) == 0.0 and epsilon(norm) == 1e-6


@integration("Liger", "multi-token prediction head beside its fused loss")
@orders
@pytest.mark.usefixtures("announced_to_liger")
def test_a_multi_token_head_is_trained_beside_ligers_loss(order, record_property):
    """Counted once, also where Liger's forward calls the text model and makes the loss itself;
    the layers stay upstream's.
    """
    from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_qwen3_5

    model, pairs = heads.build(depth=2, patched=order == "patched before"), heads.labelled()
    apply_liger_kernel_to_qwen3_5(model=model, rope=False, rms_norm=False, swiglu=False)
    if order == "patched after":
        apply_patches(model, mtp=MTPOptions(from_scratch=True, depth=2, weight=heads.WEIGHT))
        model.load_state_dict(heads.build(depth=2).state_dict())
    output = model(**heads.packed(pairs), return_dict=True)
    output.loss.backward()
    assert "liger" in model.forward.__module__ and "liger" in type(output).__module__
    error = heads.worst_gradient(heads.of_head(gradients(model)), heads.wanted_of(pairs))
    record_property("error", error)
    assert error <= 1e-4


@integration("Liger", WHAT, SAYS)
@orders
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients(order, record_property, monkeypatch):
    """In fp32, and no further off than the other exactness tests allow; what it is measured against
    runs on the CPU.

    FLA's delta rule tunes for minutes in fp32 and has tests of its own: here ours runs.
    """
    put_upstream_in_torch(monkeypatch)
    step = in_steps(labelled())[0]
    batch = DataCollatorWithFlattening()(rows(step)) | {"use_cache": False}
    wanted, leaking = per_document(tiny(), [step]), tiny()
    leaking(**batch).loss.backward()
    model = with_liger(tiny().cuda(), order, backend={"delta_rule": "torch"})
    batch = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
    # else Liger asks the config, by a name that is deprecated
    model(**batch, return_dict=True).loss.backward()
    error = worst([{name: gradient.cpu() for name, gradient in gradients(model).items()}], wanted)
    control = worst([gradients(leaking)], wanted)
    record_property("error", error)
    record_property("control", control)
    assert error <= 1e-4 and control >= CONTROL * 1e-4
