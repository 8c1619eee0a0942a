"""200 steps on real text, on one GPU and on two that share each row: the losses are the same up to
rounding.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.context_parallel_curves --out DIR
    ... --device cpu --tiny                                   # a trial of the script itself
    python -m tests.benchmarks.context_parallel_curves --plot FILE.jsonl        # docs/context_parallel.png

The text is Python's own library, its bytes the vocabulary: every file one document, cut at 8,192
bytes. Weights in fp32, bf16 by autocast, AdamW with a warm-up. "one GPU, documents in reverse" is
what rounding alone does: the same documents in every row, in the other order.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_packfree import apply_patches, remove_patches
from hf_packfree.parallel import ContextParallel
from tests.benchmarks.context_parallel_ranks import group_of, results_of_ranks
from tests.benchmarks.machine import machine
from tests.benchmarks.models import build, what_runs
from tests.benchmarks.report import ROOT
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.timing import end_if_failed, free, read_lines

LONGEST, SHORTEST = 8192, 512
PLOT = ROOT / "docs/context_parallel.png"


def rows(count: int, tokens: int) -> list[list[Tensor]]:
    """Return so many rows of documents, int64 bytes, each of `tokens` together."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files += sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))
    text = (file.read_bytes() for file in files if "site-packages" not in str(file))
    pieces = (one[start : start + LONGEST] for one in text for start in range(0, len(one), LONGEST))
    found: list[list[Tensor]] = [[]]
    for piece in pieces:
        left = tokens - sum(map(len, found[-1]))
        document = torch.tensor(list(piece[:left]))
        if len(document) >= min(SHORTEST, left):
            found[-1].append(document)
        if sum(map(len, found[-1])) == tokens:
            found.append([])
        if len(found) > count:
            break
    whole = found[:-1]
    return [whole[number % len(whole)] for number in range(count)]


def train(
    shape: Any, batches: list[list[Tensor]], ranks: Any, device: str, reverse: bool
) -> dict[str, Any]:
    """Return the loss of every step, on one process or on those of a group."""
    model = build(shape, device, torch.float32)
    settings = None if ranks is None else ContextParallel(ranks)
    apply_patches(model, context_parallel=settings, unpacked="native")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    # without it the loss jumps to 19, and from there on rounding decides
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=50)
    losses = []
    for batch in batches:
        losses.append(step(model, optimizer, batch[::-1] if reverse else batch, ranks, device))
        warm_up.step()
    with torch.autocast(device, torch.bfloat16):
        runs = what_runs(model)
    remove_patches(model)
    del model, optimizer
    free()
    # read once, at the end; whole numbers are not rounded
    micronats = (torch.stack(losses).double() * 1e6).round().long().tolist()
    return {"micronats": micronats, **runs}


def step(model: nn.Module, optimizer: Any, batch: list[Tensor], ranks: Any, device: str) -> Tensor:
    """Make one step; return the loss of the whole row."""
    ids = torch.cat(batch)[None].to(device)
    positions = torch.cat([torch.arange(len(document)) for document in batch])[None].to(device)
    targets = ids.numel() - len(batch)
    with torch.autocast(device, torch.bfloat16):
        loss: Tensor = model(
            input_ids=ids, position_ids=positions, labels=ids, num_items_in_batch=targets
        ).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    whole = loss.detach().clone()
    if ranks is not None:
        dist.all_reduce(whole, group=ranks)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=ranks)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return whole


def plot(path: Path) -> None:
    """Draw the curves, and how far they are from one GPU's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_lines(path)
    about, curves = lines[0], {line["variant"]: line for line in lines if "micronats" in line}
    losses = {name: torch.tensor(line["micronats"]) / 1e6 for name, line in curves.items()}
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(7, 5), sharex=True, layout="constrained"
    )
    for number, (name, curve) in enumerate(losses.items()):
        look = {"label": name, "linewidth": 1, "color": f"C{number}"}
        above.plot(curve, **look)
        if name != "one GPU":
            below.semilogy((curve - losses["one GPU"]).abs(), **look)
    above.set(ylabel="loss, nats a byte", title=f"{about['machine']}, {about['date']}")
    below.set(ylabel="difference from one GPU", xlabel="step")
    for side in (above, below):
        side.legend(fontsize=8, frameon=False)
    figure.savefig(PLOT, dpi=90)
    pyplot.close(figure)


def main() -> None:
    """Train, or plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="draw this file instead")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--resume", action="store_true", help="leave out rows that the file holds")
    options = parser.parse_args()
    if options.plot:
        return plot(options.plot)
    narrow = SHAPES["tiny" if options.tiny else "2b"]
    shape = replace(narrow, layers=4, sizes={**narrow.sizes, "vocab_size": 256})
    steps, tokens = (6, 600) if options.tiny else (200, 32768)
    with group_of(options.device):
        results = results_of_ranks(options.out, "context_parallel_curves", resume=options.resume)
        results.add({"workload": "machine", "variant": "", **machine(options.device)})
        batches, both = rows(steps, tokens), dist.group.WORLD
        trained = partial(train, shape, batches, device=options.device)
        ways: dict[str, Callable[[], Any]] = {
            "one GPU": partial(trained, ranks=None, reverse=False),
            "two GPUs": partial(trained, ranks=both, reverse=False),
            "one GPU, documents in reverse": partial(trained, ranks=None, reverse=True),
        }
        for name, way in ways.items():
            facts = {"tokens": tokens, "layers": shape.layers, "steps": steps}
            results.row("curves", name, lambda way=way: facts | way())
            end_if_failed(results)


if __name__ == "__main__":
    main()
