"""How rows with media are trained: checkpointing, adapters, frozen towers, precomputed features,
other options and heads.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from hf_packfree import apply_patches, register_patches
from hf_packfree.errors import BoundaryError
from hf_packfree.patching.registry import family_of
from tests.support import GRADIENT_TOL, LOGIT_TOL, checkpoint_layers, errors, recorded, relative_rms
from tests.vision import (
    alone,
    document,
    documents,
    image,
    media_arguments,
    packed_batch,
    padded_batch,
    random_weights,
    run,
    style_of,
    tiny_vision,
    video,
)

pytestmark = pytest.mark.compat


@pytest.fixture(
    scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"]
)
def unpatched(request):
    return tiny_vision(request.param)


@pytest.fixture(scope="module")
def given(unpatched):
    return documents(unpatched.model)[:6]


@pytest.fixture(scope="module")
def weights(given):
    return random_weights(given)


@pytest.fixture(scope="module")
def wanted(unpatched, given, weights):
    return alone(unpatched, given, weights)


def batches(given, model):
    return packed_batch("offsets, types", given, model.model), padded_batch("right", given)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(unpatched, given, weights, wanted, reentrant, record_property):
    model = apply_patches(copy.deepcopy(unpatched))
    checkpoint_layers(model, reentrant)
    # reentrant checkpointing passes gradients on to tensors that require them alone
    model.enable_input_require_grads()
    for batch in batches(given, unpatched):
        logits, gradients = recorded(
            record_property, errors(run(model, batch, weights), wanted), model, "media"
        )
        assert logits <= LOGIT_TOL
        assert gradients <= GRADIENT_TOL


@pytest.mark.compat(kernels=False)
@pytest.mark.parametrize("frozen", ["visual", "language_model"])
def test_frozen_parts(unpatched, given, weights, wanted, frozen):
    model = apply_patches(copy.deepcopy(unpatched))
    getattr(model.model, frozen).requires_grad_(False)
    kept = {name: grad for name, grad in wanted[1].items() if f".{frozen}." not in name}
    for batch in batches(given, unpatched):
        logits, gradients = errors(run(model, batch, weights), (wanted[0], kept))
        assert logits <= LOGIT_TOL
        assert gradients <= GRADIENT_TOL


@pytest.mark.compat(kernels=False)
# PEFT uses names that transformers deprecates
@pytest.mark.filterwarnings("default")
def test_lora_on_language_and_vision(unpatched, given, weights):
    peft = pytest.importorskip("peft")
    targets = ["qkv", "proj", "linear_fc1", "q_proj", "o_proj", "in_proj_qkv", "down_proj"]
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(copy.deepcopy(unpatched), config)
    wanted = alone(adapted, given, weights)
    assert any("visual" in name for name in wanted[1])
    model = apply_patches(copy.deepcopy(adapted))
    for batch in batches(given, unpatched):
        logits, gradients = errors(run(model, batch, weights), wanted)
        assert logits <= LOGIT_TOL
        assert gradients <= GRADIENT_TOL


class TestFeaturesFromOutside:
    """Releases from 5.19 take the towers' outputs as `mm_encoder_outputs`."""

    @pytest.fixture(autouse=True)
    def takes_them(self, unpatched):
        if "mm_encoder_outputs" not in inspect.signature(type(unpatched.model).forward).parameters:
            pytest.skip("this release computes features inside alone")

    def split(self, model, batch):
        media = {
            name: value.detach()
            for name, value in media_arguments(batch.documents, batch.pixels).items()
        }
        images, videos = media.pop("pixel_values"), media.pop("pixel_values_videos")
        return media, {
            "image": model.model.get_image_features(
                images, media["image_grid_thw"], return_dict=True
            ),
            "video": model.model.get_video_features(
                videos, media["video_grid_thw"], return_dict=True
            ),
        }

    def test_they_are_put_where_the_towers_would_be(self, unpatched, given, wanted):
        model = apply_patches(copy.deepcopy(unpatched))
        for batch in batches(given, unpatched):
            grids, outputs = self.split(model, batch)
            found = model(**batch.inputs, **grids, mm_encoder_outputs=outputs).logits
            assert relative_rms(torch.cat(batch.cut(found)), torch.cat(wanted[0])) <= LOGIT_TOL

    def test_without_grids_they_are_refused(self, unpatched, given):
        model = apply_patches(copy.deepcopy(unpatched))
        batch = packed_batch("4 rows", given, unpatched.model)
        with pytest.raises(BoundaryError, match="image features without image_grid_thw"):
            model(**batch.inputs, mm_encoder_outputs=self.split(model, batch)[1])

    @pytest.mark.parametrize("labelled", [True, False])
    def test_nor_is_one_document_numbered_as_text(self, unpatched, labelled):
        """Where such rows run in the patched layers; `generate()` passes positions."""
        model = apply_patches(copy.deepcopy(unpatched), unpacked="native")
        style = style_of(unpatched.model)
        one = document(2, image(8, 4), 3, video(2, 4, 6), 4, style=style)
        batch = padded_batch("right", [one])
        outputs = self.split(model, batch)[1]
        labels = {"labels": batch.inputs["input_ids"]} if labelled else {}
        with pytest.raises(BoundaryError, match="image features without image_grid_thw"):
            model(**batch.inputs, **labels, mm_encoder_outputs=outputs)


