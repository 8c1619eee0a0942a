"""Model FLOP/s utilisation: the operations of the model's matrix products, over the GPU's peak.

Counted as TRL does: a training step costs three forwards, a matrix product two operations per
weight and token, and attention is over the whole context. Unlike in TRL, the context is the
document, or the layer's window if that is shorter, instead of the row, and only attention layers
have one. Recurrences (delta rules, SSD), convolutions, towers and a multi-token prediction head are
not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_packfree.models.base import Replacement, size_of

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
"""{part of a GPU's name: dense bfloat16 operations per second}; the first entry that fits
counts.
"""


def peak_of(device: torch.device) -> float | None:
    """Return a device's dense operations per second in bfloat16, or None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class FlopsPerToken:
    """Operations of a training step for one token, by the mean length of documents.

    Args:
        model: the language model, head included, patched.
        trunk: its text model; see `why_not_counted`.
    """

    def __init__(self, model: Any, trunk: Any) -> None:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        head_weights = 0 if head is None else head.weight.numel()
        weights = _weights_of_a_token(trunk, _experts_of_a_token(trunk) or 0)
        self._products: float = 2 * (weights + head_weights)
        self._attention = list(_attention(trunk))

    def __call__(self, document: float) -> float:
        """Return the operations for one token, in documents of `document` tokens on average."""
        scores = sum(each * min(document, window) for each, window in self._attention)
        return 3.0 * (self._products + scores)


def why_not_counted(trunk: nn.Module) -> str | None:
    """Return why the operations of a text model cannot be counted, or None if they can."""
    has_experts = _weights_of_a_token(trunk, 1) > _weights_of_a_token(trunk, 0)
    if has_experts and _experts_of_a_token(trunk) is None:
        return "found experts, and no router whose top_k says how many of them a token goes to"
    return None


def _attention(trunk: nn.Module) -> Iterator[tuple[int, float]]:
    """Yield for each attention layer the operations per pair of query and key, and its window, the
    most keys of a query.
    """
    for module in trunk.modules():
        sizes = module.op_sizes(module) if isinstance(module, Replacement) else {}
        if "query_heads" in sizes:
            keys = sizes["head_size"]
            values = sizes.get("other_value_size", keys)
            yield 2 * sizes["query_heads"] * (keys + values), sizes.get("window", math.inf)


def _experts_of_a_token(trunk: Any) -> int | None:
    # Gemma 4's routers read the config
    named = (getattr(module, "top_k", None) for module in trunk.modules())
    return next((k for k in named if k), getattr(trunk.config, "top_k_experts", None))


def _weights_of_a_token(trunk: nn.Module, chosen: int) -> int:
    """Return how many weights each token is multiplied with, of `chosen` experts in each layer."""
    weights: dict[Any, int] = {}
    for name, module in trunk.named_modules():
        # where experts are a list of modules, its first `chosen` are counted
        expert = re.search(r"\bexperts\.(\d+)", name)
        if expert is None or int(expert[1]) < chosen:
            # Zamba2 ties adapters over layers; each runs in only one of them, and is counted once
            tied = "adapter_list" in name and hasattr(module, "weight")
            weights[module.weight if tied else module] = _weights(module, chosen)
    return sum(weights.values())


def _weights(module: Any, chosen: int) -> int:
    """Return how many weights of a module, without its children, each token is multiplied with."""
    # PEFT's wrappers also have the sizes of the layer inside, which is counted itself
    if getattr(module, "base_layer", None) is not None or isinstance(module, nn.Embedding):
        return 0
    # rotations (OFT) say what goes in alone
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        # by features, because tensors of 4-bit weights are smaller
        return int(module.in_features * module.out_features)
    sizes = {name: size_of(part) for name, part in module.named_parameters(recurse=False)}
    router = sizes.get("weight", ())
    # only experts, because convolutions have weights of three dimensions too
    stacks = [size for size in sizes.values() if len(size) == 3 and hasattr(module, "num_experts")]
    experts = chosen * sum(math.prod(size[1:]) for size in stacks)
    return experts + (math.prod(router) if len(router) == 2 else 0)
