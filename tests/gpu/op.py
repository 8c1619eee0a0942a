"""An operation as the tests see it, and what it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence
from tests.gpu.checks import ATTENTION, DEVICE, HEADS, TOWER, TRIAL

FP32_ALWAYS = ("g",)
"""The log decay stays fp32 beside bf16 inputs, as in the layers."""


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: how results call it.
        module: where its function and `OP` are.
        leaves: (tokens) -> {name: fp64 tensor}; dimension 1 is the tokens' unless the name is in
            `shared`.
        call: (function, leaves, record, backend) -> [1, T, ...].
        function: its public name.
        shared: leaves that belong to no token.
        mixes: whether tokens influence each other, so that a control can leak.
        exact: backends whose documents are promised to be, bit for bit, those of the document
            alone.
        exact_gradients: those of which that holds for tokens' gradients too, all measured 0.0 on an
            H200. Not our convolution, whose taps' sum goes by a token's place among four (4e-6),
            varlen, which adds queries' gradients as they come (9e-6), nor our MLP, where torch
            multiplies in the backward pass (9e-4).
        needs: the field that its backends have to have.
    """

    name: str
    module: str
    leaves: Callable[[int], dict[str, Tensor]]
    call: Callable[[Any, dict[str, Tensor], PackedSequence, str], Tensor]
    function: str
    shared: tuple[str, ...] = ()
    mixes: bool = True
    exact: tuple[str, ...] = ()
    exact_gradients: tuple[str, ...] = ()
    needs: str | None = None

    def backends(self) -> list[str]:
        """Names of the backends; an operation that moved or is gone raises, so that it does not
        leave in silence.
        """
        found = self.op.backends.items()
        return sorted(name for name, one in found if not self.needs or getattr(one, self.needs))

    @property
    def op(self) -> Any:
        """The object of the package."""
        return import_module(self.module).OP

    def run(self, leaves: dict[str, Tensor], packed: PackedSequence, backend: str) -> Tensor:
        """Run it, or skip the test where the backend itself says why it cannot run; whatever it
        raises then is a failure.
        """
        reason = self.unusable(backend, next(iter(leaves.values())).dtype)
        if reason is not None:
            pytest.skip(f"{self.name}, {backend}: {reason}")
        return self.call(
            getattr(import_module(self.module), self.function), leaves, packed, backend
        )

    def unusable(self, backend: str, dtype: torch.dtype) -> str | None:
        """What the backend itself says: why it cannot run here, or None."""
        from hf_packfree.ops.backend import Target

        found = self.op.backends[backend]
        capability = None if TRIAL else torch.cuda.get_device_capability()
        sizes = {"key_size": HEADS[2], "value_size": HEADS[2], "taps": 4}
        sizes |= {"head_size": ATTENTION[2], "tower_head_size": TOWER[1]}
        return found.unusable(Target(DEVICE, capability, dtype, sizes))


def as_leaves(
    values: dict[str, Tensor], dtype: torch.dtype, device: str = DEVICE
) -> dict[str, Tensor]:
    """The same values on the device in `dtype` (see `FP32_ALWAYS`), ready for gradients."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: value.detach()
        .to(device, wide if name in FP32_ALWAYS else dtype)
        .clone()
        .requires_grad_()
        for name, value in values.items()
    }


def cut(op: Op, leaves: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """One document's leaves, of its own."""
    return {
        name: (leaf if name in op.shared else leaf[:, begin:end]).detach().clone().requires_grad_()
        for name, leaf in leaves.items()
    }
