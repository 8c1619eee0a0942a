"""One call of a patched head or text model: its arguments, by upstream's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_packfree.models import compat
from hf_packfree.models.media_keywords import OF_ITEMS
from hf_packfree.packing import Batch, PackedSequence

UNREAD = None
"""The value of the argument `packed_sequence` before the batch is read."""
UNPACKED = False
"""The value of the argument `packed_sequence` once the batch is read, if it runs as upstream runs
it.
"""
_MEDIA = (*OF_ITEMS, "mm_encoder_outputs")
_OF_MEDIA = ("image_", "video_", "audio_")
"""The prefixes of the names of other arguments of towers."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a head or text model.

    Attributes:
        module: the head or text model that was called; for a vision-language model, its text model.
        arguments: those of the forward, by name. `enter` removes the packing keywords and adds
            `packed_sequence`, by which patched modules below get the record.
        packed: the record that `enter` has read from the batch; None before `enter`, and where
            upstream runs the batch as it came.
    """

    module: Any
    arguments: dict[str, Any]
    packed: PackedSequence | None = None

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or the default where there is none of that name."""
        return self.arguments.get(name, default)

    def having(self, **arguments: Any) -> Call:
        """Return the same call with some arguments changed or added."""
        return Call(self.module, self.arguments | arguments, self.packed)

    def with_padding(self) -> Call:
        """Return the call that leaves padded rows of one document each to upstream; the call itself
        where the release of transformers misreads the padding of a single row.
        """
        assert self.packed is not None
        if compat.MISREADS_PADDING_OF_ONE_ROW and self.packed.batch_shape[0] == 1:
            return self
        return self.having(packed_sequence=UNPACKED)

    @property
    def config(self) -> Any:
        """The text model's config."""
        return self.module.config.get_text_config()

    @property
    def input_ids(self) -> Any:
        """Integers [B, S], or None."""
        return self.get("input_ids")

    @property
    def inputs_embeds(self) -> Any:
        """[B, S, D], or None."""
        return self.get("inputs_embeds")

    @property
    def attention_mask(self) -> Any:
        """A tensor, a dict of tensors by kinds of layers, or what else upstream takes; or None."""
        return self.get("attention_mask")

    @property
    def position_ids(self) -> Any:
        """Integers [B, S], or a stack [3 or 4, B, S] of a model with media; or None."""
        return self.get("position_ids")

    @property
    def labels(self) -> Any:
        """Integers [B, S], the tokens that are to be predicted, at their own places; or None."""
        return self.get("labels")

    @property
    def shift_labels(self) -> Any:
        """Integers [B, S], each token's next one, or the label that means no loss; or None."""
        return self.get("shift_labels")

    @property
    def batch(self) -> Batch:
        """The tokens: ids, or else embeddings."""
        if self.input_ids is None:
            return Batch(self.inputs_embeds)
        return Batch(self.input_ids, getattr(self.config, "pad_token_id", None))

    @property
    def has_batch(self) -> bool:
        """Whether the call has tokens, as ids or as embeddings; otherwise upstream raises its own
        error.
        """
        given = [x for x in (self.input_ids, self.inputs_embeds) if x is not None]
        return len(given) == 1 and isinstance(given[0], Tensor) and given[0].ndim >= 2

    @property
    def cache(self) -> Any:
        """transformers' cache, or None."""
        return compat.cache_of(self.arguments)

    @property
    def is_whole_batch(self) -> bool:
        """Whether the call is of a batch without a cache, whose documents the head has to know for
        its loss.
        """
        return self.cache is None and self.get("packed_sequence") is not UNPACKED and self.has_batch

    @property
    def has_media(self) -> bool:
        """Whether the call has images, videos or audio, or their features."""
        return any(self.get(name) is not None for name in _MEDIA)

    @property
    def wants_all_logits(self) -> bool:
        """Whether the caller wants the logits of every token."""
        kept = self.get("logits_to_keep", 0)
        return isinstance(kept, int) and kept == 0

    @property
    def generates(self) -> bool:
        """Whether `generate()` may have made the call: in evaluation, without labels, for the
        logits of some tokens only.
        """
        asked = not self.wants_all_logits and self.labels is None
        return asked and not self.module.training


Run = Callable[[Any, Call], Any]
"""Runs a call in a patched head: takes upstream's forward, or a function in its place, and the
call.
"""


def of_media(name: str) -> bool:
    """Whether an argument of a forward belongs to media: its dimensions are then not the batch's,
    even if they are equal by chance.
    """
    return name in _MEDIA or name.startswith(_OF_MEDIA)
