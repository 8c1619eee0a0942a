"""`PackedVisionCollator`: documents with images, videos and audio become one packed row."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.data.examples import (
    FLAT,
    PADDED,
    Document,
    Pack,
    check_assistant_mask,
    check_marks,
    check_whole,
    document_of,
    messages_of,
)
from hf_packfree.errors import UnsupportedInput
from hf_packfree.models import compat
from hf_packfree.models.labels import IGNORED
from hf_packfree.models.media_checks import check_media_sizes
from hf_packfree.models.rope_index import RowMedia, counts_seconds, packed_positions, rope_source

logger = logging.getLogger("hf_packfree")

Overlong = Literal["raise", "drop"]
_CONFIGS = {
    "Qwen3VLProcessor": "Qwen3VLConfig",
    "Qwen2_5_VLProcessor": "Qwen2_5_VLConfig",
    "Qwen3OmniMoeProcessor": "Qwen3OmniMoeThinkerConfig",
}
"""{processor's class: configuration's class}; default configurations by which media get the
positions of the model's own, except for the speed of time in videos.
"""
_FIXED = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
"""Keywords with which `apply_chat_template` turns messages into a document."""
_PLACEHOLDERS = ("image", "video", "audio")
_AROUND = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""{attribute of processors for a token before or after media: the token where a processor lacks the
attribute}.
"""


