"""Two hundred steps on real text, packed against padded: in bf16 as near to fp32 as stock's own, in fp32 as ways of padding."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from itertools import combinations
from pydoc_data.topics import topics
from statistics import median

import torch
from torch.nn import functional as F

from hf_packfree import apply_patches
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.gpu.models import build
from tests.gpu.shapes import SHAPES, linear_heads

pytestmark = gpu
STEPS = 4 if TRIAL else 200
SHAPE = SHAPES["tiny"] if TRIAL else replace(SHAPES["exact"], sizes={**SHAPES["exact"].sizes, **linear_heads(16, 16)})
ROWS, LONGEST = 8, 200
SLOW_STEPS = 4 if TRIAL else 10
"""Of the curves where a leak shows; later the losses come together again."""
SHOWS = 2.24e-2
"""Nearly twice what bf16 does to the curves of two hundred steps on an H200 (1.2e-2): there a leak may stay below."""
SLACK = TRIAL * 1e-4
"""Four steps of a trial are too few to compare."""
ROUNDING = 1.5
"""Times what bf16 does to stock's curves; ours was 1.0 of it on a CPU, 1.09 on an H200."""
EARLY = 20
"""Steps before what rounding does has grown."""
HIDDEN = 100
"""Packing in fp32 moves them this many times less than bf16 does: 2,900 times on an H200 (2.5e-7 and 7.2e-4)."""
LEAK = 1e-3
"""Four thousand times the rounding of a loss in fp32 (2.4e-7), a sixth of the leak of the first step (6e-3), both on a CPU."""


