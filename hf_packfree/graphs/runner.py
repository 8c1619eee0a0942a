"""Which rows of a text model are replayed, and why others are not."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.errors import ran_out
from hf_packfree.graphs.ahead import Ahead, Inputs, Launched, places_of, widest
from hf_packfree.graphs.bucket import cut, in_bucket_on, kind_of, lengthened_inputs
from hf_packfree.graphs.bucketing import CHANGES, MOST, Bucketing, alike, in_longer
from hf_packfree.graphs.by_layer import ByLayer, are_sharded
from hf_packfree.graphs.capture import CaptureStream, Pool, forget_failed_capture, free_memory
from hf_packfree.graphs.captured import Captured
from hf_packfree.graphs.captured_sequence import CapturedSequence, NotCapturable, OtherPlan
from hf_packfree.graphs.layer_graphs import LayerGraphs
from hf_packfree.graphs.settings import Settings, switches_of, why_not_row
from hf_packfree.graphs.unread import plans_of
from hf_packfree.graphs.whole import Layers, ToCapture, Whole
from hf_packfree.ops.rounded_weights import RoundedWeights
from hf_packfree.packing import PackedSequence

logger = logging.getLogger("hf_packfree")
SPARE = 1 / 8
"""The share of the GPU's memory that a graph leaves to what is not captured: loss, optimizer,
evaluation. A graph's memory is its own from then on.
"""
_CHANGING = "the model's settings change with its steps"
Embed = Callable[[Tensor], Tensor]
"""Takes a row's ids [1, T], or its embeddings; returns its embeddings, [1, T, D]."""


