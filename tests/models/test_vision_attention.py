"""Vision towers beside packed rows: every image is what upstream makes of it alone, with one
host read a forward.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from hf_packfree import apply_patches, patch_report, register_patches, remove_patches
from hf_packfree.errors import BackendUnavailable
from hf_packfree.models import compat, vision_attention
from hf_packfree.models.vision_attention import (
    PackedVisionAttention,
    PackedVisionBlock,
    PackedVisionTower,
    mark_packed,
)
from hf_packfree.ops.attention import torch_native
from tests.models.kernels import on_kernels
from tests.support import (
    GRADIENT_TOL,
    LOGIT_TOL,
    by_family,
    checkpoint_layers,
    relative_rms,
    worst_gradient,
)
from tests.vision import documents, packed_batch, padded_batch, tiny_vision, token_types

pytestmark = pytest.mark.compat

NAMES = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
GRIDS = torch.tensor([[1, 4, 6], [1, 4, 4], [1, 2, 8], [3, 4, 4], [1, 2, 2]])
"""Two images of one size after another of another, then a video of three frames of that size,
and a small image.
"""
RUNS = [1, 5, 1]
PATCHES = GRIDS.prod(-1).tolist()


def vision_language(family="qwen3_5", attention="sdpa", *, depth=3, way=None, **options):
    """A tiny model with weights of its own; `way` patches it ("apply" or "register")."""
    name = NAMES[family]
    text = by_family[family].tiny_config().to_dict()
    vision = {
        "depth": depth,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 64,
    }
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, image_token_id=126, video_token_id=127
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    if way == "register":
        with register_patches(**options):
            model = cls._from_config(config)
    else:
        model = cls._from_config(config)
    model = sharpened(model.train())
    return apply_patches(model, **options) if way == "apply" else model


def sharpened(model):
    """Make attention far from uniform; where it is sharper, upstream's own fp32 is not within
    these tolerances of fp64.
    """
    with torch.no_grad():
        for name, parameter in tower_of(model).named_parameters():
            if name.endswith("qkv.weight"):
                parameter.mul_(5)
    return model


def tower_of(model):
    """Omni's head holds it itself before transformers 5.21."""
    return model.visual if hasattr(model, "visual") else model.model.visual


def pixels():
    return torch.randn(sum(PATCHES), 96, generator=torch.Generator().manual_seed(1))


def features(model, x, grids):
    """The tower's merged features, and those for the text model's first layers beside them."""
    out = tower_of(model)(x, grid_thw=grids)
    return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())], -1)


def step(model, x, grids):
    """Features, and the gradients of pixels and parameters under a fixed random functional."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = features(model, x, grids)
    weight = torch.randn(
        sum(PATCHES) // 4, out.shape[-1], generator=torch.Generator().manual_seed(2)
    )
    (out * weight[: len(out)]).sum().backward()
    grads = {name: p.grad for name, p in tower_of(model).named_parameters() if p.grad is not None}
    return out.detach(), {"pixels": x.grad, **grads}


def alone(model, x):
    """The same of each image by itself, upstream's; the gradients of parameters summed."""
    outs, start = [], 0
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    for part, grid in zip(x.split(PATCHES), GRIDS):
        out = features(model, part, grid[None])
        weights = torch.randn(
            sum(PATCHES) // 4, out.shape[-1], generator=torch.Generator().manual_seed(2)
        )
        (out * weights[start : start + len(out)]).sum().backward()
        outs.append(out.detach())
        start += len(out)
    grads = {name: p.grad for name, p in tower_of(model).named_parameters() if p.grad is not None}
    return torch.cat(outs), {"pixels": x.grad, **grads}


def assert_same(found, wanted):
    assert relative_rms(found[0], wanted[0]) <= LOGIT_TOL
    assert worst_gradient(found[1], wanted[1], floor=0) <= GRADIENT_TOL


@pytest.fixture
def counted(monkeypatch):
    """Count host reads of lengths, and calls of torch's attention."""
    counts = {"reads": 0, "calls": 0}
    build, attend = vision_attention.PackedSequence.from_lengths, F.scaled_dot_product_attention

    def read(*args, **kwargs):
        counts["reads"] += 1
        return build(*args, **kwargs)

    def called(*args, **kwargs):
        counts["calls"] += 1
        return attend(*args, **kwargs)

    monkeypatch.setattr(vision_attention.PackedSequence, "from_lengths", read)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", called)
    return counts


