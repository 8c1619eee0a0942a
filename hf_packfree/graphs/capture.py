"""CUDA graphs of one function, forward and backward, and their place in autograd.

torch's `make_graphed_callables` returns tensors in the memory that the next replay overwrites. So a
second forward before the first one's backward, accumulated gradients, or an output that is kept
would read another row's values. Here all results are copies, except for gradients of parameters
(`gradient_buffers.py`), and a graph whose backward has not run yet is not replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hf_packfree.graphs.captured_sequence import NotCapturable
from hf_packfree.graphs.gradient_buffers import GradientBuffers, borrowed
from hf_packfree.graphs.parts import CapturedPart, gradients, inputs_of, nodes_of, parts_of
from hf_packfree.graphs.replayed_row import Row, States, refuse_changed, refuse_second, states_of
from hf_packfree.graphs.settings import Places, places_of, weights_at
from hf_packfree.once_differentiable import once_differentiable

WARM_UP = 2
"""Runs before the capture, in which kernels are compiled and libraries loaded: on the capture's
stream, since nodes of autograd that are not collected yet are bound to theirs. The first finds
which weights are rounded (`hf_packfree.ops.rounded_weights`), the second runs with their copies.
"""
IN_THREAD: Any = "thread_local"
"""The error mode of captures: other threads pin memory for the next batches meanwhile."""
Body = Callable[..., Tensor]


class CaptureStream:
    """A stream on which graphs are captured, with memory for cuBLAS.

    cuBLAS has a workspace for each stream and thread, which a captured product writes into at every
    replay. One from before the capture is others' memory once torch frees all workspaces, as the
    CUDA graphs of `torch.compile` make it. The first products of this stream are captured, forward
    and backward, so that its workspaces are memory of a graph, which is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        one = torch.ones(16, 16, device=device)
        with torch.cuda.device_of(one), torch.enable_grad():
            # first outside of the capture, in which no library may be loaded
            _multiply(one)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self.stream, capture_error_mode=IN_THREAD):
                _multiply(one)


class Pool:
    """Memory that is shared by graphs that never run at the same time.

    Memory that one capture frees is reused by the next, because both are captured on the same
    stream.

    Args:
        stream: on which graphs are captured.
        tokens: of the longest row that is captured, whose memory is enough for shorter ones.
    """

    def __init__(self, device: torch.device, stream: CaptureStream, tokens: int) -> None:
        self.tokens = tokens
        self.handle = torch.cuda.graph_pool_handle()
        self._kept, self.stream = stream, stream.stream
        self._device, self._last = device, torch.cuda.current_stream(device)

    def follow(self) -> None:
        """Let the current stream wait for the stream that last wrote the pool's memory."""
        current = torch.cuda.current_stream(self._device)
        if current != self._last:
            current.wait_stream(self._last)
            self._last = current

    def end(self) -> None:
        """Let the stream on which the pool's memory was allocated wait for the one where a graph
        that was dropped may still run: with expandable segments, the allocator waits for the first
        alone before it frees memory.
        """
        self.stream.wait_stream(self._last)

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture what the block launches; yields the graph."""
        graph = torch.cuda.CUDAGraph()
        options: Any = {"pool": self.handle, "capture_error_mode": IN_THREAD}
        with torch.cuda.graph(graph, stream=self.stream, **options):
            yield graph

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Let what the block launches run beside what the current stream is given next, up to
        `join`.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for what runs beside it."""
        torch.cuda.current_stream(self._device).wait_stream(self.stream)


