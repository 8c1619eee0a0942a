"""Small patched models for GPU tests: the published models' heads, few layers, slow decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree import apply_patches
from hf_packfree.packing import PackedSequence
from tests.benchmarks.batches import random_tokens
from tests.benchmarks.models import build
from tests.benchmarks.shapes import SHAPES, Shape
from tests.gpu.checks import DEVICE, TRIAL

WIDE = replace(SHAPES["2b"], layers=4, sizes={**SHAPES["2b"].sizes, "vocab_size": 1024})
"""The 2B model's widths, so that its matrix products are the real ones, with 4 layers and few
words.
"""
EXPERTS = replace(
    SHAPES["moe"], layers=4, sizes={**SHAPES["moe"].sizes, "vocab_size": 1024, "num_experts": 16}
)
NARROW = SHAPES["exact"]


def small(
    shape: Shape,
    dtype: torch.dtype = torch.bfloat16,
    *,
    patched: bool = True,
    backend: Any = "auto",
    batch_invariant: bool = False,
    **options: Any,
) -> nn.Module:
    """Return a model whose states live for hundreds of tokens, and whose weights let a leak
    show, on the tests' device.
    """
    model = build(SHAPES["tiny"] if TRIAL else shape, DEVICE, torch.float32 if TRIAL else dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.01, 0.05).log_()
            elif parameter.ndim > 1:
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    if patched:
        apply_patches(model, backend=backend, batch_invariant=batch_invariant, **options)
    return model


def packed_row(model: Any, lengths: Sequence[int]) -> tuple[Tensor, PackedSequence]:
    """Random tokens int64 [1, T] of these documents, and their record, on the model's device."""
    device = str(model.device)
    tokens = random_tokens((1, sum(lengths)), model.config.vocab_size, device)
    return tokens, PackedSequence.from_lengths(list(lengths), device=device)


def hidden(model: Any, tokens: Tensor, packed: PackedSequence | None = None) -> Tensor:
    """Return the trunk's last hidden state [B, S, D]; without a record, upstream runs, unless
    the model is batch-invariant.
    """
    words = {} if packed is None else {"packed_sequence": packed}
    output: Tensor = model.base_model(input_ids=tokens, use_cache=False, **words).last_hidden_state
    return output
