"""Context parallelism: the ranks of a group share a packed row, each a span of its tokens, through
the whole model.

What mixes tokens exchanges what crosses the edges of their spans, as its `Op` in `hf_packfree.ops`
says (`across_ranks`); the rest sees one rank's tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

GDN = Literal["auto", "heads", "state"]
Attention = Literal["auto", "heads", "gather"]


@dataclass(frozen=True)
class ContextParallel:
    """The group whose ranks share each row, and how their layers exchange.

    Every rank of the group has to be given the same batches: the model takes its part inside
    forward.

    Args:
        group: torch.distributed's process group, or a mesh of one dimension.
        gdn: of Gated DeltaNet: "heads", each rank has a share of the heads over all tokens;
            "state", each has its tokens, and the states at their edges are exchanged; "auto": what
            takes less time of what the ranks and the backend can do.
        attention: of full attention: "heads"; "gather", each rank gathers the keys and values
            before its own, of which the last one has most to read; "auto": in each row what takes
            less time, where the ranks divide the heads.
        why: of a patched model's: what its operations exchange, and why.
        ways: of a patched model's: {operation: the way in which the ranks share it}.

    Raises:
        ValueError: an option has an unknown value, or the mesh has several dimensions.
    """

    group: Any
    gdn: GDN = "auto"
    attention: Attention = "auto"
    why: str = field(default="", compare=False, repr=False)
    ways: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    _memo: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Take the group out of a mesh; refuse misspelt options."""
        if isinstance(self.group, DeviceMesh):
            if self.group.ndim != 1:
                raise ValueError(
                    f"found a mesh of {self.group.ndim} dimensions for context parallelism; wanted "
                    f"one of one dimension; "
                    "pass mesh['cp'], or what the dimension of context parallelism is called"
                )
            object.__setattr__(self, "group", self.group.get_group())
        for name, known in {"gdn": get_args(GDN), "attention": get_args(Attention)}.items():
            if (found := getattr(self, name)) not in known:
                *others, last = map(repr, known)
                raise ValueError(
                    f"found {name}={found!r} for context parallelism; wanted {', '.join(others)} "
                    f"or {last}; pass one of them"
                )

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return dist.get_rank(self.group)

    @property
    def world(self) -> int:
        """W, the number of ranks."""
        return dist.get_world_size(self.group)

    def __str__(self) -> str:
        """Say what ranks exchange, and why."""
        return f"{self.world} ranks share each row: {self.why or 'not chosen yet how'}"

    def remembered(self, name: str, find: Callable[[], str]) -> str:
        """Return a sentence about the model that these settings are of, found once."""
        if name not in self._memo:
            self._memo[name] = find()
        return self._memo[name]

    def __deepcopy__(self, memo: Any) -> ContextParallel:
        """A copy of a model is in the same group, which cannot be copied."""
        return self


def context_parallel(given: Any) -> ContextParallel | None:
    """Return the settings of what `apply_patches` was given: those themselves, a group, a mesh,
    or None.
    """
    return given if given is None or isinstance(given, ContextParallel) else ContextParallel(given)


__all__ = ["ContextParallel", "context_parallel"]
