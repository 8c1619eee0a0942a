"""Omni's documents with audio, in packed rows and padded batches: what each is alone, in values,
gradients and influence.
"""

from __future__ import annotations

import copy

import pytest
import torch

from hf_packfree import apply_patches, patch_report, remove_patches, verify_packing
from tests.models.omni import (
    FORMS,
    Document,
    alone,
    arguments,
    batch,
    case_of,
    errors,
    leaves_of,
    step,
)
from tests.support import CONTROL, GRADIENT_TOL, LOGIT_TOL, recorded, relative_rms
from tests.vision import tiny_vision

pytestmark = pytest.mark.compat


NEEDS_TWO = ("rows",)


def sounding():
    return Document().text(6).video_with_sound(4, 4, 4, 130).text(4)


@pytest.fixture(scope="module", params=["qwen3_omni_moe"])
def case(request):
    return case_of(request.param)


@pytest.mark.parametrize("form", FORMS)
def test_every_document_is_what_it_is_alone(case, form, record_property):
    _, model, given, wanted = case
    logits, grads = recorded(
        record_property, errors(step(model, given, form), wanted), model, "media"
    )
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


@pytest.mark.parametrize("form", ["offsets", "4 rows", "padded"])
def test_with_one_audio_each_alone_is_upstreams(case, form):
    plain, model, given, _ = case
    given = given[:-1]
    logits, grads = errors(step(model, given, form), alone(plain, given))
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in NEEDS_TWO])
def test_a_sounding_document_without_neighbours_needs_no_flag_either(case, form):
    plain, model, _, _ = case
    given = [sounding()]
    wanted = alone(plain, given)
    logits, grads = errors(step(model, given, form), wanted)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)
    unread = errors(step(plain, given, "padded"), wanted)
    assert unread[0] >= CONTROL * LOGIT_TOL and unread[1] >= CONTROL * GRADIENT_TOL


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("documents", [1, 2])
def test_rows_of_one_document_need_no_mask(case, documents, training):
    """Upstream counts every token without it."""
    plain, model, given, wanted = case
    media = arguments(given[2:3] * documents, leaves_of(given[2:3] * documents))
    ids = torch.tensor([given[2].ids] * documents)
    for one in (plain, model):
        one.train(training)
    found, unread = (one(input_ids=ids, **media).logits for one in (model, plain))
    for one in (plain, model):
        one.train()
    for row in range(documents):
        assert relative_rms(found[row], wanted[0][2]) <= LOGIT_TOL
        assert relative_rms(unread[row], wanted[0][2]) >= CONTROL * LOGIT_TOL


@pytest.mark.parametrize("form", ["offsets", "seq_idx", "additive mask"])
def test_packing_keywords_mean_the_same_in_evaluation_by_default(case, form):
    """Where upstream would build a cache for one document, and builds none for several."""
    plain, model = (copy.deepcopy(one).eval() for one in case[:2])
    given = [sounding()]
    media = arguments(given, leaves_of(given))
    with torch.no_grad():
        of_stock = batch(given, "padded", plain)[0] | {"use_audio_in_video": True}
        wanted = plain(**of_stock, **media).logits[0]
        found = model(**batch(given, form, model)[0], **media).logits[0]
    assert relative_rms(found, wanted) <= LOGIT_TOL


def test_a_sounding_document_in_a_stock_call_has_upstreams_flag(case):
    plain, model = (copy.deepcopy(one).eval() for one in case[:2])
    given = [sounding()]
    with torch.no_grad():
        inputs = batch(given, "padded", model)[0] | arguments(given, leaves_of(given))
        for cached in ({}, {"use_cache": True}):
            assert torch.equal(model(**inputs, **cached).logits, plain(**inputs, **cached).logits)
    # upstream fails where it generates placeholders without media
    inputs |= {"max_new_tokens": 4, "suppress_tokens": list(range(110, 128))}
    for flag in ({}, {"use_audio_in_video": True}):
        for cached in (True, False):
            calls = [(one, inputs | flag | {"use_cache": cached}) for one in (model, plain)]
            found, wanted = (
                one.generate(**call, output_logits=True, return_dict_in_generate=True).logits
                for one, call in calls
            )
            assert all(map(torch.equal, found, wanted)), (flag, cached)


