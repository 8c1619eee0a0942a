"""A whole model on the Triton kernels against the same on PyTorch, logits and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_packfree.models import recompute
from tests import vision
from tests.input_formats import row_batch
from tests.integrations.marks import needs
from tests.ops.triton.kernels import all_kernels, on_kernels
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    assert_exact,
    checkpoint_layers,
    documents,
    errors,
    gradients,
    random_weights,
    relative_rms,
    run,
    run_alone,
    tiny,
)

LENGTHS = [5, 1, 8, 2]
TRITON = {"conv": "triton", "attention": "triton", "fused": "triton"}
pytestmark = pytest.mark.usefixtures("short_strips")


@pytest.fixture
def recomputed(monkeypatch):
    """A list that gets one entry for each output that a layer's backward pass recomputes instead
    of the op's own.
    """
    made, recompute_saved = [], recompute.recompute_saved

    def counted(tensor, make, worth_it):
        return recompute_saved(tensor, lambda: made.append(1) or make(), worth_it)

    monkeypatch.setattr(recompute, "recompute_saved", counted)
    return made


def step(hooked=False, **kernels):
    """Logits and gradients of a packed row; where `hooked`, somebody watches the projections
    behind norm and gate.
    """
    model = on_kernels(tiny(), **kernels)
    for name, module in model.named_modules():
        if hooked and name.endswith(("out_proj", "o_proj")):
            module.register_forward_hook(lambda *_: None)
    ids, positions = (
        torch.cat(documents(LENGTHS))[None],
        torch.cat([torch.arange(length) for length in LENGTHS])[None],
    )
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    (
        logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    ).sum().backward()
    return logits.detach(), gradients(model)


def assert_as_on_torch(found):
    logits, grads = step()
    assert relative_rms(found[0], logits) < LOGIT_TOL and found[1].keys() == grads.keys()
    assert max(relative_rms(found[1][name], grads[name]) for name in grads) < GRADIENT_TOL


def test_every_kernel_of_a_layer_runs(launched, recomputed):
    assert_as_on_torch(step(**TRITON))
    of_others = {"qkv_rope", "qkv_rope_backward", "rope"}
    of_adapters = {"split", "add_parts", "add_blocks", "lora_gradients", "drop_out"}
    of_adapters |= {"times_dropped", "gradient_of_factor", "add_dropped"}
    of_graphs = {"find_changed", "round_changed"}
    # half precision, long documents, the head's loss
    of_heads = {"scaled", "softmax_gradient", "token_gradient", "token_statistics"}
    elsewhere = {"narrow_linear", "fold_states"} | of_heads | of_graphs
    assert launched == set(all_kernels()) - elsewhere - of_others - of_adapters
    assert not recomputed


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "smollm3", "gpt_oss"])
def test_layers_of_plain_attention_call_no_norm_and_no_mlp(
    family, checkpointing, launched, monkeypatch
):
    """Experts, gpt-oss's, are called."""
    batch, model = row_batch("positions", LENGTHS), tiny(family)
    # upstream's attention reads the mask alone, and leaks
    batch.inputs["attention_mask"] = torch.ones_like(batch.inputs["input_ids"])
    weights = random_weights(batch, 128)
    alone = run_alone(model, batch, weights)
    assert errors(run(model, batch, weights), alone)[0] >= CONTROL * LOGIT_TOL
    layers, called, call = on_kernels(model, fused="triton").model.layers, [], nn.Module.__call__
    monkeypatch.setattr(
        nn.Module,
        "__call__",
        lambda part, *args, **named: called.append(part) or call(part, *args, **named),
    )
    if checkpointing:
        checkpoint_layers(model, reentrant=False)
    assert_exact(model, batch, alone)
    names = {name.partition(".")[2] for name, part in layers.named_modules() if part in called}
    experts = family == "gpt_oss"
    assert "self_attn.q_proj" in names and not any("layernorm" in x for x in names)
    assert any("mlp" in x for x in names) == experts
    kernels = {"add_norm", "add_norm_backward", "sum_partials", "rope"}
    assert launched == (kernels if experts else kernels | {"swiglu", "swiglu_backward"})


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_features_that_are_added_between_fused_layers_are_exact(family, launched):
    model = vision.tiny_vision(family)
    given = [vision.document(3, vision.image(4, 4), 2, seed=seed) for seed in range(2)]
    weights = vision.random_weights(given)
    wanted = vision.alone(model, given, weights)
    batch = vision.packed_batch("4 rows", given, model.model)
    logits, grads = errors(vision.run(on_kernels(model, fused="triton"), batch, weights), wanted)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)
    assert "add_norm_backward" in launched and ("swiglu" in launched) == (family == "qwen3_vl")


def gated_norms(model):
    return [part for part in model.modules() if type(part).__name__.endswith("RMSNormGated")]


def replaced(model):
    for norm in gated_norms(model):
        norm.forward = lambda *args, its=norm.forward: 1.1 * its(*args)
    return model


def of_another_class(model):
    for norm in gated_norms(model):
        louder = {"forward": lambda self, *args, its=type(norm): 1.1 * its.forward(self, *args)}
        norm.__class__ = type("LouderRMSNormGated", (type(norm),), louder)
    return model


def saved(model):
    """As LongLoRA trains norms beside its adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["down_proj"], modules_to_save=["norm", "o_norm"])
    return get_peft_model(model, config)


def tuned(model):
    from peft import LNTuningConfig, get_peft_model

    return get_peft_model(model, LNTuningConfig(target_modules=["norm", "o_norm"]))


# of checkpointing's newer name, and that PEFT does not know the norm
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid"])
@pytest.mark.parametrize(
    "change",
    [
        replaced,
        of_another_class,
        pytest.param(saved, marks=needs("peft")),
        pytest.param(tuned, marks=needs("peft")),
    ],
)
def test_gated_norms_that_compute_something_else_are_called(change, family, launched):
    batch, model = row_batch("positions", LENGTHS), change(tiny(family))
    alone = run_alone(model, batch, random_weights(batch, 128))
    assert_exact(on_kernels(model, fused="triton"), batch, alone)
    assert "gated_norm" not in launched


def test_projections_that_are_watched_are_called_by_themselves(recomputed):
    assert_as_on_torch(step(hooked=True, **TRITON))
    # the normed output of three layers, the gated output of the fourth
    assert len(recomputed) == 3 + 1
