"""Positions of documents with media are those that upstream's `get_rope_index` gives each
document alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect

import pytest
import torch

from hf_packfree.errors import BoundaryError, UnsupportedInput
from hf_packfree.models.rope_index import (
    RowMedia,
    audio_tokens,
    document_positions,
    packed_positions,
    rope_source,
)

CONFIGS = {
    "qwen3_5": "Qwen3_5Config",
    "qwen3_5_moe": "Qwen3_5MoeConfig",
    "qwen3_vl": "Qwen3VLConfig",
    "qwen3_vl_moe": "Qwen3VLMoeConfig",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerConfig",
}
ALL = pytest.mark.parametrize("family", CONFIGS)


def source(family: str):
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(module, CONFIGS[family])()
    # the thinker's class has no default
    config.vision_start_token_id = getattr(config, "vision_start_token_id", 151652)
    return rope_source(config)


def media_document(config, images: tuple[int, ...]) -> list[int]:
    ids = [5, 6]
    for tokens in images:
        ids += [config.vision_start_token_id, *[config.image_token_id] * tokens, 7]
    return [*ids, 8, 9]


@ALL
def test_frames_with_text_between_them_have_grids_of_their_own(family, monkeypatch):
    """Releases but 5.3 make them themselves, of any grids."""
    rope, seen = source(family), []
    upstream = type(rope).get_rope_index

    @functools.wraps(upstream)
    def watched(self, *args, **given):
        seen.append(given["video_grid_thw"].tolist())
        return upstream(self, *args, **given)

    monkeypatch.setattr(type(rope), "get_rope_index", watched)
    framewise, config = family not in ("qwen2_5_vl", "qwen3_omni_moe"), rope.config
    frame = [config.vision_start_token_id, *[config.video_token_id] * 4]
    ids = (
        [5, *frame, *[7, *frame] * 2, 9]
        if framewise
        else [5, *frame, *[config.video_token_id] * 8, 9]
    )
    seconds = None if framewise else torch.ones(1)
    media = RowMedia(video_grid_thw=torch.tensor([[3, 4, 4]]), seconds_per_grid=seconds)
    found = document_positions(rope, torch.tensor([ids]), media)
    assert seen == [[[1, 4, 4]] * 3 if framewise else [[3, 4, 4]]]
    first = ids.index(config.video_token_id)
    assert (found[2:, 0, first : first + 4] - found[2:, 0, first : first + 1]).tolist() == [
        [0, 0, 1, 1],
        [0, 1, 0, 1],
    ]


@ALL
def test_every_document_is_numbered_alone(family):
    rope = source(family)
    documents = [media_document(rope.config, sizes) for sizes in ((4,), (), (6, 4), (1,))]
    ids, lengths = torch.tensor([sum(documents, [])]), [len(document) for document in documents]
    grids = torch.tensor([[1, 4, 4], [1, 4, 6], [1, 4, 4], [1, 2, 2]])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    row = packed_positions(rope, ids, cu_seqlens, RowMedia(image_grid_thw=grids))
    assert row.shape == (4, 1, ids.shape[1])
    wanted = [grids[:1], None, grids[1:3], grids[3:]]
    for part, document, own in zip(row.split(lengths, -1), documents, wanted, strict=True):
        alone = document_positions(rope, torch.tensor([document]), RowMedia(image_grid_thw=own))
        assert torch.equal(part, alone.to(part.dtype))
        assert part[0, 0].tolist() == list(range(len(document)))
        assert part[1:, 0, 0].tolist() == [0, 0, 0]
    # by the numbers: an image of 2 x 2 tokens takes two places, whatever number of tokens it has
    assert row[:, 0, :9].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 3, 4, 4, 5, 6],
        [0, 1, 2, 3, 4, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "qwen3_omni_moe"])
def test_a_document_has_upstreams_positions(family):
    """Without a mask; text in front, between and behind, and none of it in front."""
    rope = source(family)
    config = rope.config
    start, image, video = config.vision_start_token_id, config.image_token_id, config.video_token_id
    if "mm_token_type_ids" not in inspect.signature(rope.get_rope_index).parameters:
        pytest.skip("this release finds media by their tokens, and is handed all of them")
    film = (
        [start, *[video] * 4, 7, 5, start, *[video] * 4, 7]
        if family != "qwen2_5_vl"
        else [start, *[video] * 8, 7]
    )
    grids, films = torch.tensor([[1, 4, 4], [1, 8, 4]]), torch.tensor([[2, 4, 4]])
    behind = [5] * 30 + [start] + [image] * 4 + [7] * 11 + film + [image] * 8 + [6] * 3
    for ids in ([image] * 4 + [9] + [image] * 8 + film, behind):
        given, types = (
            torch.tensor([ids]),
            torch.tensor([[{image: 1, video: 2}.get(token, 0) for token in ids]]),
        )
        more = {"image_grid_thw": grids, "video_grid_thw": films}
        seconds = {"second_per_grid_ts": torch.tensor([1.5])} if family == "qwen2_5_vl" else {}
        mask = torch.ones_like(given)
        wanted, _ = rope.get_rope_index(
            given, mm_token_type_ids=types, attention_mask=mask, **more, **seconds
        )
        media = RowMedia(**more, seconds_per_grid=torch.tensor([1.5]) if seconds else None)
        found = document_positions(rope, given, media)
        assert torch.equal(found[1:], wanted) and found.dtype == wanted.dtype
        assert torch.equal(
            document_positions(rope, given, dataclasses.replace(media, mm_token_type_ids=types)),
            found,
        )


@ALL
def test_media_of_another_document_are_refused(family):
    rope = source(family)
    ids = torch.tensor([media_document(rope.config, (4,)) + media_document(rope.config, (6,))])
    cu_seqlens = torch.tensor([0, 9, 20]).int()
    with pytest.raises(BoundaryError, match="4 image placeholders in document 0"):
        packed_positions(
            rope, ids, cu_seqlens, RowMedia(image_grid_thw=torch.tensor([[1, 4, 6], [1, 4, 4]]))
        )


@ALL
def test_a_document_that_upstream_cannot_number_is_named(family):
    """Two images without a token between them are one to it, and Qwen3-Omni's ends in its last."""
    rope = source(family)
    typed = "mm_token_type_ids" in inspect.signature(rope.get_rope_index).parameters
    if not typed and family != "qwen3_omni_moe":
        pytest.skip("this release takes what is left of a run for text")
    start, image = rope.config.vision_start_token_id, rope.config.image_token_id
    cut, grids = [start, *[image] * 4], torch.tensor([[1, 4, 4]])
    if typed:
        cut, grids = [start, *[image] * 8, 7], grids.repeat(2, 1)
    ids, cu_seqlens = torch.tensor([[5, 6, 7, *cut]]), torch.tensor([0, 3, 3 + len(cut)]).int()
    said = "found document 1 .tokens 3 to .*, whose media transformers cannot number"
    with pytest.raises(BoundaryError, match=said):
        packed_positions(rope, ids, cu_seqlens, RowMedia(image_grid_thw=grids))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_a_video_is_one_run_per_frame(family):
    rope = source(family)
    start, video = rope.config.vision_start_token_id, rope.config.video_token_id
    film = [5, start, *[video] * 4, 7, 5, start, *[video] * 4, 7]
    grids = torch.tensor([[2, 4, 4], [2, 4, 4]])
    row = packed_positions(
        rope,
        torch.tensor([film + film]),
        torch.tensor([0, 14, 28]).int(),
        RowMedia(video_grid_thw=grids),
    )
    assert torch.equal(row[..., :14], row[..., 14:])
    assert row[1, 0, :8].tolist() == [0, 1, 2, 2, 2, 2, 4, 5]
    assert grids.tolist() == [[2, 4, 4], [2, 4, 4]]


