"""What two ranks do that were given, or patched, different things; and what one does whose
companion dies, or takes no part any more.

python -m tests.parallel.disagreement FOLDER     # writes what the ranks say that are left
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from hf_packfree import MTPOptions, apply_patches, remove_patches
from hf_packfree.errors import PackFreeError
from hf_packfree.models import same_batch
from hf_packfree.parallel import ContextParallel
from tests.parallel.ranks import batch_of
from tests.support import tiny

LENGTHS = [5, 9, 3, 7]
TIMEOUT = 6


def changed_batch(name: str) -> dict[str, object]:
    """Return what the other rank is given of a batch."""
    batch = batch_of(LENGTHS, 0)
    ids, labels = batch["input_ids"], batch["labels"]
    swapped = ids.clone()
    swapped[0, [6, 7]] = ids[0, [7, 6]] + 1
    return {
        "nothing": {},
        "patched anew": {},
        "tokens": {"input_ids": swapped},
        "lengths, as many tokens": batch_of([5, 8, 4, 7], 0) | {"input_ids": ids},
        "a shorter row": batch_of(LENGTHS[:3], 0),
        "a targets' label": {"labels": labels.where(labels < 0, labels + 1)},
        "no labels": {"labels": None},
        "a count": {"num_items_in_batch": torch.tensor(8)},
        "another argument": {"output_router_logits": True},
    }[name]


BATCHES = {
    "nothing": None,
    "patched anew": None,
    "tokens": "other input_ids on rank 1 than on rank 0",
    "lengths, as many tokens": "other lengths of documents on rank 1 than on rank 0",
    "a shorter row": "tokens a row 24, 17 by rank",
    "a targets' label": "other shift_labels on rank 1 than on rank 0",
    "no labels": "other shift_labels on rank 1 than on rank 0",
    "a count": "other num_items_in_batch on rank 1 than on rank 0",
    "another argument": "other arguments",
    "no_grad": "mode (training, no_grad, autocast) on rank 1",
    "autocast": "mode (training, no_grad, autocast) on rank 1",
}
"""What is other on the second rank, and what every rank says of it."""

SETUPS = {
    "a package": "rank 1 has torch: 1.0",
    "gdn": "rank 0 has gdn: heads; rank 1 has gdn: state",
    "backend": "'loss': 'upstream'",
    "a multi-token head": "rank 1 has modules: ",
    "checkpointing": "rank 1 has gradient checkpointing: True",
    "a frozen layer": "rank 1 has trained parameters: ",
    "a dtype": "rank 1 has dtypes: ",
}
"""The same of what the ranks run."""


def said(rank: int, name: str) -> str | None:
    """Return the error of a step on two ranks of which the second has something else, or None."""
    other = rank == 1
    with ExitStack() as stack:
        model = patched(name if other else "nothing", stack)
        batch = batch_of(LENGTHS, 0) | {"num_items_in_batch": torch.tensor(7)}
        modes = {"no_grad": torch.no_grad(), "autocast": torch.autocast("cpu", torch.bfloat16)}
        if other and name in modes:
            stack.enter_context(modes[name])
        elif other and name in BATCHES:
            batch |= changed_batch(name)
        if name == "patched anew":
            model(**batch)
            if other:
                settings = ContextParallel(dist.group.WORLD, gdn="heads")
                apply_patches(remove_patches(model), context_parallel=settings)
        try:
            loss = model(**batch).loss
            if loss is not None and loss.requires_grad:
                loss.backward()
        except PackFreeError as error:
            return f"{type(error).__name__}: {error}"
    return None


def patched(name: str, stack: ExitStack):
    """Return a patched model; by name with something of its own."""
    options = {"context_parallel": ContextParallel(dist.group.WORLD, gdn="heads")}
    if name == "a package":
        installed = same_batch.installed
        stack.enter_context(
            patch.object(
                same_batch,
                "installed",
                lambda package: "1.0" if package == "torch" else installed(package),
            )
        )
    if name == "gdn":
        options["context_parallel"] = ContextParallel(dist.group.WORLD, gdn="state")
    if name == "backend":
        options["backend"] = {"loss": "upstream"}
    if name == "a multi-token head":
        options["mtp"] = MTPOptions(from_scratch=True)
    model = apply_patches(tiny(), **options).train()
    if name == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if name == "a frozen layer":
        model.model.layers[0].requires_grad_(False)
    if name == "a dtype":
        model.model.layers[0].to(torch.float64)
    return model


WAYS = {
    "ends before its first forward": 0,
    "stalls before its first forward": 0,
    "ends amid a step": 20,
    "stalls amid a step": 20,
    "ends with the store": 20,
}
"""What becomes of one of three ranks, and behind how many exchanges: 20 are a whole step and some."""
LOST = {way: int(way != "ends with the store") for way in WAYS}
"""The rank; the first one keeps the store that is no file."""


def companion(way: str, rank: int, folder: str) -> None:
    """Be one of three ranks that make steps until one of them ends, or sleeps; the others write
    after how many seconds they say what.
    """
    torch.set_num_threads(1)
    in_file = f"file://{folder}/{way}".replace(" ", "-")
    store = f"tcp://localhost:{free_port(folder)}" if way == "ends with the store" else in_file
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=3, timeout=timedelta(seconds=TIMEOUT)
    )
    settings = ContextParallel(dist.group.WORLD, gdn="state", attention="gather")
    model = apply_patches(tiny(), context_parallel=settings).train()
    # the name of both torch's releases
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    exchange, calls = getattr(dist, name), 0

    def leave() -> None:
        if rank == LOST[way] and calls == WAYS[way]:
            if way.startswith("ends"):
                os._exit(0)
            time.sleep(3 * TIMEOUT)

    def counted(*args, **options):
        nonlocal calls
        calls += 1
        leave()
        return exchange(*args, **options)

    leave()
    with patch.object(dist, name, counted):
        for _ in range(3):
            began = time.monotonic()
            try:
                model(**batch_of(LENGTHS, 0)).loss.backward()
            except Exception as error:
                waited = time.monotonic() - began
                sentence = f"{waited:.1f} {type(error).__name__}: {error}"
                Path(folder, f"{way} {rank}").write_text(sentence)
                break
    # whatever threads of gloo still wait for
    os._exit(0)


def free_port(folder: str) -> int:
    """Return the port that the parent found."""
    return int(Path(folder, "port").read_text())


def main() -> None:
    """Try all ways, side by side."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        Path(sys.argv[1], "port").write_text(str(one.getsockname()[1]))
    for way in WAYS:
        for rank in range(3):
            # which never returns
            os.fork() or companion(way, rank, sys.argv[1])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break


if __name__ == "__main__":
    main()
