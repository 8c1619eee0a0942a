"""Which rows of a text model are replayed, and why others are not."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.graphs.ahead import Ahead, Inputs, Launched, identity_of, widest
from hf_packfree.graphs.bucket import cut, in_bucket_on, kind_of, lengthened_inputs
from hf_packfree.graphs.bucketing import in_longer
from hf_packfree.graphs.by_layer import ByLayer, are_sharded
from hf_packfree.graphs.captured import Captured
from hf_packfree.graphs.captured_sequence import OtherPlan
from hf_packfree.graphs.captures import Captures
from hf_packfree.graphs.copies import Copies
from hf_packfree.graphs.layer_graphs import LayerGraphs
from hf_packfree.graphs.settings import Settings, switches_of, why_not_row
from hf_packfree.graphs.whole import Layers, Whole
from hf_packfree.packing import PackedSequence

CHANGES = 16
"""How often settings may change; and once more for every this many replays."""
AGAIN = 64
"""Where they changed more often, so many rows later two are compared."""
_CHANGING = "the model's settings change with its steps"
_NOTED = "what its layers are called with had to be seen first"
_STALE = "a layer was called with other weights or arguments than were captured"
Embed = Callable[[Tensor], Tensor]
"""Takes a row's ids [1, T], or its embeddings; returns its embeddings, [1, T, D]."""


