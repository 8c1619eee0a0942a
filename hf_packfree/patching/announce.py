"""The messages while and after a model is patched: one line on stderr, and the log."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from hf_packfree.models.attention import drops_out
from hf_packfree.models.state import Kernels, PatchState
from hf_packfree.ops.attention import OP as ATTENTION
from hf_packfree.ops.backend import Fault, installed
from hf_packfree.ops.launch import is_known
from hf_packfree.ops.table import OPS
from hf_packfree.patching.called_projections import as_under_autocast, called_in_words
from hf_packfree.patching.invariance import warn_of_rounding
from hf_packfree.patching.registry import family_of
from hf_packfree.patching.report import MEASURED, PatchReport, patch_report
from hf_packfree.patching.sharding import a_parameter, what_layers_read
from hf_packfree.versions import LAUNCHED_TRITON

logger = logging.getLogger("hf_packfree")


def announce(model: nn.Module, state: PatchState, autocast: torch.dtype | None = None) -> None:
    """Write and log which backends run in a newly patched model, which operations run in PyTorch
    eager on a GPU for want of kernels, and which kernels compile.

    Args:
        autocast: the dtype of the autocast that the model will run under, if known.
    """
    with as_under_autocast(a_parameter(model).device.type, autocast):
        report = patch_report(model)
    logger.info("%s", report)
    if state.batch_invariant:
        warn_of_rounding(report.rounding, report.implementations)
    warn_of_heads(report.left_alone)
    slow = _slow(state, report.why)
    tell(report, tuple(slow))
    for op, reason in slow.items():
        logger.warning("%s runs in PyTorch eager on this GPU, which is slow: %s", op, reason)
    for op, reason in report.why.items():
        if isinstance(reason, Fault) and op not in slow:
            warn_once(f"{op} runs on this GPU without what is installed for it: {reason}")
    if torch.cuda.is_available() and (said := _why_slow_to_start(state.cuda_half)) is not None:
        warn_once(said)
    if state.cuda_half[ATTENTION.name] != "torch" and drops_out(model):
        logger.warning(
            "attention runs in PyTorch eager on this GPU while training: the kernels lack "
            "attention_dropout"
        )
    _tell_what_compiles(model, state)


def _tell_what_compiles(model: nn.Module, state: PatchState) -> None:
    if compiling := ", ".join(_running(state.cuda_half, "seconds")):
        logger.info(
            "the first step on a GPU compiles kernels for seconds (%s); prewarm(model) does that "
            "ahead",
            compiling,
        )
    single = (
        _running(state.cuda_single, "minutes", " in float32")
        if what_layers_read(model, family_of(model)).dtype == torch.float32
        else []
    )
    # with the kernels of half precision, which a float32 model runs under autocast
    if compiling := ", ".join(_running(state.cuda_half, "minutes") + single):
        warn_once(
            "the first step on a GPU compiles and tunes kernels for minutes, once for these head "
            f"counts on a machine ({compiling}); prewarm(model) does that ahead, and "
            "TILELANG_CACHE_DIR and TRITON_CACHE_DIR name the folders that keep it"
        )


def tell(report: PatchReport, slow: Sequence[str]) -> None:
    """Write one line to stderr: the model's class, how many modules are swapped, that packed rows
    are exact, which backends run, and which operations are slow.

    Silent if PACKFREE_QUIET is set, in processes of rank 1 and up, and if a level is set for the
    logger "hf_packfree" or its parents: at INFO the whole report is logged instead.
    """
    quiet = os.environ.get("PACKFREE_QUIET", "0") not in ("", "0")
    chosen = logger.level != logging.NOTSET or logger.getEffectiveLevel() != logging.WARNING
    if quiet or chosen or not logger.isEnabledFor(logging.WARNING):
        return
    if os.environ.get("RANK", "0") != "0":
        return
    print(f"hf_packfree: {line(report, slow)}", file=sys.stderr)


def line(report: PatchReport, slow: Sequence[str]) -> str:
    """Return the line that `tell` writes."""
    names = ", ".join(dict.fromkeys(report.implementations.values()))
    where = "" if torch.cuda.is_available() else " (CPU)"
    parts = [
        f"{report.model} patched ({sum(report.swaps.values())} modules)",
        "packed rows exact" + ("" if report.listed else f" ({report.family} {MEASURED})"),
        f"{names}{where}",
    ]
    if slow:
        parts.append(f"slow for want of kernels: {', '.join(slow)}")
    if report.called:
        parts.append(called_in_words(report.called))
    return "; ".join(parts)


def warn_of_heads(left_alone: dict[str, str]) -> None:
    """Warn of heads that are not swapped, once per process and class name."""
    for name, reason in left_alone.items():
        warn_once(f"{name} is left alone: {reason}")


@cache
def warn_once(sentence: str) -> None:
    """Log a warning once per process, however many models are patched."""
    logger.warning("%s", sentence)


def _running(kernels: Kernels, time: str, where: str = "") -> list[str]:
    """Name the operations whose backends compile, or tune launch sizes, for `time`: "seconds" or
    "minutes".
    """
    runs = kernels.bare().items()
    return [f"{op}{where}: {name}" for op, name in runs if OPS[op].backends[name].compiles == time]


def _why_slow_to_start(kernels: Kernels) -> str | None:
    """Return why Triton launches our kernels itself, or None if our launcher does."""
    if "triton" not in kernels.bare().values() or is_known():
        return None
    first, last = (LAUNCHED_TRITON[i].strip(".") for i in (0, -1))
    return (
        f"Triton {installed('triton')} starts our kernels itself, which takes the host longer (12% "
        f"of a step of 4,096 tokens on an H200): our launcher was compared with {first} to {last}"
    )


def _slow(state: PatchState, why: dict[str, str]) -> dict[str, str]:
    """Return {operation: why} for operations that run in PyTorch eager for want of kernels; in
    float32 only those with `slow_in_eager`.
    """
    found = {op: reason for op, reason in why.items() if state.cuda_half.get(op) == "torch"}
    for op in (op.name for op in OPS.values() if op.slow_in_eager and op.name not in found):
        single = f"{op} in float32"
        if state.cuda_single.get(op) == "torch" and single in why:
            found[single] = why[single]
    return found
