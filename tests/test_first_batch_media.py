"""The Trainer's first batch with media: a tower that mixes documents stops training, whichever
way it looks.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree import apply_patches
from hf_packfree.errors import LeakDetected
from hf_packfree.models.call import UNPACKED
from hf_packfree.trainer.training_run import TrainingRun, outermost
from hf_packfree.verify.first_batch import first_batch_influence
from tests.models import omni
from tests.vision import (
    document,
    documents,
    image,
    media_arguments,
    packed_batch,
    padded_batch,
    tiny_vision,
)

pytestmark = pytest.mark.compat(kernels=False)


@pytest.fixture
def model():
    return apply_patches(tiny_vision("qwen3_5"))


def arguments(batch):
    return {**batch.inputs, **media_arguments(batch.documents, batch.pixels)}


@pytest.mark.parametrize("form", ["4 rows", "offsets, types", "padded"])
def test_nothing_is_noticed(model, form):
    given = documents(model.model)
    batch = (
        padded_batch("left", given) if form == "padded" else packed_batch(form, given, model.model)
    )
    assert first_batch_influence(model.model, (), arguments(batch)) == 0.0


@pytest.mark.parametrize("order", [1, -1], ids=["later from earlier", "earlier from later"])
def test_pixels_alone_are_seen_in_both_directions(model, order):
    """Each patch is mixed with its neighbour's, behind a document without media as before one."""
    given = [document(5, image(4, 4), 3, seed=1), document(4, image(4, 6), 3, seed=2)]
    inputs = arguments(packed_batch("offsets, types", given, model.model))
    model.model.visual.register_forward_pre_hook(
        lambda tower, args: (args[0] + args[0].roll(order * 16, 0), *args[1:])
    )
    with pytest.raises(LeakDetected, match="first batch reacting to each other's tokens or media"):
        first_batch_influence(model.model, (), inputs)


def test_the_callback_watches_the_tower(model, tmp_path):
    assert outermost(model, [model.model.language_model]) == [model.model]
    calls, forward = [], model.model.forward
    model.model.forward = lambda **inputs: calls.append(None) or forward(**inputs)
    (check,) = TrainingRun(model, verify=True).checks
    ids = torch.arange(2, 11)[None]
    check(model.model, (), {"input_ids": ids, "use_cache": False})
    check(model.model, (), {"input_ids": ids * 0, "attention_mask": ids * 0, "use_cache": False})
    assert len(calls) == 2, (
        "a row of one document, and one of padding: the first packed one is checked"
    )
    check(model.model, (), {"input_ids": ids, "packed_sequence": UNPACKED})
    assert len(calls) == 2, "read by the head already"
    given = packed_batch(
        "offsets, types", [document(5, seed=1), document(4, image(4, 4), seed=2)], model.model
    )
    check(model.model, (), arguments(given))
    check(model.model, (), arguments(given))
    assert len(calls) == 6


@pytest.mark.parametrize("form", ["offsets", "padded"])
@pytest.mark.parametrize(
    "order", [0, 1, -1], ids=["apart", "later from earlier", "earlier from later"]
)
def test_sounds_alone_are_seen_in_both_directions(form, order):
    """In releases, too, in which the class with the head holds the towers."""
    model = apply_patches(tiny_vision("qwen3_omni_moe"))
    given = [omni.Document().text(4).audio(130).text(3), omni.Document().text(2).audio(130).text(7)]
    inputs, _ = omni.padded(given) if form == "padded" else omni.row(given, form, model)
    inputs |= omni.arguments(
        given, {kind: [x.detach() for x in xs] for kind, xs in omni.leaves_of(given).items()}
    )
    (module,) = outermost(model, [])
    assert module is omni.source(model)
    if hasattr(module, "lm_head"):
        padding = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) == 0
        inputs["labels"] = inputs["input_ids"].masked_fill(padding, -100)
    if not order:
        assert first_batch_influence(module, (), inputs) == 0.0
        return
    module.audio_tower.register_forward_pre_hook(
        lambda tower, args: (args[0] + args[0].roll(order * 130, -1), *args[1:])
    )
    with pytest.raises(LeakDetected, match="first batch reacting to each other's tokens or media"):
        first_batch_influence(module, (), inputs)
