"""The documents of a verification: random tokens, and random images, videos and audio for models
that take them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.models.media_checks import values_of_a_patch
from hf_packfree.models.media_keywords import FEATURES
from hf_packfree.models.rope_index import RowMedia, media_of, token_types
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.tree import Tree

_FRAMES = 130
"""Frames of an audio: a full chunk and a part of one. In no release does upstream's result for such
an audio depend on its neighbours.
"""


class TextDocuments:
    """Documents of random tokens, packed by `position_ids` [1, T] that restart.

    Args:
        lengths: tokens of each document.
        vocabulary: its size; ids are smaller.
        generator: draws the ids, on the host.
        device: of a forward's arguments.
        taken: ids that are no text, such as that of padding, and do not occur in documents.
        masked: number the documents in an `attention_mask` too, for models in which upstream reads
            boundaries from positions.
        positions: whether the model takes `position_ids`.
    """

    media: tuple[str, ...] = ()
    """Kinds of media in the documents."""
    shared: Sequence[Tensor] = ()
    """bool [N] for each part of a row that some documents share, but not all: which do."""

    def __init__(
        self,
        lengths: Sequence[int],
        vocabulary: int,
        generator: torch.Generator,
        device: torch.device,
        taken: Collection[int] = (),
        *,
        masked: bool = False,
        positions: bool = True,
    ) -> None:
        self.lengths, self.device, self.generator = tuple(lengths), device, generator
        self.masked, self.takes_positions = masked, positions
        self.number = _numbered(lengths).to(device)
        self.ids, self.other_ids = (self._random_ids(vocabulary) for _ in range(2))
        self._avoid(taken)
        self.parts: list[dict[str, Tensor]] = [{} for _ in lengths]

    def alone(self, document: int) -> dict[str, Any]:
        """Return the arguments of a forward of one document."""
        return {"input_ids": self.ids[:, self.number == document]}

    def packed(self, changed: Tensor | None = None) -> dict[str, Any]:
        """Return the arguments of a forward of the row.

        Args:
            changed: bool [N], True for documents to give other tokens and media, of the same sizes.
        """
        positions = torch.cat(
            [torch.arange(length, device=self.device) for length in self.lengths]
        )[None]
        given = {"position_ids": positions} if self.takes_positions else {}
        given |= {"attention_mask": self.number[None] + 1} if self.masked else {}
        return {"input_ids": self._ids(changed), **given}

    def of_documents(self, row: Tensor) -> Tensor:
        """Return the values of a row [T, ...] for the tokens of all documents, one after the
        other.
        """
        return row

    def elsewhere(self, own: Tensor) -> Tensor:
        """Return bool [T]: the row's tokens outside of the documents whose tokens are `own`, bool
        [T].
        """
        return ~own

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Leave out of `packed`, for the block, arguments that only a patched model takes."""
        yield

    def of_document(self, name: str) -> Tensor:
        """Return int64 [M]: the document of every patch or item of an argument such as
        `pixel_values`.
        """
        counts = [len(part[name]) if name in part else 0 for part in self.parts]
        return _numbered(counts).to(self.device)

    def _ids(self, changed: Tensor | None) -> Tensor:
        if changed is None:
            return self.ids
        return torch.where(changed.to(self.device)[self.number], self.other_ids, self.ids)

    def _avoid(self, taken: Collection[int]) -> None:
        """Replace drawn ids that are in `taken` by the id of a text token."""
        text = next(token for token in range(len(taken) + 1) if token not in taken)
        for ids in (self.ids, self.other_ids):
            ids[torch.isin(ids, torch.tensor(sorted(taken), device=self.device))] = text

    def _random_ids(self, vocabulary: int) -> Tensor:
        shape = (1, sum(self.lengths))
        drawn = torch.randint(0, vocabulary, shape, generator=self.generator, device="cpu")
        return drawn.to(self.device)


def _sharing(paths: Sequence[set[int]]) -> list[Tensor]:
    """Return bool [N] for each segment that some of N samples share: which do."""
    among = {tuple(segment in path for path in paths) for path in paths for segment in path}
    return [torch.tensor(samples) for samples in sorted(among) if 1 < sum(samples) < len(paths)]


