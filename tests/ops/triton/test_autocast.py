"""Models under autocast on the Triton kernels, packed, against stock under the same autocast,
documents one by one: no farther from exact, and no layer is called.

Layer by layer, where rounding errors are small beside what they are made of; whole models with slow
decay make much of every rounding, so that what counts there is influence.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from hf_packfree.packing import PackedSequence
from tests.input_formats import row_batch
from tests.integrations.marks import needs
from tests.integrations.test_peft import quantised
from tests.ops.triton.kernels import on_kernels
from tests.ops.triton.test_lora import lora
from tests.support import leak_in_the_convolution, random_weights, relative_rms, run, tiny

pytestmark = pytest.mark.filterwarnings("default")

LENGTHS = (9, 1, 12, 2)
BATCH = row_batch("positions", (3, 1, 5, 2))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def called(monkeypatch):
    """Every linear layer that is called, by name."""
    seen, forward = [], nn.Linear.forward
    monkeypatch.setattr(
        nn.Linear, "forward", lambda layer, x: seen.append(layer) or forward(layer, x)
    )
    return seen


MODELS = {
    "full": lambda model: model,
    "LoRA": lora,
    "LoRA with dropout in evaluation": lambda model: lora(model, lora_dropout=0.5).eval(),
    "DoRA": lambda model: lora(model, use_dora=True),
}


def text_model(model):
    return (model.base_model.model if hasattr(model, "peft_config") else model).model


def alone(layer, rotary, x):
    """A stock layer's output for each document."""
    parts = x.split(LENGTHS, 1)
    positions = [torch.arange(part.shape[1])[None] for part in parts]
    return torch.cat(
        [
            layer(part, position_embeddings=rotary(part, position))
            for part, position in zip(parts, positions, strict=True)
        ],
        1,
    )


def packed(layer, rotary, x):
    """A patched layer's output for all of them."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    record = PackedSequence.from_lengths(LENGTHS)
    embeddings = rotary(x, positions)
    return layer(x, position_embeddings=embeddings, position_ids=positions, packed_sequence=record)


def results(function, model, index, x, d_out):
    """Return the layer's output, and the gradients of its input and parameters, by name."""
    layer, x = text_model(model).layers[index], x.detach().requires_grad_()
    out = function(layer, text_model(model).rotary_emb, x)
    out.backward(d_out.to(out.dtype))
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **grads}


def ratios_to_stock(kind, weights, dtype, index, family="qwen3_5"):
    """Return each result's error to fp64 over that of stock, which is called for each document.

    Gradients of a number per head are left out: the errors of so few elements scatter.
    """
    stock = MODELS[kind](tiny(family).to(weights))
    exact = copy.deepcopy(stock).double()
    return ratios_of(stock, exact, copy.deepcopy(stock), weights, dtype, index)


def ratios_of(stock, exact, ours, weights, dtype, index):
    """The same of three unpatched copies of a model, of which the second is in fp64."""
    ours = on_kernels(ours, fused="triton")
    generator = torch.Generator().manual_seed(index)
    width = text_model(stock).config.hidden_size
    x, d_out = torch.randn(2, 1, sum(LENGTHS), width, generator=generator).to(weights)
    wanted = results(alone, exact, index, x.double(), d_out)
    with torch.autocast("cpu", dtype):
        of_stock = results(alone, stock, index, x, d_out)
        found = results(packed, ours, index, x, d_out)
    assert found.keys() == of_stock.keys()
    assert all(found[name].dtype == of_stock[name].dtype for name in found)
    return {
        name: relative_rms(found[name], wanted[name]) / relative_rms(of_stock[name], wanted[name])
        for name in found
        if found[name].numel() > 8
    }


def mean(ratios):
    """Their geometric mean."""
    return math.exp(sum(map(math.log, ratios.values())) / len(ratios))


@needs("peft")
@pytest.mark.parametrize("index", [0, 3], ids=["Gated DeltaNet", "attention"])
@pytest.mark.parametrize(
    ("weights", "dtype"), [(BF16, BF16), (FP32, BF16), (FP32, FP16)], ids=["bf16", "fp32", "fp16"]
)
@pytest.mark.parametrize("kind", ["full", "LoRA", "DoRA"])
def test_a_layer_is_no_farther_from_exact_than_stock(kind, weights, dtype, index, rounds_to_bf16):
    ratios = ratios_to_stock(kind, weights, dtype, index)
    # gradients through the norm of a small key scatter, too
    assert mean(ratios) < 1 and ratios["out"] < 1.1, ratios


@needs("peft")
@pytest.mark.parametrize(
    ("weights", "dtype"), [(BF16, BF16), (FP32, BF16), (FP32, FP16)], ids=["bf16", "fp32", "fp16"]
)
@pytest.mark.parametrize("kind", ["full", "LoRA", "DoRA"])
def test_layers_of_plain_attention_are_no_farther_from_exact_than_stock(
    kind, weights, dtype, rounds_to_bf16
):
    """All four together: their attention is upstream's own, whose errors, the same in both, scatter
    by more than norms and MLP make better.
    """
    ratios = [ratios_to_stock(kind, weights, dtype, index, "llama") for index in range(4)]
    assert math.prod(map(mean, ratios)) < 1 and all(one["out"] < 1.1 for one in ratios), ratios


