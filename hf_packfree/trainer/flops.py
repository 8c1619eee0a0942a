"""Model FLOP/s utilisation: what the model's matrix products need, over what the GPU could do.

Counted as TRL does: a training step is three forwards, a matrix product costs two operations per
weight and token, attention is over all of its context. Unlike there, the context is the document
and not the row, and only layers of full attention have any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

PEAKS = {
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 125e12,
}
"""{part of a GPU's name: dense bfloat16 operations per second}; the first that fits counts."""


def peak_of(device: torch.device) -> float | None:
    """Return a device's dense operations per second in bfloat16, or None: it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class FlopsPerToken:
    """Operations of a training step for one token, by the mean length of documents.

    Args:
        model: the language model, head included.
        trunk: its text model.
    """

    def __init__(self, model: Any, trunk: Any) -> None:
        config = trunk.config
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        weights = sum(_weights(trunk, config))
        self._products: float = 2 * (weights + (0 if head is None else head.weight.numel()))
        kinds = getattr(config, "layer_types", None) or ()
        layers = kinds.count("full_attention") if kinds else config.num_hidden_layers
        size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self._per_context: float = 2 * 2 * layers * config.num_attention_heads * size

    def __call__(self, document: float) -> float:
        """Return the operations for one token, in documents of `document` tokens on average."""
        return 3.0 * (self._products + self._per_context * document)


def _weights(trunk: nn.Module, config: Any) -> Iterator[float]:
    """Yield the weights that each token meets, of linear layers and of the experts it goes to."""
    experts = getattr(config, "num_experts", None)
    modules: Iterator[Any] = trunk.modules()
    for module in modules:
        # PEFT's wrappers have the sizes of the layer that they hold, too
        inner = getattr(module, "base_layer", None)
        if hasattr(module, "in_features") and inner is None:
            # of weights in 4 bits, too, whose tensors are smaller
            yield module.in_features * module.out_features
        elif experts:
            stacks = (p for p in module.parameters(recurse=False) if p.ndim == 3)
            chosen = config.num_experts_per_tok / experts
            yield sum(stack.numel() for stack in stacks if len(stack) == experts) * chosen
