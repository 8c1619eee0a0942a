"""Omni's documents with audio, in packed rows and padded batches: what each is alone, in values, gradients and influence."""

from __future__ import annotations

import pytest
import torch

from hf_packfree import apply_patches, patch_report, remove_patches, verify_packing
from tests.models.omni import FORMS, alone, arguments, batch, case_of, errors, leaves_of, step
from tests.support import CONTROL, GRADIENT_TOL, LOGIT_TOL, recorded
from tests.vision import tiny_vision

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module", params=["qwen3_omni_moe"])
def case(request):
    return case_of(request.param)


@pytest.mark.parametrize("form", FORMS)
def test_every_document_is_what_it_is_alone(case, form, record_property):
    _, model, given, wanted = case
    logits, grads = recorded(record_property, errors(step(model, given, form), wanted), model, "media")
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


@pytest.mark.parametrize("form", ["offsets", "4 rows", "padded"])
def test_with_one_audio_each_alone_is_upstreams(case, form):
    plain, model, given, _ = case
    given = given[:-1]
    logits, grads = errors(step(model, given, form), alone(plain, given))
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


def test_the_control_leaks(case):
    plain, _, given, wanted = case
    logits, grads = errors(step(plain, given, "4 rows"), wanted)
    assert logits >= CONTROL * LOGIT_TOL and grads >= CONTROL * GRADIENT_TOL


@pytest.mark.parametrize("form", ["offsets", "padded"])
def test_an_audio_influences_its_document_alone(case, form):
    _, model, given, _ = case
    inputs, places = batch(given, form, model)
    leaves = leaves_of(given)
    logits = model(**inputs, **arguments(given, leaves), use_cache=False).logits
    logits[places[3][0], places[3][1]].pow(2).sum().backward()
    assert [bool(x.grad is not None and x.grad.any()) for x in leaves["audios"]] == [False, True, False, False, False]
    with torch.no_grad():
        before = model(**inputs, **arguments(given, leaves), use_cache=False).logits
        leaves["audios"][1].add_(1)
        after = model(**inputs, **arguments(given, leaves), use_cache=False).logits
    same = [torch.equal(before[number, tokens], after[number, tokens]) for number, tokens in places]
    assert same == [number != 3 for number in range(len(given))]


def test_report_removal_and_verification(case):
    model = tiny_vision("qwen3_omni_moe")
    classes = [type(module) for module in model.modules()]
    swaps = patch_report(apply_patches(model)).swaps
    assert [swaps[f"Qwen3OmniMoe{name}"] for name in ("AudioEncoder", "AudioAttention", "VisionEncoder")] == [1, 2, 1]
    assert not verify_packing(model.eval()).failures()
    assert [type(module) for module in remove_patches(model).modules()] == classes
