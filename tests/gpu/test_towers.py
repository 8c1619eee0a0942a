"""Vision towers on a GPU: every image against itself alone, one attention call a layer, and no
host wait behind it.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from hf_packfree import apply_patches, patch_report
from hf_packfree.models.vision_attention import mark_packed
from hf_packfree.ops.attention import torch_native
from tests.benchmarks.media import sixteen_documents
from tests.benchmarks.models import build
from tests.benchmarks.shapes import SHAPES
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.support import relative_rms, worst_gradient

pytestmark = gpu
GRIDS = (
    torch.tensor([[1, 4, 6], [3, 4, 4], [1, 4, 4], [1, 2, 2]])
    if TRIAL
    else torch.tensor([[1, 24, 24], [4, 16, 16], [1, 16, 16], [1, 28, 36], [1, 2, 2]])
)
GRIDS = GRIDS.to(DEVICE) if TRIAL or torch.cuda.is_available() else GRIDS
PATCHES = GRIDS.prod(-1).tolist()
FP32 = 1e-5
ROUNDING = 1.5
"""Times the rounding of upstream's own loop in bf16."""
BLOCKS = 2
WIDTHS = (1024, 1152, 1280)
"""Of 16 heads: of 64 channels, 72 and 80, as published towers have."""


def towers(dtype, width=1024, backend="auto"):
    """Upstream's model and the patched one, of the same weights; attention is far from uniform."""
    shape = SHAPES["tiny-vl" if TRIAL else "2b-vl"]
    vision = (
        dict(shape.vision) if TRIAL else {**shape.vision, "depth": BLOCKS, "hidden_size": width}
    )
    shape = replace(
        shape, layers=4, published_layers=4, sizes={**shape.sizes, "vocab_size": 256}, vision=vision
    )
    model = build(shape, DEVICE, torch.float32 if TRIAL else dtype)
    with torch.no_grad():
        for name, parameter in model.model.visual.named_parameters():
            if parameter.ndim == 2 and "pos_embed" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.01, 0.05).log_()
    return model, apply_patches(copy.deepcopy(model), backend=backend)


def pixels(model):
    channels = 3 * 2 * model.config.vision_config.patch_size**2
    x = torch.randn(sum(PATCHES), channels, generator=torch.Generator().manual_seed(1))
    return x.to(DEVICE, model.dtype)


