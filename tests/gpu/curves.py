"""Training curves, each in a process of its own so that they are trained side by side.

python -m tests.gpu.curves NAME FILE
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hf_packfree import apply_patches
from tests.benchmarks.models import build, pin_kernels, precise_products
from tests.benchmarks.shapes import SHAPES, linear_heads
from tests.gpu.checks import DEVICE, TRIAL
from tests.support import put_upstream_in_torch

STEPS = 4 if TRIAL else 200
SHAPE = (
    SHAPES["tiny"]
    if TRIAL
    else replace(SHAPES["exact"], sizes={**SHAPES["exact"].sizes, **linear_heads(16, 16)})
)
ROWS, LONGEST = 8, 200
ROOT = Path(__file__).parents[2]


def documents(step: int) -> list[torch.Tensor]:
    """The step's documents: 20 to 200 bytes each of Python's own help texts, int64."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - LONGEST, (ROWS,), generator=generator).tolist()
    sizes = torch.randint(20, LONGEST + 1, (ROWS,), generator=generator).tolist()
    return [torch.tensor(list(text[start : start + size])) for start, size in zip(starts, sizes)]


def padded(batch, extra: int = 0):
    """A rectangle with a 0/1 mask, `extra` tokens wider than it has to be; labels -100 where no
    byte follows.
    """
    width = max(map(len, batch)) + extra
    tokens, labels = (
        torch.zeros(len(batch), width, dtype=torch.long),
        torch.full((len(batch), width), -100),
    )
    mask = torch.zeros_like(tokens)
    for row, document in enumerate(batch):
        tokens[row, : len(document)], mask[row, : len(document)] = document, 1
        labels[row, : len(document) - 1] = document[1:]
    return {"input_ids": tokens.to(DEVICE), "attention_mask": mask.to(DEVICE)}, labels.to(DEVICE)


def packed(batch):
    """One row with restarting positions."""
    labels = torch.cat([torch.cat([document[1:], torch.tensor([-100])]) for document in batch])
    positions = torch.cat([torch.arange(len(document)) for document in batch])
    return {
        "input_ids": torch.cat(batch)[None].to(DEVICE),
        "position_ids": positions[None].to(DEVICE),
    }, labels[None].to(DEVICE)


def decaying_slowly(model):
    """States that live for hundreds of tokens, weights that let a leak show: as born, a leak
    parts curves by a seventh.
    """
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


def curve(
    batches, backend=None, steps: int = STEPS, start=lambda model: model, half=True
) -> torch.Tensor:
    """Train from the same start; `batches(step)` gives the parts whose gradients add up. Returns
    fp32 [steps] losses.

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
    return [padded(batch[: ROWS // 2]), padded(batch[ROWS // 2 :])]


def whole(step: int):
    return [padded(documents(step))]


def wider(step: int):
    return [padded(documents(step), 64)]


def row(step: int):
    return [packed(documents(step))]


def leaking(step: int):
    """An unpatched model reads one document per row where nobody says otherwise."""
    inputs, labels = packed(documents(step))
    return [({"input_ids": inputs["input_ids"]}, labels)]


def by_kernels(flag: str, patch: pytest.MonkeyPatch) -> torch.Tensor:
    """The unpatched padded curve in bf16 on the kernels that it chooses by FLA_FLASH_QLA."""
    pin_kernels(patch)("largest")
    patch.setenv("FLA_FLASH_QLA", flag)
    return curve(whole)


def in_torch(batches: Callable, patch: pytest.MonkeyPatch, half: bool = True) -> torch.Tensor:
    """The unpatched curve in upstream's own torch functions."""
    put_upstream_in_torch(patch)
    return curve(batches, half=half)


def ours(backend: Any, patch: pytest.MonkeyPatch, half: bool = True) -> torch.Tensor:
    """The packed curve."""
    put_upstream_in_torch(patch)
    return curve(row, backend, half=half)


UNPATCHED: dict[str, Callable[..., torch.Tensor]] = {
    **(
        {}
        if TRIAL
        else {"FlashQLA": partial(by_kernels, "1"), "FLA's kernels": partial(by_kernels, "0")}
    ),
    "torch": partial(in_torch, whole),
    "torch, 64 more tokens": partial(in_torch, wider),
    "torch, two halves": partial(in_torch, halves),
}
"""Unpatched padded curves in bf16: by each of the kernels it may choose, and in upstream's torch
functions.
"""
CURVES = {
    **UNPATCHED,
    "padded, fp32": partial(in_torch, whole, half=False),
    "wider, fp32": partial(in_torch, wider, half=False),
    "packed": partial(ours, "auto"),
    "packed, fp32": partial(ours, {"delta_rule": "torch"}, half=False),
}


def train(folder: Path) -> dict[str, torch.Tensor]:
    """Return every curve by name, fp32 [STEPS] each."""
    files = {name: folder / f"{number}.pt" for number, name in enumerate(CURVES)}
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.curves", name, str(file)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, file in files.items()
    ]
    said = [process.communicate()[0] for process in running]
    failed = [text[-1500:] for process, text in zip(running, said) if process.returncode]
    if failed:
        raise RuntimeError("\n".join(failed))
    return {name: torch.load(file) for name, file in files.items()}


def main(arguments: Sequence[str]) -> None:
    """Train one curve and leave it in a file."""
    name, file = arguments
    with precise_products(), pytest.MonkeyPatch.context() as patch:
        torch.save(CURVES[name](patch), file)


if __name__ == "__main__":
    main(sys.argv[1:])
