"""The vision-language model around a text trunk: text-only rows pack, rows with images are refused by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.base import Replacement
from hf_packfree.models.entry import enter, vision_given
from hf_packfree.packing import PackedSequence, repad


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
        if input_ids is None and inputs_embeds is None:  # let upstream raise its own error
            return super().forward(**kwargs)
        arguments = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            "past_key_values": past_key_values, "inputs_embeds": inputs_embeds, **kwargs,
        }
        packed = enter(self.language_model, arguments)
        if packed is not None:
            _refuse_images(packed, arguments)
            if position_ids is None:  # upstream would number the row as one document
                arguments["position_ids"] = repad(packed.position_ids(), packed)
        return super().forward(**arguments)


def _refuse_images(packed: PackedSequence, arguments: dict[str, Any]) -> None:
    given = vision_given(arguments)
    if given:
        raise UnsupportedInput(
            f"found {', '.join(given)} with a row of {packed.num_segments} documents; wanted text alone, since packed rows "
            "with images are not supported yet; pass documents with images in rows of their own"
        )
