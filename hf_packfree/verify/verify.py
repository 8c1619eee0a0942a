"""`verify_packing`: build a model if given its name, measure it, and judge the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_packfree.errors import (
    BlindMeasurement,
    LeakDetected,
    PackFreeError,
    UnsupportedModel,
    in_short,
    ran_out,
)
from hf_packfree.models.state import find_state
from hf_packfree.ops.backend import dtype_name
from hf_packfree.patching.apply import apply_patches, patches_lifted
from hf_packfree.patching.family import Family
from hf_packfree.patching.plan import trunks
from hf_packfree.patching.registry import FAMILIES, family_of
from hf_packfree.patching.report import patch_report
from hf_packfree.patching.sharding import is_fsdp2, policy_dtype
from hf_packfree.patching.unlisted import name_of, text_model, why_not_patched
from hf_packfree.verify.conditions import no_advice, no_tf32_in_cudnn, prepared
from hf_packfree.verify.model_source import build_model
from hf_packfree.verify.packing_report import (
    LIMITS,
    Limits,
    Measurement,
    PackingReport,
    limits_for,
)
from hf_packfree.verify.probe import Probe

LENGTHS = (5, 64, 1, 129, 3, 63, 65)
"""Lengths shorter than the convolution's window, around the 64-token chunk, and of one token."""
MOST_TOKENS = 2**20
"""The most tokens of a row: their logits fill the largest machine's memory."""


@torch.inference_mode(False)
@torch.enable_grad()
def verify_packing(
    model: nn.Module | str | Path | Any,
    *,
    lengths: Sequence[int] = LENGTHS,
    tree: bool | Sequence[int | None] = False,
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
    attention alone together with an indexed mask, for the same reason), and compared with a forward
    of each document alone, [1, length]. With a model that takes images, those documents that are
    long enough have an image, a video and, where it takes any, audio; the row then has an indexed
    `attention_mask` and no positions, so that losing the positions of media fails too. The model is
    measured in evaluation mode, without a cache, and with gradients whatever mode the call is in.
    Its weights, gradients and modes are restored afterwards. Under `torch.autocast` the model runs
    under autocast, with the limits of autocast's dtype; without autocast, fp32 has tighter limits.
    Under context parallelism every rank of the group calls this: they share the packed row, each
    runs the documents alone, and all get the same numbers.

    Args:
        model: a model, which is measured patched or not, on its own device and dtype; or a config,
            a checkpoint folder, a hub id or the name of a built-in tiny model ("qwen3_5"), which is
            built, patched and measured. A causal language model that cannot be patched is measured
            unpatched, packed by `position_ids`; the report says why it is not patched.
        lengths: tokens of each document, two or more, one of them longer than 1; together 2**20 at
            most.
        tree: the lengths are those of segments in a tree of shared prefixes, and every path from a
            root to a leaf is compared with itself alone, in a model that takes images without any.
            True: the first segment is the prompt of all others; or for each segment the number of
            its parent, None for a root. The control then runs the row without the record of the
            tree.
        gradients: also compare every trainable parameter's gradient (takes twice the parameters'
            memory).
        control: also measure the same weights without patches, which must leak.
        slow_decay: for the measurement, let recurrent states live long (A from 0.01 to 0.05): the
            fast decay of random weights hides leaks.
        seed: of the documents, and of the weights of a model that is built here and has none; from
            0 to 2**63 - 1.
        device, dtype: for a model that is built here (default: the CPU, the checkpoint's own
            dtype); a model object keeps its own.
        trust_remote_code: run code that comes with a hub id or folder.

    Returns:
        The numbers, relative RMS errors of logits and gradients, patched and unpatched, all within
        their limits.

    Raises:
        LeakDetected: a number is above its limit, or is NaN in the packed row alone; `.report` has
            all numbers.
        BlindMeasurement: the control does not leak, so the measurement could not see a leak;
            documents alone already give NaN or Inf; or, without `slow_decay`, a decay's gradient
            differs from theirs and nothing else does: upstream's rounds there.
        UnsupportedModel: `model` contains no text model of transformers, no model can be built from
            it, its parameters are on meta or were made in inference mode, FSDP2 shards it and a
            control is wanted, or transformers cannot run it and it is not patched.
        BoundaryError: `tree` is no tree of segments of these lengths.
        ValueError: `lengths` or `tree` names fewer than two documents or samples; `lengths` none
            longer than one token, or more tokens than can be measured; `tree` is no list; `seed` is
            no whole number in its range.
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
    _check_seed(seed)
    if isinstance(model, nn.Module):
        refused = None if family_of(model) is not None else why_not_patched(model)
    else:
        with torch.random.fork_rng(devices=[]):
            # random weights, where it has any
            torch.manual_seed(seed)
            model = build_model(
                model, device=device, dtype=dtype, trust_remote_code=trust_remote_code
            )
        refused = _patched_if_possible(model)
    family = family_of(model)
    trunk = _text_model_of(model, family)
    _refuse_unmeasurable(model, control=control)
    probe = Probe(
        model,
        trunk,
        lengths,
        gradients,
        seed,
        _reference(model),
        _coarsest(model, trunk, family),
        masked=family is not None and family.attends_only,
        parents=_parents(tree, len(lengths)),
    )
    with prepared(model, slow_decay), no_advice(), no_tf32_in_cudnn():
        patched = _measured(probe, model, refused)
        limits = _limits(probe, patched)
        unpatched = _control(model, probe) if control else None
    report = PackingReport(
        model=type(model).__name__,
        family=name_of(trunk) if family is None else family.name,
        device=str(probe.device),
        dtype=dtype_name(probe.dtype),
        lengths=probe.lengths,
        patched=patched,
        unpatched=unpatched,
        limits=limits,
        media=probe.documents.media,
        autocast=None if probe.autocast is None else dtype_name(probe.autocast),
        tree=tree is not False,
        not_patched=refused,
        jitter=_jitter(trunk.config),
    )
    _judge(report, model, slow_decay)
    return report


