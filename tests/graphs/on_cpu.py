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
    capture,
    captured,
    captured_sequence,
    gradient_buffers,
    runner,
    unread,
)
from hf_packfree.graphs.gradient_buffers import Address
from hf_packfree.models import captured_layers


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

    def _capture(self, body, pool, read):
        self.body = body
        out = body(*self.inputs)
        capture.refuse_other_leaves(out, [x for x in self.inputs if x.requires_grad] + [*read])
        self.nodes = capture.nodes_of(out)
        grads = torch.autograd.grad(out.sum(), read, allow_unused=True)
        self.written = [None if grad is None else grad.clone() for grad in grads]
        self.gradients = gradient_buffers.GradientBuffers(
            self.parameters, self.written, self.written
        )

    def _run_forward(self):
        # activations lie where gradients of rows before did
        for written in self.written:
            if written is not None:
                written.fill_(float("nan"))
        with torch.enable_grad():
            self.live = self.body(*self.inputs)
        self.out = self.live.detach()

    def run_backward(self, d_out):
        wanted = [x for x in self.inputs if x.requires_grad] + [*self.parameters]
        grads = iter(torch.autograd.grad(self.live, wanted, d_out, allow_unused=True))
        d_inputs = [next(grads) if x.requires_grad else None for x in self.inputs]
        for written, grad in zip(self.written, grads, strict=True):
            if written is not None:
                written.copy_(grad)
        return d_inputs + self.gradients.hand_out()


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


class Stream:
    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


def let_capture(monkeypatch: Any) -> None:
    """Let graphs be captured here."""
    monkeypatch.setattr(runner, "Graph", Again)
    monkeypatch.setattr(gradient_buffers, "tensor_at", tensor_at)
    monkeypatch.setattr(runner, "Pool", OnACPU)
    monkeypatch.setattr(runner, "CaptureStream", lambda device: None)
    monkeypatch.setattr(unread.Plans, "_replay", unread.Plans._write)
    monkeypatch.setattr(runner, "why_not", lambda module: None)
    monkeypatch.setattr(runner, "free_memory", lambda device: runner.SPARE)
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

    for module in (runner, captured):
        monkeypatch.setattr(module, "in_bucket", padded)
    monkeypatch.setattr(unread, "UnreadSequence", Unread)


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
