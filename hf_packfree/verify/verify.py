"""`verify_packing`: build a model if given its name, measure, judge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
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
from hf_packfree.verify.ranks import settings_of
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

    Random documents are packed into one row, `input_ids` [1, sum(lengths)] with restarting
    `position_ids` (the input format that leaks in every release of transformers; in families of
    attention alone beside an indexed mask, for the same reason), and compared with a forward of
    each document alone, [1, length]. With a model that takes images, those documents that are long
    enough have an image, a video and, where it takes any, a sound; the row then has an indexed
    `attention_mask` and no positions, so that losing the positions of media fails too. The model is
    measured in evaluation mode, without a cache. Its weights, gradients and modes are as before
    afterwards. Under context parallelism every rank of the group calls this: the row is shared, its
    documents alone are not, and all ranks get the same numbers.

    Args:
        model: a model, measured as it is, on its own device and dtype; or a config, a checkpoint
            folder, a hub id or the name of a built-in tiny model ("qwen3_5"), which is built,
            patched and measured.
        lengths: tokens of each document, two or more, one of them longer than 1.
        gradients: also compare every trainable parameter's gradient (takes twice the parameters'
            memory).
        control: also measure the same weights without patches, which must leak.
        slow_decay: for the measurement, let recurrent states live long (A from 0.01 to 0.05): the
            fast decay of random weights hides leaks.
        seed: of the documents, and of the weights of a model that is built here and has none.
        device, dtype: for a model that is built here (default: the CPU, the checkpoint's own
            dtype); a model object keeps its own.
        trust_remote_code: run code that comes with a hub id or folder.

    Returns:
        The numbers, all within their limits: relative RMS errors of logits and gradients, patched
        and unpatched.

    Raises:
        LeakDetected: a number is above its limit, or is NaN; `.report` has all numbers.
        BlindMeasurement: the control does not leak, so the measurement could not see a leak.
        UnsupportedModel: no supported text model is inside, or no model can be built from what was
            given.
        ValueError: `lengths` names fewer than two documents, or none longer than one token.
        PatchConflict, ContractError, BackendUnavailable: a model that is built here cannot be
            patched.

    Example:
        >>> from hf_packfree import apply_patches, verify_packing
        >>> from hf_packfree.verify import build_model
        >>> model = apply_patches(build_model("qwen3_5"))
        >>> report = verify_packing(model, lengths=[5, 64, 3])
        >>> report.patched.logits < 1e-5 < 1e-2 < report.unpatched.logits
        True
        >>> report.patched.influence, report.patched.cross_gradient
        (0.0, 0.0)
    """
    lengths = _whole_lengths(lengths)
    if not isinstance(model, nn.Module):
        with torch.random.fork_rng(devices=[]):
            # random weights, where it has any
            torch.manual_seed(seed)
            model = build_model(
                model, device=device, dtype=dtype, trust_remote_code=trust_remote_code
            )
        apply_patches(model)
    family = family_of(model)
    if family is None:
        raise UnsupportedModel(
            f"found a {type(model).__name__}, which holds no text model of a supported family; "
            f"wanted one of "
            f"{', '.join(row.name for row in FAMILIES)}; `packfree models` shows the table"
        )
    patches = patch_report(model)
    # documents alone would run in the patched layers too
    ours = patches.batch_invariant or patches.unpacked == "native" or settings_of(model) is not None
    reference = partial(patches_lifted, model) if ours else nullcontext
    probe = Probe(
        model,
        next(trunks(model, family)),
        lengths,
        gradients,
        seed,
        reference,
        masked=family.attends_only,
    )
    with prepared(model, slow_decay):
        patched = probe.measure()
        limits = limits_for(probe.device, probe.dtype, probe.packages)
        unpatched = _control(model, probe) if control else None
    report = PackingReport(
        model=type(model).__name__,
        family=family.name,
        device=str(probe.device),
        dtype=str(probe.dtype).removeprefix("torch."),
        lengths=probe.lengths,
        patched=patched,
        unpatched=unpatched,
        limits=limits,
        media=probe.documents.media,
    )
    _judge(report, model)
    return report


def _whole_lengths(given: Any) -> tuple[int, ...]:
    """Return the documents' lengths; refuse what cannot leak, and what is no length."""
    lengths = list(given) if isinstance(given, Iterable) else [given]
    if len(lengths) < 2:
        raise ValueError(
            f"found lengths={lengths}; wanted two documents or more, since one cannot leak; pass "
            f"[5, 64, 1]"
        )
    if not all(type(length) is int and length > 0 for length in lengths) or max(lengths) < 2:
        raise ValueError(
            f"found lengths={lengths}; wanted whole numbers above 0, one of them above 1: in "
            f"documents of one token "
            "attention has nothing to learn, and its gradients are rounding alone; pass [5, 64, 1]"
        )
    return tuple(lengths)


def _judge(report: PackingReport, model: nn.Module) -> None:
    failures = report.failures()
    if failures:
        advice = "report it" if patch_report(model).patched else "call apply_patches(model) first"
        raise LeakDetected(
            f"found documents that influence each other in {report.model}: {'; '.join(failures)}; "
            f"wanted each document as if it were alone; {advice}",
            report,
        )
    control = report.unpatched
    if control is not None and not control.logits > max(
        report.limits.logits, 10 * report.patched.logits
    ):
        raise BlindMeasurement(
            "found a control (the unpatched model) that differs from documents alone by only "
            f"{control.logits:.1e}; wanted a leak far above the limit, so that this measurement "
            "can be believed; pass slow_decay=True or longer documents"
        )


def _control(model: nn.Module, probe: Probe) -> Measurement | None:
    if not patch_report(model).patched:
        return None
    with patches_lifted(model):
        return probe.measure()
