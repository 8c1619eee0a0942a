"""Below the trunk nothing waits for the device; after `prewarm`, rows of new lengths neither
tune nor compile again.
"""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

import hf_packfree
from hf_packfree import apply_patches
from hf_packfree.models.state import state_of
from hf_packfree.packing import shard_row
from hf_packfree.parallel import ContextParallel
from tests.benchmarks.exchanges import Alone, exchanging
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.gpu.small import EXPERTS, NARROW, hidden, packed_row, small

pytestmark = gpu
WARM = ((64, 65, 129, 254), (1, 130, 700, 66), (2000, 3, 61))
"""Rows whose token counts are multiples of 512, of nothing, and of 16: what kernels are
specialised for.
"""
OTHER = ((513, 63, 2, 300), (90, 90, 90, 90, 90, 90, 90, 90), (3000, 1, 17, 1024))
LONGER = (4096, 500)
CHOICES = {
    "auto": "auto",
    "as on Ampere": {"delta_rule": "fla", "attention": "varlen"},
    "FLA": {"delta_rule": "fla", "conv": "torch"},
}
BY_LENGTH: dict[str, set[str]] = {
    "auto": set(),
    "as on Ampere": set(),
    "FLA": {"l2norm_fwd_kernel", "l2norm_bwd_kernel"},
}
"""Whose choices go by a row's length too: fla-core 0.6.0's norm of q and k, of which every 65,536
heads of tokens are a key of their own (with 16 heads, 4,096 tokens; `LONGER` has more). All other
keys of what runs here are sizes of the model."""


def step(model, row):
    tokens, packed = row
    model.zero_grad(set_to_none=True)
    hidden(model, tokens, packed).float().pow(2).mean().backward()


def warm_up(model):
    """What the package offers for it, then a step of every row in `WARM`."""
    hf_packfree.prewarm(model)
    for lengths in WARM:
        step(model, packed_row(model, lengths))


def kernels() -> Counter[tuple[str, str]]:
    """{(kind, kernel): how many} of the choices tuned ("tuned") and kernels compiled ("triton",
    "tilelang") in this process.
    """
    found: Counter[tuple[str, str]] = Counter()
    for thing in gc.get_objects():
        kinds = {kind.__name__ for kind in type(thing).__mro__}
        if "Autotuner" in kinds:
            found["tuned", thing.base_fn.__name__] += len(thing.cache)
        elif "JITFunction" in kinds and hasattr(thing, "device_caches"):
            found["triton", thing.fn.__name__] += sum(
                len(cache[0]) for cache in list(thing.device_caches.values())
            )
        elif "JITImpl" in kinds and hasattr(thing, "_kernel_cache"):
            found["tilelang", getattr(getattr(thing, "func", None), "__name__", "?")] += len(
                thing._kernel_cache
            )
    return found


def of_kind(found: Counter[tuple[str, str]], kind: str) -> dict[str, int]:
    return {name: count for (its, name), count in sorted(found.items()) if its == kind and count}


def new_after(model, rows, what: str, record) -> dict[str, dict[str, int]]:
    """What steps of these rows compile and tune; the record names it."""
    before = kernels()
    for lengths in rows:
        step(model, packed_row(model, lengths))
    new, found = kernels() - before, {}
    for kind in ("tuned", "triton", "tilelang"):
        found[kind] = of_kind(new, kind)
        had = sum(of_kind(before, kind).values())
        record(
            f"kernels, {kind}: new after {what}",
            float(sum(found[kind].values())),
            had=had,
            new=found[kind],
        )
    return found


def test_prewarm_is_enough(record):
    """The first test of this file: nothing is compiled yet. What "auto" chooses; FLA's kernels
    go by length (`BY_LENGTH`).
    """
    if kernels().total():
        pytest.skip("this process has compiled kernels before; run this file alone")
    model = small(NARROW)
    hf_packfree.prewarm(model)
    assert TRIAL or of_kind(kernels(), "triton"), "no kernel is seen"
    found = new_after(model, (WARM[0], WARM[1], OTHER[1]), "prewarm and three rows", record)
    assert not any(found.values()), found


@pytest.mark.parametrize("name", CHOICES)
def test_new_lengths_do_not_tune_again(name, record):
    """Before other tests run rows of these lengths."""
    model = small(NARROW, backend="auto" if TRIAL else CHOICES[name])
    warm_up(model)
    kind = "triton" if name == "auto" else "tuned"
    assert TRIAL or of_kind(kernels(), kind), "no kernel is seen"
    found = new_after(model, (*OTHER, LONGER), f"four rows of other lengths, {name}", record)
    assert set(found["tuned"]) <= BY_LENGTH[name], found
    if name == "auto":
        assert not any(found.values()), found


@pytest.mark.parametrize("lengths", OTHER, ids=str)
@pytest.mark.parametrize("name", CHOICES)
def test_no_host_sync_below_the_trunk(name, lengths):
    """Forward and backward with torch's sync debug mode on error; kernels that bypass torch's
    calls are not seen.
    """
    model = small(NARROW, backend="auto" if TRIAL else CHOICES[name])
    warm_up(model)
    does_not_wait(model, packed_row(model, lengths))


def test_experts_do_not_wait_either():
    model = small(EXPERTS)
    warm_up(model)
    does_not_wait(model, packed_row(model, OTHER[0]))


@pytest.mark.parametrize("gdn, attention", [("state", "heads"), ("heads", "gather")])
def test_shards_do_not_wait_for_what_they_exchange(gdn, attention):
    """The second of two ranks, whose documents go on from the first, with copies in the place of
    exchanges.
    """
    with exchanging(Alone(1, 2)):
        model = small(NARROW, patched=False)
        apply_patches(model, context_parallel=ContextParallel(None, gdn=gdn, attention=attention))
        rows = [
            packed_row(model, lengths)
            for lengths in ((64, 65, 129, 254), (3, 2000, 61), (700,), (90, 90, 300, 90))
        ]
        ways = state_of(model).context_parallel.ways
        *warm, row = [
            (tokens.chunk(2, 1)[1], shard_row(packed, 1, 2, ways=ways)) for tokens, packed in rows
        ]
        for one in warm:
            step(model, one)
        does_not_wait(model, row)


def does_not_wait(model, row):
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
