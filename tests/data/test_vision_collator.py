"""The collator's row: every document as its processor makes it alone, media in order, labels and
positions by the numbers.
"""

from __future__ import annotations

import copy
import logging
import pickle

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn import functional as F

from hf_packfree import apply_patches
from hf_packfree.data import PackedVisionCollator, examples
from hf_packfree.errors import BoundaryError, UnsupportedInput
from hf_packfree.models import compat
from hf_packfree.models.rope_index import RowMedia, document_positions, rope_source
from hf_packfree.packing import Batch, PackingInputs, resolve_boundaries
from tests.data.processors import (
    Tiny25VL,
    audio_part,
    example,
    image_part,
    omni_processor,
    picture,
    video_part,
    vision_processor,
)
from tests.support import gradients, relative_rms
from tests.vision import tiny_vision

EXAMPLES = (
    example("a b", image_part(16, 24), "c"),
    example("a"),
    example(image_part(8, 8, seed=1), image_part(24, 8, seed=2), "x"),
    example("v", video_part(), image_part(seed=3), answer="y"),
)
OFFSETS = [0, 19, 28, 45, 77]
pytestmark = [
    pytest.mark.compat(kernels=False),
    # of transformers 5.12
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    ),
]


def alone(processor, one):
    """What the processor makes of one example."""
    messages = examples.messages_of(one)
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )


def named(processor, *tokens):
    return processor.tokenizer.convert_tokens_to_ids(list(tokens))


@pytest.fixture(scope="module")
def processor():
    return vision_processor()


def test_a_row_holds_every_document_as_the_processor_makes_it(processor):
    row = PackedVisionCollator(processor)(EXAMPLES)
    each = [alone(processor, one) for one in EXAMPLES]
    assert torch.equal(row["input_ids"], torch.cat([one["input_ids"] for one in each], 1))
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert torch.equal(row[name], torch.cat([one[name] for one in each if name in one])), name
    assert row["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 2], [1, 6, 2], [1, 4, 6]]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == OFFSETS
    assert (
        row["cu_seq_lens_q"].dtype is torch.int32
        and row["max_length_q"] == row["max_length_k"] == 32
    )
    assert "attention_mask" not in row


def test_labels_leave_out_media_what_stands_around_them_and_first_tokens(processor):
    row = PackedVisionCollator(processor)(EXAMPLES)
    media = named(processor, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    wanted = torch.where(torch.isin(row["input_ids"], torch.tensor(media)), -100, row["input_ids"])
    wanted[0, OFFSETS[:-1]] = -100
    assert torch.equal(row["labels"], wanted)
    assert int((wanted == -100).sum()) == 4 + (6 + 2) + (1 + 3 + 4) + (2 * 4 + 4 + 6 + 2)


@pytest.mark.skipif(
    compat.MASKS_BEFORE_PLACEHOLDERS, reason="that mask is right from transformers 5.18 on"
)
def test_labels_of_the_assistant_alone(processor):
    row = PackedVisionCollator(processor, assistant_only_loss=True)(EXAMPLES)
    (end,) = named(processor, "<|im_end|>")
    answers = [
        processor.tokenizer.convert_tokens_to_ids(text) + [end]
        for text in (["d", "e"], ["d", "e"], ["d", "e"], ["y"])
    ]
    assert row["labels"][row["labels"] != -100].tolist() == sum(answers, [])
    assert row["labels"][0, 16:19].tolist() == answers[0]


def test_an_old_mask_of_the_assistant_is_refused(processor, monkeypatch):
    collator = PackedVisionCollator(processor, assistant_only_loss=True)
    monkeypatch.setattr(compat, "RELEASE", Version("5.17.0"))
    monkeypatch.setattr(compat, "MASKS_BEFORE_PLACEHOLDERS", True)
    assert (collator(EXAMPLES[1:2])["labels"] != -100).sum() == 3, (
        "text alone is right in all releases"
    )
    with pytest.raises(UnsupportedInput, match="transformers 5.17.0.*5.18 or later"):
        collator(EXAMPLES[:1])


def test_positions_are_upstreams_for_each_document_alone(processor):
    row = PackedVisionCollator(processor)(EXAMPLES)
    config = transformers.Qwen3_5Config(
        **{
            f"{name}_token_id": getattr(processor, f"{name}_token_id")
            for name in ("image", "video", "vision_start")
        }
    )
    config.vision_config.spatial_merge_size = 2
    wanted = [
        document_positions(rope_source(config), one["input_ids"], RowMedia.from_arguments(one))
        for one in (alone(processor, each) for each in EXAMPLES)
    ]
    assert torch.equal(row["position_ids"], torch.cat(wanted, -1))
    assert torch.equal(
        PackedVisionCollator(processor, config=config)(EXAMPLES)["position_ids"],
        row["position_ids"],
    )
    assert row["position_ids"][1, 0, :10].tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5, 5]
    types = processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    if "mm_token_type_ids" in row:
        assert [int((row["mm_token_type_ids"] == kind).sum()) for kind in (1, 2)] == [16, 8]
        assert set(row["input_ids"][row["mm_token_type_ids"] > 0].tolist()) == set(types)
    else:
        assert "mm_token_type_ids" not in processor.model_input_names


def test_a_model_gives_a_row_what_it_gives_the_documents_alone(processor):
    """Upstream's own Qwen3-VL, which is exact on such a row; without the documents' own
    positions it is not.
    """
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **{
            f"{name}_token_id": getattr(processor, f"{name}_token_id")
            for name in ("image", "video", "vision_start")
        },
    )
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    row = PackedVisionCollator(processor)(EXAMPLES)
    with torch.no_grad():
        wanted = torch.cat(
            [model(**keep(alone(processor, one)), use_cache=False).logits for one in EXAMPLES], 1
        )
        assert relative_rms(model(**row, use_cache=False).logits, wanted) <= 1e-5
        assert (
            relative_rms(
                model(**row | {"position_ids": row["position_ids"][0]}, use_cache=False).logits,
                wanted,
            )
            >= 1e-2
        )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_omni_moe"])