@pytest.mark.parametrize("way", ["apply", "register"])
@pytest.mark.parametrize("family", [name for name, row in by_family.items() if row.towers])
def test_packed_images_are_what_they_are_alone(family, way):
    wanted = alone(sharpened(tiny_vision(family)), pixels())
    with register_patches() if way == "register" else nullcontext():
        model = tiny_vision(family)
    model = sharpened(model if way == "register" else apply_patches(model))
    assert_same(step(model, pixels(), mark_packed(GRIDS)), wanted)
    layers = {
        type(module).__name__
        for module in model.modules()
        if isinstance(module, PackedVisionAttention)
    }
    assert layers == {by_family[family].towers[0].attention} and isinstance(
        tower_of(model), PackedVisionTower
    )


def test_windows_are_segments_too(counted):
    """Qwen2.5-VL attends within windows in some blocks, and within images in others."""
    model = apply_patches(tiny_vision("qwen2_5_vl"))
    counted.update(reads=0)
    step(model, pixels(), mark_packed(GRIDS))
    assert counted["reads"] == 2


@pytest.mark.skipif(compat.TOWERS_MAKE_POSITIONS, reason="this transformers takes no positions")
@pytest.mark.parametrize("merge", [1, 2])
def test_what_is_made_on_the_host_is_what_upstream_makes(merge):
    from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

    grids = torch.cat((GRIDS, GRIDS.flip(0), torch.tensor([[2, 6, 4]])))
    found = vision_attention._made_on_host(grids, merge, torch.device("cpu"))
    wanted = {
        "position_ids": get_vision_position_ids(grids, merge),
        "cu_seqlens": get_vision_cu_seqlens(grids),
    }
    assert found.keys() == wanted.keys()
    assert all(
        torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype
        for name in wanted
    )


def test_one_segment_instead_of_many_leaks(monkeypatch):
    """The control: what the test above would find."""
    wanted = alone(vision_language(), pixels())
    monkeypatch.setattr(torch_native, "plan_runs", lambda packed: ((1, packed.num_tokens),))
    found = step(vision_language(way="apply"), pixels(), mark_packed(GRIDS))
    assert relative_rms(found[0], wanted[0]) > 100 * LOGIT_TOL
    assert relative_rms(found[1]["pixels"], wanted[1]["pixels"]) > 100 * GRADIENT_TOL