@pytest.mark.parametrize("cached", [True, False])
def test_generation_where_rows_of_one_document_run_here(case, cached):
    """`generate()` runs the vision tower itself, and passes what it gives without its sizes."""
    plain = case[0]
    native = apply_patches(copy.deepcopy(plain), unpacked="native")
    inputs = batch(case[2][2:3], "padded", plain)[0]
    media = arguments(case[2][2:3], leaves_of(case[2][2:3]))
    # upstream fails where it generates placeholders without media
    settings = {"max_new_tokens": 3, "suppress_tokens": list(range(110, 128)), "use_cache": cached}
    found, wanted = (
        one.generate(
            **inputs, **media, **settings, output_logits=True, return_dict_in_generate=True
        ).logits
        for one in (native, plain)
    )
    assert relative_rms(torch.stack(found), torch.stack(wanted)) <= LOGIT_TOL


def test_videos_with_and_without_sound_are_refused_without_neighbours_too(case):
    given = [sounding().video(2, 4, 4)]
    inputs = batch(given, "padded", case[1])[0] | arguments(given, leaves_of(given))
    with pytest.raises(ValueError, match="1 videos with their sound and 1 without in one document"):
        case[1](**inputs, use_cache=False)


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
    assert [bool(x.grad is not None and x.grad.any()) for x in leaves["audios"]] == [
        False,
        True,
        False,
        False,
        False,
    ]
    with torch.no_grad():
        before = model(**inputs, **arguments(given, leaves), use_cache=False).logits
        leaves["audios"][1].add_(1)
        after = model(**inputs, **arguments(given, leaves), use_cache=False).logits
    same = [torch.equal(before[number, tokens], after[number, tokens]) for number, tokens in places]
    assert same == [number != 3 for number in range(len(given))]


def refused_row(case, **change):
    """What a row of all documents is called with."""
    _, model, given, _ = case
    inputs, _ = batch(given, change.pop("form", "offsets"), model)
    media = arguments(
        given, {kind: [x.detach() for x in xs] for kind, xs in leaves_of(given).items()}
    )
    return {**inputs, **media, **change}


SENTENCES = {
    "no sounds": "98 audio placeholders in a packed row without input_features; wanted the audios' "
    "features too; use hf_",
    "no videos": "24 video placeholders in a packed row without pixel_values_videos; wanted the "
    "videos' features too",
    "no lengths": "audio features without feature_attention_mask; wanted .* pass "
    "feature_attention_mask too",
    "a shorter sound": "found 43 audio placeholders in document 1 .* where audio 0 is the first; "
    "wanted .* pass the media",
    "a cut": "boundary at token 46, inside audio 0; wanted boundaries between media alone; build "
    "the boundaries",
    "one flag": "use_audio_in_video=True for a row of 1 videos with their sound and 1 without; .* "
    "leave it out",
    "half precision": "position_ids of torch.bfloat16, which counts to 256 only; wanted integers, "
    "or torch.float32",
    "three rows": "boundaries they cannot show; wanted the boundaries too; put the text positions",
}


@pytest.mark.parametrize("what", SENTENCES)
def test_what_cannot_be_exact_is_refused_with_what_mends_it(case, what):
    row = refused_row(
        case, form="4 rows" if what in ("half precision", "three rows") else "offsets"
    )
    if what == "no sounds":
        del row["input_features"], row["feature_attention_mask"]
    elif what == "no videos":
        del row["pixel_values_videos"], row["video_grid_thw"]
    elif what == "no lengths":
        del row["feature_attention_mask"]
    elif what == "a shorter sound":
        row["feature_attention_mask"][0, 250:] = 0
    elif what == "a cut":
        row["cu_seq_lens_q"] = row["cu_seq_lens_k"] = row["cu_seq_lens_q"].clone()
        row["cu_seq_lens_q"][2] = 46
        row |= dict.fromkeys(("max_length_q", "max_length_k"), row["input_ids"].shape[1])
    elif what == "one flag":
        row["use_audio_in_video"] = True
    elif what == "half precision":
        row["position_ids"] = row["position_ids"].bfloat16()
    else:
        row["position_ids"] = row["position_ids"][1:]
    with pytest.raises(ValueError, match=SENTENCES[what]):
        case[1](**row, use_cache=False)


def test_report_removal_and_verification(case):
    model = tiny_vision("qwen3_omni_moe")
    classes = [type(module) for module in model.modules()]
    swaps = patch_report(apply_patches(model)).swaps
    assert [
        swaps[f"Qwen3OmniMoe{name}"] for name in ("AudioEncoder", "AudioAttention", "VisionEncoder")
    ] == [1, 2, 1]
    assert not verify_packing(model.eval()).failures()
    assert [type(module) for module in remove_patches(model).modules()] == classes