def test_a_row_has_the_loss_of_its_documents_alone(family):
    """Positions from the processor, from the configuration, or from the model itself, where
    videos need its rate.
    """
    plain, processor = tiny_vision(family), vision_processor(Tiny25VL)
    given = [*EXAMPLES[:2], example("s", video_part())]
    if family == "qwen3_omni_moe":
        processor, given = omni_processor(), [*given, example("s", audio_part(130))]
        for config in {
            id(part.config): part.config for part in plain.modules() if hasattr(part, "audio_tower")
        }.values():
            config.audio_token_id, config.audio_start_token_id = named(
                processor, "<|audio_pad|>", "<|audio_start|>"
            )
    model = apply_patches(copy.deepcopy(plain))
    for config in (None, plain.config):
        collator = PackedVisionCollator(processor, pad_to_multiple_of=16, config=config)
        for some in (given, [*given[:2], *given[3:]]):
            row, total, count = collator(some), 0.0, 0
            assert ("position_ids" in row) == (
                config is not None or some is not given
            ) or compat.IMAGES_COUNT_SECONDS
            for one in some:
                labels = collator.document(one).labels
                logits = plain(**keep(alone(processor, one)), use_cache=False).logits[0, :-1]
                total, count = (
                    total + F.cross_entropy(logits, labels[1:], reduction="sum"),
                    count + int((labels != -100).sum()),
                )
            assert relative_rms(model(**row).loss, total / count) <= 1e-5


def keep(output):
    """Without what is said of videos and no model takes."""
    return {name: value for name, value in output.items() if name != "video_metadata"}


@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "lists, as datasets keep them"])
def test_processor_outputs_are_documents_too(processor, listed):
    collator = PackedVisionCollator(processor)
    outputs = [dict(keep(alone(processor, one))) for one in EXAMPLES]
    if listed:
        outputs = [
            {name: value.tolist() for name, value in one.items()}
            | {"input_ids": one["input_ids"][0].tolist()}
            for one in outputs
        ]
    same(collator(outputs), collator(EXAMPLES))


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (
            found[name] == value if isinstance(value, int) else torch.equal(found[name], value)
        ), name


def test_padding_of_an_output_is_cut_off_and_its_labels_are_kept(processor):
    output = {
        "input_ids": [0, 0, 75, 76, 77],
        "attention_mask": [0, 0, 1, 1, 1],
        "labels": [-100, -100, 75, -100, 77],
    }
    row = PackedVisionCollator(processor)([output])
    assert row["input_ids"].tolist() == [[75, 76, 77]] and row["labels"].tolist() == [
        [-100, -100, 77]
    ]


def test_media_may_stand_in_columns_of_their_own(processor):
    """As datasets keep them: every part has every key, most of them None."""
    parts = [
        {"type": "text", "text": "a b", "image": None},
        {"type": "image", "text": None},
        {"type": "text", "text": "c"},
    ]
    one = {
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "d e"}],
        "images": [picture(16, 24)],
    }
    collator = PackedVisionCollator(processor)
    same(collator([one]), collator(EXAMPLES[:1]))
    for images, what in (([], "without its image"), ([picture(16, 24)] * 2, "1 images more")):
        with pytest.raises(UnsupportedInput, match=what):
            collator([one | {"images": images}])


