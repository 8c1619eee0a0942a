"""Operations of a training step, as the Trainer's log counts them, against those that torch counts in
upstream's own model.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Exaone4Config, Exaone4ForCausalLM

from hf_packfree import apply_patches
from hf_packfree.patching.registry import FAMILIES
from hf_packfree.trainer.flops import FlopsPerToken, why_not_counted
from tests.support import by_family, tiny, trunk_of

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("lfm3_convolves_in_torch")]
# more than the tiny models' windows
TOKENS = 64
PRODUCTS = "aten.mm", "aten.addmm"
"""With weights; of activations alone they are `aten.bmm`."""
SIZES_OF_EXAONE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 16,
    "sliding_window_pattern": 4,
}


def counted(model, attention: set[str]) -> tuple[float, float]:
    """Return the operations of a stock model's forward per token of one document: of its products
    with weights, and of scores and values in modules of the classes `attention`, of which those
    count that the last token sees.
    """
    layers = {n: part for n, part in model.named_modules() if type(part).__name__ in attention}
    seen = {}
    for name, part in layers.items():
        part.register_forward_hook(
            lambda _, inputs, out, name=name: seen.update({name: int((out[1][0, 0, -1] > 0).sum())})
        )
    for part in model.modules():
        if hasattr(part, "config"):
            # one product for each expert, which is counted
            part.config._experts_implementation = "eager"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(2, 2 + TOKENS)[None], use_cache=False)
    counts = {
        name: {str(op): n for op, n in ops.items()}
        for name, ops in counter.get_flop_counts().items()
    }
    products = sum(counts["Global"].get(op, 0) for op in PRODUCTS)
    scores = sum(
        counts[f"{type(model).__name__}.{name}"]["aten.bmm"] * seen[name] / TOKENS
        for name in layers
    )
    return products / TOKENS, scores / TOKENS


def assert_operations_are_those_counted(model, attention: set[str]) -> None:
    """In the forward, times three."""
    products, scores = counted(model, attention)
    apply_patches(model)
    flops = FlopsPerToken(model, trunk_of(model))
    assert why_not_counted(trunk_of(model)) is None
    assert flops(0.0) == 3 * products
    assert flops(TOKENS) - flops(0.0) == 3 * scores


def attention_of(family: str) -> set[str]:
    return {mixer.cls for mixer in by_family[family].mixers if "attention" in mixer.ops}


# products, experts, windows, two mixers in a layer; the others take their time together
QUICK = "qwen3_5", "gpt_oss", "falcon_h1"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(row.name, marks=[] if row.name in QUICK else pytest.mark.slow)
        for row in FAMILIES
    ],
)
def test_operations_of_a_token_are_those_that_torch_counts(family):
    model = tiny(family, attention="eager").eval()
    assert_operations_are_those_counted(model, attention_of(family))


@pytest.mark.skipif("gemma4_text" not in by_family, reason="this transformers has no Gemma 4")
def test_experts_of_gemma4_are_counted():
    """Its routers ask the config how many."""
    row = by_family["gemma4_text"]
    more = {"enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 32}
    model = tiny(replace(row, tiny={**row.tiny, **more}), attention="eager").eval()
    assert_operations_are_those_counted(model, attention_of("gemma4_text"))


def test_layers_that_do_not_use_their_window_are_counted_without():
    config = Exaone4Config(**SIZES_OF_EXAONE)
    config._attn_implementation = "eager"
    assert_operations_are_those_counted(Exaone4ForCausalLM(config).eval(), {"Exaone4Attention"})


def test_experts_that_no_router_counts_are_said():
    model = apply_patches(tiny("qwen3_5_moe"))
    for part in model.modules():
        if hasattr(part, "top_k"):
            del part.top_k
    assert "found experts, and no router" in why_not_counted(model.model)


def test_a_module_of_input_features_alone_is_counted_by_its_weights():
    """As the rotations of PEFT's OFT are, which stopped the Trainer as it began to train."""
    model = apply_patches(tiny())
    before = FlopsPerToken(model, model.model)(0.0)
    rotation = torch.nn.Module()
    rotation.in_features, rotation.weight = 64, torch.nn.Parameter(torch.ones(8, 28))
    model.model.layers[0].rotation = rotation
    assert why_not_counted(model.model) is None
    assert FlopsPerToken(model, model.model)(0.0) == before + 3 * 2 * 8 * 28
