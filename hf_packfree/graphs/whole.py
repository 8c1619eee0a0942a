"""All layers of a text model in one graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from hf_packfree.graphs import checkpointing
from hf_packfree.graphs.ahead import Inputs
from hf_packfree.graphs.capture import Graph, Pool, in_the_place_of
from hf_packfree.graphs.captured_sequence import CapturedSequence
from hf_packfree.graphs.copies import Copies
from hf_packfree.graphs.parts import layers_to_cut_at
from hf_packfree.graphs.settings import Settings, put_back, read_weights, why_not
from hf_packfree.ops.rounded_weights import RoundedWeights
from hf_packfree.ops.seeds import Seeds
from hf_packfree.packing import PackedSequence

Layers = Callable[[Tensor, Tensor, PackedSequence], Tensor]
"""A text model: ids [1, T] or embeddings [1, T, D], positions [..., 1, T] and the record, to the
last hidden states [1, T, D].
"""


class ToCapture(NamedTuple):
    """What a graph is captured of.

    Attributes:
        key: of the graph, see `Runner.graphs`.
        layers: the text model.
        inputs: of a row, in the bucket's size.
        parameters: those of the text model that are trained.
        packed: the row's record.
        pool: the memory of the graph.
    """

    key: Any
    layers: Layers
    inputs: Inputs
    parameters: list[nn.Parameter]
    packed: CapturedSequence
    pool: Pool


class Whole:
    """How rows of a text model are captured and replayed.

    Args:
        trunk: the text model.
        copies: of its weights.
    """

    def __init__(self, trunk: nn.Module, copies: Copies) -> None:
        self._trunk = weakref.ref(trunk)
        self.settings = Settings(trunk)
        self.why_not = why_not(trunk)
        self._copies, self.seeds = copies, Seeds()
        copies.of_new_settings()

    @property
    def rounded(self) -> RoundedWeights:
        """The copies of fp32 weights that the graphs read under autocast."""
        return self._copies.rounded

    def forget(self) -> None:
        """Free the copies of weights."""
        self._copies.begin(self.rounded.refused)

    def note(self, key: Any, layers: Layers, inputs: Inputs, row: PackedSequence) -> Tensor | None:
        """Run a row without a graph, if something has to be known before its graph is captured."""
        return None

    def capture(self, wanted: ToCapture) -> Graph:
        """Return a graph of the layers.

        Raises:
            NotCapturable, RuntimeError: there is none.
        """
        _, layers, inputs, parameters, packed, pool = wanted
        rounded = self.rounded
        # a weight that changed since would be read by the graph itself
        rounded.refresh()
        trunk = self._trunk()
        assert trunk is not None
        weights = read_weights(trunk)

        def body(embeddings: Tensor, positions: Tensor) -> Tensor:
            self._copies.allocate()
            return layers(embeddings, positions, packed)

        with (
            checkpointing.in_capture(trunk, inputs[0].requires_grad, self.seeds),
            in_the_place_of(parameters, trunk) as read,
            rounded.in_use(),
            self.seeds.in_use(),
        ):
            # the backward graph reads plans, weights and seeds, too
            kept = self.settings, packed, rounded, self.seeds
            cuts = layers_to_cut_at(trunk)
            return Graph(body, inputs, parameters, pool, read, kept, cuts, weights, put_back(trunk))