def documents(step: int) -> list[torch.Tensor]:
    """The step's documents: 20 to 200 bytes each of Python's own help texts, int64."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - LONGEST, (ROWS,), generator=generator).tolist()
    sizes = torch.randint(20, LONGEST + 1, (ROWS,), generator=generator).tolist()
    return [torch.tensor(list(text[start:start + size])) for start, size in zip(starts, sizes)]


def padded(batch, extra: int = 0):
    """A rectangle with a 0/1 mask, `extra` slots wider than it has to be; labels -100 where no byte follows."""
    width = max(map(len, batch)) + extra
    tokens, labels = torch.zeros(len(batch), width, dtype=torch.long), torch.full((len(batch), width), -100)
    mask = torch.zeros_like(tokens)
    for row, document in enumerate(batch):
        tokens[row, : len(document)], mask[row, : len(document)] = document, 1
        labels[row, : len(document) - 1] = document[1:]
    return {"input_ids": tokens.to(DEVICE), "attention_mask": mask.to(DEVICE)}, labels.to(DEVICE)


def packed(batch):
    """One row with restarting positions."""
    labels = torch.cat([torch.cat([document[1:], torch.tensor([-100])]) for document in batch])
    positions = torch.cat([torch.arange(len(document)) for document in batch])
    return {"input_ids": torch.cat(batch)[None].to(DEVICE), "position_ids": positions[None].to(DEVICE)}, labels[None].to(DEVICE)


def decaying_slowly(model):
    """States that live for hundreds of tokens, weights that let a leak show: as born, a leak parts curves by a seventh."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.01, 0.05).log_()
            elif parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def loss_of(model, inputs, labels, half):
    with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
        logits = model(use_cache=False, **inputs).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def curve(batches, backend=None, steps: int = STEPS, start=lambda model: model, half=True) -> torch.Tensor:
    """Train from the same start; `batches(step)` gives the parts whose gradients add up.  Returns fp32 [steps] losses.

    Patched if there is a backend; in bf16 autocast if `half`.
    """
    torch.manual_seed(0)
    model = start(build(SHAPE, DEVICE, torch.float32))
    if backend is not None:
        apply_patches(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        parts = batches(step)
        count = sum((labels >= 0).sum() for _, labels in parts)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for inputs, labels in parts:
            loss = loss_of(model, inputs, labels, half) / count
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return torch.stack(losses).float().cpu()


def halves(step: int):
    batch = documents(step)
    return [padded(batch[: ROWS // 2]), padded(batch[ROWS // 2:])]


def whole(step: int):
    return [padded(documents(step))]


def wider(step: int):
    return [padded(documents(step), 64)]


def row(step: int):
    return [packed(documents(step))]


KERNELS = {} if TRIAL else {"FlashQLA": "1", "FLA's kernels": "0"}
"""Of upstream's delta rule on a GPU, by FLA_FLASH_QLA."""


def stocks_runs(request, monkeypatch):
    """Stock's padded curves in bf16: by each of the kernels it may choose, and in its own torch functions."""
    runs = {}
    for name, flag in KERNELS.items():
        request.getfixturevalue("pin")("largest")
        monkeypatch.setenv("FLA_FLASH_QLA", flag)
        runs[name] = curve(whole)
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    request.getfixturevalue("upstream_in_torch")
    return runs | {"torch": curve(whole), "torch, 64 more slots": curve(wider), "torch, two halves": curve(halves)}


def test_two_hundred_steps_packed_and_padded(record, request, monkeypatch, precise):
    """Training multiplies whatever parts two curves, rounding too, a hundredfold and more in two hundred steps.

    So bf16's noise is how far stock's curves are from its own in fp32.  Packed, in bf16, may be 1.5 times as far from that
    one, and as far from a padded one as two that are each so far from it.  The first steps are compared by themselves:
    rounding has not grown yet, and a leak cannot hide in it.
    """
    runs = stocks_runs(request, monkeypatch)
    exact, found = curve(whole, half=False), curve(row, "auto")
    noise = {name: gap(run, exact) for name, run in runs.items()}
    usual, what = median(noise.values()), f"{STEPS} steps, mean gap of the losses"
    record(f"{what}: padded in bf16 against fp32", usual, gaps=noise)
    record(f"{what}: packed in bf16 against padded in fp32", gap(found, exact), ROUNDING * usual + SLACK)
    gaps = {name: gap(found, run) for name, run in runs.items()}
    record(f"{what}: packed against padded, both in bf16", median(gaps.values()), 2 * max(noise.values()), gaps=gaps,
           first=float(exact[0]), last=float(exact[-10:].mean()), last_packed=float(found[-10:].mean()))
    apart = {f"{one}; {other}": gap(runs[one], runs[other]) for one, other in combinations(runs, 2)}
    record(f"{what}: padded runs in bf16 among themselves", median(apart.values()), gaps=apart)

    rows, others = curve(row, {"delta_rule": "torch"}, half=False), curve(wider, half=False)
    record(f"{what}: packed against padded, both in fp32", gap(rows, exact))
    record(f"{what}: padded runs in fp32 among themselves", gap(others, exact))
    what, hidden = f"{EARLY} steps, mean gap of the losses", median(early(run, exact) for run in runs.values())
    record(f"{what}: padded in bf16 against fp32", hidden)
    record(f"{what}: packed in bf16 against padded in fp32", early(found, exact), ROUNDING * hidden + SLACK)
    record(f"{what}: packed against padded, both in fp32", early(rows, exact), hidden / HIDDEN + SLACK)
    record(f"{what}: padded runs in fp32 among themselves", early(others, exact))
    assert TRIAL or exact[-10:].mean() < exact[0] - 1.0, "the model did not learn"
    save({**runs, "padded, fp32": exact, "packed, fp32": rows, "wider, fp32": others, "packed": found})


def leaking(step: int):
    """Stock reads one document per row where nobody says otherwise."""
    inputs, labels = packed(documents(step))
    return [({"input_ids": inputs["input_ids"]}, labels)]


def test_a_leaking_run_parts_from_padded_and_packed_does_not(record, upstream_in_torch):
    """Few steps from a start that shows leaks.

    Packed may part by a quarter of what leaking does: in bf16 on a CPU it was a twentieth (3.6e-3 of 7.0e-2), so that the
    kernels may round five times as much, and a leak of a quarter is seen.
    """
    options = {"steps": SLOW_STEPS, "start": decaying_slowly}
    reference = curve(whole, **options)
    leak = gap(curve(leaking, **options), reference)
    error = gap(curve(row, "auto", **options), reference)
    record(f"{SLOW_STEPS} steps from slow decay, control, leaking against padded: mean gap of the losses", leak)
    record(f"{SLOW_STEPS} steps from slow decay, packed against padded: mean gap of the losses", error, leak / 4)
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
    """In fp32 and from slow decay: in bf16, as born, it differed by 1.6e-4, as much as by rounding."""
    torch.manual_seed(0)
    model, batch = decaying_slowly(build(SHAPE, DEVICE, torch.float32)), documents(0)
    with torch.no_grad():
        exact, wider, leaked = (
            float(loss_of(model, *part, half=False)) for part in (padded(batch), padded(batch, 64), *leaking(0))
        )
    leak, rounding = abs(leaked / exact - 1), abs(wider / exact - 1)
    record("control, stock reads one document: relative gap of the first loss", leak, rounding=rounding)
    assert leak > LEAK > 100 * rounding
