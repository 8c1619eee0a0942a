"""Operations in graphs of torch.compile: each becomes one operator of `torch.library`, so that the
graph does not break.

Operations plan on the host, from the row's offsets, and a graph must not hold these as constants.
So the operator takes the offsets as a tensor, and looks the row's record up by their values. Only
inputs are saved for the backward pass, which runs the operation's forward pass again.

Eager mode does without the operator, which costs the host some 90 us a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.library import define, impl, register_autograd, register_fake

from hf_packfree.packing import PackedSequence
from hf_packfree.packing.record import Integers

# cached records: all layers share a row's plans, forward and backward, and a row of evaluation
# between two of training evicts neither
_RECORDS = 8


def is_operator(packed: PackedSequence) -> bool:
    """Whether torch.compile traces an operation on this row as an operator; rows of shared prefixes
    and rows that ranks share break the graph instead.
    """
    return torch.compiler.is_compiling() and packed.tree is None and not packed.is_shard


def operator(
    run: Callable[..., Any], arguments: str, like: Callable[..., Any], outputs: int = 1
) -> Callable[..., Any]:
    """Register an operation as an operator; return a function of the row's record and of
    `arguments`, by position, that calls it.

    Args:
        run: the operation, which takes `arguments` and `packed` by name; the operator gets the
            function's name.
        arguments: as in a torch.library schema, such as "Tensor q, bool qk_l2norm"; the first is a
            tensor.
        like: returns empty tensors like the outputs, given the arguments without the record.
        outputs: how many tensors the operation returns.
    """
    name, given = f"hf_packfree::{run.__name__}", f"Tensor cu_seqlens, {arguments}"
    names = tuple(argument.split()[-1] for argument in arguments.split(", "))
    define(name, f"({given}) -> ({', '.join(['Tensor'] * outputs)})")
    define(f"{name}_backward", f"(Tensor?[] d_outs, bool[] needed, {given}) -> Tensor[]")
    passes = _Passes(run, names, getattr(torch.ops.hf_packfree, f"{run.__name__}_backward"))
    impl(name, "CompositeExplicitAutograd", passes.forward)
    impl(f"{name}_backward", "CompositeExplicitAutograd", passes.backward)
    register_fake(name, lambda _, *values: like(*values))
    register_fake(f"{name}_backward", _like_needed)
    register_autograd(name, passes.differentiate, setup_context=_keep_inputs)
    operator = getattr(torch.ops.hf_packfree, run.__name__)

    def call(packed: PackedSequence, *values: Any) -> Any:
        return operator(packed.cu_seqlens_cpu, *values)

    return call


@dataclass(frozen=True)
class _Passes:
    """The forward and backward pass of the operator for `run`, whose arguments have these names."""

    run: Callable[..., Any]
    names: tuple[str, ...]
    again: Callable[..., list[Tensor]]

    def forward(self, cu_seqlens: Tensor, *values: Any) -> Any:
        with torch.no_grad():
            outs = tuple(out.contiguous() for out in self._compute(cu_seqlens, values))
        return outs if len(outs) > 1 else outs[0]

    def backward(
        self,
        d_outs: Sequence[Tensor | None],
        needed: Sequence[bool],
        cu_seqlens: Tensor,
        *values: Any,
    ) -> list[Tensor]:
        """Return the gradients of the values that need one, in order."""
        with torch.enable_grad():
            leaves = [
                value.detach().requires_grad_(needs) if isinstance(value, Tensor) else value
                for value, needs in zip(values, needed, strict=True)
            ]
            outs = self._compute(cu_seqlens, leaves)
        found = torch.autograd.grad(
            [out for out, d in zip(outs, d_outs, strict=True) if d is not None],
            [leaf for leaf, needs in zip(leaves, needed, strict=True) if needs],
            [d for d in d_outs if d is not None],
            materialize_grads=True,
        )
        return [d.contiguous() for d in found]

    def differentiate(self, ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:
        cu_seqlens, *tensors = ctx.saved_tensors
        left, needed = iter(tensors), list(ctx.needs_input_grad[1:])
        values = [next(left) if is_tensor else value for is_tensor, value in ctx.values]
        found = iter(self.again(d_outs, needed, cu_seqlens, *values))
        return None, *(next(found) if needs else None for needs in needed)

    def _compute(self, cu_seqlens: Tensor, values: Sequence[Any]) -> tuple[Tensor, ...]:
        packed = _record(cu_seqlens.numpy().tobytes(), values[0].device)
        found = self.run(**dict(zip(self.names, values, strict=True)), packed=packed)
        return found if isinstance(found, tuple) else (found,)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    kinds = [(isinstance(value, Tensor), value) for value in inputs[1:]]
    ctx.values = [(is_tensor, None if is_tensor else value) for is_tensor, value in kinds]


def _like_needed(
    d_outs: Sequence[Tensor | None], needed: Sequence[bool], cu_seqlens: Tensor, *values: Any
) -> list[Tensor]:
    pairs = zip(values, needed, strict=True)
    return [value.new_empty(value.shape) for value, needs in pairs if needs]


@lru_cache(maxsize=_RECORDS)
def _record(offsets: bytes, device: torch.device) -> PackedSequence:
    """The record of a row with these offsets (bytes of int32 [N+1]); cached, and so are its
    plans.
    """
    ends: Integers = np.frombuffer(offsets, dtype=np.int32)
    # the record of a row of evaluation may be used in training afterwards
    with torch.inference_mode(False):
        return PackedSequence.from_lengths(ends[1:] - ends[:-1], device=device)