class Graph:
    """A function as CUDA graphs, one forward and one for each part of the backward pass; a function
    of some tensors, and of parameters that it reads itself.

    Args:
        body: the function: returns one tensor, given the inputs.
        inputs: examples; the inputs of every replay have the same sizes, and are copied to fixed
            addresses.
        parameters: the parameters that the body reads itself and that get gradients.
        pool: the memory, see `Pool`.
        read: the stand-ins for `parameters` that the body reads during the capture, see
            `in_the_place_of`.
        kept: what holds all else that the body reads, such as frozen weights and plans: it lives as
            long as the graph, which a backward pass that is still to come keeps.
        layers: at whose inputs the backward pass is cut, see `parts_of`.
        weights: all that the body reads, frozen ones, too; a backward pass is refused if they
            changed since its forward pass, as autograd refuses it.
        put_back: those of them of which only a move counts, see `states_of`.
    """

    def __init__(
        self,
        body: Body,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        pool: Pool,
        read: Sequence[Tensor],
        kept: Any = None,
        layers: Sequence[nn.Module] = (),
        weights: Sequence[Tensor] = (),
        put_back: Sequence[Tensor] = (),
    ) -> None:
        # the pool, too: its stream has the memory of cuBLAS's workspaces
        self.kept = kept, pool
        self.inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
        self.parameters, self.weights = tuple(parameters), tuple(weights)
        self._put_back = {id(x) for x in put_back}
        self.parts: list[CapturedPart] = []
        self._row: Any = lambda: None
        with torch.cuda.device_of(self.inputs[0]):
            self._capture(body, pool, read, layers)

    def _capture(
        self, body: Body, pool: Pool, read: Sequence[Tensor], layers: Sequence[nn.Module]
    ) -> None:
        leaves = self._leaves(self.inputs, read)
        # of what steps before left to the allocator, another stream can reuse nothing
        torch.cuda.empty_cache()
        before = torch.cuda.current_stream()
        pool.stream.wait_stream(before)
        with torch.cuda.stream(pool.stream):
            for _ in range(WARM_UP):
                out = body(*self.inputs)
                if not out.requires_grad:
                    raise NotCapturable("nothing that it reads is trained")
                gradients(out, leaves, torch.zeros_like(out))
        before.wait_stream(pool.stream)
        refuse_other_leaves(out, leaves)
        del out
        with pool.capture() as self._forward, inputs_of(layers) as cuts:
            out = body(*self.inputs)
        self.d_out = torch.zeros_like(out)
        # kept up to the last part, so that none writes where one before it did
        grads: list[Tensor | None] = [None] * len(leaves)
        d_end = self.d_out
        for part in parts_of(out, cuts, leaves):
            with pool.capture() as graph:
                d_end, found = part.gradients(d_end, leaves)
            for leaf, grad in zip(part.leaves, found, strict=True):
                grads[leaf] = grad
            self.parts.append(CapturedPart(graph, part.leaves))
            # what is before it has no gradient
            if d_end is None:
                break
        # results are copied right after a replay, because other graphs use the memory afterwards
        self.out = borrowed(out)
        self._keep(grads, [part.graph for part in self.parts])

    def _leaves(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return what has gradients, given a row's inputs: these first."""
        both = zip(self.inputs, inputs, strict=True)
        return [given for own, given in both if own.requires_grad] + [*parameters]

    def _keep(self, grads: Sequence[Tensor | None], owner: Any) -> None:
        """Keep the leaves' gradients where they are written."""
        inputs = len(grads) - len(self.parameters)
        self._d_inputs = [None if grad is None else borrowed(grad) for grad in grads[:inputs]]
        self.gradients = GradientBuffers(self.parameters, grads[inputs:], owner)

    @property
    def is_free(self) -> bool:
        """Whether no backward is still to run that reads memory which a replay would overwrite."""
        row = self._row()
        return row is None or row.left == 0

    def take_back(self) -> bool:
        """See `GradientBuffers.take_back`."""
        return self.gradients.take_back()

    @torch.no_grad()
    def launch(self, inputs: Sequence[Tensor], beside: Pool | None = None) -> None:
        """Replay the forward graph on these inputs, `beside` the current stream, see `Pool`."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.detach().copy_(given)
        with nullcontext() if beside is None else beside.beside():
            self._run_forward()

    def result(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return a copy of the function's value after `launch` with the same inputs, and its place
        in autograd, which takes the host time for every parameter: the GPU runs meanwhile.
        """
        row = Row(len(self.parts), self.out.clone(), self.states())
        self._row = weakref.ref(row)
        leaves = self._leaves(inputs, self.parameters)
        link: Any = None
        # the first layers' part comes last in the backward pass
        for number in reversed(range(len(self.parts))):
            its = (leaves[leaf] for leaf in self.parts[number].leaves)
            link = _Replay.apply(self, row, number, link, *its)
        return link  # type: ignore[no-any-return]

    def states(self) -> States:
        """See `states_of`."""
        return states_of(self.weights, self._put_back)

    def _run_forward(self) -> None:
        with torch.cuda.device_of(self.out):
            self._forward.replay()

    def run_backward(self, number: int, d_out: Tensor) -> list[Tensor | None]:
        """Replay a part's graph; return the gradients of its leaves. The first part's gets the
        function's gradient `d_out`, the others' read what the one before wrote.
        """
        if number == 0:
            self.d_out.copy_(d_out)
        self._run_part(number)
        return [self._gradient(leaf) for leaf in self.parts[number].leaves]

    def _gradient(self, leaf: int) -> Tensor | None:
        """Return a leaf's gradient of the last replay: of an input a copy."""
        inputs = len(self._d_inputs)
        if leaf >= inputs:
            return self.gradients.hand_out(leaf - inputs)
        grad = self._d_inputs[leaf]
        return None if grad is None else grad.clone()

    def _run_part(self, number: int) -> None:
        with torch.cuda.device_of(self.out):
            self.parts[number].graph.replay()


@contextmanager
def in_the_place_of(parameters: Sequence[Tensor], module: nn.Module) -> Iterator[list[Tensor]]:
    """Replace a module's parameters, for the block, by new ones on the same memory; yields these.

    The autograd node that accumulates a parameter's gradients is bound to the stream on which it
    was made, and lives while DDP, or the last step's loss, holds it. A capture, on a stream of its
    own, fails if it meets such a node.

    Raises:
        NotCapturable: the block gave one of them other memory, which a replay would read: nobody
            keeps it, and the optimizer does not know it.
    """
    others = {id(x): nn.Parameter(x.detach()) for x in parameters}
    places = [(own, name) for own, name in places_of(module) if id(own[name]) in others]
    with reading(places, [others[id(x)] for x in weights_at(places)]):
        yield [others[id(x)] for x in parameters]
        for given in parameters:
            read = others[id(given)]
            if (read.data_ptr(), read.dtype) != (given.data_ptr(), given.dtype):
                raise NotCapturable(f"a layer moves a parameter of {tuple(given.shape)}")


@contextmanager
def reading(places: Places, weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within the block, modules have these weights at the places."""
    before: list[Any] = weights_at(places)
    try:
        for (parameters, name), weight in zip(places, weights, strict=True):
            parameters[name] = weight
        yield
    finally:
        for (parameters, name), weight in zip(places, before, strict=True):
            parameters[name] = weight


def refuse_other_leaves(out: Tensor, wanted: Sequence[Tensor]) -> None:
    """Refuse a function that reads other leaves with gradients than `wanted`: a replay would not
    compute these gradients.

    Such leaves are parameters that a replaced forward or a list holds, which `in_the_place_of` does
    not replace.

    Raises:
        NotCapturable: there is such a leaf.
    """
    known = {id(x) for x in wanted}
    for leaf in (getattr(node, "variable", None) for node in nodes_of(out)):
        if leaf is not None and id(leaf) not in known:
            raise NotCapturable(
                f"a layer reads a parameter of {tuple(leaf.shape)} from elsewhere than its module"
            )


def forget_failed_capture(device: torch.device) -> None:
    """Make the random generator usable after a failed capture: torch 2.11's still takes itself to
    be in a capture.
    """
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())


def free_memory(device: torch.device) -> float:
    """Return which share of the GPU's memory nobody holds, 0 to 1."""
    free, total = torch.cuda.mem_get_info(device)
    return free / total


def _multiply(x: Tensor) -> None:
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, enabled=False):
        torch.autograd.grad((x @ x).sum(), x)


class _Replay(Function):
    """A part of the backward pass, 0 that of the last layers, whose output is the function's value.
    Each other's is an empty tensor, by which the part that runs before it leads to it.
    """

    @staticmethod
    def forward(
        ctx: Any, graph: Graph, row: Row, number: int, link: Tensor | None, *leaves: Tensor
    ) -> Tensor:
        ctx.graph, ctx.row, ctx.number, ctx.is_linked = graph, row, number, link is not None
        ctx.set_materialize_grads(True)
        assert row.out is not None
        if number:
            return row.out.new_empty(0)
        out, row.out = row.out, None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        row, number = ctx.row, ctx.number
        if row.left != len(ctx.graph.parts) - number:
            refuse_second()
        if number == 0:
            refuse_changed(ctx.graph.weights, row.weights, ctx.graph.states())
        row.left -= 1
        d_link = d_out.new_empty(0) if ctx.is_linked else None
        return None, None, None, d_link, *ctx.graph.run_backward(number, d_out)
