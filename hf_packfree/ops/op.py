"""`Op`, an operation on packed rows: what leaks without it, its backends, and how ranks share
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.backend import BATCH_INVARIANT, B
from hf_packfree.packing import PackedSequence, refuse_shard


def in_words(name: str) -> str:
    """Return the name of an operation or a size as words of a sentence: "key heads" for
    "key_heads".
    """
    return name.replace("_", " ")


def _nothing(backend: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Way:
    """One way in which the ranks of a context-parallel group share an operation.

    Attributes:
        run: takes a backend, and then the arguments of `Backend.run` for one rank's tokens and the
            record of its shard. Functions that exchange have to be
            `hf_packfree.packing.uncompiled`.
        exchanges: what the ranks exchange, in words, such as "heads"; empty: messages do not
            mention it.
        divides: the name in `Target.sizes` of the size that W, the number of ranks, has to divide;
            None: any W.
        lacking: returns what a backend lacks for this way, such as "gives no states", or None.
    """

    run: Callable[..., Any]
    exchanges: str
    divides: str | None = None
    lacking: Callable[[Any], str | None] = _nothing

    def why_not(self, sizes: Mapping[str, int], world: int) -> str | None:
        """Return why `world` ranks cannot share the operation in this way, in a model of these
        sizes, or None.
        """
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
        ways: {name: way}, preferred ways first; the last way works for any number of ranks.
        option: the field of `hf_packfree.parallel.ContextParallel` by which a user chooses a way;
            None: there is no choice.
        of: the name of the operation for users; empty: `Op.name`.
        cheaper: returns which way takes less time, if several ways are possible, and why, as a
            sentence, from `Target.sizes` and W; None: the first possible way is taken.
        not_with: {name in `Target.sizes`: the name in words}, sizes above 0 that need whole rows.
    """

    ways: Mapping[str, Way]
    option: str | None = None
    of: str = ""
    cheaper: Callable[[Mapping[str, int], int], tuple[str, str]] | None = None
    not_with: Mapping[str, str] = field(default_factory=dict)

    def divided(self) -> set[str]:
        """Return the names of all sizes that W has to divide in one of the ways."""
        return {way.divides for way in self.ways.values() if way.divides is not None}


@dataclass(frozen=True)
class Op(Generic[B]):
    """One operation on packed rows, with a folder of its own and a line in `hf_packfree.ops.table`.

    Attributes:
        name: its name in `apply_patches(model, backend={name: ...})`.
        backends: {name: backend}, preferred backends first; the last backend runs everywhere.
        leaks: what crosses document boundaries in upstream's implementation, as half a sentence;
            None: nothing, the operation is only faster.
        leaks_sometimes: whether upstream leaks with some input formats only, because transformers
            reads boundaries from the others.
        where: the part of a model that calls the operation: token mixers ("layers"), the head with
            its loss ("head"), vision and audio towers ("towers").
        compiled: the backend that runs under torch.compile; None: the chosen one.
        loaded: whether the attention implementation of the model's or tower's config runs instead
            of the operation, if that is not "sdpa".
        slow_in_eager: whether the backend "torch" takes many times as long as a kernel on a GPU in
            float32 too, not only in half precision.
        linear_layers: whether the decoder layers' linear layers run in this operation, unless its
            backend is "torch".
        across_ranks: how ranks that hold parts of a row share the operation; None: they cannot
            share it.
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
        """The name of the operation for users."""
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
        """Return the function that runs the operation on a row: the backend's `running(packed)`,
        or, for one rank's shard of a row, the `Way.run` by which ranks share it, with the backend.

        Raises:
            BackendUnavailable: no backend has that name, or the backend lacks something for this
                way.
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
        """Return why ranks cannot share this operation in a model of these sizes, as the name of
        the operation and of what needs whole rows, or None.
        """
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
