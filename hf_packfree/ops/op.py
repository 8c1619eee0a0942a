"""An operation: what leaks without it, and its backends in order of preference."""

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
        option: the field of `hf_packfree.parallel.ContextParallel` that chooses the way.
        heads: the heads that the ranks divide among them, by their name in `Target.sizes`; None:
            those of another operation with the same option.
    """

    option: str
    heads: str | None = None


@dataclass(frozen=True)
class Op(Generic[B]):
    """One operation on packed rows, with a folder of its own and a line in `hf_packfree.ops.table`.

    Attributes:
        name: its name in `apply_patches(model, backend={name: ...})`.
        backends: {name: backend}, the preferred ones first; the last of them runs everywhere.
        leaks: what crosses document boundaries in upstream's implementation, as half a sentence;
            None: nothing, the operation is only faster.
        leaks_sometimes: whether upstream leaks with some input formats only, because transformers
            reads boundaries from the others.
        where: the part of a model that calls the operation: token mixers ("layers"), the head with
            its loss ("head"), vision and audio towers ("towers").
        compiled: the backend that runs under torch.compile; None: the chosen one.
        loaded: whether the attention implementation that a model or a tower was loaded with runs
            instead, if that is not "sdpa".
        slow_in_eager: whether "torch" takes many times as long as a kernel on a GPU in float32 too,
            not only in half precision.
        linear_layers: whether the decoder layers' linear layers run in this operation, unless its
            backend is "torch".
        across_ranks: how ranks that hold parts of a row share the operation; None: they cannot.
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
            BackendUnavailable: no backend has that name.
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
        """Return the name of the backend that gives a document the same bits in every row: `name`
        itself, or with the suffix `BATCH_INVARIANT`.
        """
        found = self.backends[name]
        return name if found.for_every_row() is found else name + BATCH_INVARIANT
