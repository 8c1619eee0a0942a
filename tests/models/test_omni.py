"""Omni's documents with audio, in packed rows and padded batches: what each is alone, in values, gradients and influence."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch

from hf_packfree import apply_patches, patch_report, remove_patches, verify_packing
from hf_packfree.models import compat
from hf_packfree.models.mrope import RowMedia, audio_tokens, document_positions
from tests.support import CONTROL, GRADIENT_TOL, LOGIT_TOL, gradients, recorded, relative_rms
from tests.vision import END, IMAGE, PATCH, START, VIDEO, tiny_vision

pytestmark = pytest.mark.compat
AUDIO, AUDIO_START, AUDIO_END, MEL = 121, 122, 123, 16
FEATURES = ("pixel_values", "pixel_values_videos", "input_features")


@dataclass
class Document:
    """One document: ids, and the media in the order of their placeholders; audio is [mel bins, frames]."""

    ids: list[int] = field(default_factory=list)
    images: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    videos: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    audios: list[torch.Tensor] = field(default_factory=list)
    sounding: bool = False

    def text(self, count):
        generator = torch.Generator().manual_seed(len(self.ids) + count)
        self.ids += torch.randint(2, 120, (count,), generator=generator).tolist()
        return self

    def image(self, height, width):
        self.images.append(([1, height, width], _noise(height * width, PATCH)))
        self.ids += [START, *[IMAGE] * (height * width // 4), END]
        return self

    def video(self, frames, height, width, seconds=1.5):
        self._video(frames, height, width, seconds)
        self.ids += [START, *[VIDEO] * (frames * height * width // 4), END]
        return self

    def audio(self, frames):
        self.ids += [AUDIO_START, *[AUDIO] * self._audio(frames), AUDIO_END]
        return self

    def video_with_sound(self, frames, height, width, sound):
        self._video(frames, height, width, 1.0)
        self.sounding = True
        run = [VIDEO] * (frames * height * width // 4) + [AUDIO] * self._audio(sound)
        self.ids += [START, AUDIO_START, *run, AUDIO_END, END]
        return self

    def _video(self, frames, height, width, seconds):
        self.videos.append(([frames, height, width], _noise(frames * height * width, PATCH)))
        self.seconds.append(seconds)

    def _audio(self, frames):
        self.audios.append(_noise(MEL, frames))
        return int(audio_tokens(torch.tensor([frames])))


def _noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def documents():
    return [
        Document().text(37),
        Document().text(3).audio(330).text(5),
        Document().text(4).image(4, 6).text(3),
        Document().text(2).audio(60).text(9),
        Document().text(6).video_with_sound(4, 4, 4, 230).text(4),
        Document().text(5).video(2, 4, 4).text(6),
        Document().text(1),
        Document().text(3).audio(100).text(2).image(4, 4).audio(30).text(7),
    ]


def arguments(given, leaves):
    """The media of these documents as one call's arguments, with `leaves` in the place of their numbers."""
    found = {}
    for name, kind in (("image", "images"), ("video", "videos")):
        grids = [grid for one in given for grid, _ in getattr(one, kind)]
        if grids:
            found |= {f"{name}_grid_thw": torch.tensor(grids)}
            found["pixel_values" if name == "image" else "pixel_values_videos"] = torch.cat(leaves[kind])
    if seconds := [second for one in given for second in one.seconds]:
        found["video_second_per_grid"] = torch.tensor(seconds)
    if sounds := leaves["audios"]:
        longest = max(x.shape[1] for x in sounds)
        padded = [torch.nn.functional.pad(x, (0, longest - x.shape[1])) for x in sounds]
        mask = [torch.arange(longest) < x.shape[1] for x in sounds]
        found |= {"input_features": torch.stack(padded), "feature_attention_mask": torch.stack(mask).long()}
    return found


def leaves_of(given):
    return {
        "images": [x.clone().requires_grad_() for one in given for _, x in one.images],
        "videos": [x.clone().requires_grad_() for one in given for _, x in one.videos],
        "audios": [x.clone().requires_grad_() for one in given for x in one.audios],
    }


def row(given, form, model):
    ids = torch.tensor([sum((one.ids for one in given), [])])
    lengths = torch.tensor([len(one.ids) for one in given])
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    longest = int(lengths.max())
    varlen = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}
    places = [(0, part) for part in torch.arange(ids.shape[1]).split(lengths.tolist())]
    if form == "offsets":
        return {"input_ids": ids, **varlen}, places
    parts = [document_positions(source(model), torch.tensor([one.ids]), media_of(one)) for one in given]
    return {"input_ids": ids, "position_ids": torch.cat(parts, -1)}, places


def padded(given):
    width = max(len(one.ids) for one in given)
    ids, mask, places = torch.zeros(len(given), width).long(), torch.zeros(len(given), width).long(), []
    for number, one in enumerate(given):
        ids[number, : len(one.ids)], mask[number, : len(one.ids)] = torch.tensor(one.ids), 1
        places.append((number, torch.arange(len(one.ids))))
    return {"input_ids": ids, "attention_mask": mask}, places


