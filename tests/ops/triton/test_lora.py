"""PEFT's LoRA inside the fused layers: a packed row on the kernels against each document alone,
unpatched, on PEFT's own.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops import conv_delta_rule
from hf_packfree.ops.fused import joined_linear
from hf_packfree.ops.fused.computed_weights import Weights
from tests.input_formats import row_batch
from tests.integrations.marks import needs
from tests.integrations.test_peft import quantised
from tests.ops.triton.kernels import on_kernels
from tests.support import (
    GRADIENT_TOL,
    LOGIT_TOL,
    assert_exact,
    errors,
    random_weights,
    run,
    run_alone,
    tiny,
)

pytestmark = [needs("peft"), pytest.mark.filterwarnings("default")]

BATCH = row_batch("positions", (5, 1, 8, 2))


@pytest.fixture
def called():
    """How often PEFT's own forward of a linear layer has run."""
    count = []
    with pytest.MonkeyPatch.context() as patch:
        base = torch.nn.Linear.forward
        patch.setattr(
            torch.nn.Linear, "forward", lambda layer, x: count.append(1) or base(layer, x)
        )
        yield count


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
    model = get_peft_model(model, LoraConfig(**settings | options))
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.3 * torch.rand(parameter.shape))
    return model


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5", {}),
        ("qwen3_5", {"use_dora": True}),
        ("qwen3_next", {}),
        ("llama", {}),
        ("qwen3", {"use_dora": True}),
    ],
)
def test_exact_and_no_layer_is_called(family, options, called, launched, monkeypatch):
    made, gradients = [], Weights.gradients
    monkeypatch.setattr(Weights, "gradients", lambda *args: made.append(1) or gradients(*args))
    model = on_kernels(lora(tiny(family), **options), fused="triton")
    run(model, BATCH, random_weights(BATCH, 128))
    assert "swiglu_backward" in launched or family == "qwen3_next"
    assert "sum_partials" not in launched and bool(made) == bool(options), (
        "no gradient of a frozen parameter is made"
    )
    # the head, and four projections of attention with three products each, or DoRA's
    around = {"qwen3_5": 1, "llama": 1 + 4 * 4 * 3}.get(family)
    assert around is None or len(called) == around
    reference = lora(tiny(family), **options)
    assert_exact(model, BATCH, run_alone(reference, BATCH, random_weights(BATCH, 128)))


@pytest.mark.parametrize("options", [{}, {"r": 3}])
def test_nothing_that_adapters_read_is_copied(options, monkeypatch):
    """What a layer reads is made with spare columns, by norms, gates and gated products
    alike; so are gradients.
    """
    append_h, in_place = joined_linear._append_h, []

    def watched(x, h, padded):
        found = append_h(x, h, padded)
        in_place.append(found.data_ptr() == x.data_ptr())
        return found

    monkeypatch.setattr(joined_linear, "_append_h", watched)
    model = on_kernels(lora(tiny(), **options), fused="triton")
    logits, count = model(**BATCH.inputs).logits, len(model.get_base_model().model.layers)
    assert in_place == [True] * 4 * count
    logits.sum().backward()
    # below upstream's norm, and of k_proj, which is narrow
    copies = [False, True, False]
    assert in_place[4 * count :] == [*copies, *[True] * 2 * (count - 1)]


def kept_beside_parameters(model):
    """Every tensor that a forward pass of the text model keeps for the backward pass, once,
    delta rule left out.
    """
    parameters, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in parameters:
            kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    trunk = (
        on_kernels(model, fused="triton").get_base_model().model
        if hasattr(model, "peft_config")
        else on_kernels(model, fused="triton").model
    )
    x = trunk.embed_tokens(BATCH.inputs["input_ids"]).detach().requires_grad_()
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
    ):
        patch.setattr(conv_delta_rule, "gated_delta_rule", lambda q, k, v, *args, **options: v)
        trunk(inputs_embeds=x, position_ids=BATCH.inputs["position_ids"], use_cache=False)
    return list(kept.values())


def size(tensors):
    return sum(x.untyped_storage().nbytes() for x in tensors)


def test_keeps_no_more_than_full_training_and_the_products_with_a():
    tokens, width = BATCH.inputs["input_ids"].numel(), 64
    full = kept_beside_parameters(tiny().bfloat16().train())
    kept, few = map(kept_with_adapters, ("all-linear", ["q_proj", "v_proj"]))
    assert kept == size(full) - 4 * tokens * width, (
        "upstream's last norm keeps one fp32 tensor less where it is frozen"
    )
    assert kept == few, "no norm of the residual stream is kept for the gradients of A"


def kept_with_adapters(targets):
    """Bytes, without what is kept of the products with A: these are fp32, and upstream's last
    norm alone keeps others so.
    """
    model, tokens = (
        lora(tiny().bfloat16(), target_modules=targets).train(),
        BATCH.inputs["input_ids"].numel(),
    )
    kept = kept_beside_parameters(model)
    assert sum(x.numel() >= tokens * 64 for x in kept if x.dtype == torch.float32) == 1
    return size(kept) - 4 * tokens * sum(
        len(p) for name, p in model.named_parameters() if "lora_A" in name
    )


@needs("bitsandbytes")
def test_bases_in_4_bits_are_made_whole_in_the_fused_layers(tmp_path):
    tiny().save_pretrained(tmp_path)
    model = on_kernels(lora(quantised(tmp_path)), fused="triton")
    with pytest.MonkeyPatch.context() as patch:
        from bitsandbytes.nn import Linear4bit

        patch.setattr(Linear4bit, "forward", None)
        found = run(model, BATCH, random_weights(BATCH, 128))
    logits, grads = errors(
        found, run_alone(lora(quantised(tmp_path)), BATCH, random_weights(BATCH, 128))
    )
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)
