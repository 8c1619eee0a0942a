"""CUDA graphs of single layers, for text models whose layers FSDP2 shards.

FSDP2 gathers a layer's weights in hooks around the layer's call, each time at another address, and
collectives of other ranks wait for them. So the layers are called as ever, one by one, and only
their forwards are replaced for a row: each copies its gathered weights to fixed addresses, which
all layers with weights of the same sizes share, and replays a graph of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hf_packfree.graphs.capture import WARM_UP, Pool, reading, refuse_other_leaves
from hf_packfree.graphs.captured_sequence import CapturedSequence, NotCapturable
from hf_packfree.graphs.checkpointing import own_forward
from hf_packfree.graphs.gradient_buffers import borrowed
from hf_packfree.graphs.layer_calls import (
    Arguments,
    CallsOfLayers,
    Forward,
    LayerCall,
    constants_of,
    forwards_of,
    is_same,
    tensors_in,
    with_record,
)
from hf_packfree.graphs.parts import gradients
from hf_packfree.graphs.replayed_row import Row, refuse_second
from hf_packfree.graphs.settings import places_of, weights_at
from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.packing import PackedSequence


class GatheredWeights:
    """Memory at fixed addresses for a layer's weights.

    Args:
        like: tensors of their sizes and dtypes.
        device: where.

    Attributes:
        read: what the layer reads there during the capture.
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        self._memory = [torch.zeros_like(x, device=device) for x in like]
        pairs = zip(self._memory, like, strict=True)
        self.read = [nn.Parameter(x, its.requires_grad) for x, its in pairs]

    def write(self, weights: list[Tensor]) -> None:
        """Copy gathered weights there, by one kernel."""
        # a layer may have none
        if weights:
            with torch.no_grad():
                torch._foreach_copy_(self._memory, weights)


Memory = dict[Any, GatheredWeights]
"""{sizes and dtypes of a layer's weights: their memory}."""


