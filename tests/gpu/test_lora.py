"""PEFT's LoRA in the fused layers on the GPU: layers against exact products, and models packed
against documents alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_packfree import apply_patches, patch_report
from hf_packfree.ops.fused import dropped_products, projections
from hf_packfree.ops.fused.dropped_products import Mask
from hf_packfree.ops.fused.lora import Adapter, LoraLinear
from hf_packfree.ops.seeds import Seed
from tests.benchmarks.models import quantise
from tests.gpu.checks import DEVICE, TRIAL, WIDTH, gpu
from tests.gpu.small import NARROW, small
from tests.input_formats import row_batch
from tests.integrations.marks import needs
from tests.support import (
    GRADIENT_TOL,
    LOGIT_TOL,
    errors,
    random_weights,
    relative_rms,
    run,
    run_alone,
)

pytestmark = [*gpu]
TOKENS, SIZES, RANK = (70, (200, 40, 3), 4) if TRIAL else (5000, (6144, 2048, 16), 16)
LENGTHS = (1, 2, 3, 63, 64, 65, 129, 200)
FP32 = 1e-5 if TRIAL else 0.0
TWO_PARTS = 2**-16
"""What is left out of an fp32 number that is kept as two of bfloat16, for the tensor cores;
PEFT's fp32 products keep all.
"""
ROUNDING = 1.5
"""Times upstream's own rounding in bf16, as of padded batches: kernels of the delta rule round
elsewhere.
"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def leaf(*shape, dtype, scale):
    return (scale * torch.randn(shape, device=DEVICE)).to(dtype).requires_grad_()


def results(x, layers, d_outs, backend):
    leaves = [x, *(tensor for layer in layers for a in layer.adapters for tensor in (a.A, a.B))]
    outs = projections(x, *layers, backend=backend)
    return [*outs, *torch.autograd.grad(outs, leaves, [d_out.to(x.dtype) for d_out in d_outs])]


@pytest.mark.parametrize("of_adapters", DTYPES)
def test_layers_are_no_farther_from_exact_than_pefts_formula(of_adapters, record, precise):
    torch.manual_seed(0)
    x, dtype = leaf(1, TOKENS, WIDTH, dtype=torch.bfloat16, scale=1.0), DTYPES[of_adapters]
    layers = []
    for size in SIZES:
        A = leaf(RANK, WIDTH, dtype=dtype, scale=WIDTH**-0.5)
        B = leaf(size, RANK, dtype=dtype, scale=0.1)
        weight = leaf(size, WIDTH, dtype=x.dtype, scale=WIDTH**-0.5).detach()
        layers.append(LoraLinear(weight, (Adapter(A, B, 2.0),)))
    d_outs = [leaf(1, TOKENS, size, dtype=x.dtype, scale=1.0).detach() for size in SIZES]
    wide = [
        LoraLinear(
            layer.weight.double(),
            tuple(Adapter(a.A.double(), a.B.double(), a.scaling) for a in layer.adapters),
        )
        for layer in layers
    ]
    exact = results(x.double(), wide, d_outs, "torch")
    ours, pefts = results(x, layers, d_outs, "triton"), results(x, layers, d_outs, "torch")
    for i, (found, peft, wanted) in enumerate(zip(ours, pefts, exact, strict=True)):
        assert found.dtype == peft.dtype
        error, rounding = relative_rms(found, wanted), relative_rms(peft, wanted)
        limit = max(1.05 * rounding, TWO_PARTS if found.dtype == torch.float32 else 0.0)
        record(
            f"LoRA in {of_adapters}: output, gradient of x, of A and B, number {i}, against exact",
            error,
            limit,
        )


