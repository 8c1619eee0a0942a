"""A comparison of setups and batches among ranks before they exchange anything: with different
batches, exchanges hang, end the process, or mix the batches.

All ranks read the same table, so that either all ranks go on or all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import PatchConflict, UnsupportedInput
from hf_packfree.packing.boundaries import UNCUT
from hf_packfree.parallel.collectives import gathered

COLUMNS = 16
"""The number of columns of the table, the first of which is the setup's digest. Never change this,
so that ranks with different releases of hf_packfree can compare.
"""
_TEXT = 2**14
"""The number of bytes of its setup, padded with spaces, that a rank sends if setups differ. Never
change this either.
"""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (-0x61C8864680B583EB, -0x4B47D0C5A1A6F2A3)


def digest(text: str) -> int:
    """Return a 63-bit hash of a text, the same in every process."""
    found = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(found, "big") >> 1


def checksum(x: Tensor) -> Tensor:
    """Return a hash of a tensor, an int64 scalar on its device: of the bits of its elements in
    order; of floats [..., D], of the sums of the bits over D.
    """
    x = x.detach().contiguous()
    bits = x.view(_INTEGERS[x.element_size()])
    # images and audio are large: do not copy their bits to int64
    bits = bits.sum(-1) if x.is_floating_point() and x.ndim > 1 else bits.long()
    mixed = bits.flatten() + torch.arange(bits.numel(), device=x.device) * _ODD[0]
    mixed = (mixed ^ (mixed >> 32)) * _ODD[1]
    return (mixed ^ (mixed >> 29)).sum()


def refuse_disagreement(
    setup: str,
    counts: Mapping[str, int],
    contents: Mapping[str, int | Tensor],
    group: Any,
    device: torch.device,
) -> None:
    """Raise on every rank if the ranks of a group differ in setup or batch.

    This takes one all-gather of 128 bytes for each rank, for which the host waits.

    Args:
        setup: lines "name: value" of facts that do not change between forwards.
        counts: {name: integer}, which the message shows.
        contents: {name: `digest` or `checksum`} of everything else. At most 15 entries together
            with the counts, with equal names on all ranks that have equal setups.
        group: torch.distributed's process group.
        device: the device on which the group exchanges.

    Raises:
        PatchConflict: the setups differ.
        UnsupportedInput: the batches differ.
    """
    facts = [digest(setup), *counts.values(), *contents.values()]
    facts += [0] * (COLUMNS - len(facts))
    on_host = [0 if isinstance(fact, Tensor) else fact for fact in facts]
    sent = torch.tensor(on_host, dtype=torch.int64).to(device, non_blocking=True)
    mine = torch.stack(
        [fact if isinstance(fact, Tensor) else sent[column] for column, fact in enumerate(facts)]
    )
    setups, *columns = zip(*gathered(mine, group).tolist(), strict=True)
    if len(set(setups)) > 1:
        _refuse_other_setup(setup, group, device)
    found = [
        _other(name, values, shown=name in counts)
        for name, values in zip([*counts, *contents], columns, strict=False)
        if len(set(values)) > 1
    ]
    if found:
        raise UnsupportedInput(
            "found different batches on the ranks of a context-parallel group: "
            f"{'; '.join(found)}; wanted the same batch on all of them, of which each takes its "
            "part; share the data over the other ranks alone: DistributedSampler(dataset, "
            "num_replicas=mesh['dp'].size(), rank=mesh['dp'].get_local_rank()), the same seed on "
            "every rank, and num_items_in_batch of the whole row; a Trainer's stream wants "
            f"{UNCUT}"
        )


def _other(name: str, values: Sequence[int], *, shown: bool) -> str:
    """Return which ranks differ from rank 0 in `name`, in words; with `shown`, the values of all
    ranks.
    """
    if shown:
        return f"{name} {', '.join(map(str, values))} by rank"
    others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
    return f"other {name} on rank {', '.join(others)} than on rank 0"


def _refuse_other_setup(setup: str, group: Any, device: torch.device) -> None:
    """Exchange the setups and raise with the lines that differ; all ranks call this.

    Raises:
        PatchConflict: always.
    """
    text = torch.tensor(list(setup.encode()[:_TEXT].ljust(_TEXT)), dtype=torch.uint8)
    everyones = [
        set(bytes(one).decode(errors="ignore").strip().splitlines())
        for one in gathered(text.to(device), group).tolist()
    ]
    common = set.intersection(*everyones)
    found = "; ".join(
        f"rank {rank} has {', '.join(sorted(lines - common)) or 'less'}"
        for rank, lines in enumerate(everyones)
    )
    raise PatchConflict(
        f"found ranks of a context-parallel group that are not set up alike: {found}; wanted the "
        "same packages, options and model on all of them; install and pass the same"
    )
