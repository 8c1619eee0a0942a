"""The comparison of model and batch among the ranks of a context-parallel group, before the row is
cut into shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree._version import __version__
from hf_packfree.models.linear_weights import autocast_dtype
from hf_packfree.models.state import state_of
from hf_packfree.ops.backend import installed
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.parallel import ContextParallel
from hf_packfree.parallel.agreement import checksum, digest, refuse_disagreement
from hf_packfree.parallel.roll_call import refuse_missing_ranks
from hf_packfree.versions import VERSIONS

_INPUT = ("input_ids", "inputs_embeds")
_TARGETS = ("shift_labels", "labels")


@uncompiled
def refuse_other_ranks(
    head: nn.Module, row: dict[str, Any], packed: PackedSequence, settings: ContextParallel
) -> None:
    """Raise on every rank if the ranks differ in batch, packages, options or model.

    Args:
        head: the patched head.
        row: the head's arguments for the whole row, [1, T, ...] each.
        packed: the record of the row.
        settings: the group, and how its ranks share operations.

    Raises:
        RankLost: some ranks do not take part in the group's first forward.
        PatchConflict, UnsupportedInput: see `refuse_disagreement`.
    """
    rows, width = packed.batch_shape
    counts = {
        "rows": rows,
        "tokens a row": width,
        "tokens without padding": packed.num_real_tokens,
        "documents": packed.num_documents,
    }
    given = {name: row.get(name) for name in (*_INPUT, *_TARGETS, "num_items_in_batch")}
    device = next(value for value in given.values() if isinstance(value, Tensor)).device
    contents = {
        "lengths of documents": digest(f"{packed.lengths} {packed.padding_segments}"),
        **{name: _content(value) for name, value in given.items()},
        "further arguments": _of_all(row[name] for name in sorted(row.keys() - given.keys())),
        "arguments, or a mode (training, no_grad, autocast)": digest(
            f"{sorted(map(_described, row.items()))} {head.training} {torch.is_grad_enabled()} "
            f"{autocast_dtype(device)}"
        ),
    }
    refuse_disagreement(
        settings.setup(lambda: _setup_of_all(head, settings)),
        counts,
        contents,
        settings.group,
        device,
    )


def _setup_of_all(head: nn.Module, settings: ContextParallel) -> str:
    """Return this rank's setup, once all ranks have arrived."""
    refuse_missing_ranks(settings.group)
    return setup_of(head, settings)


def setup_of(head: nn.Module, settings: ContextParallel) -> str:
    """Return the facts that have to be equal on all ranks in every forward, as lines "name:
    value".
    """
    state: Any = replace(state_of(head), context_parallel=None)
    modules = [f"{name} {type(module).__name__}" for name, module in head.named_modules()]
    recomputed = [one for one in head.modules() if getattr(one, "gradient_checkpointing", False)]
    trained = [name for name, one in head.named_parameters() if one.requires_grad]
    dtypes = sorted({str(one.dtype) for one in head.parameters()})
    facts = {
        "hf_packfree": __version__,
        **{name: installed(name) for name in VERSIONS if name not in ("python", "hf_packfree")},
        **vars(state),
        "gdn": settings.gdn,
        "attention": settings.attention,
        "modules": f"{len(modules)} ({digest(str(modules)):x})",
        "trained parameters": f"{len(trained)} ({digest(str(trained)):x})",
        "dtypes": ", ".join(dtypes),
        "gradient checkpointing": bool(recomputed),
    }
    # fields that do not change results
    for name in ("why", "observers", "followers", "graphs"):
        del facts[name]
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def _content(value: Any) -> int | Tensor:
    return checksum(value) if isinstance(value, Tensor) else digest(repr(value))


def _of_all(values: Iterator[Any]) -> int | Tensor:
    """Return one checksum of all tensors among the values, 0 if there are no tensors."""
    found = [checksum(value) for value in values if isinstance(value, Tensor)]
    return checksum(torch.stack(found)) if found else 0


def _described(argument: tuple[str, Any]) -> str:
    """Return an argument's name with the shape and dtype of a tensor, the value of a number, string
    or None, or the type of any other object.
    """
    name, value = argument
    if isinstance(value, Tensor):
        return f"{name} {tuple(value.shape)} {value.dtype}"
    plain = value is None or isinstance(value, (bool, int, float, str))
    return f"{name} {value if plain else type(value).__name__}"
