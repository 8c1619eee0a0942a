"""The graphs of a text model, and the memory that they share: captured, counted and dropped."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.errors import in_short, ran_out
from hf_packfree.graphs.ahead import Inputs
from hf_packfree.graphs.bucket import cut, in_bucket_on
from hf_packfree.graphs.bucketing import MOST, Bucketing, alike
from hf_packfree.graphs.by_layer import ByLayer
from hf_packfree.graphs.capture import CaptureStream, Pool, forget_failed_capture, free_memory
from hf_packfree.graphs.captured import Captured
from hf_packfree.graphs.captured_sequence import CapturedSequence, NotCapturable
from hf_packfree.graphs.unread import plans_of
from hf_packfree.graphs.whole import Layers, ToCapture, Whole
from hf_packfree.ops.rounded_weights import RoundedWeights
from hf_packfree.packing import PackedSequence

logger = logging.getLogger("hf_packfree")
SPARE = 1 / 8
"""The share of the GPU's memory that a graph leaves to what is not captured: loss, optimizer,
evaluation. A graph's memory is its own from then on.
"""


@dataclass(eq=False, repr=False)
class Captures:
    """The graphs of one text model.

    Attributes:
        graphs: {(bucket, kind of inputs): graph}, the most recently used one last.
        bucketing: which graph a row is for.
        way: how rows are captured; None: the model was not looked at yet.
        why_not: why none is captured until settings change, or None.
        pool: the memory of all of them.
    """

    graphs: dict[Any, Captured] = field(default_factory=dict)
    bucketing: Bucketing = field(default_factory=Bucketing)
    way: Whole | ByLayer | None = None
    why_not: str | None = None
    pool: Pool | None = None
    _streams: dict[torch.device, CaptureStream] = field(default_factory=dict)

    @property
    def rounded(self) -> RoundedWeights:
        """The copies of fp32 weights that the graphs read under autocast."""
        return RoundedWeights() if self.way is None else self.way.rounded

    def refresh(self) -> None:
        """Write what the graphs read besides a row: rounded weights, and seeds of dropout."""
        if self.way is not None:
            self.way.rounded.refresh()
            self.way.seeds.refresh()

    @property
    def embed_within(self) -> bool:
        """Whether a row's ids are embedded within its graph, and so only once."""
        return isinstance(self.way, ByLayer)

    def start_anew(self, way: Whole | ByLayer) -> None:
        """Drop all graphs: settings changed."""
        self.drop()
        self.bucketing.start_anew()
        self.way, self.why_not = way, way.why_not

    def choose(self, packed: PackedSequence, kind: Any, replayed: int, wait: bool) -> Any:
        """See `Bucketing.choose`."""
        return self.bucketing.choose(packed, kind, self.graphs, replayed, wait)

    def last(self, key: Any) -> Captured:
        """Return a graph, which is the most recently used one now."""
        found = self.graphs[key] = self.graphs.pop(key)
        return found

    def are_read(self) -> bool:
        """Whether a backward pass is still to come that reads the graphs' memory; the current
        stream waits for what was launched before.
        """
        if self.pool is not None:
            self.pool.follow()
        return not all(each.graph.is_free for each in self.graphs.values())

    def in_use(self) -> str | None:
        """Return why the graphs' memory must not be overwritten yet, or None."""
        if self.are_read():
            return "the backward pass of a row before is still to come"
        if not all(each.graph.take_back() for each in self.graphs.values()):
            return "gradients of a row before are kept elsewhere than in .grad"
        return None

    def capture(
        self, trunk: nn.Module, key: Any, layers: Layers, inputs: Inputs, packed: PackedSequence
    ) -> Tensor | str | None:
        """Capture the bucket's graph; return why that is not possible, or None; or the layers'
        hidden states, where a row has to run without before.
        """
        row = in_bucket_on(packed, key[0], inputs[0].device)
        assert self.way is not None
        parameters = [x for x in trunk.parameters() if x.requires_grad]
        if not parameters and not inputs[0].requires_grad:
            self.bucketing.given_up[key] = "none of its weights is trained"
            return self.bucketing.given_up[key]
        # the capture's backward pass would run the hooks, and the step's own again
        hooks = any(x._backward_hooks for x in parameters)
        why = "parameters have hooks (register_hook)" if hooks else self.in_use()
        if why is not None:
            return why
        if (out := self.way.note(key, layers, inputs, row)) is not None:
            return cut(out, packed.num_tokens)
        while len(self.graphs) >= MOST:
            self.graphs.pop(next(iter(self.graphs)))
        self.bucketing.captures += 1
        found = self._graph(key, layers, inputs, parameters, row)
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
            self.drop()
            self.rounded.refused = True
            return why
        self.bucketing.no_room = key[0].tokens, why
        if not self.graphs:
            self.drop()
        return self._give_up(key, why)

    def _give_up(self, key: Any, why: str) -> str:
        """Never capture a bucket's graph again; return why."""
        self.bucketing.given_up[key] = why
        logger.warning("rows of %s tokens run without a CUDA graph: %s", key[0].tokens, why)
        return why

    def drop(self) -> None:
        """Drop all graphs, and all memory that only they read."""
        self.graphs.clear()
        if self.pool is not None:
            self.pool.end()
        self.pool = None
        if self.way is not None:
            self.way.forget()

    def _pool_for(self, device: torch.device, tokens: int) -> Pool:
        # sized by its longest row: for a longer one all graphs are dropped, and captured anew
        if self.pool is None or self.pool.tokens < tokens:
            if self.pool is not None:
                self.graphs.clear()
                self.pool.end()
            if device not in self._streams:
                self._streams[device] = CaptureStream(device)
            self.pool = Pool(device, self._streams[device], tokens)
        return self.pool

    def _graph(
        self,
        key: Any,
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
            assert self.way is not None
            wanted = ToCapture(key, layers, inputs, parameters, packed, pool)
            return Captured(self.way.capture(wanted), packed, plans_of(packed, bucket, pool))
        except NotCapturable as error:
            # which no other length would change
            self.drop()
            self.why_not = str(error)
            return self.why_not
        # layers of others may raise anything
        except Exception as error:
            # other graphs draw random numbers from the state that the failed capture spoiled
            copied = len(self.rounded) > 0
            self.drop()
            forget_failed_capture(device)
            why = f"the capture failed: {in_short(error)}"
            if ran_out(error):
                self.bucketing.no_room = bucket.tokens, why
                self.rounded.refused |= copied
            # no length was captured, so that it is not for its length that this one failed
            if self.bucketing.captures == 1 and not ran_out(error):
                self.why_not = why
            return why
