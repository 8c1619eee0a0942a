"""An operation: what leaks without it, and its backends in order of preference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.backend import BATCH_INVARIANT, B
from hf_packfree.packing import PackedSequence, refuse_shard


def in_words(name: str) -> str:
    """Return a name of an operation or a size as text has it: "key heads"."""
    return name.replace("_", " ")


def _nothing(backend: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Way:
    """One way in which the ranks of a context-parallel group share an operation.

    Attributes:
        run: takes a backend, and then what `Backend.run` takes: one rank's tokens and the record of
            its shard. Exchanges are `hf_packfree.packing.uncompiled`.
        exchanges: what, in words: "heads".
        divides: what W, the number of ranks, has to divide, by its name in `Target.sizes`; None:
            nothing.
        lacking: returns what a backend lacks for it, as in "gives no states", or None.
    """

    run: Callable[..., Any]
    exchanges: str
    divides: str | None = None
    lacking: Callable[[Any], str | None] = _nothing

    def why_not(self, sizes: Mapping[str, int], world: int) -> str | None:
        """Return why so many ranks cannot share a model of these sizes in it, or None."""
        if self.divides is None:
            return None
        count, heads = sizes.get(self.divides), in_words(self.divides)
        if count is None:
            return f"the number of {heads} is not known"
        return f"{world} ranks do not divide {count} {heads}" if count % world else None


@dataclass(frozen=True)
class AcrossRanks:
    """How the ranks of a context-parallel group share an operation.

    Attributes:
        ways: {name: way}, the preferred ones first; the last of them is for any number of ranks.
        option: the field of `hf_packfree.parallel.ContextParallel` by which a user names one; None:
            nothing is left to choose.
        of: what users know the operation by; empty: its name.
        cheaper: where several ways can be taken, returns which one takes less time, given
            `Target.sizes` and W, and why in a sentence; None: the first of them is taken.
        not_with: {name in `Target.sizes`: in words}, what a model may have that needs whole rows.
    """

    ways: Mapping[str, Way]
    option: str | None = None
    of: str = ""
    cheaper: Callable[[Mapping[str, int], int], tuple[str, str]] | None = None
    not_with: Mapping[str, str] = field(default_factory=dict)

    def divided(self) -> set[str]:
        """Return all that W has to divide in some way."""
        return {way.divides for way in self.ways.values() if way.divides is not None}


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

    @property
    def title(self) -> str:
        """What users know it by."""
        return (self.across_ranks and self.across_ranks.of) or in_words(self.name)

    def backend(self, name: str) -> B:
        """Return the backend of that name, which may end in `BATCH_INVARIANT`.

        Raises:
            BackendUnavailable: no backend has that name.
        """
        bare = name.removesuffix(BATCH_INVARIANT)
        if bare not in self.backends:
            raise BackendUnavailable(
                f"found {in_words(self.name)} backend {name!r}; wanted one of "
                f"{', '.join(sorted(self.backends))}; pass one of them"
            )
        found = self.backends[bare]
        return found if bare == name else found.for_every_row()

    def running(self, backend: str, packed: PackedSequence) -> Callable[..., Any]:
        """Return what runs on a row: a backend; on one rank's part of a row, on that backend, what
        the ranks share it by.

        Raises:
            BackendUnavailable: no backend has that name, or it lacks something for that.
            UnsupportedInput: ranks cannot share the operation.
        """
        found = self.backend(backend)
        if packed.shard is None:
            return found.running(packed)
        if self.across_ranks is None or self.name not in packed.shard.ways:
            refuse_shard(packed, self.name)
        assert self.across_ranks is not None
        way = self.across_ranks.ways[packed.shard.ways[self.name]]
        if (lacking := way.lacking(found)) is not None:
            able = [name for name, other in self.backends.items() if way.lacking(other) is None]
            raise BackendUnavailable(
                f"found {in_words(self.name)} on {backend!r}, which {lacking}, under context "
                f"parallelism by exchange of {way.exchanges}; wanted it on {' or '.join(able)}; "
                "name one as backend, or another way as an option of `ContextParallel`"
            )
        return partial(way.run, found)

    def needs_whole_rows(self, sizes: Mapping[str, int]) -> str | None:
        """Return what of it in a model of these sizes no ranks can share, in words, or None."""
        if self.leaks is None:
            return None
        if self.across_ranks is None:
            return self.name
        found = [words for name, words in self.across_ranks.not_with.items() if sizes.get(name)]
        return f"{self.name} with {' and '.join(found)}" if found else None

    def for_every_row(self, name: str) -> str:
        """Return the name of the backend that gives a document the same bits in every row: `name`
        itself, or with the suffix `BATCH_INVARIANT`.
        """
        found = self.backends[name]
        return name if found.for_every_row() is found else name + BATCH_INVARIANT
