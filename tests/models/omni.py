"""Omni's documents of text, images, videos and audio, packed or padded, and what a model gives
for them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch

from hf_packfree import apply_patches
from hf_packfree.models import compat
from hf_packfree.models.rope_index import RowMedia, audio_tokens, document_positions
from tests.support import gradients, relative_rms
from tests.vision import END, IMAGE, PATCH, START, VIDEO, tiny_vision

AUDIO, AUDIO_START, AUDIO_END, MEL = 121, 122, 123, 16


@dataclass
class Document:
    """One document: ids, and the media in the order of their placeholders; audio is [mel bins,
    frames].
    """

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
    """The media of these documents as one call's arguments, with `leaves` in the place of their
    numbers.
    """
    found = {}
    for name, kind in (("image", "images"), ("video", "videos")):
        grids = [grid for one in given for grid, _ in getattr(one, kind)]
        if grids:
            found |= {f"{name}_grid_thw": torch.tensor(grids)}
            found["pixel_values" if name == "image" else "pixel_values_videos"] = torch.cat(
                leaves[kind]
            )
    if seconds := [second for one in given for second in one.seconds]:
        found["video_second_per_grid"] = torch.tensor(seconds)
    if sounds := leaves["audios"]:
        longest = max(x.shape[1] for x in sounds)
        padded = [torch.nn.functional.pad(x, (0, longest - x.shape[1])) for x in sounds]
        mask = [torch.arange(longest) < x.shape[1] for x in sounds]
        found |= {
            "input_features": torch.stack(padded),
            "feature_attention_mask": torch.stack(mask).long(),
        }
    return found


def leaves_of(given):
    return {
        "images": [x.clone().requires_grad_() for one in given for _, x in one.images],
        "videos": [x.clone().requires_grad_() for one in given for _, x in one.videos],
        "audios": [x.clone().requires_grad_() for one in given for x in one.audios],
    }


FORMS = (
    "offsets",
    "4 rows",
    "3 rows, offsets",
    "seq_idx",
    "indexed mask",
    "additive mask",
    "padded",
    "left",
    "rows",
)


def batch(given, form, model):
    """The arguments that are no media, and each document's row and tokens."""
    if form in ("padded", "left"):
        return padded(given, form)
    return rows(given, model) if form == "rows" else row(given, form, model)


def row(given, form, model):
    ids = torch.tensor([sum((one.ids for one in given), [])])
    lengths = torch.tensor([len(one.ids) for one in given])
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    longest = int(lengths.max())
    varlen = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    places = [(0, part) for part in torch.arange(ids.shape[1]).split(lengths.tolist())]
    number = torch.repeat_interleave(torch.arange(len(given)), lengths)[None]
    if form == "offsets":
        described = varlen
    elif form == "seq_idx":
        described = {"seq_idx": number.int()}
    elif form == "indexed mask":
        described = {"attention_mask": number + 1}
    elif form == "additive mask":
        own = (number[:, None, :, None] == number[:, None, None, :]).tril()
        described = {
            "attention_mask": torch.zeros(own.shape).masked_fill(
                ~own, torch.finfo(torch.float32).min
            )
        }
    else:
        described = (
            {"position_ids": positions(given, model)}
            if form == "4 rows"
            else {"position_ids": positions(given, model)[1:], **varlen}
        )
    return {"input_ids": ids, **described}, places


def positions(given, model):
    """[4, 1, T], each document numbered alone."""
    parts = [
        document_positions(source(model), torch.tensor([one.ids]), media_of(one)) for one in given
    ]
    return torch.cat(parts, -1)


def rows(given, model):
    """Two packed rows with tails of padding."""
    half, places = len(given) // 2, []
    parts = [given[:half], given[half:]]
    width = 3 + max(sum(len(one.ids) for one in part) for part in parts)
    ids, numbers = torch.zeros(2, width).long(), torch.arange(width).float().repeat(4, 2, 1)
    for number, part in enumerate(parts):
        flat = sum((one.ids for one in part), [])
        ids[number, : len(flat)] = torch.tensor(flat)
        numbers[:, number, : len(flat)] = positions(part, model)[:, 0]
        numbers[:, number, len(flat) :] -= len(flat)
        places += [
            (number, place)
            for place in torch.arange(len(flat)).split([len(one.ids) for one in part])
        ]
    return {"input_ids": ids, "position_ids": numbers}, places


def padded(given, side="padded"):
    width = max(len(one.ids) for one in given)
    ids, mask, places = (
        torch.zeros(len(given), width).long(),
        torch.zeros(len(given), width).long(),
        [],
    )
    for number, one in enumerate(given):
        place = torch.arange(len(one.ids)) + (width - len(one.ids) if side == "left" else 0)
        ids[number, place], mask[number, place] = torch.tensor(one.ids), 1
        places.append((number, place))
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
    inputs, places = batch(given, form, model)
    leaves = leaves_of(given)
    model.zero_grad(set_to_none=True)
    logits = model(**inputs, **arguments(given, leaves), use_cache=False).logits
    parts = [logits[number, tokens] for number, tokens in places]
    sum((part * weight(one)).sum() for part, one in zip(parts, given)).backward()
    return [part.detach() for part in parts], graded(model, leaves)


def graded(model, leaves):
    """Softmax ignores the keys' bias in the audio tower: its gradient is noise."""
    found = {
        name: grad for name, grad in gradients(model).items() if not name.endswith("k_proj.bias")
    }
    return found | {
        f"{kind} {number}": x.grad for kind, xs in leaves.items() for number, x in enumerate(xs)
    }


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
        logits = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more
        ).logits[0]
        (logits * weight(one)).sum().backward()
        outputs.append(logits.detach())
    return outputs, graded(model, leaves)


def errors(found, wanted):
    """(of the worst values, of the worst gradient)."""
    return (
        max(relative_rms(one, other) for one, other in zip(found[0], wanted[0], strict=True)),
        max(relative_rms(found[1][name], wanted[1][name]) for name in wanted[1]),
    )


def case_of(family):
    """The model unpatched and patched, documents, and what each of them is alone."""
    model = tiny_vision(family)
    with torch.no_grad():
        for name, parameter in source(model).audio_tower.named_parameters():
            if name.startswith("conv2d"):
                # so that what padding becomes is far from zero
                parameter.normal_(std=0.3)
    patched, given = apply_patches(copy.deepcopy(model)), documents()
    # the last document's audios are neighbours of each other: by itself, too, upstream makes of
    # them what none is alone
    return model, patched, given, alone(patched, given)
