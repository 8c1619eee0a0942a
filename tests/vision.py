"""Tiny vision-language models, documents with images and videos, and the forms in which their
rows are passed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from hf_packfree.models.rope_index import RowMedia, document_positions
from tests.support import by_family, gradients, slow_decay

IMAGE, VIDEO, START, END = 124, 125, 126, 127
PATCH = 3 * 2 * 4 * 4
"""Numbers of a patch: three colours, two frames, 4 x 4 pixels."""

Result = tuple[list[torch.Tensor], dict[str, torch.Tensor]]
"""Logits of each document, and gradients by name."""

CLASSES = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 100.0,
    "partial_rotary_factor": 1.0,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}


def tiny_vision(
    family: str, *, attention: str = "sdpa", head: str = "ForConditionalGeneration", **text: Any
) -> torch.nn.Module:
    """Return the family's tiny vision-language model in training mode, unpatched, fp32, slow decay.

    Its rotary embedding turns all of a head, so that positions of images matter.
    """
    row = by_family[family]
    config = row.tiny_config()
    if hasattr(config, "vision_config"):
        name = row.causal_lm
        rope = {**config.text_config.rope_parameters, "rope_theta": 100.0}
        for field_name, value in {"rope_parameters": rope, **text}.items():
            setattr(config.text_config, field_name, value)
    else:
        name = CLASSES[family] + head
        configuration = import_module(row.upstream.replace("modeling_", "configuration_"))
        config = getattr(configuration, f"{CLASSES[family]}Config")(
            text_config={**config.to_dict(), "rope_parameters": ROPE, **text},
            vision_config=VISION,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
        )
    config._attn_implementation = attention
    torch.manual_seed(0)
    return slow_decay(getattr(import_module(row.upstream), name)._from_config(config)).train()


@dataclass(frozen=True)
class Style:
    """How a family's processor writes videos.

    Attributes:
        framewise: whether every frame has its own start and end, with its time as text before it.
        seconds: the keyword of the seconds between two grids of a video, if there is one.
    """

    framewise: bool = True
    seconds: str | None = None


def style_of(rope: Any) -> Style:
    """Return the style of a model's family, by what its `get_rope_index` reads."""
    wanted = inspect.signature(rope.get_rope_index).parameters
    return Style(False, "second_per_grid_ts") if "second_per_grid_ts" in wanted else Style()


