"""Random documents with random media in random forms, against each document alone."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest

from hf_packfree import apply_patches
from tests.support import GRADIENT_TOL, LOGIT_TOL, errors
from tests.vision import (
    END,
    FORMS,
    Document,
    MediaBatch,
    alone,
    document,
    image,
    packed_batch,
    padded_batch,
    random_weights,
    rows_batch,
    run,
    tiny_vision,
    video,
)


@pytest.fixture(scope="module")
def models():
    unpatched = tiny_vision("qwen3_5")
    return copy.deepcopy(unpatched).double(), apply_patches(unpatched)


def any_document(choose: random.Random) -> Document:
    """Up to four parts of text, images and videos; one that ends in media may lack the token
    behind them.
    """
    kinds = [
        lambda: choose.randint(1, 30),
        lambda: image(2 * choose.randint(1, 4), 2 * choose.randint(1, 4)),
        lambda: video(choose.randint(1, 3), 2 * choose.randint(1, 3), 2 * choose.randint(1, 3)),
    ]
    parts = [choose.choice(kinds)() for _ in range(choose.randint(1, 4))]
    made = document(*parts, seed=choose.randint(0, 9999))
    return (
        replace(made, ids=made.ids[:-1]) if made.ids[-1] == END and choose.random() < 0.3 else made
    )


def any_batch(choose: random.Random, given: list[Document], rope) -> MediaBatch:
    form = choose.choice([*FORMS, "right", "left", "rows"])
    if form in ("right", "left"):
        return padded_batch(form, given)
    return rows_batch(given, rope) if form == "rows" else packed_batch(form, given, rope)


@pytest.mark.parametrize("seed", range(12))
def test_any_row_is_exact(models, seed):
    # pictures' gradients in fp32 are up to 6e-05 from these, of documents alone, too
    exact, model = models
    choose = random.Random(seed)
    given = [any_document(choose) for _ in range(choose.randint(2, 6))]
    weights = random_weights(given)
    found = run(model, any_batch(choose, given, model.model), weights)
    logits, gradients = errors(found, alone(exact, given, [each.double() for each in weights]))
    assert logits <= LOGIT_TOL
    assert gradients <= GRADIENT_TOL