class PackedVisionCollator:
    """Make one packed row of a batch's documents; pass it as `Trainer(data_collator=...)`.

    An example is a document, or a list of documents (what `PackedDataset` holds). A document is one
    of:

    - a mapping with `messages`: goes through the processor's own `apply_chat_template`; images,
      videos and audio stand in the messages, or in columns `images`, `videos` and `audios`, in the
      order of the parts that wait for them;
    - a mapping with `input_ids`: the processor's output for one text, tensors or lists; `labels`
      are kept if it has them.

    The row, T tokens of N segments, with M media items of a kind:

    - input_ids, labels: int64 [1, T]; labels are -100 at a document's first token, at placeholders
      and at the tokens that stand before and after media;
    - mm_token_type_ids: int64 [1, T], for families whose processors give them: 1 for images, 2 for
      videos;
    - pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, second_per_grid_ts,
      video_second_per_grid: all documents' media one after the other; absent where the batch has
      none;
    - input_features, feature_attention_mask: [M, bins, frames] and [M, frames], padded to the
      batch's longest audio;
    - cu_seq_lens_q, cu_seq_lens_k: int32 [N+1], offsets of the segments; max_length_q,
      max_length_k: the longest;
    - position_ids: [4, 1, T], each document numbered by upstream's own `get_rope_index`; see
      `config`.

    Documents are never cut. The collator holds no model, and no state but the number of dropped
    documents; it can be pickled.

    Args:
        processor: of the model, with a chat template where examples are messages.
        max_length: the most tokens of a document; None: any number.
        overlong: what to do with longer documents: "raise", or "drop", which counts them in
            `dropped` and logs it. If none of a batch is left, the row is all padding, whose loss
            and gradients are zero in a patched model.
        pad_to_multiple_of: pad the row to a multiple of this number of tokens; the pad tokens are
            padding segments (FP8 needs 16).
        assistant_only_loss: labels are -100 outside of what the assistant wrote, as the chat
            template marks it.
        config: the model's (for an omni model its thinker's), for computing mRoPE positions.
            Without it the processor is enough for all media of Qwen3-VL's, which Qwen3.5 shares,
            and for all but videos of Qwen2.5-VL's and Qwen3-Omni's. For other rows with media the
            model computes positions, and a warning says so once.
        chat_template_kwargs: more keywords of `apply_chat_template`, such as `fps` or
            `load_audio_from_video`.

    Raises:
        ValueError: an option has another value.

    Attributes:
        dropped: how many documents were left out, in this process: worker processes count for
            themselves.
    """

    def __init__(
        self,
        processor: Any,
        *,
        max_length: int | None = None,
        overlong: Overlong = "raise",
        pad_to_multiple_of: int | None = None,
        assistant_only_loss: bool = False,
        config: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if overlong not in ("raise", "drop"):
            raise ValueError(
                f"found overlong={overlong!r}; wanted 'raise' or 'drop'; pass one of them"
            )
        for name, value in {
            "max_length": max_length,
            "pad_to_multiple_of": pad_to_multiple_of,
        }.items():
            if value is not None:
                check_whole(name, value)
        if taken := sorted({*(chat_template_kwargs or {})} & {*_FIXED}):
            raise ValueError(
                f"found {taken[0]} in chat_template_kwargs; wanted other keywords, since the "
                f"collator sets {', '.join(_FIXED)}; leave it out"
            )
        self.processor = processor
        self.max_length = max_length
        self.overlong: Overlong = overlong
        self.pad_to_multiple_of = pad_to_multiple_of or 1
        self.assistant_only_loss = assistant_only_loss
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.dropped = 0
        # kept, because tokenizers build the vocabulary anew on each call
        vocabulary = processor.tokenizer.get_vocab()
        found = {
            kind: vocabulary.get(getattr(processor, f"{kind}_token", None))
            for kind in _PLACEHOLDERS
        }
        self._placeholders = {kind: token for kind, token in found.items() if token}
        around = {
            vocabulary.get(getattr(processor, name, spelling)) for name, spelling in _AROUND.items()
        }
        self._no_targets = torch.tensor(sorted({*self._placeholders.values(), *around} - {None}))
        self._config = (
            _config_of(processor, self._placeholders, vocabulary) if config is None else config
        )
        self._knows_seconds, self._warned = config is not None, False

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return the row of a batch.

        Raises:
            UnsupportedInput: a document is longer than `max_length` and `overlong` is "raise"; the
                batch is empty; an example cannot be read; a pack is longer than the lengths given
                to `PackedDataset`.
            BoundaryError: a document's placeholders are not those of its media.
        """
        given = [document for example in examples for document in self._documents(example)]
        if not given:
            raise UnsupportedInput(
                "found a batch without a document; wanted one at least; leave empty examples out"
            )
        documents = self.fitting(given)
        return self._row(documents) if documents else self._row_of_padding()

    def _documents(self, example: Any) -> list[Document]:
        """Return an example's documents: one, or those of a list."""
        if not isinstance(example, (list, tuple)):
            return [self.document(example)]
        documents = [self.document(one) for one in example]
        if isinstance(example, Pack):
            example.check(sum(map(len, documents)))
        return documents

    def document(self, example: Any) -> Document:
        """Return an example as a document: `input_ids`, `labels` and media; its length is
        `len(document)`.

        Raises:
            UnsupportedInput: the example is no document, or a list of several.
        """
        if isinstance(example, Document):
            return example
        if not isinstance(example, Mapping) or not {"messages", "input_ids"} & set(example):
            keys = sorted(example) if isinstance(example, Mapping) else type(example).__name__
            raise UnsupportedInput(
                f"found an example with {keys}; wanted 'messages', or a processor's output with "
                "'input_ids'; where the Trainer "
                "removed its columns, pass remove_unused_columns=False"
            )
        output: Any = example if "input_ids" in example else self._processed(example)
        document = document_of(output, assistant_only=self.assistant_only_loss)
        if self.assistant_only_loss:
            check_assistant_mask(document)
            check_marks(document, example)
        document.labels[torch.isin(document.input_ids, self._no_targets)] = IGNORED
        document.labels[0] = IGNORED
        return document

    def fitting(self, documents: Iterable[Document]) -> list[Document]:
        """Return the documents that are not longer than `max_length`.

        Raises:
            UnsupportedInput: a document is longer, and `overlong` is "raise".
        """
        kept = []
        for document in documents:
            if self.max_length is None or len(document) <= self.max_length:
                kept.append(document)
                continue
            found = (
                f"found a document of {len(document)} tokens; wanted max_length={self.max_length} "
                "at most"
            )
            if self.overlong == "raise":
                raise UnsupportedInput(
                    f"{found}, since it is never cut; pass overlong='drop', or a larger max_length"
                )
            self.dropped += 1
            logger.warning("%s; it was left out (%d so far in this process)", found, self.dropped)
        return kept

    def _processed(self, example: Mapping[str, Any]) -> Any:
        more = {"tools": example["tools"]} if example.get("tools") else {}
        if self.assistant_only_loss:
            more["return_assistant_tokens_mask"] = True
        return self.processor.apply_chat_template(
            messages_of(example), **{**_FIXED, **self.chat_template_kwargs, **more}
        )

    def _row_of_padding(self) -> dict[str, Any]:
        """Return the shortest row of padding, so that the step still runs, as other ranks need."""
        ids = torch.full((1, self.pad_to_multiple_of), self._pad_token())
        return {
            "input_ids": ids,
            "labels": torch.full_like(ids, IGNORED),
            "attention_mask": torch.zeros_like(ids),
        }

    def _row(self, documents: Sequence[Document]) -> dict[str, Any]:
        ids = torch.cat([document.input_ids for document in documents])
        tail = -len(ids) % self.pad_to_multiple_of
        media, lengths = _joined_media(documents), [len(document) for document in documents]
        positions = self._positions(ids, _offsets(lengths), media)
        # without positions, padding is recognised by equal tokens in one-token segments
        if positions is None:
            lengths += [1] * tail
        elif tail:
            lengths = _with_tail(lengths, tail, ids == self._pad_token())
        cu_seqlens = _offsets(lengths)
        ids = F.pad(ids, (0, tail), value=self._pad_token())
        labels = F.pad(
            torch.cat([document.labels for document in documents]), (0, tail), value=IGNORED
        )
        row: dict[str, Any] = {
            "input_ids": ids[None],
            "labels": labels[None],
            **self._token_types(ids),
            **media,
        }
        if positions is not None:
            # 0 for every pad token: padding is recognised by equal positions
            row["position_ids"] = F.pad(positions, (0, tail))
        longest = max(lengths)
        return row | {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def _positions(
        self, ids: Tensor, cu_seqlens: Tensor, media: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Return position_ids [4, 1, T], or None where only the model can compute those of
        media.
        """
        if self._config is not None:
            source = rope_source(self._config)
            if "video_grid_thw" not in media or self._knows_seconds or not counts_seconds(source):
                items = RowMedia.from_arguments(media)
                check_media_sizes(self._config, media, items)
                return packed_positions(source, ids[None], cu_seqlens, items)
        if media:
            self._warn_once()
            return None
        return torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()]).expand(
            4, 1, -1
        )

    def _warn_once(self) -> None:
        if not self._warned:
            logger.warning(
                "found media of which %s says too little to number them, so the model will in its "
                "forward; wanted the model's "
                "configuration too; pass PackedVisionCollator(processor, config=model.config), of "
                "an omni model its thinker's",
                type(self.processor).__name__,
            )
        self._warned = True

    def _token_types(self, ids: Tensor) -> dict[str, Tensor]:
        if "mm_token_type_ids" not in self.processor.model_input_names:
            return {}
        types = torch.zeros_like(ids)
        for number, kind in enumerate(("image", "video"), 1):
            types[ids == self._placeholders.get(kind, IGNORED)] = number
        return {"mm_token_type_ids": types[None]}

    def _pad_token(self) -> int:
        token: int | None = self.processor.tokenizer.pad_token_id
        return 0 if token is None else token


def _joined_media(documents: Sequence[Document]) -> dict[str, Tensor]:
    """Return the media of all documents in their order."""
    joined = {}
    for name in (*FLAT, *PADDED):
        parts = [document.media[name] for document in documents if name in document.media]
        if name in PADDED and parts:
            frames = max(part.shape[-1] for part in parts)
            parts = [F.pad(part, (0, frames - part.shape[-1])) for part in parts]
        if parts:
            joined[name] = torch.cat(parts)
    return joined


def _offsets(lengths: Sequence[int]) -> Tensor:
    """Return int32 [N+1]."""
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def _with_tail(lengths: Sequence[int], tail: int, is_pad: Tensor) -> list[int]:
    """Return the lengths of segments: of the documents, and last of the padding tail, with which
    documents of a single pad token just before it are merged.

    Neither positions nor labels distinguish such documents from the tail, and they predict nothing.

    Args:
        lengths: of the documents.
        is_pad: bool [T], which of the documents' tokens are pad tokens.
    """
    kept = list(lengths)
    while kept and kept[-1] == 1 and bool(is_pad[sum(kept) - 1]):
        tail += kept.pop()
    return [*kept, tail]


def _config_of(
    processor: Any, placeholders: Mapping[str, int], vocabulary: Mapping[str, int]
) -> Any:
    """Return a configuration with the processor's ids and sizes of media, or None for a processor
    that is not in `_CONFIGS`.
    """
    names = [name for name in (cls.__name__ for cls in type(processor).__mro__) if name in _CONFIGS]
    if not names or (compat.IMAGES_COUNT_SECONDS and names[0] == "Qwen2_5_VLProcessor"):
        return None
    ids = {f"{kind}_token_id": token for kind, token in placeholders.items()}
    for kind in ("vision", "audio"):
        spelling = getattr(
            processor,
            f"{kind}_start_token",
            getattr(processor, f"{kind}_bos_token", f"<|{kind}_start|>"),
        )
        if spelling in vocabulary:
            ids[f"{kind}_start_token_id"] = vocabulary[spelling]
    config = getattr(import_module("transformers"), _CONFIGS[names[0]])(**ids)
    config.vision_config.spatial_merge_size = processor.image_processor.merge_size
    return config
