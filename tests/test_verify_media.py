"""verify_packing of models that take images: values, gradients and influence of pixels, and what
a leak looks like there.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch

from hf_packfree import apply_patches, verify_packing
from hf_packfree.cli import main
from hf_packfree.errors import LeakDetected
from hf_packfree.models import vision_language
from hf_packfree.verify.random_documents import MediaDocuments, media_source
from tests.support import tiny
from tests.vision import CLASSES, IMAGE, START, VIDEO, tiny_vision


@pytest.fixture(scope="module")
def patched():
    return apply_patches(tiny_vision("qwen3_5"))


@pytest.mark.slow
@pytest.mark.compat(kernels=False)
@pytest.mark.parametrize("family", CLASSES)
def test_images_and_videos_are_measured(family):
    report = verify_packing(apply_patches(tiny_vision(family)))
    assert report.media == ("image", "video") and report.as_dict()["media"] == ("image", "video")
    assert report.patched.logits <= 1e-5 and report.patched.gradients <= 1e-4
    assert report.patched.influence == 0 and report.patched.cross_gradient == 0
    assert (
        report.unpatched.logits >= 1e-2
        and report.unpatched.influence >= 1e-2
        and report.unpatched.cross_gradient >= 1e-2
    )
    assert "7 packed documents with images and videos" in str(report)


def test_sounds_are_measured():
    report = verify_packing("qwen3_omni_moe", gradients=False)
    assert report.media == ("image", "video", "audio") and "with images, videos and audios" in str(
        report
    )
    assert report.patched.logits <= 1e-5 and report.patched.influence == 0
    assert report.unpatched.logits >= 1e-2 and report.unpatched.influence >= 1e-2


def test_documents_hold_what_there_is_room_for():
    source = media_source(tiny_vision("qwen3_5"))
    lengths = (3, 30, 9, 12, 9)
    given = MediaDocuments(
        lengths, source, torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32
    )
    assert given.media == ("image", "video")
    row = given.packed()
    assert row["image_grid_thw"].tolist() == [[1, 4, 4]] * 4 and row["video_grid_thw"].tolist() == [
        [2, 4, 4]
    ]
    assert given.of_document("pixel_values").tolist() == sum(
        ([number] * 16 for number in (1, 2, 3, 4)), []
    )
    for ids in (given.ids, given.other_ids):
        assert [int((ids == token).sum()) for token in (IMAGE, VIDEO, START)] == [16, 8, 6]
    changed = given.packed(torch.tensor([True, False, True, False, True]))
    same = (changed["pixel_values"] == row["pixel_values"]).all(1)
    assert same.tolist() == (given.of_document("pixel_values") % 2 == 1).tolist()


def test_text_models_get_text():
    assert media_source(tiny()) is None
    model = tiny_vision("qwen3_5")
    model.config.image_token_id = 5000
    assert media_source(model) is None, "placeholders that no embedding knows"


def test_a_text_model_without_linear_layers_has_a_control_that_leaks():
    """Of restarting positions alone upstream's attention would be exact."""
    text = tiny("qwen3_vl").model.language_model
    report = verify_packing(apply_patches(text), gradients=False)
    assert report.media == () and report.patched.influence == 0 and report.unpatched.logits >= 1e-2


def test_losing_the_positions_of_media_fails_though_nothing_leaks(patched, monkeypatch):
    monkeypatch.setattr(
        vision_language,
        "packed_positions",
        lambda source, ids, cu_seqlens, media: torch.cat(
            [torch.arange(length) for length in cu_seqlens.diff().tolist()]
        ).expand(4, 1, -1),
    )
    with pytest.raises(LeakDetected, match="logits differ from a forward per document") as error:
        verify_packing(patched)
    found = error.value.report.patched
    assert found.influence == 0 and found.cross_gradient == 0 and found.logits > 1e-2
    assert found.per_document[0] <= 1e-5, "text is numbered the same"


@pytest.mark.slow
def test_a_tower_that_mixes_images_fails_in_both_directions(patched):
    model = copy.deepcopy(patched)
    model.model.visual.register_forward_pre_hook(
        lambda tower, args: (args[0] + args[0].mean(0), *args[1:])
    )
    with pytest.raises(
        LeakDetected, match="react to each other's tokens, images and videos"
    ) as error:
        verify_packing(model)
    found = error.value.report.patched
    assert found.influence > 1e-3 and found.cross_gradient > 1e-3


def test_an_unpatched_model_leaks():
    with pytest.raises(LeakDetected, match="apply_patches"):
        verify_packing(tiny_vision("qwen3_5"), gradients=False)


@pytest.mark.usefixtures("imports_tried_once")
@pytest.mark.slow
def test_commands_know_media(capsys, tmp_path):
    tiny_vision("qwen3_5").config.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--lengths=5,64,65", "--no-gradients", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["media"] == ["image", "video"]
    assert main(["models", "--json"]) == 0
    media = {row["name"]: row["media"] for row in json.loads(capsys.readouterr().out)}
    assert media["qwen3_5"] == ["text", "images", "videos"] and media["qwen3_next"] == ["text"]
    assert media["qwen3_omni_moe"] == ["text", "images", "videos", "audio"]
    for model, wanted in ((str(tmp_path), ["text", "images", "videos"]), ("qwen3_5", ["text"])):
        assert main(["doctor", "--model", model, "--json"]) == 0
        (plan,) = json.loads(capsys.readouterr().out)["plans"]
        assert plan["media"] == wanted
