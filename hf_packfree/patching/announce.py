"""What is said when a model is patched: what runs, what is slow, what compiles."""

from __future__ import annotations

import logging

from torch import nn

from hf_packfree.models.state import PatchState
from hf_packfree.patching.report import patch_report

logger = logging.getLogger("hf_packfree")
_COMPILE = {"triton", "fla", "flash_qla", "flash_qla_cut"}
"""Backends that compile their kernels, or try out launch sizes, when they first run."""


def announce(model: nn.Module, state: PatchState) -> None:
    """Log what runs in a model that was patched just now, what of it runs in plain torch on a GPU, and what compiles."""
    logger.info("%s", patch_report(model))
    for op, reason in _slow(state).items():
        logger.warning("%s runs in plain torch on this GPU, which is slow: %s", op, reason)
    if state.cuda_half.attention != "torch" and any(getattr(module, "attention_dropout", 0) for module in model.modules()):
        logger.warning("attention runs in plain torch on this GPU while training: the kernels lack attention_dropout")
    compiling = [f"{op}: {name}" for op, name in vars(state.cuda_half).items() if name in _COMPILE]
    if compiling:
        logger.info(
            "the first step on a GPU compiles kernels for a while (%s); prewarm(model) does that ahead", ", ".join(compiling)
        )


def _slow(state: PatchState) -> dict[str, str]:
    """Return what plain torch runs for want of kernels; in float32 the delta rule alone: it slows most, others have none."""
    found = {op: reason for op, reason in state.why.items() if getattr(state.cuda_half, op, None) == "torch"}
    single = "delta_rule in float32"
    if "delta_rule" not in found and state.cuda_single.delta_rule == "torch" and single in state.why:
        found[single] = state.why[single]
    return found