class LayerGraph:
    """One layer as two CUDA graphs, forward and backward.

    Args:
        layer: the layer, whose own forward is captured.
        call: what it is called with.
        hidden: the memory of its input, [1, T, D].
        arguments: everything else, see `LayerCall`.
        weights: the memory of its weights.
        is_last: whether its output leaves the graphs: then it is a copy.
        kept: what holds all else that it reads, which a backward pass that is still to come keeps.
    """

    def __init__(
        self,
        layer: nn.Module,
        call: LayerCall,
        hidden: Tensor,
        arguments: Arguments,
        weights: GatheredWeights,
        is_last: bool,
        kept: Any,
    ) -> None:
        self.kept = kept
        self.call, self.hidden, self.weights = call, hidden, weights
        self.is_last, self.tensors = is_last, tensors_in(arguments)
        self._constants = constants_of(arguments)
        self._own, self._arguments, self.places = own_forward(layer), arguments, places_of(layer)
        self._leaves = [x for x in (hidden, *weights.read) if x.requires_grad]
        self.has_backward = bool(self._leaves)

    def compute(self) -> Tensor:
        """Run the layer's own forward on what is at the fixed addresses."""
        args, kwargs = self._arguments
        with reading(self.places, self.weights.read):
            out = self._own(self.hidden, *args, **kwargs)
        if not isinstance(out, Tensor):
            raise NotCapturable(f"a layer returns a {type(out).__name__}")
        return out

    def capture(self, pool: Pool) -> Tensor:
        """Capture the forward; return its output."""
        before = torch.cuda.current_stream()
        pool.stream.wait_stream(before)
        with torch.cuda.stream(pool.stream):
            for _ in range(WARM_UP):
                out = self.compute()
                if self.has_backward:
                    with reading(self.places, self.weights.read):
                        gradients(out, self._leaves, torch.zeros_like(out))
        before.wait_stream(pool.stream)
        refuse_other_leaves(out, self._leaves)
        del out
        with pool.capture() as self._forward:
            self.out = self.compute()
        return self.out

    def capture_backward(self, d_out: Tensor, pool: Pool) -> None:
        """Capture the backward pass, given the memory of the output's gradient, after those of all
        later layers.
        """
        self.d_out, found = d_out, iter(())
        if self.has_backward:
            # layers that are recomputed read their weights once more
            with reading(self.places, self.weights.read), pool.capture() as self._backward:
                found = iter(gradients(self.out, self._leaves, d_out))
        self._keep(found)

    def _keep(self, found: Iterator[Tensor | None]) -> None:
        """Keep where the leaves' gradients are written, and all else that a replay writes or reads,
        but not its memory, which the graphs of other layers use too.
        """
        trained = (x for x in self.weights.read if x.requires_grad)
        grads = [next(found) if x.requires_grad else None for x in (self.hidden, *trained)]
        self._d_hidden, *self._grads = (None if x is None else borrowed(x) for x in grads)
        self._written = [x for x in self._grads if x is not None]
        self.out, self._leaves = borrowed(self.out), []
        self.hidden = borrowed(self.hidden) if self.call.follows else self.hidden.detach()

    def fits(
        self,
        hidden: Tensor,
        weights: Sequence[Tensor],
        tensors: Sequence[Tensor],
        constants: Arguments,
    ) -> bool:
        """Whether the layer was captured with such an input, such weights and arguments."""
        return (
            _are_alike(hidden, self.call.hidden)
            and constants == self._constants
            and len(tensors) == len(self.tensors)
            and all(map(_are_alike, weights, self.call.weights))
            and all(map(_are_alike, tensors, self.tensors))
        )

    def replay(self, row: Row, hidden: Tensor, weights: list[Tensor]) -> Tensor:
        """Return the layer's output and its place in autograd."""
        trained = (x for x in weights if x.requires_grad)
        out: Tensor = _ReplayLayer.apply(self, row, hidden, weights, *trained)
        return out

    def run(self, hidden: Tensor, weights: list[Tensor]) -> Tensor:
        """Replay the forward; return its output where the next layer's graph reads it."""
        if not is_same(hidden, self.hidden):
            self.hidden.copy_(hidden)
        self.weights.write(weights)
        self._run_forward()
        return self.out.clone() if self.is_last else self.out.detach()

    def run_backward(self, d_out: Tensor) -> list[Tensor | None]:
        """Replay the backward pass; return copies of the gradients of the input and of the trained
        weights.
        """
        # where other layers' have been since
        self.weights.write(weights_at(self.places))
        self.d_out.copy_(d_out)
        self._run_backward()
        copies = [torch.empty_like(x) for x in self._written]
        if copies:
            torch._foreach_copy_(copies, self._written)
        left = iter(copies)
        d_hidden = None if self._d_hidden is None else self._d_hidden.clone()
        return [d_hidden, *(None if x is None else next(left) for x in self._grads)]

    def _run_forward(self) -> None:
        with torch.cuda.device_of(self.out):
            self._forward.replay()

    def _run_backward(self) -> None:
        with torch.cuda.device_of(self.out):
            self._backward.replay()


