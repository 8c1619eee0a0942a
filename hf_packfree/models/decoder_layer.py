"""The decoder layer of transformers 5.2 to 5.8, which hands no keywords to its Gated DeltaNet."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_packfree.models.replacement import Replacement


class PackedDecoderLayer(Replacement):
    """Put in front of a family's decoder layer where `eras.LAYERS_DROP_KEYWORDS`; ends with it."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Send the record down as the one thing that reaches a linear layer: its attention mask."""
        if kwargs.get("packed_sequence") is not None and self.layer_type == "linear_attention":
            kwargs["attention_mask"] = kwargs["packed_sequence"]
        return super().forward(hidden_states, *args, **kwargs)
