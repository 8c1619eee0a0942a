"""Shapes, lengths and names that the GPU scripts stand on; runs anywhere."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.layers import products
from tests.benchmarks.media import sixteen_documents
from tests.benchmarks.shapes import (
    SHAPES,
    TOKENS,
    batch_lengths,
    configuration,
    fixed_lengths,
    log_normal_lengths,
    special_tokens,
)
from tests.benchmarks.workloads import groups


def test_lengths():
    lengths = log_normal_lengths(TOKENS)
    assert (
        sum(lengths) == TOKENS
        and len(lengths) == 58
        and max(lengths) <= 2048
        and min(lengths[:-1]) >= 32
    )
    assert fixed_lengths(1000, 300) == [300, 300, 300, 100] and fixed_lengths(64, 64) == [64]
    rows = batch_lengths(8, 2048, 0.34)
    assert len(rows) == 8 and max(rows) == 2048 and min(rows) >= 1
    assert sum(rows) / (8 * 2048) == pytest.approx(0.34, abs=0.005)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_three_linear_layers_to_one_full(name):
    config = configuration(SHAPES[name]).get_text_config()
    assert config.layer_types.count("linear_attention") == 3 * config.layer_types.count(
        "full_attention"
    )


def test_documents_with_images():
    """What the first measurement of these models had: of a padded batch 34% are real."""
    load = sixteen_documents("padded")
    facts = load.facts()
    assert (facts["documents"], facts["real_tokens"], facts["images"], facts["patches"]) == (
        16,
        11108,
        29,
        16288,
    )
    batch = load.inputs(1000, "cpu")
    special = special_tokens(1000)
    assert batch["pixel_values"].shape == (16288, 1536) and batch["attention_mask"].sum() == 11108
    assert int((batch["input_ids"] == special["image_token_id"]).sum()) == 16288 // 4
    row = sixteen_documents("offsets").inputs(1000, "cpu")
    assert torch.equal(row["input_ids"][0], batch["input_ids"][batch["attention_mask"].bool()])


@pytest.mark.parametrize("name, tera", [("2b", 270), ("9b", 340), ("moe", 95)])
def test_matrix_products(name, tera):
    """Six operations per token, weight and direction: forward, and two gradients."""
    chosen = SHAPES[name].sizes.get("num_experts_per_tok", 1)
    operations = sum(
        6 * TOKENS * outputs * inputs * count * (chosen if experts > 1 else 1)
        for (experts, outputs, inputs), count in products(SHAPES[name]).items()
    )
    assert operations / 1e12 == pytest.approx(tera, rel=0.01)


def test_rows_have_names_of_their_own():
    names = [row[:2] for group in groups() for row in group.rows]
    assert len(names) == len(set(names))
    assert {row[0] for group in groups() for row in group.rows} >= {
        "2b-32k-packed",
        "2b-8x2048-padded",
        "moe-32k-packed",
    }
    sizes = (1024, 2048, 4096, 8192, TOKENS, 2 * TOKENS, 4 * TOKENS, 5567, 11108)
    assert all(row[2].real_tokens in sizes for group in groups() for row in group.rows)
