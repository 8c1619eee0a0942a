"""The backward pass in parts, each a CUDA graph of its own: the gradients of the last layers are
handed out before those of the layers before them are computed, so that DDP reduces them meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PARTS = 8
"""The most parts of a backward pass. The reduction of the last one's gradients overlaps with
nothing that is in a graph.
"""


class Part(NamedTuple):
    """The backward pass from one tensor to another that was computed before it.

    Attributes:
        end: the tensor whose gradient is given.
        start: the other one; None: the part ends at leaves alone.
        leaves: which of the function's leaves lie between them.
    """

    end: Tensor
    start: Tensor | None
    leaves: list[int]

    def gradients(self, d_end: Tensor, leaves: Sequence[Tensor]) -> tuple[Any, list[Any]]:
        """Return the gradients of `start` (None: there is none) and of the leaves between, given
        all leaves.
        """
        wanted = [leaves[number] for number in self.leaves]
        if self.start is None:
            return None, [*gradients(self.end, wanted, d_end)]
        d_start, *found = gradients(self.end, [self.start, *wanted], d_end)
        return d_start, found


class CapturedPart(NamedTuple):
    """A part's graph, and which of the function's leaves it writes gradients of."""

    graph: Any
    leaves: list[int]


def gradients(out: Tensor, wanted: Sequence[Tensor], d_out: Tensor) -> tuple[Any, ...]:
    """Return the gradients, computed without autocast, which is off in a step's backward pass."""
    with torch.autocast(out.device.type, enabled=False):
        return torch.autograd.grad(out, wanted, d_out, allow_unused=True)


def layers_to_cut_at(module: Any) -> list[nn.Module]:
    """Return the layers of a text model whose inputs the backward pass may be cut at."""
    layers = [*getattr(module, "layers", ())]
    places = (len(layers) * number // PARTS for number in range(1, PARTS))
    return [*dict.fromkeys(layers[place] for place in places)] if layers else []


@contextmanager
def inputs_of(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list, to which every layer that runs in the block adds the hidden states it gets."""
    found: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("hidden_states")
        if isinstance(x, Tensor):
            found.append(x)

    with ExitStack() as stack:
        for layer in layers:
            hook = layer.register_forward_pre_hook(note, with_kwargs=True)
            stack.callback(hook.remove)
        yield found


def parts_of(out: Tensor, cuts: list[Tensor], leaves: Sequence[Tensor]) -> Iterator[Part]:
    """Yield the parts of a backward pass, the last layers' first.

    Args:
        out: the function's value.
        cuts: tensors that it was computed from, in the order in which they were computed; they are
            taken out, so that a part's memory is free after it. The backward pass is cut at those
            alone that nothing goes past.
        leaves: all of the function's.
    """
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}

    def between(end: Tensor, start: Tensor | None) -> list[int]:
        found = {id(getattr(node, "variable", None)) for node in nodes_of(end, start)}
        return sorted(numbers[leaf] for leaf in found & numbers.keys())

    end = out
    while cuts:
        cut = cuts.pop()
        if _divides(end, cut):
            yield Part(end, cut, between(end, cut))
            end = cut
    yield Part(end, None, between(end, None))


def _divides(end: Tensor, cut: Tensor) -> bool:
    """Whether `end` was computed from `cut` and from nothing else before it: neither a tensor nor a
    leaf, whose gradient autograd would look for on both sides.
    """
    # autograd runs a tensor's hooks where its gradient is wanted, and where a backward pass begins
    if cut.grad_fn is None or cut._backward_hooks:
        return False
    after = nodes_of(end, cut)
    reads = any(cut.grad_fn is before for node in after for before, _ in node.next_functions)
    return reads and after.isdisjoint(nodes_of(cut))


def nodes_of(out: Tensor, start: Tensor | None = None) -> set[Any]:
    """Return the autograd nodes that a tensor was computed by, those of leaves included; given a
    tensor to `start` from, without those that computed it.
    """
    found: set[Any] = set()
    first = None if start is None else (start.grad_fn, start.output_nr)
    edges: list[Any] = [(out.grad_fn, out.output_nr)]
    while edges:
        node, number = edges.pop()
        if node is not None and node not in found and (node, number) != first:
            found.add(node)
            edges += node.next_functions
    return found
