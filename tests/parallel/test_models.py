"""Rows of models with more than a text model and its head, shared by two ranks, are what they are in one process."""

from __future__ import annotations

import pytest

from hf_packfree import apply_patches
from hf_packfree.mtp import MTPOptions
from tests.mtp.heads import build
from tests.parallel.model_ranks import media, multi_token
from tests.parallel.ranks import batch_of, step, worst
from tests.ranks import two_ranks
from tests.support import relative_rms, tiny

EXACT, WRONG = 1e-10, 1e-2


@pytest.mark.slow
def test_multi_token_prediction(tmp_path):
    for found in two_ranks(multi_token, [()], tmp_path)[0]:
        controls = {name: error for name, error in found.items() if name.startswith("control")}
        assert len(controls) == 2 and all(error >= WRONG for error in controls.values()), controls
        assert {name: error for name, error in found.items() if name not in controls and not error <= EXACT} == {}
        assert len(found) == 44


def test_a_head_that_is_kept_changes_nothing(group, tmp_path):
    build("qwen3_5").save_pretrained(tmp_path)
    kept = MTPOptions(train=False, checkpoint=str(tmp_path))
    one, many = tiny(), tiny()
    apply_patches(one, mtp=kept)
    apply_patches(many, mtp=kept, context_parallel=group)
    batch = batch_of([5, 9, 3], 0)
    (wanted, wanted_gradients), (found, found_gradients) = step(one, batch), step(many, batch)
    assert relative_rms(found.loss, wanted.loss) == 0 and worst(found_gradients, wanted_gradients) <= 1e-6
    assert sum(name.startswith("mtp.") for name in many.state_dict()) == 15


@pytest.mark.slow
def test_media(tmp_path):
    families = ["qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_omni_moe"]
    for found in two_ranks(media, [(families,)], tmp_path)[0]:
        assert found.pop("control, the first features of an image") >= WRONG
        assert {name: error for name, error in found.items() if not error <= EXACT} == {}
        assert len(found) == 40
