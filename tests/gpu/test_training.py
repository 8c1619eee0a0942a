"""Two hundred steps on real text, packed against padded: in bf16 as near to fp32 as upstream's,
in fp32 as ways of padding.
"""

from __future__ import annotations

import contextlib
import os
from itertools import combinations
from statistics import median

import torch

from tests.benchmarks.models import build
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.gpu.curves import (
    SHAPE,
    STEPS,
    UNPATCHED,
    curve,
    decaying_slowly,
    documents,
    leaking,
    loss_of,
    padded,
    row,
    train,
    whole,
)

pytestmark = gpu
SLOW_STEPS = 4 if TRIAL else 10
"""Of the curves where a leak shows; later the losses come together again."""
SHOWS = 2.24e-2
"""Nearly twice what bf16 does to the curves of two hundred steps on an H200 (1.2e-2): there a
leak may stay below.
"""
SLACK = TRIAL * 1e-4
"""Four steps of a trial are too few to compare."""
ROUNDING = 1.5
"""Times what bf16 does to upstream's curves; ours was 1.0 of it on a CPU, 1.09 on an H200."""
EARLY = 20
"""Steps before what rounding does has grown."""
HIDDEN = 100
"""Packing in fp32 moves them this many times less than bf16 does: 2,900 times on an H200 (2.5e-7
and 7.2e-4).
"""
LEAK = 1e-3
"""Four thousand times the rounding of a loss in fp32 (2.4e-7), a sixth of the leak of the first
step (6e-3), both on a CPU.
"""


def test_two_hundred_steps_packed_and_padded(record, tmp_path):
    """Training multiplies whatever parts two curves, rounding too, a hundredfold and more in two
    hundred steps.

    So bf16's noise is how far upstream's curves are from its own in fp32. Packed, in bf16, may be
    1.5 times as far from that one, and as far from a padded one as two that are each so far from
    it. The first steps are compared by themselves: rounding has not grown yet, and a leak cannot
    hide in it.
    """
    curves = train(tmp_path)
    save(curves)
    runs = {name: curves[name] for name in UNPATCHED}
    exact, found, rows, others = (
        curves[name] for name in ("padded, fp32", "packed", "packed, fp32", "wider, fp32")
    )
    noise = {name: gap(run, exact) for name, run in runs.items()}
    usual, what = median(noise.values()), f"{STEPS} steps, mean gap of the losses"
    record(f"{what}: padded in bf16 against fp32", usual, gaps=noise)
    record(
        f"{what}: packed in bf16 against padded in fp32",
        gap(found, exact),
        ROUNDING * usual + SLACK,
    )
    gaps = {name: gap(found, run) for name, run in runs.items()}
    record(
        f"{what}: packed against padded, both in bf16",
        median(gaps.values()),
        2 * max(noise.values()),
        gaps=gaps,
        first=float(exact[0]),
        last=float(exact[-10:].mean()),
        last_packed=float(found[-10:].mean()),
    )
    apart = {f"{one}; {other}": gap(runs[one], runs[other]) for one, other in combinations(runs, 2)}
    record(f"{what}: padded runs in bf16 among themselves", median(apart.values()), gaps=apart)
    record(f"{what}: packed against padded, both in fp32", gap(rows, exact))
    record(f"{what}: padded runs in fp32 among themselves", gap(others, exact))
    what, hidden = (
        f"{EARLY} steps, mean gap of the losses",
        median(early(run, exact) for run in runs.values()),
    )
    record(f"{what}: padded in bf16 against fp32", hidden)
    record(
        f"{what}: packed in bf16 against padded in fp32",
        early(found, exact),
        ROUNDING * hidden + SLACK,
    )
    record(
        f"{what}: packed against padded, both in fp32", early(rows, exact), hidden / HIDDEN + SLACK
    )
    record(f"{what}: padded runs in fp32 among themselves", early(others, exact))
    assert TRIAL or exact[-10:].mean() < exact[0] - 1.0, "the model did not learn"


def test_a_leaking_run_parts_from_padded_and_packed_does_not(record, upstream_in_torch):
    """Few steps from a start that shows leaks.

    Packed may part by a quarter of what leaking does: in bf16 on a CPU it was a twentieth (3.6e-3
    of 7.0e-2), so that the kernels may round five times as much, and a leak of a quarter is seen.
    """
    options = {"steps": SLOW_STEPS, "start": decaying_slowly}
    reference = curve(whole, **options)
    leak = gap(curve(leaking, **options), reference)
    error = gap(curve(row, "auto", **options), reference)
    record(
        f"{SLOW_STEPS} steps from slow decay, control, leaking against padded: mean gap of the "
        f"losses",
        leak,
    )
    record(
        f"{SLOW_STEPS} steps from slow decay, packed against padded: mean gap of the losses",
        error,
        leak / 4,
    )
    assert leak > SHOWS


def gap(found, wanted) -> float:
    """Mean absolute difference over the steps."""
    return float((found - wanted).abs().mean())


def early(found, wanted) -> float:
    """The same over the first steps."""
    return gap(found[:EARLY], wanted[:EARLY])


def save(curves):
    """Leave the curves beside the other results."""
    folder = os.environ.get("PACKFREE_GPU_OUT")
    with contextlib.suppress(TypeError):
        torch.save(curves, os.path.join(folder, "curves.pt"))


def test_control_without_boundaries_the_first_loss_differs(record, precise, upstream_in_torch):
    """In fp32 and from slow decay: in bf16, as born, it differed by 1.6e-4, as much as by
    rounding.
    """
    torch.manual_seed(0)
    model, batch = decaying_slowly(build(SHAPE, DEVICE, torch.float32)), documents(0)
    with torch.no_grad():
        exact, wider, leaked = (
            float(loss_of(model, *part, half=False))
            for part in (padded(batch), padded(batch, 64), *leaking(0))
        )
    leak, rounding = abs(leaked / exact - 1), abs(wider / exact - 1)
    record(
        "control, unpatched reads one document: relative gap of the first loss",
        leak,
        rounding=rounding,
    )
    assert leak > LEAK > 100 * rounding
