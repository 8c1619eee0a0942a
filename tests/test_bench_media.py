"""The benchmark of models that take images: the same documents and images in every batch."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.bench import BenchOptions, run_bench
from hf_packfree.bench.lengths import documents_of, illustrated, packed_media, padded_media
from hf_packfree.bench.measure import Floor
from tests.vision import IMAGE, START, tiny_vision

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return tiny_vision("qwen3_5")


def test_both_batches_hold_the_same_documents_images_and_targets(model):
    given = illustrated(documents_of((60, 4, 25), 128, seed=1), model.model, seed=1)
    assert given.grids.tolist() == [[1, 6, 8], [1, 4, 4]] and given.pixels.shape == (48 + 16, 96)
    rows, row = (
        make(given, model.model, CPU, torch.float32) for make in (padded_media, packed_media)
    )
    assert torch.equal(rows["input_ids"][rows["attention_mask"].bool()], row["input_ids"][0])
    assert torch.equal(rows["pixel_values"], row["pixel_values"]) and torch.equal(
        rows["image_grid_thw"], row["image_grid_thw"]
    )
    assert (
        int((row["input_ids"] == IMAGE).sum()) == 12 + 4
        and int((row["input_ids"] == START).sum()) == 2
    )
    targets = [int((batch["labels"][:, 1:] != -100).sum()) for batch in (rows, row)]
    assert targets[0] == targets[1] == 60 + 4 + 25 - 3 - 16
    assert row["position_ids"].shape == (4, 1, 89) and row["position_ids"][
        0, 0, [0, 60, 64]
    ].tolist() == [0, 0, 0]
    bare = packed_media(given, model.model, CPU, torch.float32, boundaries=False)
    assert "cu_seq_lens_q" in row and not {"cu_seq_lens_q", "seq_idx"} & set(bare)


@pytest.mark.slow
def test_a_step_of_every_candidate(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    report = run_bench(BenchOptions(str(tmp_path), (40, 4, 20), rounds=1, threads=1))
    assert report.complete and report.images == 2 and report.patches == 4 * (8 + 4)
    assert [row.computed_tokens for row in report.candidates] == [120, 64, 64, 64]
    assert "3 documents with 2 images" in str(report) and report.as_dict()["images"] == 2


def test_the_floor_leaves_towers_out(model):
    linears = [
        m
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and "visual" not in name
    ]
    floor = Floor(model, 10)
    floor._once = lambda fan_in, fan_out: fan_in * fan_out
    assert floor.seconds() == sum(linear.weight.numel() for linear in linears)