def lora(model, dtype, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(
        r=RANK,
        init_lora_weights=False,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        **options,
    )
    return get_peft_model(model, config, autocast_adapter_dtype=dtype == torch.float32)


def on_device(batch):
    moved = {
        name: value.to(DEVICE) if torch.is_tensor(value) else value
        for name, value in batch.inputs.items()
    }
    places = [(row, tokens.to(DEVICE)) for row, tokens in batch.places]
    return replace(
        batch, inputs=moved, documents=[one.to(DEVICE) for one in batch.documents], places=places
    )


def case(dtype):
    batch = on_device(row_batch("positions", LENGTHS))
    vocabulary = small(NARROW, dtype, patched=False).config.vocab_size
    return batch, [weight.to(DEVICE) for weight in random_weights(batch, vocabulary)]


def adapted(dtype, of_adapters, *, backend=None, exact=False, in_4_bits=False, **options):
    torch.manual_seed(0)
    model = small(NARROW, dtype, patched=False)
    if in_4_bits:
        quantise(model)
    model = lora(model, of_adapters, **options)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.1 * torch.rand_like(parameter))
    model = model.float() if exact else model
    for layer in model.modules() if exact else ():
        if hasattr(layer, "compute_dtype"):
            layer.compute_dtype = torch.float32
    return model if backend is None else apply_patches(model, backend=backend)


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_model_is_exact_in_fp32(use_dora, record, precise, upstream_in_torch):
    batch, weights = case(torch.float32)
    found = run(
        adapted(torch.float32, torch.float32, backend={"delta_rule": "torch"}, use_dora=use_dora),
        batch,
        weights,
    )
    wanted = run_alone(adapted(torch.float32, torch.float32, use_dora=use_dora), batch, weights)
    logits, grads = errors(found, wanted)
    name = "DoRA" if use_dora else "LoRA"
    record(f"{name}, fp32: logits against documents alone, unpatched", logits, LOGIT_TOL)
    record(f"{name}, fp32: worst gradient against documents alone, unpatched", grads, GRADIENT_TOL)


@pytest.mark.parametrize("of_adapters", DTYPES)
def test_a_model_is_as_near_as_unpatched_in_bf16(of_adapters, record, precise, upstream_in_torch):
    assert_as_near(DTYPES[of_adapters], record, f"LoRA in {of_adapters}, bf16")


@pytest.mark.parametrize("of_adapters", DTYPES)
def test_a_model_with_dora_is_as_near_as_unpatched_in_bf16(
    of_adapters, record, precise, upstream_in_torch
):
    assert_as_near(DTYPES[of_adapters], record, f"DoRA in {of_adapters}, bf16", use_dora=True)


@needs("bitsandbytes")
def test_a_model_in_4_bits_is_as_near_as_unpatched(record, precise, upstream_in_torch):
    assert_as_near(torch.float32, record, "LoRA in fp32 on 4 bits, bf16", in_4_bits=True)


def assert_as_near(dtype, record, what, **options):
    batch, weights = case(torch.bfloat16)
    exact = run_alone(adapted(torch.bfloat16, dtype, exact=True, **options), batch, weights)
    unpatched = errors(run_alone(adapted(torch.bfloat16, dtype, **options), batch, weights), exact)
    model = adapted(torch.bfloat16, dtype, backend="auto", **options)
    assert patch_report(model).called == {}
    found = errors(run(model, batch, weights), exact)
    for which, ours, limit in zip(("logits", "worst gradient"), found, unpatched, strict=True):
        record(f"{what}: {which} from exact", ours, max(ROUNDING * limit, FP32))


@pytest.mark.parametrize("columns", [RANK, 3 * RANK])
def test_products_with_dropout_are_of_what_one_mask_leaves(record, columns):
    """The mask by a product of ones."""
    if DEVICE != "cuda":
        pytest.skip("the kernels are interpreted in tests/ops/triton/test_dropped_products.py")
    seed = Seed(torch.zeros(1, dtype=torch.int64, device=DEVICE).random_(), 5)
    mask = Mask(seed, 0.05, True)
    sizes = (TOKENS, WIDTH), (columns, WIDTH), (TOKENS, columns)
    x, w, d_h = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in sizes)
    ones = torch.ones_like(d_h[:, :1]), torch.ones_like(w[:1])
    kept = dropped_products.add(None, *ones, mask) != 0
    share = kept.double().mean().item()
    record(
        "share that is dropped out, less the probability", abs(1 - share - mask.probability), 1e-3
    )
    left = (x * kept).double()
    h = dropped_products.times(x, w, mask, 0.5, torch.float32)
    record("h", relative_rms(h, 0.5 * left @ w.double().T), 1e-5)
    d_w = dropped_products.gradient(d_h, x, mask, torch.float32)
    record("gradient of A", relative_rms(d_w, d_h.double().T @ left), 1e-5)
    d_x = dropped_products.add(None, d_h, w, mask)
    record("gradient of x", relative_rms(d_x, d_h.double() @ w.double() * kept), 2**-8)
