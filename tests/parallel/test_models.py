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
from hf_packfree.trainer.training_run import Counts
from tests.mtp.heads import build
from tests.parallel.model_ranks import measured
from tests.parallel.ranks import batch_of, step, worst
from tests.ranks import two_ranks
from tests.support import relative_rms, tiny
from tests.vision import PATCH, document, image, packed_batch, tiny_vision

EXACT, WRONG = 1e-10, 1e-2
FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_omni_moe"]
PIXELS = {"pixel_values": torch.zeros(16, PATCH), "image_grid_thw": torch.tensor([[1, 4, 4]])}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes measured, in fp64."""
    return two_ranks(measured, [(FAMILIES,)], tmp_path_factory.mktemp("ranks"))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "cases", "controls"),
    [("multi-token prediction", 44, 2), ("media", 39, 1), ("verification", 12, 4)],
)
def test_two_ranks_are_one_process(two, what, cases, controls):
    for found in (rank[what] for rank in two):
        wrong = {name: error for name, error in found.items() if name.startswith("control")}
        assert len(wrong) == controls and all(error >= WRONG for error in wrong.values()), wrong
        assert {
            name: error for name, error in found.items() if name not in wrong and not error <= EXACT
        } == {}
        assert len(found) >= cases


def test_the_callback_counts_the_batch_that_ranks_share():
    counts = Counts()
    counts(shard_row(PackedSequence.from_lengths([3, 5, 1]), 0, 2), (1, 5), None)
    facts = counts.take()
    assert (facts["packfree/documents_per_row"], facts["packfree/real_token_share"]) == (3, 1)


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