def media_of(one):
    found = {"seconds_per_grid": torch.tensor(one.seconds) if one.seconds else None}
    for name, items in (("image_grid_thw", one.images), ("video_grid_thw", one.videos)):
        found[name] = torch.tensor([grid for grid, _ in items]) if items else None
    found["audio_lengths"] = torch.tensor([x.shape[1] for x in one.audios]) if one.audios else None
    return RowMedia(**found)


def source(model):
    return model if compat.THINKER_HOLDS_TOWERS else model.model


def weight(one):
    return torch.randn(len(one.ids), 128, generator=torch.Generator().manual_seed(len(one.ids)))


def step(model, given, form):
    """Logits of each document, and gradients of a fixed functional: parameters' and media's."""
    inputs, places = padded(given) if form == "padded" else row(given, form, model)
    leaves = leaves_of(given)
    model.zero_grad(set_to_none=True)
    logits = model(**inputs, **arguments(given, leaves), use_cache=False).logits
    parts = [logits[number, tokens] for number, tokens in places]
    sum((part * weight(one)).sum() for part, one in zip(parts, given)).backward()
    return [part.detach() for part in parts], graded(model, leaves)


def graded(model, leaves):
    """Softmax ignores the keys' bias in the audio tower: its gradient is noise."""
    found = {name: grad for name, grad in gradients(model).items() if not name.endswith("k_proj.bias")}
    return found | {f"{kind} {number}": x.grad for kind, xs in leaves.items() for number, x in enumerate(xs)}


def alone(model, given):
    """Each document by itself, as its processor gives it."""
    leaves, outputs = leaves_of(given), []
    at = dict.fromkeys(leaves, 0)
    model.zero_grad(set_to_none=True)
    for one in given:
        own = {}
        for kind in leaves:
            count = len(getattr(one, kind))
            own[kind], at[kind] = leaves[kind][at[kind] : at[kind] + count], at[kind] + count
        ids = torch.tensor([one.ids])
        more = arguments([one], own) | ({"use_audio_in_video": True} if one.sounding else {})
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more).logits[0]
        (logits * weight(one)).sum().backward()
        outputs.append(logits.detach())
    return outputs, graded(model, leaves)


def errors(found, wanted):
    return (
        max(relative_rms(one, other) for one, other in zip(found[0], wanted[0], strict=True)),
        max(relative_rms(found[1][name], wanted[1][name]) for name in wanted[1]),
    )


@pytest.fixture(scope="module", params=["qwen3_omni_moe"])
def case(request):
    model = tiny_vision(request.param)
    with torch.no_grad():
        for name, parameter in source(model).audio_tower.named_parameters():
            if name.startswith("conv2d"):
                parameter.normal_(std=0.3)  # so that what padding becomes is far from zero
    patched, given = apply_patches(copy.deepcopy(model)), documents()
    # the last document's audios are neighbours of each other: by itself, too, upstream makes of them what none is alone
    return model, patched, given, alone(patched, given)


@pytest.mark.parametrize("form", ["offsets", "4 rows", "padded"])
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
    inputs, places = padded(given) if form == "padded" else row(given, form, model)
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


def checkpointed(model, reentrant):
    """Also the towers: recomputing finds the record, the grids' mark and the audios' widths again."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
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


@pytest.mark.filterwarnings("default")  # PEFT uses names that transformers deprecates
def test_lora_on_text_and_towers(case):
    peft = pytest.importorskip("peft")
    plain, _, given, _ = case
    targets = ["qkv", "proj", "q_proj", "out_proj", "o_proj", "linear_fc1", "fc1"]
    torch.manual_seed(3)
    model = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    patched, given = apply_patches(copy.deepcopy(model)), given[:-1]
    wanted = alone(model, given)
    trained = [name for name in wanted[1] if "lora" in name]
    assert all(any(part in name for name in trained) for part in ("audio_tower", "visual", "layers"))
    for form in ("offsets", "padded"):
        logits, grads = errors(step(patched, given, form), wanted)
        assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


@pytest.mark.parametrize("form", ["offsets", "4 rows", "padded"])
def test_eager_attention(case, form, record_property):
    plain, _, given, wanted = case
    model = tiny_vision("qwen3_omni_moe", attention="eager")
    model.load_state_dict(plain.state_dict())
    logits, grads = recorded(record_property, errors(step(apply_patches(model), given, form), wanted), model, "media")
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


def test_report_removal_and_verification(case):
    model = tiny_vision("qwen3_omni_moe")
    classes = [type(module) for module in model.modules()]
    swaps = patch_report(apply_patches(model)).swaps
    assert [swaps[f"Qwen3OmniMoe{name}"] for name in ("AudioEncoder", "AudioAttention", "VisionEncoder")] == [1, 2, 1]
    assert not verify_packing(model.eval()).failures()
    assert [type(module) for module in remove_patches(model).modules()] == classes
