"""Compilation and tuning of kernels ahead of the first step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_packfree.errors import UnsupportedModel
from hf_packfree.models import head_loss
from hf_packfree.models.linear_weights import compute_dtype
from hf_packfree.models.state import state_of
from hf_packfree.ops.loss import OP as LOSS
from hf_packfree.ops.loss import linear_cross_entropy
from hf_packfree.packing import PackedSequence
from hf_packfree.patching.plan import language_heads, trunks
from hf_packfree.patching.registry import family_of
from hf_packfree.patching.report import patch_report

ROWS = ((131,), (1, 66), (64, 64, 64), (1, 66, 3, 5, 64, 2))
"""Document lengths of rows that together use every variant of the kernels: with whole and partial
chunks, and with every range of documents times heads for which FlashQLA 0.1.3 has a variant.
"""
CUT = (8192,)
"""A document that is long for every backend, for the kernels of `LongDocuments`."""


def prewarm(model: nn.Module) -> float:
    """Run small packed rows forward and backward, so that the first real step compiles and tunes
    nothing.

    Call this under the same `torch.autocast` as in training, which `bf16=True` of a Trainer uses.
    Kernels depend on head counts and sizes, dtype and GPU, not on the length of a row. The
    exception is fla-core 0.6.0's norm of q and k, which its delta rule calls if another convolution
    than ours is forced: it is tuned once for every 65,536 heads of tokens (4,096 tokens of 16
    heads), so much longer rows tune again.

    FlashQLA and flash-linear-attention compile for minutes the first time on a machine;
    TILELANG_CACHE_DIR and TRITON_CACHE_DIR name the folders that keep what was compiled. Weights,
    gradients and random state stay as they are.

    Args:
        model: patched, on its device and in its dtype.

    Returns:
        The time that it took, in seconds.

    Raises:
        UnsupportedModel: `model` holds no patched text model.
    """
    family = family_of(model)
    report = patch_report(model)
    if family is None or not report.patched:
        raise UnsupportedModel(
            f"found a {type(model).__name__} to prewarm; wanted a patched model; call "
            "apply_patches first"
        )
    start = time.perf_counter()
    for trunk in trunks(model, family):
        _run(trunk, (*ROWS, CUT) if report.long_documents else ROWS)
    for head in language_heads(model):
        _run_loss(head)
    return time.perf_counter() - start


def _run(trunk: Any, rows: Sequence[Sequence[int]]) -> None:
    parameter = next(trunk.parameters())
    device, dtype = parameter.device, parameter.dtype
    devices = [device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for lengths in rows:
            packed = PackedSequence.from_lengths(lengths, device=device)
            shape = (1, packed.num_tokens, trunk.config.hidden_size)
            embeds = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
            out = trunk(
                inputs_embeds=embeds, packed_sequence=packed, use_cache=False
            ).last_hidden_state
            torch.autograd.grad(out.float().square().mean(), embeds)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _run_loss(head: Any) -> None:
    """Run the loss of a few tokens on the head's own weight, which gets no gradient."""
    if head_loss.why_logits_are_made(head) is not None:
        return
    weight = head.get_output_embeddings().weight.detach()
    weight = weight.to(compute_dtype(weight))
    backend = state_of(head).kernels_for(weight.device, weight.dtype)[LOSS.name]
    x = weight.new_zeros(2, weight.shape[1]).requires_grad_()
    targets = torch.zeros(2, dtype=torch.int64, device=weight.device)
    torch.autograd.grad(linear_cross_entropy(x, weight, targets, backend=backend), x)
