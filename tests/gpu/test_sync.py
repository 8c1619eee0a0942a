"""Below the trunk nothing waits for the device, and rows of new lengths neither tune nor compile again."""

from __future__ import annotations

import gc

import pytest
import torch

import hf_packfree
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.gpu.small import NARROW, hidden, packed_row, small

pytestmark = gpu
WARM = ((64, 65, 129, 254), (1, 130, 700, 66), (2000, 3, 61))
"""Rows whose token counts are multiples of 512, of nothing, and of 16: what kernels are specialised for."""
OTHER = ((513, 63, 2, 300), (90, 90, 90, 90, 90, 90, 90, 90), (3000, 1, 17, 1024))


def step(model, row):
    tokens, packed = row
    model.zero_grad(set_to_none=True)
    hidden(model, tokens, packed).float().pow(2).mean().backward()


def warm_up(model):
    """What the package offers for it, then a step of every row in `WARM`."""
    prewarm = getattr(hf_packfree, "prewarm", None)
    if prewarm is not None:
        prewarm(model)
    for lengths in WARM:
        step(model, packed_row(model, lengths))


@pytest.mark.parametrize("lengths", OTHER, ids=str)
def test_no_host_sync_below_the_trunk(lengths):
    """Forward and backward with torch's sync debug mode on error; kernels that bypass torch's calls are not seen."""
    model = small(NARROW)
    warm_up(model)
    row = packed_row(model, lengths)
    if TRIAL:
        return step(model, row)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, row)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.skipif(TRIAL, reason="CPU has no such mode")
def test_control_the_mode_sees_a_sync():
    flag = torch.ones((), device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            flag.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def counts() -> dict[str, int]:
    """How many tuned choices ("tuned") and compiled kernels ("triton", "tilelang") this process holds."""
    found = {"tuned": 0, "triton": 0, "tilelang": 0}
    for thing in gc.get_objects():
        kinds = {kind.__name__ for kind in type(thing).__mro__}
        if "Autotuner" in kinds:
            found["tuned"] += len(thing.cache)
        elif "JITFunction" in kinds and hasattr(thing, "device_caches"):
            found["triton"] += sum(len(cache[0]) for cache in list(thing.device_caches.values()))
        elif "JITImpl" in kinds and hasattr(thing, "_kernel_cache"):
            found["tilelang"] += len(thing._kernel_cache)
    return found


def test_new_lengths_do_not_tune_again(record):
    """Tuning has to stop after warm-up; compiling is recorded too."""
    model = small(NARROW)
    warm_up(model)
    before = counts()
    for lengths in OTHER:
        step(model, packed_row(model, lengths))
    after = counts()
    for kind in before:
        new = after[kind] - before[kind]
        record(f"kernels, {kind}: new after three rows of other lengths", float(new), had=before[kind])
    assert after["tuned"] == before["tuned"]
    assert after["triton"] == before["triton"] and after["tilelang"] == before["tilelang"]
