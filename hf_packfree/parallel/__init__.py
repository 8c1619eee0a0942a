"""Context parallelism: the ranks of a group share a packed row, each a span of its tokens, through
the whole model.

Operations that mix tokens exchange states, heads or keys across the edges of the spans, in the ways
of their `Op.across_ranks` in `hf_packfree.ops`. All other modules run on one rank's tokens.
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

    Every rank of the group has to get the same batches: the model cuts out the rank's tokens inside
    forward.

    Args:
        group: torch.distributed's process group, or a mesh of one dimension.
        gdn: for Gated DeltaNet: "heads": each rank runs a share of the heads over all tokens;
            "state": each rank runs its own tokens, and ranks exchange the states at the edges;
            "auto": the faster of the two, if the number of ranks and the backend allow both.
        attention: for full attention: "heads": each rank runs a share of the heads over all tokens;
            "gather": each rank gathers the keys and values of earlier tokens of its documents, so
            that later ranks have more to compute; "auto": the faster of the two in each row, if the
            number of ranks divides the heads.
        why: set for a patched model: what its operations exchange, and why, in words.
        ways: set for a patched model: {operation: the name of the way in which the ranks share the
            operation}.

    Raises:
        ValueError: an option has an unknown value, or the mesh has several dimensions.
    """

    group: Any
    gdn: GDN = "auto"
    attention: Attention = "auto"
    why: str = field(default="", compare=False, repr=False)
    ways: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    _setup: list[str] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Replace a mesh by its group; refuse unknown values of options."""
        if isinstance(self.group, DeviceMesh):
            if self.group.ndim != 1:
                raise ValueError(
                    f"found a mesh of {self.group.ndim} dimensions for context parallelism; wanted "
                    "one of one dimension; "
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
        """Return what ranks exchange, and why, as a sentence."""
        return f"{self.world} ranks share each row: {self.why or 'not chosen yet how'}"

    def setup(self, find: Callable[[], str]) -> str:
        """Return the setup that `find` returns, called once; settings belong to one model."""
        if not self._setup:
            self._setup.append(find())
        return self._setup[0]

    def __deepcopy__(self, memo: Any) -> ContextParallel:
        """Return these settings: a copy of a model is in the same group, and process groups cannot
        be copied.
        """
        return self


def context_parallel(given: Any) -> ContextParallel | None:
    """Return the settings for the argument `context_parallel` of `apply_patches`: settings, a
    group, a mesh, or None.

    Raises:
        ValueError: see `ContextParallel`.
    """
    return given if given is None or isinstance(given, ContextParallel) else ContextParallel(given)


__all__ = ["ContextParallel", "context_parallel"]