class TreeDocuments(TextDocuments):
    """Samples that share prefixes, in a row that holds each prefix once.

    Args:
        lengths: tokens of each segment.
        parents: each segment's parent, or None.
        vocabulary, generator, device, taken: see `TextDocuments`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        parents: Sequence[int | None],
        vocabulary: int,
        generator: torch.Generator,
        device: torch.device,
        taken: Collection[int] = (),
    ) -> None:
        super().__init__(lengths, vocabulary, generator, device, taken)
        self.record: PackedSequence | None = PackedSequence.from_tree(
            lengths, parents, device=device
        )
        tree = Tree.of(lengths, parents)
        if len(tree.leaves) < 2:
            raise ValueError(
                f"found a tree of {len(lengths)} segments with one sample; wanted two samples or "
                "more, since one cannot leak; pass lengths=[20, 5, 64] for two that share a prefix"
            )
        paths = tree.samples()
        self.positions = self.record.position_ids()
        self.of_segment, self.leaves = self.number, torch.tensor(tree.leaves, device=device)
        self.index = torch.cat(paths).to(device)
        self.shared = _sharing([{*tree.path(leaf)} for leaf in tree.leaves])
        self.lengths = tuple(map(len, paths))
        self.number = _numbered(self.lengths).to(device)
        self.parts = [{} for _ in paths]

    def alone(self, document: int) -> dict[str, Any]:
        """Return the arguments of a forward of one sample."""
        return {"input_ids": self.ids[:, self.index[self.number == document]]}

    def packed(self, changed: Tensor | None = None) -> dict[str, Any]:
        """Return the arguments of a forward of the row; `changed` samples have other tokens in
        their last segment.
        """
        marked = {} if self.record is None else {"packed_sequence": self.record}
        return {"input_ids": self._ids(changed), "position_ids": self.positions, **marked}

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Leave the record with the tree out of `packed`, for the block."""
        record, self.record = self.record, None
        try:
            yield
        finally:
            self.record = record

    def of_documents(self, row: Tensor) -> Tensor:
        """Return the values of a row [T, ...] for the tokens of all samples, one after the
        other.
        """
        return row[self.index]

    def elsewhere(self, own: Tensor) -> Tensor:
        """Return bool [T]: the row's tokens that are not in the samples whose tokens are `own`."""
        found = torch.ones_like(self.of_segment, dtype=torch.bool)
        found[self.index[own]] = False
        return found

    def branch(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return bool over the samples' tokens: those of the last sample's last segment; and bool
        [T]: the row's tokens in front of that segment on its path.
        """
        last = self.of_segment == self.leaves[-1]
        return own & last[self.index], ~self.elsewhere(own) & ~last

    def _ids(self, changed: Tensor | None) -> Tensor:
        if changed is None:
            return self.ids
        leaves = self.leaves[changed.to(self.device)]
        return torch.where(torch.isin(self.of_segment, leaves), self.other_ids, self.ids)


class MediaDocuments(TextDocuments):
    """Documents with media where they are long enough, packed by an indexed `attention_mask` [1,
    T], positions left out.

    Args:
        source: the module that has `get_rope_index`.
        dtype: of pixels and audio.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        source: Any,
        generator: torch.Generator,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.source, self.dtype = source, dtype
        self.tokens = media_tokens(source.config)
        vocabulary = source.config.get_text_config().vocab_size
        super().__init__(lengths, vocabulary, generator, device, self.tokens.values())
        self.parts = [self._place(document) for document in range(len(lengths))]
        self.other_parts = [self._redrawn(part) for part in self.parts]
        self.media = tuple(
            kind for kind, name in FEATURES.items() if any(name in part for part in self.parts)
        )

    def alone(self, document: int) -> dict[str, Any]:
        """Return the arguments of a forward of one document, with an `attention_mask`, without
        which some releases misread images.
        """
        ids = self.ids[:, self.number == document]
        return self._arguments(ids, torch.ones_like(ids), self.parts[document : document + 1])

    def packed(self, changed: Tensor | None = None) -> dict[str, Any]:
        """Return the arguments of a forward of the row, see `TextDocuments`."""
        other = [False] * len(self.parts) if changed is None else changed.tolist()
        parts = [
            self.other_parts[number] if is_other else self.parts[number]
            for number, is_other in enumerate(other)
        ]
        return self._arguments(self._ids(changed), self.number[None] + 1, parts)

    def _arguments(
        self, ids: Tensor, mask: Tensor, parts: Sequence[dict[str, Tensor]]
    ) -> dict[str, Any]:
        names = dict.fromkeys(name for part in self.parts for name in part)
        media = {name: [part[name] for part in parts if name in part] for name in names}
        given = {name: torch.cat(items) for name, items in media.items() if items}
        if "mm_token_type_ids" in inspect.signature(self.source.get_rope_index).parameters:
            given["mm_token_type_ids"] = token_types(self.source.config, ids)
        return {"input_ids": ids, "attention_mask": mask, **given}

    def _place(self, document: int) -> dict[str, Tensor]:
        """Write placeholders into a document's ids, one item of each kind while there is room, and
        return its media.
        """
        inside = (self.number == document).nonzero()[:, 0]
        at, end, media = int(inside[0]) + 2, int(inside[-1]), dict[str, Tensor]()
        for kind in FEATURES:
            if kind not in self.tokens:
                continue
            given, runs = self._draw(kind)
            size = sum(runs) + 2 * len(runs)
            if at + size > end:
                break
            for run in runs:
                for ids in (self.ids, self.other_ids):
                    ids[0, at] = self.tokens[f"{kind}_start"]
                    ids[0, at + 1 : at + 1 + run] = self.tokens[kind]
                # the token after the placeholders has to be text
                at += run + 2
            media |= given
        return media

    def _draw(self, kind: str) -> tuple[dict[str, Tensor], list[int]]:
        """Return a random item as the forward's arguments, and the number of placeholders in each
        of its runs.
        """
        config = self.source.config
        if kind == "audio":
            given = {
                "input_features": self._noise(1, config.audio_config.num_mel_bins, _FRAMES),
                "feature_attention_mask": torch.ones(
                    1, _FRAMES, dtype=torch.int64, device=self.device
                ),
            }
            row = RowMedia(audio_lengths=torch.tensor([_FRAMES], device="cpu"))
        else:
            vision, frames = config.vision_config, 1 if kind == "image" else 2
            side = 2 * vision.spatial_merge_size
            grid = torch.tensor([[frames, side, side]], device="cpu")
            given = {
                FEATURES[kind]: self._noise(frames * side * side, values_of_a_patch(vision)),
                f"{kind}_grid_thw": grid.to(self.device),
            }
            given |= self._seconds() if kind == "video" else {}
            sizes: dict[str, Any] = {f"{kind}_grid_thw": grid}
            row = RowMedia(**sizes)
        item = next(media for media in media_of(self.source, row) if media.name == kind)
        return given, item.run_sizes().tolist()

    def _seconds(self) -> dict[str, Tensor]:
        wanted = inspect.signature(self.source.get_rope_index).parameters
        names = {
            "second_per_grid_ts": "second_per_grid_ts",
            "second_per_grids": "video_second_per_grid",
        }
        return {
            name: torch.ones(1, device=self.device) for own, name in names.items() if own in wanted
        }

    def _redrawn(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._noise(*value.shape) if name in FEATURES.values() else value
            for name, value in part.items()
        }

    def _noise(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device="cpu")
        return drawn.to(self.device, self.dtype)


def _numbered(sizes: Sequence[int]) -> Tensor:
    """Return int64 [sum of sizes] on the host: 0 repeated sizes[0] times, 1 repeated sizes[1]
    times, and so on.
    """
    numbers = torch.arange(len(sizes), device="cpu")
    return torch.repeat_interleave(numbers, torch.tensor(sizes, device="cpu", dtype=torch.int64))


def media_source(model: nn.Module) -> Any:
    """Return the module of a vision-language model that has `get_rope_index` and the towers, or
    None where it takes no media.

    A configuration whose placeholders are outside of the vocabulary takes none.
    """
    found: Any = None
    for module in model.modules():
        if hasattr(module, "get_rope_index") and hasattr(module, "visual"):
            found = module
    inside = (
        found is not None
        and max(media_tokens(found.config).values()) < found.config.get_text_config().vocab_size
    )
    return found if inside else None


def media_tokens(config: Any) -> dict[str, int]:
    """Return the ids of placeholders and of the tokens before them: {"image": .., "image_start":
    ..}.
    """
    tokens = {kind: getattr(config, f"{kind}_token_id", None) for kind in FEATURES}
    start = getattr(config, "vision_start_token_id", None)
    starts = {
        "image_start": start,
        "video_start": start,
        "audio_start": getattr(config, "audio_start_token_id", None),
    }
    return {name: token for name, token in {**tokens, **starts}.items() if token is not None}
