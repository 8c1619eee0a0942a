"""The options of `apply_patches` that patched modules read in every forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hf_packfree.parallel import ContextParallel

Unpacked = Literal["upstream", "native"]
Padded = Literal["lazy", "upstream"]
CudaGraphs = Literal["auto", "never"]
_VALUES = {
    "batch_invariant": (True, False),
    "unpacked": get_args(Unpacked),
    "padded": get_args(Padded),
    "cuda_graphs": get_args(CudaGraphs),
}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Which rows run in the patched layers, and how.

    Attributes:
        batch_invariant: whether a document gets the same bits in a row of any length, alone or
            packed.
        unpacked: "native": rows of one document run through the patched layers too; "upstream":
            transformers runs them.
        padded: "lazy": padded rows run without their padding, and logits get the caller's shape
            when something reads them; "upstream": transformers runs padded rows.
        cuda_graphs: "auto": training steps of few tokens replay CUDA graphs of the layers, if
            possible; "never".
        context_parallel: the group whose ranks share each row, or None.

    Raises:
        ValueError: an option has an unknown value, or two exclude each other.
    """

    batch_invariant: bool = False
    unpacked: Unpacked = "upstream"
    padded: Padded = "lazy"
    cuda_graphs: CudaGraphs = "never"
    context_parallel: ContextParallel | None = None

    def __post_init__(self) -> None:
        """Refuse a misspelt option, and options that exclude each other."""
        for name, values in _VALUES.items():
            if (found := getattr(self, name)) not in values:
                *others, last = map(repr, values)
                raise ValueError(
                    f"found {name}={found!r}; wanted {', '.join(others)} or {last}; pass one of "
                    "them"
                )
        if self.batch_invariant and self.padded == "upstream":
            raise ValueError(
                "found batch_invariant=True with padded='upstream', which leaves padded rows to "
                "layers that promise no bits; "
                "wanted padded='lazy'; leave one of the two options out"
            )
        if self.context_parallel is not None:
            self._refuse_whole_rows()

    def _refuse_whole_rows(self) -> None:
        """Refuse, under context parallelism, options that need whole rows."""
        found = (
            "batch_invariant=True"
            if self.batch_invariant
            else "padded='upstream'"
            if self.padded == "upstream"
            else None
        )
        if found is not None:
            raise ValueError(
                f"found context_parallel together with {found}, which wants whole rows; wanted one "
                "of the two; leave one out"
            )

    @property
    def drops_padding(self) -> bool:
        """Whether padded rows always run in the patched layers, without their padding."""
        return self.batch_invariant or self.context_parallel is not None

    @property
    def runs_unpacked(self) -> bool:
        """Whether rows of one document run through the patched layers too, unless a call wants
        something that only upstream has.
        """
        return self.unpacked == "native" or self.drops_padding