@dataclass(eq=False, repr=False)
class Runner:
    """The graphs of one text model, and why rows ran without a graph.

    Attributes:
        trunk: the text model.
        copies: of its weights.
        captures: the graphs.
        reasons: {why rows ran without a graph: how many}.
        replayed: how many rows ran in a graph.
        replayed_in_longer: how many of them in a graph for longer rows, for lack of their own.
        ahead: rows that were replayed before the host had read their documents.
        output: the class of upstream's output.
        given: the dtype of the last row's ids, or of its embeddings.
    """

    trunk: weakref.ref[nn.Module]
    copies: Copies
    captures: Captures = field(default_factory=Captures)
    reasons: Counter[str] = field(default_factory=Counter)
    replayed: int = 0
    replayed_in_longer: int = 0
    ahead: Ahead = field(default_factory=Ahead)
    output: Any = None
    given: torch.dtype | None = None
    _settings: Settings | None = None
    _switches: Any = None
    _switches_before: Any = None
    _compared: bool = False
    _looked_for: weakref.ref[Tensor] | None = None
    _changes: int = 0
    _passed: int = 0

    def look(self) -> None:
        """Begin a row. Graphs are dropped if the model, or a setting, changed since they were
        captured: at once if what they read was moved, else while the GPU runs what `run_ahead` or
        `run` launches.
        """
        # of a call that never came to `run`
        self.ahead.drop()
        self._compared, self._looked_for = False, None
        trunk, settings = self.trunk(), self._settings
        # here, since a caller may change them for the text model alone
        self._switches = None if trunk is None else switches_of(trunk)
        # a replay of moved weights would read memory that was freed
        if not self.captures.graphs or settings is None or not settings.keep_memory():
            self._compare()

    def _compare(self) -> bool:
        """Drop all graphs if the model, or a setting, changed; return whether. Done once a row."""
        trunk, settings, changes = self.trunk(), self._settings, self._changes
        if trunk is None or self._compared:
            return False
        self._compared = True
        if self.captures.why_not == _CHANGING:
            if not self._has_settled(trunk):
                return False
            settings, changes, self._changes = None, 0, 0
        if settings is None or self._switches != self._switches_before or not settings.hold():
            self.ahead.drop_result()
            way = self._way_of(trunk)
            self.captures.start_anew(way)
            self._settings, self._switches_before = way.settings, self._switches
            self._changes += 1
        if self._changes > CHANGES + self.replayed // CHANGES:
            self.captures.why_not = _CHANGING
        return self._changes > changes

    def _has_settled(self, trunk: nn.Module) -> bool:
        """Whether settings that always changed did not from one row to the next; asked of few rows,
        because comparing takes as long as a step of a small model.
        """
        self._passed += 1
        if self._passed == AGAIN:
            self._settings = self._way_of(trunk).settings
            self._switches_before = self._switches
        if self._passed <= AGAIN:
            return False
        self._passed = 0
        settings = self._settings
        same = self._switches == self._switches_before
        return same and settings is not None and settings.hold()

    def leave(self) -> None:
        """Forget what was launched for a row that will not come to `run`, and compare: graphs of
        other settings keep memory.
        """
        self.ahead.drop()
        self._compare()

    def looked_for(self, packed: PackedSequence) -> None:
        """Note that `look` was for the row of this record; `run` will not look again."""
        self._looked_for = weakref.ref(packed.seq_idx)

    def run_ahead(
        self, embed: Embed, given: Tensor, positions: Tensor, starts: Tensor, on_host: Tensor
    ) -> None:
        """Replay a row before the host knows its documents, on plans that the device makes, and
        beside the current stream, so that neither waits for the other; `run` takes the result,
        unless the row turns out to need another graph, or none. Then compare, see `look`.

        Args:
            embed, given, positions: as for `run`.
            starts, on_host: see `hf_packfree.packing.fast_path.Meanwhile`.
        """
        if not self._compared and not self.captures.embed_within:
            self._launch_ahead(embed, given, positions, starts, on_host)
            self._compare()

    def _launch_ahead(
        self, embed: Embed, given: Tensor, positions: Tensor, starts: Tensor, on_host: Tensor
    ) -> None:
        fits = [
            key
            for key, each in self.captures.graphs.items()
            if each.plans is not None and key[0].holds_tokens(len(starts))
            if key[1][0] == positions.shape[:-1]
        ]
        if not fits or not self.ahead.pays() or self.captures.in_use() is not None:
            return
        key = widest(fits)
        captured, embeddings = self.captures.graphs[key], embed(given)
        if key[1] != kind_of(embeddings, positions):
            return
        assert self.captures.pool is not None and captured.plans is not None
        assert not isinstance(captured.graph, LayerGraphs)
        captured.plans.write(starts)
        self.captures.refresh()
        inputs = lengthened_inputs(embeddings, positions, key[0])
        identity = identity_of((given, positions))
        self.ahead.launch(
            Launched(key, captured.graph, embeddings, inputs, self.captures.pool, identity, on_host)
        )

    def run(
        self,
        layers: Layers,
        embed: Embed,
        given: Tensor,
        positions: Tensor,
        packed: PackedSequence,
        why_not: str | None,
        wait: bool,
    ) -> Tensor | None:
        """Return the layers' hidden states of the row [1, T, D] by a graph, or None if the row has
        to run without, because of the caller's `why_not` or another reason, which is counted; with
        `wait` no graph is captured, see `Graphs`.
        """
        if self._looked_for is None or self._looked_for() is not packed.seq_idx:
            self.look()
        self._looked_for = None
        self.given = given.dtype
        found: Tensor | str | None = why_not or self.captures.why_not or why_not_row(packed)
        embeddings = self.ahead.embeddings((given, positions))
        if found is None:
            found = self._take(given, positions, packed)
        self.ahead.drop()
        if found is None:
            embed = embed if embeddings is None else (lambda _: embeddings)
            replay = partial(self._replay, layers, embed, given, positions, packed, wait)
            found = replay()
            if found is None:
                found = self.captures.why_not or replay()
                assert found is not None
        self._compare()
        if isinstance(found, Tensor):
            return found
        self.reasons[found] += 1
        return None

    def _take(self, given: Tensor, positions: Tensor, packed: PackedSequence) -> Tensor | None:
        """Return what `run_ahead` computed for the row, or None."""
        found = self.ahead.take((given, positions), packed)
        if found is None:
            return None
        self.captures.last(found.key)
        self.replayed += 1
        return found.graph.result(found.inputs)[:, : packed.num_tokens]

    def _replay(
        self,
        layers: Layers,
        embed: Embed,
        given: Tensor,
        positions: Tensor,
        packed: PackedSequence,
        wait: bool,
    ) -> Tensor | str | None:
        """Return the row's hidden states, or why it cannot be replayed; None if settings turn out
        to have changed, and all graphs are dropped.
        """
        # before the row gathers weights, which it may do only once
        if self.captures.embed_within and self._compare():
            return None
        row = given if self.captures.embed_within else embed(given)
        kind = kind_of(row, positions)
        # what was given up is tried again with other settings
        if in_longer(packed, kind, self.captures.graphs) is None and self._compare():
            return None
        key = self.captures.choose(packed, kind, self.replayed, wait)
        if not isinstance(key, str) and key not in self.captures.graphs:
            if self._compare():
                return None
            inputs = lengthened_inputs(row, positions, key[0])
            first = self._capture(key, layers, inputs, packed)
            if isinstance(first, Tensor):
                return first
            key = in_longer(packed, kind, self.captures.graphs) or first
        if isinstance(key, str):
            return key
        replayed = self.replayed
        found = self._run(key, layers, lengthened_inputs(row, positions, key[0]), packed)
        if not key[0].holds_tokens(packed.num_tokens):
            self.replayed_in_longer += self.replayed - replayed
        return found

    def _capture(
        self, key: Any, layers: Layers, inputs: Inputs, packed: PackedSequence
    ) -> Tensor | str:
        """Capture the bucket's graph, and replay it on the row that it was captured for, or say why
        not; if that replay fails, never capture the bucket again.
        """
        trunk = self.trunk()
        assert trunk is not None
        found = self.captures.capture(trunk, key, layers, inputs, packed)
        if isinstance(found, Tensor):
            self.reasons[_NOTED] += 1
        if found is not None:
            return found
        found = self._run(key, layers, inputs, packed)
        # settings were compared before
        assert found is not None
        if isinstance(found, str):
            del self.captures.graphs[key]
            self.captures.bucketing.given_up[key] = found
        return found

    def _run(
        self, key: Any, layers: Layers, inputs: Inputs, packed: PackedSequence
    ) -> Tensor | str | None:
        """As `_replay`, by a graph that is there."""
        captured = self.captures.last(key)
        if (why := self.captures.in_use()) is not None:
            return why
        try:
            captured.write_for(packed, key[0])
        except OtherPlan:
            return "its kernels' plan is not a table of the bucket's size"
        out = self._out_of(captured, layers, inputs, packed, key)
        if out is None:
            return None
        self.replayed += self._settings is not None
        return cut(out, packed.num_tokens)

    def _out_of(
        self, captured: Captured, layers: Layers, inputs: Inputs, packed: PackedSequence, key: Any
    ) -> Tensor | None:
        """Replay a graph, and compare; return its output, or None if settings have changed."""
        graph = captured.graph
        self.captures.refresh()
        if isinstance(graph, LayerGraphs):
            plain = partial(in_bucket_on, packed, key[0], inputs[0].device)
            out = graph.run(partial(layers, *inputs, captured.packed), plain)
            if graph.is_stale:
                self._settings = None
                self.reasons[_STALE] += 1
            return out
        graph.launch(inputs)
        # while the GPU runs
        return None if self._compare() else graph.result(inputs)

    def _way_of(self, trunk: nn.Module) -> Whole | ByLayer:
        return ByLayer(trunk) if are_sharded(trunk) else Whole(trunk, self.copies)
