"""In the place of CUDA graphs: runs the layers again where a GPU would replay a graph, with gradients
at an address, as the CUDA array interface gives it on a GPU.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_packfree import PackedSequence
from hf_packfree.graphs import (
    bucket,
    capture,
    captured,
    captured_sequence,
    captures,
    checkpointing,
    gradient_buffers,
    layer_graphs,
    parts,
    unread,
    whole,
)
from hf_packfree.graphs.gradient_buffers import Address
from hf_packfree.models import captured_layers
from hf_packfree.ops.seeds import Seeds
from tests.support import runner_of


def tensor_at(address: Address, like: Tensor) -> Tensor:
    """In the place of `gradient_buffers.tensor_at`."""
    facts = address.__cuda_array_interface__
    # a class of its own takes attributes
    kind: Any = type("Bytes", (ctypes.c_char * facts["shape"][0],), {})
    memory = kind.from_address(facts["data"][0])
    memory.address = address
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())


class Again(capture.Graph):
    """Runs the layers at every replay, on the tensors that a graph would read and write."""

    def _capture(self, body, pool, read, layers):
        self.body, self.layers = body, layers
        with parts.inputs_of(layers) as cuts:
            out = body(*self.inputs)
        leaves = self._leaves(self.inputs, read)
        capture.refuse_other_leaves(out, leaves)
        self.nodes = parts.nodes_of(out)
        self.written, d_end = [None] * len(leaves), torch.ones_like(out)
        for part in parts.parts_of(out, cuts, leaves):
            d_end, grads = part.gradients(d_end, leaves)
            for leaf, grad in zip(part.leaves, grads, strict=True):
                self.written[leaf] = None if grad is None else grad.clone()
            self.parts.append(parts.CapturedPart(None, part.leaves))
        self._keep(self.written, self.written)

    def _run_forward(self):
        # activations lie where gradients of rows before did
        for written in self.written:
            if written is not None:
                written.fill_(float("nan"))
        with torch.enable_grad(), parts.inputs_of(self.layers) as cuts:
            live = self.body(*self.inputs)
        self.live = parts.parts_of(live, cuts, self._leaves(self.inputs, self.parameters))
        self.d_out = torch.empty_like(live)
        self.out = live.detach()

    def _run_part(self, number):
        part, leaves = next(self.live), self._leaves(self.inputs, self.parameters)
        self.d_end, grads = part.gradients(self.d_end if number else self.d_out, leaves)
        for leaf, grad in zip(part.leaves, grads, strict=True):
            if grad is not None:
                self.written[leaf].copy_(grad)


class LayerAgain(layer_graphs.LayerGraph):
    """Runs one layer at every replay, and once more in its backward pass, on the tensors that graphs
    would read and write; what later replays may overwrite is NaN.
    """

    def __init__(self, layer, *args, **kwargs):
        self.layer = layer
        super().__init__(layer, *args, **kwargs)

    def compute(self):
        args, kwargs = self._arguments
        with (
            layer_graphs.reading(self.places, self.weights.read),
            checkpointing.in_capture(self.layer, has_gradients=True, seeds=Seeds()),
        ):
            return self._own(self.leaf, *args, **kwargs)

    def capture(self, pool):
        self.leaf, self.leaves = self.hidden, self._leaves
        self.memory = self.out = self.compute()
        capture.refuse_other_leaves(self.out, self._leaves)
        return self.out

    def capture_backward(self, d_out, pool):
        self.d_out = d_out
        with layer_graphs.reading(self.places, self.weights.read):
            found = parts.gradients(self.out, self._leaves, d_out) if self._leaves else ()
        self.written = [None if x is None else x.clone() for x in found]
        self._keep(iter(self.written))

    def _run_forward(self):
        with torch.no_grad():
            self.out.copy_(self.compute())

    def _run_backward(self):
        reading = layer_graphs.reading(self.places, self.weights.read)
        with torch.enable_grad(), reading:
            found = parts.gradients(self.compute(), self.leaves, self.d_out)
        for written, grad in zip(self.written, found, strict=True):
            if grad is not None:
                written.copy_(grad)
        self.out.fill_(float("nan"))


class OnACPU(capture.Pool):
    """Memory that nobody shares, and streams that a test names."""

    def __init__(self, device, stream, tokens):
        self.tokens, self.running = tokens, False
        self._device, self._last = device, torch.cuda.current_stream(device)

    @contextmanager
    def capture(self):
        yield

    @contextmanager
    def beside(self):
        assert not self.running
        self.running = True
        yield

    def join(self):
        self.running = False

    def end(self):
        pass


class Stream:
    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


def let_capture(monkeypatch: Any) -> None:
    """Let graphs be captured here."""
    monkeypatch.setattr(whole, "Graph", Again)
    monkeypatch.setattr(layer_graphs, "_LAYER_GRAPH", LayerAgain)
    monkeypatch.setattr(gradient_buffers, "tensor_at", tensor_at)
    monkeypatch.setattr(captures, "Pool", OnACPU)
    monkeypatch.setattr(captures, "CaptureStream", lambda device: None)
    monkeypatch.setattr(unread.Plans, "_replay", unread.Plans._write)
    monkeypatch.setattr(whole, "why_not", lambda module: None)
    monkeypatch.setattr(captures, "free_memory", lambda device: captures.SPARE)
    monkeypatch.setattr(
        captured_layers,
        "_is_training_step",
        lambda trunk, row: trunk.training and torch.is_grad_enabled(),
    )
    monkeypatch.setattr(captured_layers, "_unbounded", lambda trunk: None)
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)


def let_capture_whole_documents(monkeypatch: Any) -> None:
    """Let graphs be captured here, of rows without empty documents, which PyTorch's layers lack."""
    let_capture(monkeypatch)
    monkeypatch.setattr(captured_sequence.CapturedSequence, "become", _become)

    for module in (bucket, captured):
        monkeypatch.setattr(module, "in_bucket", padded)
    monkeypatch.setattr(unread, "UnreadSequence", Unread)


def replay_with_copies(monkeypatch: Any, model: torch.nn.Module) -> None:
    """Let the model's layers find the copies of fp32 weights wherever a graph would read them."""
    replay = Again._run_forward

    def with_copies(graph: Any) -> None:
        with runner_of(model).captures.rounded.in_use():
            replay(graph)

    monkeypatch.setattr(Again, "_run_forward", with_copies)


def padded(packed, bucket):
    """In the place of `in_bucket`."""
    whole, rest = divmod(bucket.tokens - packed.num_tokens, bucket.longest)
    padding = [bucket.longest] * whole + [rest] * (rest > 0)
    return PackedSequence.from_lengths(packed.lengths + padding)


class Unread:
    """In the place of `UnreadSequence`."""

    @staticmethod
    def of(starts, bucket):
        first = sorted({0, *starts.nonzero()[:, 0].tolist()})
        ends = [*first[1:], len(starts)]
        lengths = [end - start for start, end in zip(first, ends, strict=True)]
        return padded(PackedSequence.from_lengths(lengths), bucket)


def _become(self, packed):
    """PyTorch's plans on a CPU are no tables: what the layers run on next is another record."""
    for name in ("cu_seqlens", "cu_seqlens_cpu", "seq_idx", "max_seqlen"):
        object.__setattr__(self, name, getattr(packed, name))
    self._memo.clear()
