"""What is said when a model is patched: what runs, what is slow, what compiles."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from hf_packfree.models.attention import drops_out
from hf_packfree.models.state import Kernels, PatchState
from hf_packfree.ops.releases import Fault
from hf_packfree.patching.report import a_parameter, patch_report

logger = logging.getLogger("hf_packfree")
_SECONDS, _MINUTES = ("triton",), ("fla", "flash_qla", "flash_qla_cut")
"""Backends that compile their kernels, or try out launch sizes, when they first run: how long all of them take."""


def announce(model: nn.Module, state: PatchState) -> None:
    """Log what runs in a model that was patched just now, what of it runs in plain torch on a GPU or without what is
    installed for it, and what compiles.
    """
    logger.info("%s", patch_report(model))
    slow = _slow(state)
    for op, reason in slow.items():
        logger.warning("%s runs in plain torch on this GPU, which is slow: %s", op, reason)
    for op, reason in state.why.items():
        if isinstance(reason, Fault) and op not in slow:
            warn_once(f"{op} runs on this GPU without what is installed for it: {reason}")
    if state.cuda_half.attention != "torch" and drops_out(model):
        logger.warning("attention runs in plain torch on this GPU while training: the kernels lack attention_dropout")
    if compiling := ", ".join(_running(state.cuda_half, _SECONDS)):
        logger.info("the first step on a GPU compiles kernels for seconds (%s); prewarm(model) does that ahead", compiling)
    single = _running(state.cuda_single, _MINUTES, " in float32") if a_parameter(model).dtype == torch.float32 else []
    if compiling := ", ".join(_running(state.cuda_half, _MINUTES) + single):  # the former under autocast, too
        warn_once(
            "the first step on a GPU compiles and tunes kernels for minutes, once for these head counts on a machine "
            f"({compiling}); prewarm(model) does that ahead, and TILELANG_CACHE_DIR and TRITON_CACHE_DIR name the folders that "
            "keep it"
        )


@cache
def warn_once(sentence: str) -> None:
    """Warn of something, once per process however many models are patched."""
    logger.warning("%s", sentence)


def _running(kernels: Kernels, names: Sequence[str], where: str = "") -> list[str]:
    """Name the operations that run on these backends."""
    return [f"{op}{where}: {name}" for op, name in vars(kernels).items() if name in names]


def _slow(state: PatchState) -> dict[str, str]:
    """Return what plain torch runs for want of kernels; in float32 the delta rule alone: it slows most, others have none."""
    found = {op: reason for op, reason in state.why.items() if getattr(state.cuda_half, op, None) == "torch"}
    single = "delta_rule in float32"
    if "delta_rule" not in found and state.cuda_single.delta_rule == "torch" and single in state.why:
        found[single] = state.why[single]
    return found
