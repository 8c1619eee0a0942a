"""What the report says of projections that are fused together or not at all."""

from __future__ import annotations

from types import MethodType

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM

from hf_packfree import apply_patches, patch_report
from hf_packfree.models.qwen3_5 import tiny_config
from tests.support import tiny

LAYERS = 4
OF_MLP = 3 * LAYERS
BESIDE = "one beside them that is called"


def called(model):
    return patch_report(apply_patches(model)).called


def llama(**options):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=128, num_hidden_layers=LAYERS, **sizes | options)
    )


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {}),
        ({"mlp_bias": True}, {"a bias": OF_MLP}),
        (
            {"hidden_act": "gelu_pytorch_tanh"},
            {"an MLP of another formula than SwiGLU": OF_MLP},
        ),
        # upstream's forward calls them in any case
        ({"attention_bias": True}, {}),
    ],
)
def test_mlps_that_are_called_are_counted(options, wanted):
    assert called(llama(**options)) == wanted


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_what_an_mlp_does_beside_calls_its_projections(family):
    model = tiny(family)
    hooked, replaced, ligers, _ = (layer.mlp for layer in model.model.layers)
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = replaced.forward

    def forward(self, x):
        """As Liger puts its kernel on an instance."""

    forward.__module__ = "liger_kernel.transformers.swiglu"
    forward.__qualname__ = "LigerSwiGLUMLP.forward"
    ligers.forward = MethodType(forward, ligers)
    assert called(model) == {"a forward of its own on their MLP": 3, "hooks on their MLP": 3}


def test_a_bias_among_projections_that_read_one_tensor():
    """Of queries, keys and values of the attention layer, and of what follows it."""
    config = tiny_config()
    config.attention_bias = True
    assert called(Qwen3_5ForCausalLM(config)) == {"a bias": 4}
    model = tiny()
    attention = model.model.layers[3].self_attn
    attention.q_proj.bias = nn.Parameter(attention.q_proj.weight.new_zeros(128))
    assert called(model) == {"a bias": 1, BESIDE: 2}


def test_one_that_is_called_has_all_beside_it_called():
    model = tiny()
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)
    model.model.layers[0].linear_attn.in_proj_z.register_forward_hook(lambda *_: None)
    assert called(model) == {"hooks or a forward of its own": 2, BESIDE: 2 + 3}


@pytest.mark.filterwarnings("default")
def test_activations_are_in_the_text_models_dtype_beside_a_tower_in_another():
    peft = pytest.importorskip("peft")
    model = apply_patches(tiny("qwen3_vl").bfloat16())
    model.model.visual.float()
    options = peft.LoraConfig(r=2, target_modules=r".*language_model.*\.up_proj")
    adapted = peft.get_peft_model(model, options, autocast_adapter_dtype=False)
    assert patch_report(adapted).called == {}
