"""An operation: what leaks where it is missing, and its backends in order of preference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.backend import BATCH_INVARIANT, B


@dataclass(frozen=True)
class AcrossRanks:
    """How the ranks of a context-parallel group share an operation.

    Attributes:
        option: the field of `hf_packfree.parallel.ContextParallel` that says which way.
        heads: what they divide among them, by its name in `Target.sizes`; None: what another
            operation of the same option divides.
    """

    option: str
    heads: str | None = None


@dataclass(frozen=True)
class Op(Generic[B]):
    """One operation on packed rows: its folder holds it, and `hf_packfree.ops.table` lists it.

    Attributes:
        name: as `apply_patches(model, backend={name: ...})` takes it.
        backends: {name: backend}, the preferred ones first; the last of them runs everywhere.
        leaks: what crosses document boundaries where upstream's own runs, as half a sentence; None:
            nothing, it is here for speed.
        leaks_sometimes: whether that is so for some forms of input alone, because transformers
            reads boundaries in others.
        where: what of a model calls it: token mixers ("layers"), the head with its loss ("head"),
            vision and audio towers ("towers").
        compiled: the backend that runs under torch.compile; None: the chosen one.
        loaded: whether the attention implementation that a model or a tower was loaded with runs
            instead, unless that is "sdpa".
        slow_in_eager: whether PyTorch eager takes many times as long on a GPU in float32, too.
        linear_layers: whether the layers' linear layers run in it, unless it runs on "torch".
        across_ranks: how ranks that hold parts of a row share it; None: they cannot.
    """

    name: str
    backends: Mapping[str, B]
    leaks: str | None = None
    leaks_sometimes: bool = False
    where: Literal["layers", "head", "towers"] = "layers"
    compiled: str | None = None
    loaded: bool = False
    slow_in_eager: bool = False
    linear_layers: bool = False
    across_ranks: AcrossRanks | None = None

    def backend(self, name: str) -> B:
        """Return the backend of that name, which may end in `BATCH_INVARIANT`.

        Raises:
            BackendUnavailable: there is none.
        """
        bare = name.removesuffix(BATCH_INVARIANT)
        if bare not in self.backends:
            raise BackendUnavailable(
                f"found {self.name.replace('_', ' ')} backend {name!r}; wanted one of "
                f"{', '.join(sorted(self.backends))}; pass one of them"
            )
        found = self.backends[bare]
        return found if bare == name else found.for_every_row()

    def for_every_row(self, name: str) -> str:
        """Return the name by which `backend` finds what gives a document the same bits in every
        row: the same name, where that is the backend itself.
        """
        found = self.backends[name]
        return name if found.for_every_row() is found else name + BATCH_INVARIANT