def test_seconds_of_a_video_go_with_their_document():
    rope = source("qwen2_5_vl")
    film = [5, rope.config.vision_start_token_id, *[rope.config.video_token_id] * 8, 7]
    media = RowMedia(
        video_grid_thw=torch.tensor([[2, 4, 4]] * 2), seconds_per_grid=torch.tensor([1.0, 3.0])
    )
    row = packed_positions(
        rope, torch.tensor([film + film]), torch.tensor([0, 11, 22]).int(), media
    )
    first, second = row[1, 0].split(11)
    per_second = rope.config.vision_config.tokens_per_second
    assert (first[6] - first[2]).item() == per_second
    assert (second[6] - second[2]).item() == 3 * per_second


class TestOmni:
    FRAMES = torch.tensor([60, 60])

    def row(self):
        rope = source("qwen3_omni_moe")
        config = rope.config
        audio, video = [config.audio_token_id] * 8, config.video_token_id
        with_sound = [
            5,
            config.vision_start_token_id,
            config.audio_start_token_id,
            *[video] * 4,
            *audio,
            7,
            7,
            6,
        ]
        speech = [5, config.audio_start_token_id, *audio, 7, 6]
        silent = [5, config.vision_start_token_id, *[video] * 8, 7, 6]
        media = RowMedia(
            video_grid_thw=torch.tensor([[1, 4, 4], [2, 4, 4]]),
            seconds_per_grid=torch.tensor([1.0, 0.7]),
            audio_lengths=self.FRAMES,
        )
        return rope, (with_sound, speech, silent), media

    def test_a_video_with_sound_beside_a_silent_one(self):
        rope, documents, media = self.row()
        ids, lengths = torch.tensor([sum(documents, [])]), [len(document) for document in documents]
        row = packed_positions(rope, ids, torch.tensor([0, *lengths]).cumsum(0).int(), media)
        assert row.dtype == torch.float32
        grids, seconds = media.video_grid_thw, media.seconds_per_grid
        alone = [
            (True, grids[:1], self.FRAMES[:1], seconds[:1]),
            (False, None, self.FRAMES[1:], None),
            (False, grids[1:], None, seconds[1:]),
        ]
        for part, document, (flag, grid, frames, second) in zip(
            row.split(lengths, -1), documents, alone, strict=True
        ):
            given = torch.tensor([document])
            wanted, _ = rope.get_rope_index(
                given,
                None,
                grid,
                torch.ones_like(given),
                flag,
                audio_seqlens=frames,
                second_per_grids=second,
            )
            assert torch.equal(part[1:], wanted)
        # 0.7 s x 25, or 13, is no whole number
        assert row[1, 0].frac().max() == 0.5

    @pytest.mark.parametrize("flag", [True, False])
    def test_one_flag_for_both_kinds_of_videos_is_refused(self, flag):
        rope, documents, media = self.row()
        ids, lengths = torch.tensor([sum(documents, [])]), [len(document) for document in documents]
        with pytest.raises(
            UnsupportedInput,
            match=f"use_audio_in_video={flag} for a row of 1 videos with their sound and 1",
        ):
            packed_positions(
                rope,
                ids,
                torch.tensor([0, *lengths]).cumsum(0).int(),
                dataclasses.replace(media, use_audio_in_video=flag),
            )

    def test_tokens_of_an_audio(self):
        assert audio_tokens(torch.tensor([1, 60, 99, 100, 101, 330])).tolist() == [
            1,
            8,
            13,
            13,
            14,
            43,
        ]


def test_a_model_without_images_has_no_positions_of_them():
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    with pytest.raises(
        UnsupportedInput, match="Qwen3_5TextConfig, whose model has no get_rope_index"
    ):
        rope_source(Qwen3_5TextConfig())