@needs("peft", "bitsandbytes")
@pytest.mark.parametrize("index", [0, 3], ids=["Gated DeltaNet", "attention"])
def test_a_layer_in_4_bits_is_no_farther_from_exact_than_stock(index, tmp_path, rounds_to_bf16):
    """As PEFT documents QLoRA: products in bf16, norms and activations in fp32."""
    from peft import prepare_model_for_kbit_training

    tiny().save_pretrained(tmp_path)
    stock, exact, ours = (
        lora(prepare_model_for_kbit_training(quantised(tmp_path, computes_in=BF16)))
        for _ in range(3)
    )
    ratios = ratios_of(stock, dequantised(exact).double(), ours, FP32, BF16, index)
    assert mean(ratios) < 1 and ratios["out"] < 1.1, ratios


def dequantised(model):
    """Put plain linear layers in the place of those in 4 bits."""
    from bitsandbytes.functional import dequantize_4bit

    for layer in list(model.modules()):
        base = getattr(layer, "base_layer", None)
        if type(base).__name__ == "Linear4bit":
            layer.base_layer = nn.Linear(1, 1, bias=False)
            weight = dequantize_4bit(base.weight.data, base.weight.quant_state)
            layer.base_layer.weight = nn.Parameter(weight, requires_grad=False)
    return model


def test_rounding_that_is_coarser_is_seen():
    """As the interpreter's, which cuts off."""
    assert mean(ratios_to_stock("full", FP32, BF16, 3)) > 1.2


@needs("peft")
@pytest.mark.parametrize(
    ("kind", "weights", "checkpointing"),
    [
        ("full", FP32, True),
        ("LoRA", BF16, False),
        ("LoRA with dropout in evaluation", FP32, False),
        ("DoRA", FP32, True),
    ],
    ids=["full", "LoRA on bf16", "LoRA on fp32", "DoRA"],
)
def test_no_layer_is_called_and_documents_do_not_touch(
    kind, weights, checkpointing, called, launched
):
    model = on_kernels(MODELS[kind](tiny().to(weights)), fused="triton")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    called.clear()
    parts, grads = trained(model)
    assert len(called) <= 1, "the head alone"
    assert {"add_norm_backward", "swiglu_backward"} <= launched
    assert all(grad.isfinite().all() for grad in grads.values())
    assert influences(model, parts) == [True, False, False, False]


def test_a_leak_would_be_seen(monkeypatch):
    leak_in_the_convolution(monkeypatch)
    model = on_kernels(tiny(), fused="triton")
    assert influences(model, trained(model)[0])[1]


def trained(model):
    """Each document's logits and the gradients of a functional of them, under bf16 autocast."""
    with torch.autocast("cpu", BF16):
        return run(model, BATCH, random_weights(BATCH, 128))


def influences(model, parts):
    """Whether other tokens in the first document move each document's logits by a bit."""
    ids = BATCH.inputs["input_ids"].clone()
    ids[0, :3] += 1
    with torch.no_grad(), torch.autocast("cpu", BF16):
        moved = BATCH.cut(model(**BATCH.inputs | {"input_ids": ids}).logits)
    return [not torch.equal(a, b) for a, b in zip(moved, parts, strict=True)]


@pytest.mark.slow
def by_a_forward(part, see):
    """What it does, in fp32."""
    forward = torch.autocast("cpu", enabled=False)(part.forward)
    part.forward = lambda *args, **kwargs: see(args, kwargs) or forward(*args, **kwargs)


def by_a_hook(part, see):
    part.register_forward_pre_hook(lambda _, *given: see(*given), with_kwargs=True)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize(
    ("name", "read"),
    # a mixer with a forward of its own is refused
    [("mlp", by_a_forward), ("mlp", by_a_hook), ("self_attn", by_a_hook)],
)
def test_what_reads_a_norm_first_is_given_what_stock_gives_it(family, name, read, rounds_to_bf16):
    """In fp32, which the linear layers inside of it would round."""
    model, dtypes = on_kernels(tiny(family), fused="triton"), []
    part = next(getattr(each, name) for each in model.model.layers if hasattr(each, name))
    read(part, lambda args, kwargs: dtypes.append((*args, *kwargs.values())[0].dtype))
    with torch.autocast("cpu", BF16):
        model(**BATCH.inputs).logits.sum().backward()
    assert dtypes == [FP32]


def test_a_gradient_scaler_in_fp16_scales_what_is_small_and_skips_what_overflows():
    model = on_kernels(tiny(), fused="triton")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = model.model.layers[0].mlp.up_proj.weight

    def backward(scaler, enabled):
        optimizer.zero_grad()
        with torch.autocast("cpu", FP16, enabled=enabled):
            # gradients below what fp16 holds
            loss = 1e-5 * model(**BATCH.inputs).logits.float().sin().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        return weight.grad.clone()

    wanted = backward(torch.amp.GradScaler("cpu", enabled=False), False)
    assert relative_rms(backward(torch.amp.GradScaler("cpu", init_scale=1.0), True), wanted) > 0.3
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    assert relative_rms(backward(scaler, True), wanted) < 0.05
    before, scaler = weight.detach().clone(), torch.amp.GradScaler("cpu", init_scale=2.0**60)
    assert not backward(scaler, True).isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, before) and scaler.get_scale() < 2.0**60
