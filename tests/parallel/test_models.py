"""Rows of models with more than a text model and its head, shared by two ranks, are what they
are in one process.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree import PackedSequence, apply_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.mtp import MTPOptions
from hf_packfree.packing import shard_row
from hf_packfree.trainer.training_run import Counts, SmoothedLabels
from tests.mtp.heads import build
from tests.parallel.model_ranks import HEADS, VERIFIED, key_of, measured, names
from tests.parallel.ranks import ROWS, batch_of, step, worst
from tests.ranks import two_ranks
from tests.support import relative_rms, tiny
from tests.vision import PATCH, document, image, packed_batch, tiny_vision

EXACT, WRONG = 1e-10, 1e-2
PIXELS = {"pixel_values": torch.zeros(16, PATCH), "image_grid_thw": torch.tensor([[1, 4, 4]])}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes measured, in fp64."""
    return two_ranks(measured, [()], tmp_path_factory.mktemp("ranks"))[0]


NAMES = names()
NEXT_TOKENS = [key_of("qwen3_5", *way, [*ROWS][0]) for way in HEADS["qwen3_5"]]
CONTROLS = {
    "multi-token prediction": [f"each rank's own next tokens: {key}" for key in NEXT_TOKENS],
    "media": ["the first features of an image"],
    "verification": [
        f"{what}: {row}" for row in VERIFIED for what in ("unpatched", "one document")
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), [(what, one) for what in NAMES for one in NAMES[what]])
def test_two_ranks_are_one_process(two, what, name):
    assert max(rank[what][name] for rank in two) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "name"), [(what, one) for what in CONTROLS for one in CONTROLS[what]]
)
def test_what_is_wrong_is_found(two, what, name):
    assert min(rank[what][f"control, {name}"] for rank in two) >= WRONG


@pytest.mark.slow
def test_every_number_of_two_ranks_has_a_test(two):
    for rank in two:
        for what, found in rank.items():
            assert found.keys() == {*NAMES[what], *(f"control, {one}" for one in CONTROLS[what])}


def test_the_callback_counts_the_batch_that_ranks_share():
    counts = Counts()
    counts(shard_row(PackedSequence.from_lengths([3, 5, 1]), 0, 2), (1, 5), None)
    facts = counts.take()
    assert (facts["packfree/documents_per_row"], facts["packfree/real_token_share"]) == (3, 1)


def test_labels_that_the_trainer_smooths_are_refused():
    """Its loss would read the logits of the whole row."""
    row = PackedSequence.from_lengths([3, 5])
    with pytest.raises(UnsupportedInput, match="label_smoothing_factor for a row that 2 ranks"):
        SmoothedLabels()(shard_row(row, 0, 2), (1, 8), None)
    for whole in (None, row, shard_row(row, 0, 1)):
        SmoothedLabels()(whole, (1, 8), None)


def test_a_head_that_is_kept_changes_nothing(group, tmp_path):
    build("qwen3_5").save_pretrained(tmp_path)
    kept = MTPOptions(train=False, checkpoint=str(tmp_path))
    one, many = tiny(), tiny()
    apply_patches(one, mtp=kept)
    apply_patches(many, mtp=kept, context_parallel=group)
    batch = batch_of([5, 9, 3], 0)
    (wanted, wanted_gradients), (found, found_gradients) = step(one, batch), step(many, batch)
    assert (
        relative_rms(found.loss, wanted.loss) == 0
        and worst(found_gradients, wanted_gradients) <= 1e-6
    )
    assert sum(name.startswith("mtp.") for name in many.state_dict()) == 15


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (
            {"mm_encoder_outputs": {"image": object()}},
            "mm_encoder_outputs under context parallelism, made for the media",
        ),
        (
            {"image_cu_seqlens": torch.tensor([0, 4])},
            "image_cu_seqlens under context parallelism, made for the media",
        ),
        (
            {"input_ids": None, "inputs_embeds": torch.zeros(1, 17, 64)},
            "media with inputs_embeds under context parallelism",
        ),
    ],
)
def test_media_that_no_rank_can_take_its_part_of_are_refused(group, changed, found):
    model = apply_patches(tiny_vision("qwen3_5"), context_parallel=group)
    with pytest.raises(UnsupportedInput, match=f"found {found}"):
        model(
            **packed_batch("4 rows", [document(3, image(4, 4), 2), document(6)], model.model).inputs
            | changed,
            **PIXELS,
        )