def step(model, x, grids):
    """Features, and the gradients of pixels and parameters under a fixed random functional."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = model.model.visual(x, grid_thw=grids).pooler_output
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(
        DEVICE, out.dtype
    )
    (out * weight).sum().backward()
    grads = {
        name: p.grad for name, p in model.model.visual.named_parameters() if p.grad is not None
    }
    return out.detach(), {"pixels": x.grad, **grads}


def worst(found, wanted):
    return worst_gradient(found[1], wanted[1], floor=0)


def packed_grids():
    return mark_packed(GRIDS)


def test_in_fp32_it_is_upstreams(record, precise):
    """Batches of one size, and never a kernel of half precision."""
    model, ours = towers(torch.float32)
    assert patch_report(ours).implementations["tower_attention"] == "torch"
    wanted, found = step(model, pixels(model), GRIDS), step(ours, pixels(model), packed_grids())
    record(
        "vision tower, fp32: features against unpatched", relative_rms(found[0], wanted[0]), FP32
    )
    record("vision tower, fp32: worst gradient against unpatched", worst(found, wanted), 10 * FP32)


def test_control_one_segment_leaks(monkeypatch, record):
    model, ours = towers(torch.float32)
    monkeypatch.setattr(torch_native, "plan_runs", lambda packed: ((1, packed.num_tokens),))
    wanted, found = step(model, pixels(model), GRIDS), step(ours, pixels(model), packed_grids())
    error = relative_rms(found[0], wanted[0])
    record("vision tower, fp32: control, one segment for all images", error)
    assert error > 1e-2


@pytest.mark.parametrize("width", WIDTHS[:1] if TRIAL else WIDTHS)
def test_in_bf16_it_rounds_no_worse_than_upstreams_loop(width, record, precise):
    model, ours = towers(torch.bfloat16, width)
    assert TRIAL or patch_report(ours).implementations["tower_attention"] == "varlen"
    x = pixels(model)
    loop, found = step(model, x, GRIDS), step(ours, x, packed_grids())
    exact = step(copy.deepcopy(model).double(), x.double(), GRIDS)
    size = width // 16
    for what, error, limit in (
        ("features", relative_rms(found[0], exact[0]), relative_rms(loop[0], exact[0])),
        ("worst gradient", worst(found, exact), worst(loop, exact)),
    ):
        record(
            f"vision tower, heads of {size}, bf16: {what} against fp64",
            error,
            ROUNDING * limit + 1e-12,
            upstream=limit,
        )


def test_an_image_influences_no_other():
    _, ours = towers(torch.bfloat16)
    x, tokens = pixels(ours), [patches // 4 for patches in PATCHES]
    changed = x.clone()
    changed[PATCHES[0] : sum(PATCHES[:2])] = 3
    with torch.no_grad():
        outputs = [
            ours.model.visual(values, grid_thw=packed_grids()).pooler_output.split(tokens)
            for values in (x, changed)
        ]
    assert [torch.equal(*both) for both in zip(*outputs)] == [
        number != 1 for number in range(len(PATCHES))
    ]


@contextmanager
def refused_from(first, last):
    """Let nothing wait for the device from the start of one module to the end of another."""
    hooks = [first.register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error"))]
    hooks.append(last.register_forward_hook(lambda *_: torch.cuda.set_sync_debug_mode("default")))
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for hook in hooks:
            hook.remove()


def waits():
    return pytest.raises(RuntimeError, match="synchroniz")


@pytest.mark.skipif(TRIAL, reason="a CPU waits for nothing")
def test_in_the_blocks_nothing_waits_for_the_device():
    model, ours = towers(torch.bfloat16)
    x = pixels(ours)
    # compiles what there is to compile
    step(ours, x, packed_grids())
    for tower, grids, outcome in ((ours, packed_grids(), nullcontext()), (model, GRIDS, waits())):
        blocks = tower.model.visual.blocks
        with outcome, refused_from(blocks[0], blocks[-1]):
            step(tower, x, grids)


@pytest.mark.skipif(TRIAL, reason="a CPU waits for nothing")
@pytest.mark.parametrize("form", ["padded", "offsets"])
def test_from_the_tower_to_the_last_layer_nothing_waits_for_the_device(form):
    """The host runs ahead: it numbers the documents, and plans the text model's kernels, while
    the tower runs.
    """
    model, ours = towers(torch.bfloat16)
    batch = replace(sixteen_documents(form, tiny=True), patch=16).inputs(256, DEVICE)
    ours.base_model(use_cache=False, **batch)
    for one, outcome in ((ours, nullcontext()), *([(model, waits())] if form == "padded" else [])):
        with outcome, refused_from(one.base_model.visual.blocks[0], one.base_model.language_model):
            one.base_model(use_cache=False, **batch)


@pytest.mark.skipif(TRIAL, reason="a CPU waits for nothing")
@pytest.mark.parametrize("form", ["padded", "offsets"])
def test_the_backward_pass_waits_for_nothing(form):
    """Not between text and tower either, where upstream's gradient of the scattered features
    counts tokens.
    """
    model, ours = towers(torch.bfloat16)
    batch = replace(sixteen_documents(form, tiny=True), patch=16).inputs(256, DEVICE)
    ours.base_model(use_cache=False, **batch).last_hidden_state.float().mean().backward()
    for one, outcome in ((ours, nullcontext()), *([(model, waits())] if form == "padded" else [])):
        loss = one.base_model(use_cache=False, **batch).last_hidden_state.float().mean()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with outcome:
                loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("form", ["padded", "offsets"])
def test_documents_with_images_are_upstreams_alone(form, record, precise, upstream_in_torch):
    """The whole model in fp32: a padded batch of the processor's, and the row of it, against
    unpatched padded.
    """
    model, ours = towers(torch.float32, backend={"delta_rule": "torch"})
    load = sixteen_documents(form, tiny=True)
    load = load if TRIAL else replace(load, patch=16)
    padded = replace(load, input_format="padded").inputs(256, DEVICE)
    batch = load.inputs(256, DEVICE)
    for inputs in (padded, batch):
        inputs["pixel_values"] = inputs["pixel_values"].float()
    real = padded["attention_mask"].bool()
    with torch.no_grad():
        wanted = model.base_model(use_cache=False, **padded).last_hidden_state[real]
        found = ours.base_model(use_cache=False, **batch).last_hidden_state
    found = found[real] if form == "padded" else found[0]
    record(
        f"documents with images, {form}, fp32: values against unpatched padded",
        relative_rms(found, wanted),
        FP32,
    )