def test_a_tail_is_one_padding_segment(processor):
    plain, row = (
        PackedVisionCollator(processor, pad_to_multiple_of=multiple)(EXAMPLES)
        for multiple in (None, 16)
    )
    assert row["input_ids"].shape == (1, 80) and row["position_ids"].shape == (4, 1, 80)
    assert (
        row["cu_seq_lens_q"].tolist() == [*OFFSETS, 80]
        and row["labels"][0, 77:].tolist() == [-100] * 3
    )
    row = PackedVisionCollator(processor, pad_to_multiple_of=64)(EXAMPLES)
    assert row["input_ids"][0, 77:].tolist() == [0] * 51 and set(
        row["labels"][0, 77:].tolist()
    ) == {-100}
    assert row["max_length_q"] == 51 and not row["position_ids"][..., 77:].any()
    assert "mm_token_type_ids" not in row or not row["mm_token_type_ids"][0, 77:].any()
    for name, value in plain.items():
        assert (
            isinstance(value, int)
            or name.startswith("cu_")
            or torch.equal(row[name][..., : value.shape[-1]], value)
        ), name
    record = record_of(row)
    assert (
        record.padding_segments == (4,)
        and record.num_documents == 4
        and record.num_real_tokens == 77
    )


def record_of(row):
    names = {
        name: row[name]
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    }
    inputs = PackingInputs.from_kwargs(
        names, position_ids=row.get("position_ids"), attention_mask=None
    )
    return resolve_boundaries(inputs, Batch(row["input_ids"]))


def test_a_tail_behind_media_that_the_model_numbers():
    """Without positions, too, it is no document: no part in routers' statistics, no real tokens."""
    collator = PackedVisionCollator(vision_processor(Tiny25VL), pad_to_multiple_of=64)
    row = collator([EXAMPLES[3], EXAMPLES[1]])
    assert "position_ids" not in row and row["max_length_q"] == row["cu_seq_lens_q"][1]
    real, record = int(row["cu_seq_lens_q"][2]), record_of(row)
    assert record.padding_segments == tuple(range(2, 66 - real)) and real < 62
    assert record.num_documents == 2 and record.num_real_tokens == real


def test_text_alone_is_a_row_without_media(processor):
    row = PackedVisionCollator(processor)([EXAMPLES[1], EXAMPLES[1]])
    assert not {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"} & set(
        row
    )
    assert row["position_ids"].tolist() == [[[*range(9), *range(9)]]] * 4


def test_keywords_of_the_chat_template_reach_it(processor):
    template = "{%- for message in messages -%}<|im_end|>{{ tail }}{%- endfor -%}"
    keywords = {"chat_template": template, "tail": "c"}
    row = PackedVisionCollator(processor, chat_template_kwargs=keywords)([EXAMPLES[1], EXAMPLES[1]])
    assert row["input_ids"][0].tolist() == named(processor, "<|im_end|>", "c") * 4 and keywords == {
        "chat_template": template,
        "tail": "c",
    }


def test_documents_are_never_cut(processor, caplog):
    with pytest.raises(UnsupportedInput, match="32 tokens.*max_length=20"):
        PackedVisionCollator(processor, max_length=20)(EXAMPLES)
    collator = PackedVisionCollator(processor, max_length=20, overlong="drop")
    with caplog.at_level(logging.WARNING, "hf_packfree"):
        same(collator(EXAMPLES), PackedVisionCollator(processor)(EXAMPLES[:3]))
    assert (
        collator.dropped == 1
        and "document of 32 tokens" in caplog.text
        and "1 so far" in caplog.text
    )
    with pytest.raises(UnsupportedInput, match="a batch without a document"):
        collator([])
    with pytest.raises(ValueError, match="overlong='cut'"):
        PackedVisionCollator(processor, overlong="cut")


@pytest.mark.parametrize("tail", [None, 16])
def test_a_batch_of_which_nothing_is_left_is_a_row_of_padding(processor, tail):
    """Its step changes nothing, and other ranks do not wait."""
    collator = PackedVisionCollator(
        processor, max_length=20, overlong="drop", pad_to_multiple_of=tail
    )
    row = collator(EXAMPLES[3:])
    assert (
        row["input_ids"].shape == (1, tail or 1)
        and not row["attention_mask"].any()
        and collator.dropped == 1
    )
    model = apply_patches(tiny_vision("qwen3_5"))
    loss = model(**row, num_items_in_batch=torch.tensor(0)).loss
    loss.backward()
    assert loss.item() == 0 and not any(grad.any() for grad in gradients(model).values())


