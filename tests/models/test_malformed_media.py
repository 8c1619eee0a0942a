"""Media that no processor made are refused by name, before a tower runs."""

from __future__ import annotations

import pytest
import torch

from hf_packfree import apply_patches
from hf_packfree.data import PackedVisionCollator
from hf_packfree.errors import BoundaryError
from hf_packfree.models.media_checks import check_media_sizes, check_media_tensors, check_widths
from hf_packfree.models.rope_index import RowMedia
from tests.support import by_family
from tests.vision import document, image, media_arguments, packed_batch, tiny_vision, token_types


@pytest.fixture(scope="module")
def model():
    return apply_patches(tiny_vision("qwen3_5"))


@pytest.fixture
def given(model):
    documents = [document(7, seed=1), document(3, image(4, 4), 4, seed=2), document(9, seed=5)]
    batch = packed_batch("offsets, types", documents, model.model)
    return batch.inputs | media_arguments(documents, batch.pixels)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("pixel_values", lambda x: x[:-1], "pixel_values of 15 patches, where image_grid_thw .*16"),
        ("pixel_values", lambda x: torch.cat([x, x]), "pixel_values of 32 patches"),
        ("pixel_values", lambda x: x[:0], "pixel_values of 0 patches"),
        ("pixel_values", lambda x: x[None], r"pixel_values torch.float32 \[1, 16, 96\]; wanted"),
        ("pixel_values", lambda x: x[:, :-1], "pixel_values .*; wanted 96 values of a patch"),
        ("pixel_values", lambda x: list(x), "pixel_values as a list"),
        ("pixel_values", lambda x: x.to("meta"), "pixel_values .* on meta"),
        ("image_grid_thw", lambda x: x.float(), r"image_grid_thw torch.float32 \[1, 3\]"),
        ("image_grid_thw", lambda x: x.tolist(), "image_grid_thw as a list"),
        ("image_grid_thw", lambda x: x[0], r"image_grid_thw torch.int64 \[3\]"),
        ("image_grid_thw", lambda x: x[:, :2], r"image_grid_thw torch.int64 \[1, 2\]"),
        ("image_grid_thw", lambda x: x.to("meta"), "image_grid_thw .* on meta"),
        (
            "image_grid_thw",
            lambda x: torch.tensor([[1, 16, 1]]),
            r"image_grid_thw\[0\]=\[1, 16, 1\]",
        ),
        ("image_grid_thw", lambda x: -x, r"image_grid_thw\[0\]=\[-1, -4, -4\]"),
        ("image_grid_thw", lambda x: x[:0], "4 image placeholders .* without"),
        ("image_grid_thw", lambda x: torch.tensor(5), r"image_grid_thw torch.int64 \[\]"),
        ("mm_token_type_ids", lambda x: x[:, :-1], r"mm_token_type_ids .*; wanted .*\[1, 29\]"),
        ("mm_token_type_ids", lambda x: x.tolist(), "mm_token_type_ids as a list"),
    ],
)
def test_a_changed_argument(name, change, said, model, given):
    with pytest.raises(BoundaryError, match=f"found {said}"):
        model(**given | {name: change(given[name])})


def test_control_as_they_are_they_run(model, given):
    assert torch.isfinite(model(**given).logits).all()


def test_a_padded_batch_is_checked_too(model):
    one = document(3, image(4, 4), 4, seed=2)
    ids = torch.tensor([[0, *one.ids], [*one.ids, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    pixels = {"pixel_values": one.pixels["image"].repeat(2, 1)[:-1]}
    grids = {"image_grid_thw": torch.tensor(one.grids["image"] * 2)}
    with pytest.raises(BoundaryError, match="found pixel_values of 31 patches"):
        model(**batch, **pixels, **grids, mm_token_type_ids=token_types(ids))


@pytest.mark.parametrize("seconds", [torch.ones(1), torch.ones(3), torch.ones(2, 1)])
def test_seconds_are_one_for_each_video(seconds):
    """A document whose video had none was numbered as if a second passed between its grids."""
    config = by_family["qwen2_5_vl"].tiny_config()
    media = RowMedia(video_grid_thw=torch.tensor([[2, 4, 4]] * 2), seconds_per_grid=seconds)
    with pytest.raises(BoundaryError, match="found seconds per grid .* for 2 videos"):
        check_media_sizes(config, {}, media)


SOUNDS = {"input_features": torch.zeros(2, 16, 30), "feature_attention_mask": torch.ones(2, 30)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"feature_attention_mask": torch.ones(2, 30)}, "feature_attention_mask torch.float32"),
        ({"feature_attention_mask": torch.ones(30).long()}, "feature_attention_mask .*wanted"),
        ({"feature_attention_mask": torch.zeros(2, 30).long()}, "audio 0 of 0 frames"),
        ({"feature_attention_mask": torch.ones(2, 29).long()}, "input_features .* with"),
        ({"feature_attention_mask": torch.ones(3, 30).long()}, "input_features .* with"),
        ({"input_features": torch.zeros(2, 30)}, "input_features .* with"),
        ({"input_features": [1]}, "input_features as a list with"),
        ({"input_features": torch.zeros(2, 15, 30)}, "input_features .*; wanted 16 values of a"),
    ],
)
def test_audio_features(change, said):
    whole = SOUNDS | {"feature_attention_mask": torch.ones(2, 30).long()}
    config = by_family["qwen3_omni_moe"].tiny_config()
    config = getattr(config, "thinker_config", config)
    config.audio_config.num_mel_bins = 16

    def check(given):
        check_media_tensors(given)
        check_media_sizes(config, given, RowMedia.from_arguments(given))
        check_widths(config, given)

    check(whole)
    with pytest.raises(BoundaryError, match=f"found {said}"):
        check(whole | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_grid_thw": [1, 2, 2]}, r"image_grid_thw torch.int64 \[3\]"),
        ({"image_grid_thw": [[1.0, 2.0, 2.0]]}, "image_grid_thw torch.float32"),
        ({"image_grid_thw": [[1, 1, 4]]}, r"image_grid_thw\[0\]=\[1, 1, 4\]"),
        ({"pixel_values": torch.zeros(3, 96)}, "pixel_values of 3 patches"),
    ],
)
def test_the_collator_refuses_them_first(change, said):
    """In a worker process, say, where torch's error would name no document."""
    processors = pytest.importorskip("tests.data.processors", exc_type=ImportError)
    processor = processors.vision_processor()
    token = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    one = {"input_ids": [20, token, 21], "image_grid_thw": [[1, 2, 2]]}
    one["pixel_values"] = torch.zeros(4, 96)
    assert PackedVisionCollator(processor)([one])["pixel_values"].shape == (4, 96)
    with pytest.raises(BoundaryError, match=f"found {said}"):
        PackedVisionCollator(processor)([one | change])