@pytest.mark.parametrize("kind", ["eager attention", "patched while loading"])
def test_other_models(unpatched, given, weights, wanted, kind, record_property):
    family = family_of(unpatched).name
    if kind == "eager attention":
        model = apply_patches(tiny_vision(family, attention="eager"))
    else:
        with register_patches():
            model = tiny_vision(family)
    for batch in batches(given, unpatched):
        logits, gradients = recorded(
            record_property, errors(run(model, batch, weights), wanted), model, "media"
        )
        assert logits <= LOGIT_TOL
        assert gradients <= GRADIENT_TOL


@pytest.mark.compat(kernels=False)
@pytest.mark.parametrize(
    "options",
    [{"batch_invariant": True}, {"unpacked": "native"}, {"padded": "upstream"}],
)
def test_options(unpatched, given, weights, wanted, options):
    model = apply_patches(copy.deepcopy(unpatched), **options)
    single = padded_batch("right", given[2:3])
    for batch in (*batches(given, unpatched), single):
        part = slice(2, 3) if batch is single else slice(None)
        try:
            found = run(model, batch, weights[part])
        except StopIteration:
            assert options == {"padded": "upstream"}
            pytest.skip("transformers 5.4 numbers no batch of Qwen2.5-VL with images and videos")
        assert relative_rms(torch.cat(found[0]), torch.cat(wanted[0][part])) <= LOGIT_TOL
        if batch is not single:
            assert errors(found, wanted)[1] <= GRADIENT_TOL


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_experts_count_real_tokens_alone(family):
    """The routers' loss of a padded batch is that of its real tokens, and of the packed row,
    with and without a tail.
    """
    unpatched = tiny_vision(family, router_aux_loss_coef=0.5)
    given = documents(unpatched.model)[:4]
    padded, packed = (
        padded_batch("right", given),
        packed_batch("offsets, types", given, unpatched.model),
    )
    aligned = packed_batch("4 rows", given, unpatched.model)
    for name in ("input_ids", "position_ids"):
        aligned.inputs[name] = torch.nn.functional.pad(aligned.inputs[name], (0, 11))
    wanted = padded.call(unpatched, output_router_logits=True).aux_loss
    model = apply_patches(unpatched)
    for batch in (padded, packed, aligned):
        assert (
            relative_rms(batch.call(model, output_router_logits=True).aux_loss, wanted) <= LOGIT_TOL
        )
