"""The vision-language model around a text trunk: text-only rows pack, rows with images are refused by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.base import Replacement
from hf_packfree.models.entry import read_arguments, skips_padding
from hf_packfree.packing import PackedSequence, PackingInputs, repad

_VISION = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "mm_encoder_outputs")


class PackedVisionLanguage(Replacement):
    """Put in front of a family's vision-language model."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run upstream's forward, with the record handed down when the batch is packed.

        Raises:
            UnsupportedInput: a packed row came with images or videos.
        """
        if input_ids is None and inputs_embeds is None:  # upstream has the words for this
            return super().forward(**kwargs)
        packed: PackedSequence | None = kwargs.get("packed_sequence")
        if packed is None:
            inputs = PackingInputs.from_kwargs(kwargs, position_ids=position_ids, attention_mask=attention_mask)
            trunk, use_cache = self.language_model, kwargs.get("use_cache")
            skip = not vision_given(kwargs) and skips_padding(trunk, inputs, past_key_values, use_cache, kwargs)
            packed = read_arguments(inputs, input_ids, inputs_embeds, past_key_values, config=trunk.config, skip_padding=skip)
        if packed is not None:
            _refuse_images(packed, kwargs)
            kwargs["packed_sequence"] = packed
            if position_ids is None:  # upstream would number the row as one document
                position_ids = repad(packed.position_ids(), packed)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


def vision_given(kwargs: dict[str, Any]) -> list[str]:
    """Return which keywords of images or videos a call has."""
    return [name for name in _VISION if kwargs.get(name) is not None]


def _refuse_images(packed: PackedSequence, kwargs: dict[str, Any]) -> None:
    given = vision_given(kwargs)
    if given:
        raise UnsupportedInput(
            f"found {', '.join(given)} with a row of {packed.num_segments} documents; wanted text alone, since packed rows "
            "with images are not supported yet; pass documents with images one by one, padded"
        )