def test_media_of_another_size_are_refused(processor):
    output = dict(alone(processor, EXAMPLES[0])) | {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(BoundaryError, match="image"):
        PackedVisionCollator(processor)([output])


@pytest.mark.parametrize(
    "wrong", [{"images": [1]}, "text", {"input_ids": [[1, 2], [3, 4]]}, {"input_ids": []}]
)
def test_what_is_no_document_is_refused(processor, wrong):
    with pytest.raises(UnsupportedInput, match="wanted"):
        PackedVisionCollator(processor)([wrong])


@pytest.mark.filterwarnings("ignore:'pin_memory'")
def test_worker_processes_make_the_same_rows(processor):
    collator = PackedVisionCollator(processor, pad_to_multiple_of=8)
    same(pickle.loads(pickle.dumps(collator))(EXAMPLES), collator(EXAMPLES))
    batches = torch.utils.data.DataLoader(
        list(EXAMPLES), batch_size=2, num_workers=1, collate_fn=collator
    )
    for found, start in zip(batches, (0, 2), strict=True):
        same(found, collator(EXAMPLES[start : start + 2]))


def test_audio_is_padded_to_the_longest():
    processor = omni_processor()
    spoken = [
        example("s", audio_part(60), audio_part(130, seed=1)),
        EXAMPLES[0],
        example(audio_part(40, seed=2)),
    ]
    row = PackedVisionCollator(processor)(spoken)
    each = [alone(processor, one) for one in spoken]
    assert row["feature_attention_mask"].sum(-1).tolist() == [60, 130, 40]
    assert row["input_features"].shape == (3, 16, 130)
    for place, one in ((slice(0, 2), each[0]), (slice(2, 3), each[2])):
        real = one["feature_attention_mask"].bool()
        frames = real.shape[-1]
        assert torch.equal(row["input_features"][place, :, :frames], one["input_features"])
        assert torch.equal(row["feature_attention_mask"][place, :frames].bool(), real)
    marks = named(processor, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
    assert set(row["labels"][torch.isin(row["input_ids"], torch.tensor(marks))].tolist()) == {-100}
    assert int((row["input_ids"] == marks[2]).sum()) == 8 + 17 + 5
    assert "mm_token_type_ids" not in row
    numbered_as_alone(row, omni_config(processor), each)


def numbered_as_alone(row, config, outputs):
    """By the configuration of the model."""
    parts = [
        document_positions(rope_source(config), one["input_ids"], RowMedia.from_arguments(one))
        for one in outputs
    ]
    assert torch.equal(
        row["position_ids"], torch.cat([part.to(row["position_ids"]) for part in parts], -1)
    )


def omni_config(processor):
    ids = {
        f"{name}_token_id": named(processor, f"<|{name}_pad|>")[0]
        for name in ("image", "video", "audio")
    }
    marks = named(processor, "<|vision_start|>", "<|audio_start|>")
    config = (
        transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe.Qwen3OmniMoeThinkerConfig(
            **ids,
            vision_start_token_id=marks[0],
            audio_start_token_id=marks[1],
            position_id_per_seconds=13,
        )
    )
    config.vision_config.spatial_merge_size = 2
    return config


def test_with_a_configuration_videos_and_audio_are_numbered():
    processor = omni_processor()
    config = omni_config(processor)
    mixed = [example("s", audio_part(60)), example("v", video_part()), EXAMPLES[1]]
    row = PackedVisionCollator(processor, config=config, pad_to_multiple_of=16)(mixed)
    assert row["position_ids"].dtype is torch.float32 and row["position_ids"].shape == (4, 1, 48)
    tokens = int(row["cu_seq_lens_q"][3])
    numbered = row["position_ids"][..., :tokens]
    numbered_as_alone(
        {"position_ids": numbered}, config, [alone(processor, each) for each in mixed]
    )
    # the video's second frame is 2 seconds, 26 places, behind its first
    assert (
        np.ptp(numbered[1, 0][row["input_ids"][0, :tokens] == config.video_token_id].numpy()) == 26
    )


def test_seconds_of_videos_are_kept(caplog):
    processor = vision_processor(Tiny25VL)
    collator = PackedVisionCollator(processor)
    with caplog.at_level(logging.WARNING, "hf_packfree"):
        rows = [collator([EXAMPLES[0], EXAMPLES[3], EXAMPLES[3]]) for _ in range(2)]
    assert rows[0]["second_per_grid_ts"].tolist() == [1.0, 1.0] and "position_ids" not in rows[0]
    assert [record.getMessage().count("config=model.config") for record in caplog.records] == [1], (
        "said once"
    )
    ids = {
        f"{name}_token_id": getattr(processor, f"{name}_token_id") for name in ("image", "video")
    }
    config = transformers.Qwen2_5_VLConfig(
        **ids, vision_start_token_id=named(processor, "<|vision_start|>")[0]
    )
    config.vision_config.tokens_per_second, config.vision_config.spatial_merge_size = 9, 2
    row = collator(EXAMPLES[:3])
    if compat.IMAGES_COUNT_SECONDS:
        assert "position_ids" not in row
    else:
        numbered_as_alone(row, config, [alone(processor, one) for one in EXAMPLES[:3]])
    filmed = example("v", video_part())
    output = alone(processor, filmed)
    numbered_as_alone(PackedVisionCollator(processor, config=config)([filmed]), config, [output])