def test_an_image_influences_no_other():
    model, x = vision_language(way="apply"), pixels()
    changed = x.clone()
    # the second image
    changed[PATCHES[0] : sum(PATCHES[:2])] = 3
    with torch.no_grad():
        outputs = [
            features(model, values, mark_packed(GRIDS)).split([n // 4 for n in PATCHES])
            for values in (x, changed)
        ]
    assert [torch.equal(one, other) for one, other in zip(*outputs)] == [
        True,
        False,
        True,
        True,
        True,
    ]
    x.requires_grad_()
    features(model, x, mark_packed(GRIDS)).split([n // 4 for n in PATCHES])[3].pow(
        2
    ).sum().backward()
    reached = [bool(part.any()) for part in x.grad.split(PATCHES)]
    assert reached == [False, False, False, True, False]


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_lengths_are_read_once_a_forward_and_neighbours_of_one_size_are_one_call(
    counted, use_reentrant
):
    wanted = alone(vision_language(), pixels())
    model = vision_language(way="apply")
    if use_reentrant is not None:
        checkpoint_layers(model, use_reentrant)
    counted.update(reads=0, calls=0)
    found = step(model, pixels(), mark_packed(GRIDS))
    times = 1 if use_reentrant is None else 2
    assert counted == {"reads": 1, "calls": times * 3 * len(RUNS)}
    assert_same(found, wanted)


@pytest.mark.parametrize("form", ["4 rows", "offsets, types", "padded", "of one row"])
def test_the_model_tells_its_tower_that_a_batch_is_packed(form, monkeypatch):
    """Images and videos are a call of the tower each, of two blocks; a batch that is upstream's
    reads nothing.
    """
    model = apply_patches(tiny_vision("qwen3_5"))
    given = documents(model.model)[1:8]
    if form == "of one row":
        batch = packed_batch("4 rows", given[-1:], model.model)
        del batch.inputs["position_ids"]
        ids = batch.inputs["input_ids"]
        batch.inputs |= {
            "mm_token_type_ids": token_types(ids),
            "attention_mask": torch.ones_like(ids),
        }
    else:
        batch = (
            padded_batch("right", given)
            if form == "padded"
            else packed_batch(form, given, model.model)
        )
    read, seen = vision_attention.segments_of, []
    monkeypatch.setattr(
        vision_attention, "segments_of", lambda offsets: seen.append(offsets) or read(offsets)
    )
    batch.call(model)
    assert (len(seen), len({id(offsets) for offsets in seen})) == (
        (0, 0) if form == "of one row" else (4, 2)
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_batches_that_are_upstreams_stay_so_bit_for_bit(counted, attention):
    wanted = step(vision_language(attention=attention), pixels(), GRIDS)
    counted.update(reads=0, calls=0)
    model = vision_language(attention=attention, way="apply")
    found = step(model, pixels(), GRIDS)
    assert counted["reads"] == 0 and torch.equal(found[0], wanted[0])
    assert all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])


def test_eager_attention_is_upstreams(counted):
    wanted = alone(vision_language(attention="eager"), pixels())
    model = vision_language(attention="eager", way="apply")
    assert_same(step(model, pixels(), mark_packed(GRIDS)), wanted)
    assert counted == {"reads": 0, "calls": 0}
    assert patch_report(model).implementations["tower_attention"] == "eager (the model's)"


def test_native_rows_run_it_without_a_mark(counted):
    wanted = alone(vision_language(), pixels())
    model = vision_language(way="apply", unpacked="native")
    counted.update(reads=0)
    assert_same(step(model, pixels(), GRIDS), wanted)
    assert counted["reads"] == 1


class Adapted(nn.Module):
    """A projection with something beside its weight, as an adapter is."""

    def __init__(self, base):
        super().__init__()
        self.base, self.in_features = base, base.in_features
        self.down, self.up = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_on_projections_count(when):
    def adapt(model):
        torch.manual_seed(3)
        for block in model.model.visual.blocks:
            block.attn.qkv, block.attn.proj = Adapted(block.attn.qkv), Adapted(block.attn.proj)
        return model

    wanted = alone(adapt(vision_language()), pixels())
    model = (
        apply_patches(adapt(vision_language()))
        if when == "before"
        else adapt(vision_language(way="apply"))
    )
    assert_same(step(model, pixels(), mark_packed(GRIDS)), wanted)


@pytest.mark.parametrize("what", ["nothing", "a hook", "autocast", "upstream's batch"])
def test_a_convolution_of_whole_patches_is_one_product(what, monkeypatch):
    """Unless something beside its weights counts; the other tests say that it is upstream's up
    to rounding.
    """
    calls, convolve = [], nn.Conv3d.forward
    monkeypatch.setattr(
        nn.Conv3d, "forward", lambda self, x: calls.append(len(x)) or convolve(self, x)
    )
    model = vision_language(way="apply")
    if what == "a hook":
        model.model.visual.patch_embed.proj.register_forward_hook(lambda *_: None)
    with torch.autocast("cpu", enabled=what == "autocast"):
        features(model, pixels(), GRIDS if what == "upstream's batch" else mark_packed(GRIDS))
    assert calls == ([] if what in ("nothing", "autocast") else [sum(PATCHES)])


@pytest.mark.parametrize("family", [name for name, row in by_family.items() if row.towers])
def test_the_product_is_the_convolution(family):
    model = apply_patches(tiny_vision(family))
    embedding = tower_of(model).patch_embed
    channels = embedding.proj.weight[0].numel()
    x = torch.randn(7, channels, generator=torch.Generator().manual_seed(1)).requires_grad_()
    results = []
    for given in (x, mark_packed(x)):
        out = embedding(given)
        names, parameters = zip(*embedding.named_parameters())
        results.append([out, *torch.autograd.grad(out.sin().sum(), (x, *parameters))])
    assert (
        max(relative_rms(found, wanted) for wanted, found in zip(*results, strict=True))
        <= LOGIT_TOL
    )
    assert set(names) <= {"proj.weight", "proj.bias"}


@pytest.fixture
def fused(monkeypatch):
    """The weights of the norms that blocks fuse, here by the op's reference under the kernel's
    name.
    """
    seen, reference = [], vision_attention.add_layer_norm

    def call(*arguments, dtype, backend):
        assert backend == "triton"
        seen.append(arguments[2])
        return reference(*arguments, dtype=dtype)

    monkeypatch.setattr(vision_attention, "add_layer_norm", call)
    return seen


@pytest.mark.parametrize("family", [name for name, row in by_family.items() if row.towers])
def test_every_layer_norm_of_a_block_is_fused_and_exact(family, fused):
    wanted = alone(sharpened(tiny_vision(family)), pixels())
    model = on_kernels(sharpened(tiny_vision(family)), PackedVisionBlock)
    assert_same(step(model, pixels(), mark_packed(GRIDS)), wanted)
    norms = [norm for block in tower_of(model).blocks for norm in (block.norm1, block.norm2)]
    layer_norms = [norm.weight for norm in norms if type(norm) is nn.LayerNorm]
    assert len(layer_norms) == (0 if family == "qwen2_5_vl" else len(norms))
    assert len(fused) == len(layer_norms) and all(a is b for a, b in zip(fused, layer_norms))
    features(model, pixels(), GRIDS)
    assert len(fused) == len(layer_norms), "a batch of upstream's"


def test_hooked_norms_are_called(fused):
    model, calls = on_kernels(sharpened(vision_language()), PackedVisionBlock), []
    first, second, _ = model.model.visual.blocks
    first.norm2.register_forward_hook(lambda *_: calls.append("hook"))
    second.norm1.forward = lambda x: calls.append("forward") or F.layer_norm(x, x.shape[-1:])
    features(model, pixels(), mark_packed(GRIDS))
    assert calls == ["hook", "forward"] and len(fused) == 2


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_under_autocast_norms_are_fused_and_no_farther_from_exact(fused, weights):
    stock = sharpened(vision_language()).to(weights)
    wanted = alone(copy.deepcopy(stock).double(), pixels().double())
    model, calls = on_kernels(copy.deepcopy(stock), PackedVisionBlock), []
    with torch.autocast("cpu", torch.bfloat16):
        called, found = alone(stock, pixels()), step(model, pixels(), mark_packed(GRIDS))
        assert len(fused) == 2 * len(tower_of(model).blocks)
        first = tower_of(model).blocks[0]
        first.attn.qkv.register_forward_hook(lambda *_: calls.append("hook"))
        features(model, pixels(), mark_packed(GRIDS))
    assert len(fused) == 2 * (2 * len(tower_of(model).blocks) - 1) and calls
    assert relative_rms(found[0], wanted[0]) < 1.1 * relative_rms(called[0], wanted[0])
    ratios = [
        relative_rms(found[1][name], grad) / relative_rms(called[1][name], grad)
        for name, grad in wanted[1].items()
    ]
    assert sum(ratios) / len(ratios) < 1.05, ratios


def test_frozen_tower_trains_nothing():
    model = vision_language(way="apply")
    model.model.visual.requires_grad_(False)
    with torch.no_grad():
        wanted = features(model, pixels(), GRIDS)
    found = features(model, pixels(), mark_packed(GRIDS))
    assert not found.requires_grad and relative_rms(found, wanted) <= LOGIT_TOL


def test_the_caller_keeps_its_grids():
    grids = GRIDS.clone()
    assert mark_packed(grids).data_ptr() == grids.data_ptr() and not vars(grids)


def test_report_forcing_and_removal():
    model = vision_language()
    classes = [type(module) for module in model.modules()]
    report = patch_report(apply_patches(model))
    towers = {name: count for name, count in report.swaps.items() if "Vision" in name}
    parts = {"Qwen3_5VisionAttention": 3, "Qwen3_5VisionBlock": 3, "Qwen3_5VisionPatchEmbed": 1}
    assert towers == {"Qwen3_5VisionModel": 1, **parts}
    assert report.implementations["tower_attention"] == "torch"
    assert classes == [type(module) for module in remove_patches(model).modules()]
    with pytest.raises(
        BackendUnavailable,
        match="found tower_attention backend 'varlen' forced, but it runs on CUDA devices",
    ):
        apply_patches(model, backend={"tower_attention": "varlen"})
    text = patch_report(
        apply_patches(transformers.Qwen3_5ForCausalLM(by_family["qwen3_5"].tiny_config()))
    )
    assert "tower_attention" not in text.implementations and "Qwen3_5VisionModel" not in text.swaps


def test_a_vision_language_model_loaded_without_a_head_is_patched_as_a_whole():
    config = vision_language().config
    with register_patches():
        model = transformers.Qwen3_5Model._from_config(config)
    assert (
        patch_report(model).swaps
        == patch_report(apply_patches(transformers.Qwen3_5Model._from_config(config))).swaps
    )


def test_a_wrapped_block_is_left_alone():
    model = vision_language()
    attention = model.model.visual.blocks[1].attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    assert patch_report(apply_patches(model)).swaps["Qwen3_5VisionAttention"] == 2
    attention = alone(vision_language(), pixels())
    assert_same(step(model, pixels(), mark_packed(GRIDS)), attention)
