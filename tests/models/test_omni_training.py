"""How rows with audio are trained: checkpointing, adapters, frozen towers, eager attention,
losses; and generation after it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from hf_packfree import apply_patches
from tests.models.omni import (
    AUDIO,
    AUDIO_END,
    alone,
    arguments,
    case_of,
    errors,
    leaves_of,
    padded,
    row,
    source,
    step,
)
from tests.support import GRADIENT_TOL, LOGIT_TOL, checkpoint_layers, recorded, relative_rms
from tests.vision import IMAGE, tiny_vision

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module", params=["qwen3_omni_moe"])
def case(request):
    return case_of(request.param)


def checkpointed(model, reentrant):
    """Also the towers: recomputing finds the record, the grids' mark and the audios' widths
    again.
    """
    checkpoint_layers(model, reentrant)
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("form", ["offsets", "padded"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(case, reentrant, form):
    _, model, given, wanted = case
    logits, grads = errors(step(checkpointed(copy.deepcopy(model), reentrant), given, form), wanted)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


@pytest.mark.parametrize("form", ["offsets", "padded"])
@pytest.mark.parametrize("frozen", ["audio_tower", "visual"])
def test_frozen_towers(case, frozen, form):
    _, patched, given, (outputs, grads) = case
    model = copy.deepcopy(patched)
    getattr(source(model), frozen).requires_grad_(False)
    kept = {name: grad for name, grad in grads.items() if f"{frozen}." not in name}
    found = step(model, given, form)
    assert found[1].keys() == kept.keys()
    logits, grads = errors(found, (outputs, kept))
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


# PEFT uses names that transformers deprecates
@pytest.mark.filterwarnings("default")
def test_lora_on_text_and_towers(case):
    peft = pytest.importorskip("peft")
    plain, _, given, _ = case
    targets = ["qkv", "proj", "q_proj", "out_proj", "o_proj", "linear_fc1", "fc1"]
    torch.manual_seed(3)
    model = peft.get_peft_model(
        copy.deepcopy(plain), peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
    )
    patched, given = apply_patches(copy.deepcopy(model)), given[:-1]
    wanted = alone(model, given)
    trained = [name for name in wanted[1] if "lora" in name]
    assert all(
        any(part in name for name in trained) for part in ("audio_tower", "visual", "layers")
    )
    for form in ("offsets", "padded"):
        logits, grads = errors(step(patched, given, form), wanted)
        assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


@pytest.mark.parametrize("form", ["offsets", "4 rows", "padded"])
def test_eager_attention(case, form, record_property):
    plain, _, given, wanted = case
    model = tiny_vision("qwen3_omni_moe", attention="eager")
    model.load_state_dict(plain.state_dict())
    logits, grads = recorded(
        record_property, errors(step(apply_patches(model), given, form), wanted), model, "media"
    )
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


def call(model, given, form, tail=0, **more):
    """The output for a batch with labels: none for media, padding and first tokens; `tail` pad
    tokens behind the row.
    """
    inputs, places = padded(given) if form == "padded" else row(given, "offsets", model)
    ids = inputs["input_ids"]
    labels = torch.full_like(ids, -100)
    for number, tokens in places:
        labels[number, tokens[1:]] = ids[number, tokens[1:]]
    inputs["labels"] = labels.masked_fill(
        (ids >= AUDIO) & (ids != AUDIO_END) | (ids >= IMAGE), -100
    )
    if form == "indexed mask":
        lengths = inputs["cu_seq_lens_q"].diff()
        number = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)[None]
        inputs = {"input_ids": ids, "labels": inputs["labels"], "attention_mask": number}
    if tail:
        inputs |= {
            "input_ids": F.pad(ids, (0, tail)),
            "labels": F.pad(inputs["labels"], (0, tail), value=-100),
        }
        offsets = torch.cat(
            (inputs["cu_seq_lens_q"], ids.shape[1] + torch.arange(1, tail + 1).int())
        )
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    media = arguments(
        given, {kind: [x.detach() for x in xs] for kind, xs in leaves_of(given).items()}
    )
    return model(**inputs, **media, use_cache=False, **more), inputs["labels"]


@pytest.mark.parametrize("form", ["offsets", "padded", "indexed mask", "tail"])
def test_loss(case, form):
    """The mean over tokens with a label, each document's logits being those that it has alone."""
    _, model, given, (logits, _) = case
    found, labels = call(model, given, form, 5 if form == "tail" else 0)
    targets = labels[labels != -100]
    predicted = [part[:-1][wanted[1:] != -100] for part, wanted in zip(logits, label_parts(given))]
    wanted = F.cross_entropy(torch.cat(predicted), targets)
    assert relative_rms(found.loss, wanted) <= LOGIT_TOL


def label_parts(given):
    for one in given:
        ids = torch.tensor(one.ids)
        yield ids.masked_fill((ids >= AUDIO) & (ids != AUDIO_END) | (ids >= IMAGE), -100)


@pytest.mark.parametrize("form", ["offsets", "padded", "indexed mask", "tail"])
def test_experts_count_real_tokens_alone(case, form):
    """One audio, of more than a chunk: what the unpatched model makes of the padded batch is right.

    Older releases of the thinker know no `num_items_in_batch`, patched or not.
    """
    more = {"output_router_logits": True, "num_items_in_batch": 211}
    plain, model, given, _ = case
    given = [*given[:3], *given[5:7]]
    wanted = call(plain, given, "padded", **more)[0]
    found = call(model, given, form, 5 if form == "tail" else 0, **more)[0]
    assert relative_rms(found.aux_loss, wanted.aux_loss) <= LOGIT_TOL
    assert relative_rms(found.loss, wanted.loss) <= LOGIT_TOL


def test_generation_is_the_same_before_and_after_a_packed_step(case):
    """A step leaves `rope_deltas` alone, which decoding reads."""
    _, model, given, _ = case
    prompt = given[1:2]
    inputs = padded(prompt)[0] | arguments(
        prompt, {kind: [x.detach() for x in xs] for kind, xs in leaves_of(prompt).items()}
    )

    def generate():
        settings = {
            "max_new_tokens": 4,
            "do_sample": False,
            "pad_token_id": 0,
            "output_scores": True,
        }
        with torch.no_grad():
            found = model.eval().generate(**inputs, **settings, return_dict_in_generate=True)
        return found.sequences, torch.stack(found.scores)

    before = generate()
    deltas = source(model).rope_deltas.clone()
    call(model.train(), given, "offsets")
    assert torch.equal(source(model).rope_deltas, deltas)
    assert all(torch.equal(one, other) for one, other in zip(before, generate(), strict=True))
    model.train()