@dataclass(frozen=True)
class Document:
    """One document: its ids, patches and grids of its images and videos, and seconds between
    grids of the videos.
    """

    ids: list[int]
    pixels: dict[str, torch.Tensor] = field(default_factory=dict)
    grids: dict[str, list[list[int]]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    style: Style = Style()

    def media(self) -> RowMedia:
        """Return the sizes of the media."""
        sizes = {f"{kind}_grid_thw": torch.tensor(grids) for kind, grids in self.grids.items()}
        return RowMedia(
            **sizes, seconds_per_grid=torch.tensor(self.seconds) if self.seconds else None
        )


def image(height: int, width: int) -> tuple[str, list[int]]:
    return "image", [1, height, width]


def video(frames: int, height: int, width: int) -> tuple[str, list[int]]:
    return "video", [frames, height, width]


def document(
    *parts: int | tuple[str, list[int]], seed: int = 0, bare: bool = False, style: Style = Style()
) -> Document:
    """Build a document from parts: a number is so many text tokens, others are images and videos.

    Args:
        bare: images come without the tokens before and behind them.
        style: how videos are written.
    """
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    pixels: dict[str, list[torch.Tensor]] = {}
    grids: dict[str, list[list[int]]] = {}
    seconds: list[float] = []
    edges = ([], []) if bare else ([START], [END])
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(2, 120, (part,), generator=generator).tolist()
            continue
        kind, (frames, height, width) = part
        runs = frames if style.framewise else 1
        for _ in range(runs):
            timestamp = (
                torch.randint(2, 120, (2,), generator=generator).tolist()
                if kind == "video" and style.framewise
                else []
            )
            placeholders = [IMAGE if kind == "image" else VIDEO] * (
                frames // runs * height * width // 4
            )
            ids += [*timestamp, *edges[0], *placeholders, *edges[1]]
        if kind == "video" and style.seconds is not None:
            seconds.append(0.75 + len(seconds))
        pixels.setdefault(kind, []).append(
            torch.randn(frames * height * width, PATCH, generator=generator)
        )
        grids.setdefault(kind, []).append([frames, height, width])
    return Document(
        ids, {kind: torch.cat(parts) for kind, parts in pixels.items()}, grids, seconds, style
    )


def number_frames(patch: Any) -> None:
    """Give upstream's `get_rope_index` of families that write times between frames one grid for
    each frame, for good.
    """
    names = {
        "qwen3_5": "Qwen3_5",
        "qwen3_5_moe": "Qwen3_5Moe",
        "qwen3_vl": "Qwen3VL",
        "qwen3_vl_moe": "Qwen3VLMoe",
    }
    for family, name in names.items():
        cls = getattr(
            import_module(f"transformers.models.{family}.modeling_{family}"), f"{name}Model"
        )
        patch.setattr(cls, "get_rope_index", _with_frames(cls.get_rope_index))


def _with_frames(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def get_rope_index(self: Any, *args: Any, video_grid_thw: Any = None, **given: Any) -> Any:
        if video_grid_thw is not None:
            video_grid_thw = video_grid_thw.repeat_interleave(video_grid_thw[:, 0], 0)
            video_grid_thw[:, 0] = 1
        return upstream(self, *args, video_grid_thw=video_grid_thw, **given)

    return get_rope_index


def documents(rope: Any) -> list[Document]:
    """Return the acceptance list: every place an image can have in a document, beside text, videos
    and single tokens.

    Args:
        rope: a model, or what `rope_source` returns; releases that find images by the token before
            them get one at token 1.
    """
    by_type, style = (
        "mm_token_type_ids" in inspect.signature(rope.get_rope_index).parameters,
        style_of(rope),
    )
    ends_in_image = document(7, image(4, 4), seed=5)
    return [
        document(37, seed=1),
        document(6, image(4, 6), 9, seed=2),
        document(3, image(4, 4), 2, image(6, 8), 5, seed=3),
        replace(ends_in_image, ids=ends_in_image.ids[:-1]),
        document(image(6, 4), 8, seed=4, bare=by_type),
        document(5, video(3, 4, 4), 6, seed=6, style=style),
        document(1, seed=7),
        document(2, image(8, 4), 3, video(2, 4, 6), 4, seed=8, style=style),
        document(1, seed=9),
        document(70, seed=10),
    ]


@dataclass
class MediaBatch:
    """Documents, what to call the model with, and where each document's tokens are in the caller's
    shape.

    Pixels are leaves, one per document and kind, so that their gradients can be asked for.
    """

    documents: list[Document]
    inputs: dict[str, Any]
    places: list[tuple[int, torch.Tensor]]
    pixels: list[dict[str, torch.Tensor]]

    def cut(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Return each document's part [n, ...] of an output [B, S, ...]."""
        return [output[row, tokens] for row, tokens in self.places]

    def call(self, model: Any, **more: Any) -> Any:
        """Call the model."""
        return model(**self.inputs, **media_arguments(self.documents, self.pixels), **more)


def leaves(given: Sequence[Document]) -> list[dict[str, torch.Tensor]]:
    """Return new leaves of all documents' pixels."""
    return [
        {kind: pixels.clone().requires_grad_() for kind, pixels in one.pixels.items()}
        for one in given
    ]


def media_arguments(
    given: Sequence[Document], pixels: list[dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """Return the arguments that hold media, flat and in the documents' order; without a kind
    where no document has it.
    """
    arguments: dict[str, Any] = {}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        parts = [own[kind] for own in pixels if kind in own]
        if parts:
            arguments[name] = torch.cat(parts)
            arguments[f"{kind}_grid_thw"] = torch.tensor(
                sum((one.grids.get(kind, []) for one in given), [])
            )
    arguments |= {
        name: torch.tensor(sum((one.seconds for one in given), []))
        for name in {one.style.seconds for one in given if one.seconds}
    }
    return arguments


def token_types(ids: torch.Tensor) -> torch.Tensor:
    """Return what a processor gives: 1 at placeholders of images, 2 at those of videos."""
    return (ids == IMAGE).long() + 2 * (ids == VIDEO).long()


def row_positions(rope: Any, given: Sequence[Document]) -> torch.Tensor:
    """Return [4, 1, T]: every document numbered alone."""
    parts = [document_positions(rope, torch.tensor([one.ids]), one.media()) for one in given]
    return torch.cat(parts, -1)


def packed_batch(form: str, given: Sequence[Document], rope: Any) -> MediaBatch:
    """Return one row of all documents in a form that marks their boundaries; see `FORMS`."""
    lengths = torch.tensor([len(one.ids) for one in given])
    ids, offsets = (
        torch.tensor([sum((one.ids for one in given), [])]),
        torch.cat((torch.zeros(1).long(), lengths.cumsum(0))),
    )
    number = torch.repeat_interleave(torch.arange(len(given)), lengths)[None]
    cu_seqlens = offsets.int()
    varlen = {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }
    positions = row_positions(rope, given)
    own = (number[:, None, :, None] == number[:, None, None, :]).tril()
    additive = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)
    described: dict[str, dict[str, Any]] = {
        "4 rows": {"position_ids": positions},
        "3 rows, offsets": {"position_ids": positions[1:], **varlen},
        "offsets, types": {**varlen, "mm_token_type_ids": token_types(ids)},
        "offsets, seq_idx": {**varlen, "seq_idx": number.int()},
        "indexed mask": {"attention_mask": number + 1, "mm_token_type_ids": token_types(ids)},
        "additive mask": {"attention_mask": additive},
    }
    tokens = torch.arange(ids.shape[1]).split(lengths.tolist())
    return MediaBatch(
        list(given),
        {"input_ids": ids, "use_cache": False, **described[form]},
        [(0, part) for part in tokens],
        leaves(given),
    )


FORMS = (
    "4 rows",
    "3 rows, offsets",
    "offsets, types",
    "offsets, seq_idx",
    "indexed mask",
    "additive mask",
)


def padded_batch(side: str, given: Sequence[Document]) -> MediaBatch:
    """Return what a processor gives: one document per row, padded on one side."""
    width = max(len(one.ids) for one in given)
    ids, mask = torch.zeros(len(given), width).long(), torch.zeros(len(given), width).long()
    places = []
    for row, one in enumerate(given):
        first = 0 if side == "right" else width - len(one.ids)
        place = torch.arange(first, first + len(one.ids))
        ids[row, place], mask[row, place] = torch.tensor(one.ids), 1
        places.append((row, place))
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": token_types(ids),
        "use_cache": False,
    }
    return MediaBatch(list(given), inputs, places, leaves(given))


def rows_batch(given: Sequence[Document], rope: Any) -> MediaBatch:
    """Return two packed rows, the second with a tail of padding, which starts a document of its
    own in `position_ids`.
    """
    half = len(given) // 2
    parts = [given[:half], given[half:]]
    width = 3 + max(sum(len(one.ids) for one in part) for part in parts)
    ids, positions, places = torch.zeros(2, width).long(), torch.zeros(4, 2, width).long(), []
    for row, part in enumerate(parts):
        flat = sum((one.ids for one in part), [])
        ids[row, : len(flat)] = torch.tensor(flat)
        positions[:, row, : len(flat)] = row_positions(rope, part)[:, 0]
        positions[:, row, len(flat) :] = torch.arange(width - len(flat))
        lengths = [len(one.ids) for one in part]
        places += [(row, place) for place in torch.arange(len(flat)).split(lengths)]
    return MediaBatch(
        list(given),
        {"input_ids": ids, "position_ids": positions, "use_cache": False},
        places,
        leaves(given),
    )


def run(model: Any, batch: MediaBatch, weights: list[torch.Tensor], **more: Any) -> Result:
    """Return per-document logits, and the gradients of a fixed random functional of them:
    parameters' and pixels'.
    """
    model.zero_grad(set_to_none=True)
    parts = batch.cut(batch.call(model, **more).logits)
    sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)).backward()
    return [part.detach() for part in parts], {**gradients(model), **pixel_gradients(batch)}


def pixel_gradients(batch: MediaBatch) -> dict[str, torch.Tensor]:
    """Return {document and kind: gradient}, zeros where there is none."""
    return {
        f"document {number}, {kind}s": torch.zeros_like(pixels)
        if pixels.grad is None
        else pixels.grad.clone()
        for number, own in enumerate(batch.pixels)
        for kind, pixels in own.items()
    }


def alone(model: Any, given: Sequence[Document], weights: list[torch.Tensor]) -> Result:
    """The same of each document in a forward of its own; with a mask, without which some
    releases misread images.
    """
    model.zero_grad(set_to_none=True)
    parts, pixels = [], {}
    for number, (one, weight) in enumerate(zip(given, weights, strict=True)):
        batch = padded_batch("right", [one])
        part = batch.call(model).logits[0]
        (part * weight).sum().backward()
        parts.append(part.detach())
        pixels |= {
            name.replace("document 0", f"document {number}"): grad
            for name, grad in pixel_gradients(batch).items()
        }
    return parts, {**gradients(model), **pixels}


def random_weights(
    given: Sequence[Document], width: int = 128, seed: int = 2
) -> list[torch.Tensor]:
    """One fixed random functional per document."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(one.ids), width, generator=generator) for one in given]
