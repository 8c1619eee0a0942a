"""`verify_packing`: build if asked, measure, judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_packfree.errors import BlindMeasurement, LeakDetected, UnsupportedModel
from hf_packfree.patching.apply import apply_patches, patches_lifted
from hf_packfree.patching.plan import trunks
from hf_packfree.patching.registry import FAMILIES, family_of
from hf_packfree.patching.report import patch_report
from hf_packfree.verify.model_source import build_model
from hf_packfree.verify.probe import Probe, prepared
from hf_packfree.verify.report import Measurement, PackingReport, limits_for

LENGTHS = (5, 64, 1, 129, 3, 63, 65)
"""Documents shorter than the convolution, around the 64-token chunk, and of one token."""


def verify_packing(
    model: nn.Module | str | Path | Any,
    *,
    lengths: Sequence[int] = LENGTHS,
    gradients: bool = True,
    control: bool = True,
    slow_decay: bool = True,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> PackingReport:
    """Measure whether packed documents influence each other.

    Random documents are packed into one row with restarting `position_ids`, the form that leaks in every release of
    transformers, and compared with the same documents run one by one.  Weights, gradients and modes of a model passed
    as an object are as before afterwards.

    Args:
        model: a model, measured as it is, on its own device and dtype; or a config, a checkpoint folder, a hub id or
            the name of a built-in tiny model ("qwen3_5"), which is built, patched and measured.
        lengths: tokens of each document, two or more.
        gradients: also compare every trainable parameter's gradient (takes twice the parameters' memory).
        control: also measure the same weights without patches, which must leak.
        slow_decay: for the measurement, let recurrent states live long (A from 0.01 to 0.05): the fast decay of random
            weights hides leaks.
        seed: of the documents, and of the weights of a model that is built here and has none.
        device, dtype: for a model that is built here; a model object keeps its own.
        trust_remote_code: for a hub id or folder with code of its own.

    Raises:
        LeakDetected: a number is above its limit, or is NaN; `.report` has all numbers.
        BlindMeasurement: the control does not leak, so the measurement could not see a leak.
        UnsupportedModel: no supported text model is inside.
    """
    if len(lengths) < 2:
        raise ValueError(f"found lengths={list(lengths)}; wanted two documents or more, since one cannot leak")
    if not all(isinstance(length, int) and length > 0 for length in lengths) or max(lengths) < 2:
        raise ValueError(
            f"found lengths={list(lengths)}; wanted whole numbers above 0, one of them above 1: in documents of one token "
            "attention has nothing to learn, and its gradients are rounding alone"
        )
    if not isinstance(model, nn.Module):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # random weights, where it has any
            model = build_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        apply_patches(model)
    family = family_of(model)
    if family is None:
        raise UnsupportedModel(
            f"found a {type(model).__name__}, which holds no text model of a supported family; wanted one of "
            f"{', '.join(row.name for row in FAMILIES)}"
        )
    probe = Probe(model, next(trunks(model, family)), tuple(lengths), gradients, seed)
    with prepared(model, slow_decay):
        patched = probe.measure()
        stock = _control(model, probe) if control else None
    report = PackingReport(
        model=type(model).__name__,
        family=family.name,
        device=str(probe.device),
        dtype=str(probe.dtype).removeprefix("torch."),
        lengths=probe.lengths,
        patched=patched,
        stock=stock,
        limits=limits_for(probe.device, probe.dtype),
    )
    _judge(report, model)
    return report


def _judge(report: PackingReport, model: nn.Module) -> None:
    failures = report.failures()
    if failures:
        advice = "report it" if patch_report(model).patched else "call apply_patches(model) first"
        raise LeakDetected(
            f"found documents that influence each other in {report.model}: {'; '.join(failures)}; wanted documents as if "
            f"run one by one; {advice}",
            report,
        )
    if report.stock is not None and not report.stock.logits > max(report.limits.logits, 10 * report.patched.logits):
        raise BlindMeasurement(
            f"found a control (the unpatched model) that differs from one-by-one by only {report.stock.logits:.1e}; wanted a "
            "leak far above the limit, so that this measurement can be believed; pass slow_decay=True or longer documents"
        )


def _control(model: nn.Module, probe: Probe) -> Measurement | None:
    if not patch_report(model).patched:
        return None
    with patches_lifted(model):
        return probe.measure()