class LayerGraphs:
    """The graphs of all layers of a text model, for the rows of one bucket.

    Args:
        calls: what they are called with.
        packed: the record that they read.
        pool: the memory of the graphs.
        memory: that of weights, for graphs of all lengths.
        kept: what holds all else that they read.

    Attributes:
        is_stale: whether a layer's weights or arguments turned out to be others than were captured.

    Raises:
        NotCapturable, RuntimeError: they cannot be captured.
    """

    def __init__(
        self,
        calls: CallsOfLayers,
        packed: CapturedSequence,
        pool: Pool,
        memory: Memory,
        kept: Any,
    ) -> None:
        if calls.why_not is not None:
            raise NotCapturable(calls.why_not)
        self.layers, self.packed, self.is_stale = calls.layers, packed, False
        self._row: Callable[[], Row | None] = lambda: None
        self.graphs: list[LayerGraph] = []
        with torch.cuda.device_of(packed.seq_idx), _autocast(packed.seq_idx.device):
            # of what steps before left to the allocator, another stream can reuse nothing
            torch.cuda.empty_cache()
            self._capture(calls.calls, memory, pool, kept)

    def _capture(self, calls: Sequence[LayerCall], memory: Memory, pool: Pool, kept: Any) -> None:
        device, out = self.packed.seq_idx.device, None
        for number, (layer, call) in enumerate(zip(self.layers, calls, strict=True)):
            sizes = tuple(map(_facts, call.weights))
            if sizes not in memory:
                memory[sizes] = GatheredWeights(call.weights, device)
            hidden = torch.zeros_like(call.hidden, device=device) if out is None else out.detach()
            hidden.requires_grad_(call.hidden.requires_grad)
            self.graphs.append(
                _LAYER_GRAPH(
                    layer,
                    call,
                    hidden,
                    with_record(call.arguments, self.packed),
                    memory[sizes],
                    is_last=number == len(self.layers) - 1,
                    # the pool, too: its stream has the memory of cuBLAS's workspaces
                    kept=(pool, kept),
                )
            )
            out = self.graphs[-1].capture(pool)
        assert out is not None
        d_out = torch.zeros_like(out.detach())
        del out, hidden
        for graph in reversed(self.graphs):
            graph.capture_backward(d_out, pool)

    @property
    def is_free(self) -> bool:
        """See `Graph.is_free`."""
        row = self._row()
        return row is None or row.left == 0

    def take_back(self) -> bool:
        """See `Graph.take_back`: gradients are copies."""
        return True

    def run(self, layers: Callable[[], Tensor], plain: Callable[[], PackedSequence]) -> Tensor:
        """Return what `layers` returns, which calls all layers one after the other, each replayed.

        Args:
            layers: runs the text model's forward on a row of the bucket, with the record `packed`.
            plain: returns the row's own record, for a layer that is not called as it was captured.
        """
        row, written, replayed = Row(0), dict[int, Tensor](), list[LayerGraph]()
        self._row = weakref.ref(row)

        def replay(number: int, own: Forward) -> Forward:
            graph = self.graphs[number]

            def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                weights, tensors = weights_at(graph.places), tensors_in((args, kwargs))
                follows = len(replayed) == number and (
                    number == 0 or is_same(hidden_states, replayed[-1].out)
                )
                pairs = [*zip(graph.tensors, tensors, strict=False)]
                new = [(fixed, its) for fixed, its in pairs if id(fixed) not in written]
                # another tensor there would be read by the backward passes of layers before, too
                follows &= all(written.setdefault(id(fixed), its) is its for fixed, its in pairs)
                constants = constants_of((args, kwargs))
                fits = graph.fits(hidden_states, weights, tensors, constants)
                if self.is_stale or not follows or not fits:
                    self.is_stale = True
                    args, kwargs = with_record((args, kwargs), plain())
                    # it may be in a graph's memory
                    return own(hidden_states.clone(), *args, **kwargs)
                for fixed, its in new:
                    fixed.copy_(its)
                replayed.append(graph)
                row.left += graph.has_backward
                return graph.replay(row, hidden_states, weights)

            return forward

        with forwards_of(self.layers, replay):
            return layers()


_LAYER_GRAPH = LayerGraph
"""What captures a layer."""


class _ReplayLayer(Function):
    """A layer's place in autograd; its gathered weights' gradients go to FSDP2's hooks."""

    @staticmethod
    def forward(
        ctx: Any, graph: LayerGraph, row: Row, hidden: Tensor, weights: Any, *trained: Tensor
    ) -> Tensor:
        ctx.graph, ctx.row, ctx.done = graph, row, False
        ctx.set_materialize_grads(True)
        return graph.run(hidden, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.done:
            refuse_second()
        ctx.done = True
        ctx.row.left -= 1
        d_hidden, *grads = ctx.graph.run_backward(d_out)
        return None, None, d_hidden, None, *grads


def _facts(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.requires_grad


def _are_alike(x: Tensor, like: Tensor) -> bool:
    facts = x.shape == like.shape and x.dtype == like.dtype
    return facts and x.requires_grad == like.requires_grad


def _autocast(device: torch.device) -> Any:
    """Return the autocast that is in force, without its cache: a replay would read weights from it
    that have changed since.
    """
    enabled, dtype = (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
    )
    return torch.autocast(device.type, dtype, enabled, cache_enabled=False)
