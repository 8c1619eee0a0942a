"""What ranks have to agree on before they exchange anything: where batches differ exchanges hang,
end the process, or train on a mixture.

All ranks read the same table, so that all of them go on, or all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import PatchConflict, UnsupportedInput
from hf_packfree.parallel.collectives import gathered

COLUMNS = 16
"""Of the table, and the first of them is the setup's: never changed, so that ranks that run other
releases find out.
"""
_TEXT = 2**14
"""Bytes of setup that a rank shows where setups differ, padded with spaces; never changed either.
"""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (-0x61C8864680B583EB, -0x4B47D0C5A1A6F2A3)


def digest(text: str) -> int:
    """Return 63 bits that tell texts apart, the same in every process."""
    found = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(found, "big") >> 1


def checksum(x: Tensor) -> Tensor:
    """Return an int64 scalar on the device that tells tensors apart by the bits of their elements,
    in order; of floats [..., D] by the sums of D elements' bits.
    """
    x = x.detach().contiguous()
    bits = x.view(_INTEGERS[x.element_size()])
    # images and audio are large: make no copy of them
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
    """Refuse, on every rank, what the ranks of a group do not have in common.

    One all-gather of 128 bytes a rank, which the host waits for.

    Args:
        setup: lines "name: value" of what is the same in every forward.
        counts: by name, integers that a reader understands.
        contents: by name, `digest` or `checksum` of the rest. 15 numbers at most with the counts,
            of the same names on all ranks that have the same setup.
        group: torch.distributed's.
        device: on which it exchanges.

    Raises:
        PatchConflict: the setups differ.
        UnsupportedInput: the batches do.
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
            f"found different batches on the ranks of a context-parallel group: "
            f"{'; '.join(found)}; wanted the same batch on all of them, of which each takes its "
            "part; share the data over the other ranks alone: DistributedSampler(dataset, "
            "num_replicas=mesh['dp'].size(), rank=mesh['dp'].get_local_rank()), the same seed on "
            "every rank, and num_items_in_batch of the whole row"
        )


def _other(name: str, values: Sequence[int], *, shown: bool) -> str:
    """Say which ranks have something else than the first one."""
    if shown:
        return f"{name} {', '.join(map(str, values))} by rank"
    others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
    return f"other {name} on rank {', '.join(others)} than on rank 0"


def _refuse_other_setup(setup: str, group: Any, device: torch.device) -> None:
    """Show what differs: all ranks are here."""
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