def _text_model_of(model: nn.Module, family: Family | None) -> Any:
    """Return the text model that is measured; refuse a model without one."""
    trunk: Any = text_model(model) if family is None else next(trunks(model, family))
    if trunk is None:
        raise UnsupportedModel(
            f"found a {type(model).__name__}, which holds no text model; wanted a causal language "
            f"model, of {', '.join(row.name for row in FAMILIES)} or others; pass one"
        )
    return trunk


def _reference(model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context in which documents alone run as transformers runs them."""
    state = find_state(model)
    ours = state is not None and state.runs_unpacked
    return partial(patches_lifted, model) if ours else nullcontext


def _patched_if_possible(model: nn.Module) -> str | None:
    """Patch a model that was built here; return why its packed rows cannot be made exact."""
    try:
        apply_patches(model)
    except UnsupportedModel as error:
        if error.reason is None:
            raise
        return error.reason
    return None


def _measured(probe: Probe, model: nn.Module, refused: str | None) -> Measurement:
    """Measure a model; what transformers itself cannot run is refused as that."""
    try:
        return probe.measure()
    except Exception as error:
        if refused is None or isinstance(error, PackFreeError) or ran_out(error):
            raise
        raise UnsupportedModel(
            f"found a {type(model).__name__}, which fails as it is ({in_short(error)}), and is not "
            f"patched: {refused}; wanted a model that transformers runs; pass a config or "
            "checkpoint of other sizes"
        ) from error


def _limits(probe: Probe, found: Measurement) -> Limits:
    """Return the limits of rounding for what a probe has measured."""
    dtype = probe.autocast or probe.dtype
    limits = limits_for(probe.device, dtype, probe.packages)
    if _may_be_rounding(found, limits, dtype):
        # both runs round: documents packed, and alone
        limits = limits.at_least(*(2 * moved for moved in probe.rounding()))
    return limits


def _whole_lengths(given: Any) -> tuple[int, ...]:
    """Return the documents' lengths; refuse values that are no lengths, and rows that cannot
    leak.
    """
    given = _plain(given)
    lengths = list(given) if isinstance(given, Iterable) else [given]
    if len(lengths) < 2:
        raise ValueError(
            f"found lengths={lengths}; wanted two documents or more, since one cannot leak; pass "
            "[5, 64, 1]"
        )
    if not all(type(length) is int and length > 0 for length in lengths) or max(lengths) < 2:
        raise ValueError(
            f"found lengths={lengths}; wanted whole numbers above 0, one of them above 1: in "
            "documents of one token "
            "attention has nothing to learn, and its gradients are rounding alone; pass [5, 64, 1]"
        )
    if sum(lengths) > MOST_TOKENS:
        raise ValueError(
            f"found lengths of {sum(lengths)} tokens together; wanted {MOST_TOKENS} at most, whose "
            "logits fill a large machine; pass shorter documents"
        )
    return tuple(lengths)


def _parents(tree: bool | Sequence[int | None], segments: int) -> list[int | None] | None:
    """Return each segment's parent, or None where the lengths are of documents."""
    tree = _plain(tree)
    if isinstance(tree, bool):
        return [None, *[0] * (segments - 1)] if tree else None
    if not isinstance(tree, Iterable):
        raise ValueError(
            f"found tree={tree!r}; wanted True, False or the number of each segment's parent; pass "
            "True where all segments go on from the first"
        )
    return list(tree)


def _plain(given: Any) -> Any:
    """Return the lists and numbers of an array or a tensor; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def _check_seed(seed: Any) -> None:
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ValueError(
            f"found seed={seed!r}; wanted a whole number from 0 to 2**63 - 1; pass seed=0"
        )


def _coarsest(model: nn.Module, trunk: nn.Module, family: Family | None) -> torch.dtype:
    """Return the dtype of the most rounding that a text model computes in: of its weights, of what
    FSDP gathers them in, of layers in 4 bits.
    """
    held: set[Any] = {parameter.dtype for parameter in trunk.parameters()}
    held |= {getattr(part, "compute_dtype", None) for part in trunk.modules()}
    known = held & LIMITS.keys()
    return policy_dtype(model, family) or max(known, key=lambda dtype: torch.finfo(dtype).eps)


def _refuse_unmeasurable(model: nn.Module, *, control: bool) -> None:
    """Refuse a model with parameters on meta, which hold no numbers, or made in inference mode,
    which cannot be differentiated; with a control, one that FSDP2 shards, whose patches stay.
    """
    if control and any(map(is_fsdp2, model.modules())):
        raise UnsupportedModel(
            "found a model that FSDP2 shards, whose patches cannot be taken off for the control; "
            "wanted whole weights; call verify_packing before fully_shard, or with control=False "
            "on every rank"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedModel(
                f"found {name} on the meta device, built without numbers or offloaded; wanted all "
                "parameters on a CPU or GPU; load the model with from_pretrained and no device_map"
            )
        if parameter.is_inference():
            raise UnsupportedModel(
                f"found {name} made in torch.inference_mode, which nothing differentiates; wanted "
                "parameters that can be trained; build or load the model outside of that mode"
            )


def _jitter(config: Any) -> tuple[str, ...]:
    """Return the fields of a config for router noise in training, with their values, such as
    Mixtral's and Phi-MoE's `router_jitter_noise`.
    """
    found = config.to_dict().items()
    return tuple(
        f"{name}={value}" for name, value in found if name.endswith("jitter_noise") and value
    )


def _judge(report: PackingReport, model: nn.Module, slow_decay: bool) -> None:
    failures, found = report.failures(), report.patched
    if failures and not slow_decay and _fails_by_decay_alone(report):
        raise BlindMeasurement(
            f"found the gradient of {found.worst_parameter} {found.gradients:.1e} off that of "
            "documents alone, and no document that reaches another; wanted "
            f"{report.limits.gradients:.0e} at most, which transformers' own gradient of a fast "
            "decay misses in fp32; pass slow_decay=True"
        )
    if failures:
        advice = "report it" if patch_report(model).patched else "call apply_patches(model) first"
        if report.not_patched is not None:
            advice = f"pass it documents in rows of their own: {report.not_patched}"
        raise LeakDetected(
            f"found documents that influence each other in {report.model}: {'; '.join(failures)}; "
            f"wanted each document as if it were alone; {advice}",
            report,
        )
    if report.unpatched is not None and not _seen(report.unpatched, report):
        advice = "longer documents" if slow_decay else "slow_decay=True"
        raise BlindMeasurement(
            "found a control (the unpatched model) that differs from documents alone by only "
            f"{report.unpatched.logits:.1e}; wanted a leak far above the limit, so that this "
            f"measurement can be believed; pass {advice}"
        )


def _fails_by_decay_alone(report: PackingReport) -> bool:
    """Whether a decay's gradient is above its limit, and nothing else is."""
    gradients, name = report.patched.gradients or 0.0, report.patched.worst_parameter or ""
    others = replace(report, patched=replace(report.patched, gradients=None)).failures()
    return name.endswith(("A_log", "dt_bias")) and math.isfinite(gradients) and not others


def _seen(control: Measurement, report: PackingReport) -> bool:
    """Whether the control's leak is far above the limit and the patched model's number, in logits
    or in influence: in deep models in half precision rounding fills logits, and influence is 0.
    """
    pairs = (
        (control.logits, report.patched.logits, report.limits.logits),
        (control.influence, report.patched.influence, report.limits.influence),
    )
    return any(leak > max(limit, 10 * found) for leak, found, limit in pairs)


def _may_be_rounding(found: Measurement, limits: Limits, dtype: torch.dtype) -> bool:
    """Whether, in half precision, logits or gradients exceed their limits while nothing leaks: one
    rounding may send a token to another expert.
    """
    apart = found.influence <= limits.influence and not found.cross_gradient
    near = found.logits <= limits.logits and (found.gradients or 0.0) <= limits.gradients
    return dtype in (torch.bfloat16, torch.float16) and apart and not near


def _control(model: nn.Module, probe: Probe) -> Measurement | None:
    if not patch_report(model).patched:
        return None
    # it has to leak, not everywhere
    probe.halves = probe.halves[:1]
    with patches_lifted(model), probe.documents.unmarked():
        return probe.measure()