@dataclass(eq=False, repr=False)
class Runner:
    """The graphs of one text model, and why rows ran without a graph.

    Attributes:
        trunk: the text model.
        graphs: {(bucket, kind of inputs): graph}, the most recently used one last.
        reasons: {why rows ran without a graph: how many}.
        replayed: how many rows ran in a graph.
        in_longer: how many of them in one for longer rows, since they had none of their own.
        ahead: rows that were replayed before the host had read their documents.
        output: the class of upstream's output.
        given: the dtype of the last row's ids, or of its embeddings.
        rounded: the copies of fp32 weights that graphs read under autocast.
    """

    trunk: weakref.ref[nn.Module]
    graphs: dict[Any, Captured] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    replayed: int = 0
    in_longer: int = 0
    ahead: Ahead = field(default_factory=Ahead)
    output: Any = None
    given: torch.dtype | None = None
    rounded: RoundedWeights = field(default_factory=RoundedWeights)
    _bucketing: Bucketing = field(default_factory=Bucketing)
    _way: Whole | ByLayer | None = None
    _settings: Settings | None = None
    _switches: Any = None
    _switches_before: Any = None
    _why_not: str | None = None
    _streams: dict[torch.device, CaptureStream] = field(default_factory=dict)
    _pool: Pool | None = None
    _compared: bool = False
    _looked_for: weakref.ref[Tensor] | None = None
    _changes: int = 0

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
        if not self.graphs or settings is None or not settings.keep_memory():
            self._compare()

    def _compare(self) -> bool:
        """Drop all graphs if the model, or a setting, changed; return whether. Done once a row."""
        trunk, settings, changes = self.trunk(), self._settings, self._changes
        if trunk is None or self._compared or self._why_not == _CHANGING:
            return False
        self._compared = True
        if settings is None or self._switches != self._switches_before or not settings.hold():
            self.ahead.drop_result()
            self._drop()
            self._bucketing.start_anew()
            self._way = (ByLayer if are_sharded(trunk) else Whole)(trunk)
            self._settings, self._switches_before = self._way.settings, self._switches
            self._why_not, self.rounded = self._way.why_not, self._way.rounded
            self._changes += 1
        if self._changes > CHANGES + self.replayed // CHANGES:
            self._why_not = _CHANGING
        return self._changes > changes

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
        if not self._compared and not isinstance(self._way, ByLayer):
            self._launch_ahead(embed, given, positions, starts, on_host)
            self._compare()

    def _launch_ahead(
        self, embed: Embed, given: Tensor, positions: Tensor, starts: Tensor, on_host: Tensor
    ) -> None:
        fits = [
            key
            for key, each in self.graphs.items()
            if each.plans is not None and key[0].holds_tokens(len(starts))
            if key[1][0] == positions.shape[:-1]
        ]
        if not fits or not self.ahead.pays() or self._in_use() is not None:
            return
        key = widest(fits)
        captured, embeddings = self.graphs[key], embed(given)
        if key[1] != kind_of(embeddings, positions):
            return
        assert self._pool is not None and captured.plans is not None
        assert not isinstance(captured.graph, LayerGraphs)
        captured.plans.write(starts)
        self.rounded.refresh()
        inputs = lengthened_inputs(embeddings, positions, key[0])
        places = places_of((given, positions))
        self.ahead.launch(
            Launched(key, captured.graph, embeddings, inputs, self._pool, places, on_host)
        )

    def run(
        self,
        layers: Layers,
        embed: Embed,
        given: Tensor,
        positions: Tensor,
        packed: PackedSequence,
        why_not: str | None = None,
        wait: bool = False,
    ) -> Tensor | None:
        """Return the layers' hidden states of the row [1, T, D] by a graph, or None if the row has
        to run without, because of the caller's `why_not` or another reason, which is counted; with
        `wait` no graph is captured, see `Graphs`.
        """
        if self._looked_for is None or self._looked_for() is not packed.seq_idx:
            self.look()
        self._looked_for = None
        self.given = given.dtype
        found: Tensor | str | None = why_not or self._why_not or why_not_row(packed)
        embeddings = self.ahead.embeddings((given, positions))
        if found is None:
            found = self._take(given, positions, packed)
        self.ahead.drop()
        if found is None:
            embed = embed if embeddings is None else (lambda _: embeddings)
            replay = partial(self._replay, layers, embed, given, positions, packed, wait)
            found = replay()
            if found is None:
                found = self._why_not or replay()
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
        self.graphs[found.key] = self.graphs.pop(found.key)
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
        # layer by layer, ranks gather weights in the row: it embeds, and runs, only once
        if isinstance(self._way, ByLayer) and self._compare():
            return None
        row = given if isinstance(self._way, ByLayer) else embed(given)
        kind = kind_of(row, positions)
        # what was given up is tried again with other settings
        if in_longer(packed, kind, self.graphs) is None and self._compare():
            return None
        key = self._bucketing.choose(packed, kind, self.graphs, self.replayed, wait)
        if not isinstance(key, str) and key not in self.graphs:
            if self._compare():
                return None
            inputs = lengthened_inputs(row, positions, key[0])
            found = self._capture(key, layers, inputs, packed)
            if found is None:
                found = self._first(key, layers, inputs, packed)
            if isinstance(found, Tensor):
                return found
            key = in_longer(packed, kind, self.graphs) or found
        if isinstance(key, str):
            return key
        found = self._run(key, layers, lengthened_inputs(row, positions, key[0]), packed)
        longer = not key[0].holds_tokens(packed.num_tokens)
        self.in_longer += longer and isinstance(found, Tensor)
        return found

    def _first(
        self, key: Any, layers: Layers, inputs: Inputs, packed: PackedSequence
    ) -> Tensor | str | None:
        """Replay a new graph on the row that it was captured for; if that fails, never capture the
        bucket again.
        """
        found = self._run(key, layers, inputs, packed)
        if isinstance(found, str):
            del self.graphs[key]
            self._bucketing.given_up[key] = found
        return found

    def _run(
        self, key: Any, layers: Layers, inputs: Inputs, packed: PackedSequence
    ) -> Tensor | str | None:
        """As `_replay`, by a graph that is there."""
        captured = self.graphs[key] = self.graphs.pop(key)
        if (why := self._in_use()) is not None:
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
        if isinstance(graph, LayerGraphs):
            plain = partial(in_bucket_on, packed, key[0], inputs[0].device)
            out = graph.run(partial(layers, *inputs, captured.packed), plain)
            self._settings = None if graph.is_stale else self._settings
            return out
        self.rounded.refresh()
        graph.launch(inputs)
        # while the GPU runs
        return None if self._compare() else graph.result(inputs)

    def _in_use(self) -> str | None:
        """Return why the graphs' memory must not be overwritten yet, or None."""
        if self._pool is not None:
            self._pool.follow()
        graphs = [each.graph for each in self.graphs.values()]
        if not all(graph.is_free for graph in graphs):
            return "the backward pass of a row before is still to come"
        if not all(graph.take_back() for graph in graphs):
            return "gradients of a row before are kept elsewhere than in .grad"
        return None

    def _capture(
        self, key: Any, layers: Layers, inputs: Inputs, packed: PackedSequence
    ) -> Tensor | str | None:
        """Capture the bucket's graph; return why that is not possible, or None; or the layers'
        hidden states, where a row has to run without before.
        """
        row, trunk = in_bucket_on(packed, key[0], inputs[0].device), self.trunk()
        assert trunk is not None and self._way is not None
        parameters = [x for x in trunk.parameters() if x.requires_grad]
        if not parameters and not inputs[0].requires_grad:
            self._bucketing.given_up[key] = "none of its weights is trained"
            return self._bucketing.given_up[key]
        # the capture's backward pass would run the hooks, and the step's own again
        hooks = any(x._backward_hooks for x in parameters)
        why = "parameters have hooks (register_hook)" if hooks else self._in_use()
        if why is not None:
            return why
        if (out := self._way.note(key, layers, inputs, row)) is not None:
            return cut(out, packed.num_tokens)
        while len(self.graphs) >= MOST:
            self.graphs.pop(next(iter(self.graphs)))
        self._bucketing.captures += 1
        found = self._graph(key, trunk, layers, inputs, parameters, row)
        if isinstance(found, str):
            return self._give_up(key, found)
        if free_memory(inputs[0].device) < SPARE:
            return self._without_room(key)
        for each in alike(key, self.graphs):
            del self.graphs[each]
        self.graphs[key] = found
        return None

    def _without_room(self, key: Any) -> str:
        """Do without the graph that was captured last; return why."""
        why = f"with it, less than {SPARE:.1%} of the GPU's memory would be free"
        # copies of weights are what goes first: the next row's graph is captured without
        if len(self.rounded):
            self._drop()
            self.rounded.refused = True
            return why
        self._bucketing.no_room = key[0].tokens, why
        self._pool = self._pool if self.graphs else None
        return self._give_up(key, why)

    def _give_up(self, key: Any, why: str) -> str:
        """Never capture a bucket's graph again; return why."""
        self._bucketing.given_up[key] = why
        logger.warning("rows of %s tokens run without a CUDA graph: %s", key[0].tokens, why)
        return why

    def _drop(self) -> None:
        """Drop all graphs, and all memory that only they read."""
        self.graphs.clear()
        if self._pool is not None:
            self._pool.end()
        self._pool, self.rounded = None, RoundedWeights()

    def _pool_for(self, device: torch.device, tokens: int) -> Pool:
        # sized by its longest row: for a longer one all graphs are dropped, and captured anew
        if self._pool is None or self._pool.tokens < tokens:
            if self._pool is not None:
                self.graphs.clear()
                self._pool.end()
            if device not in self._streams:
                self._streams[device] = CaptureStream(device)
            self._pool = Pool(device, self._streams[device], tokens)
        return self._pool

    def _graph(
        self,
        key: Any,
        trunk: nn.Module,
        layers: Layers,
        inputs: Inputs,
        parameters: list[nn.Parameter],
        row: PackedSequence,
    ) -> Captured | str:
        """Return a graph of the layers, or why they cannot be captured."""
        bucket, device = key[0], inputs[0].device
        try:
            pool = self._pool_for(device, bucket.tokens)
            packed = CapturedSequence.of(row)
            assert self._way is not None
            wanted = ToCapture(key, layers, inputs, parameters, packed, pool, self.rounded)
            return Captured(self._way.capture(wanted), packed, plans_of(packed, bucket, pool))
        except NotCapturable as error:
            # which no other length would change
            self._drop()
            self._why_not = str(error)
            return self._why_not
        except RuntimeError as error:
            # other graphs draw random numbers from the state that the failed capture spoiled
            self._drop()
            forget_failed_capture(device)
            why = f"the capture failed: {str(error).splitlines()[0]}"
            if ran_out(error):
                self._bucketing.no_room = bucket.tokens, why
            # no length was captured, so that it is not for its length that this one failed
            if self._bucketing.captures == 1 and not ran_out(error):
                self._why_not = why
            return why
