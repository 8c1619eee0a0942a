"""Where GPU tests run, the operations as one table, and documents cut out of a row."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_packfree.errors import BackendUnavailable
from hf_packfree.packing import PackedSequence

TRIAL = os.environ.get("PACKFREE_GPU_TESTS") == "cpu"
"""A trial of the tests themselves on a CPU, with tiny sizes."""
DEVICE = "cpu" if TRIAL else "cuda"
LENGTHS = (1, 2, 3, 63, 64, 65, 129, 200, 513)
LONG = (*LENGTHS, 1000, 2000)
"""Left to itself, FlashQLA computes parts of documents of 500 tokens and more apart, from an approximate state."""
HEADS = (2, 4, 16) if TRIAL else (16, 32, 128)
"""Key heads, value heads and their size in the linear layers: grouped, and the published models' size."""
ATTENTION = (4, 2, 16) if TRIAL else (8, 2, 256)
"""Query heads, key heads and their size in full attention."""
WIDTH = 72 if TRIAL else 2048
"""Of the residual stream."""

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not TRIAL and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # the kernels' packages warn in their own ways
]


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: how results call it.
        module: where its function and `BACKENDS` are.
        leaves: (tokens) -> {name: fp64 tensor}; dimension 1 is the tokens' unless the name is in `shared`.
        call: (function, leaves, record, backend) -> [1, T, ...].
        function: its public name.
        shared: leaves that belong to no token.
        mixes: whether tokens influence each other, so that a control can leak.
        exact: backends whose documents are promised to be, bit for bit, those of the document alone.
        table: the name of the module's table of backends.
    """

    name: str
    module: str
    leaves: Callable[[int], dict[str, Tensor]]
    call: Callable[[Any, dict[str, Tensor], PackedSequence, str], Tensor]
    function: str
    shared: tuple[str, ...] = ()
    mixes: bool = True
    exact: tuple[str, ...] = ()
    table: str = "BACKENDS"

    def backends(self) -> list[str]:
        """Names of the backends, or none where the operation does not exist."""
        found = importlib.util.find_spec(self.module) is not None
        return sorted(getattr(import_module(self.module), self.table, {})) if found else []

    def run(self, leaves: dict[str, Tensor], packed: PackedSequence, backend: str) -> Tensor:
        """Run it, or skip the test where the backend is not available, with its reason."""
        reason = self.unusable(backend, next(iter(leaves.values())).dtype)
        if reason is not None:
            pytest.skip(f"{self.name}, {backend}: {reason}")
        try:
            return self.call(getattr(import_module(self.module), self.function), leaves, packed, backend)
        except (BackendUnavailable, ImportError) as error:
            pytest.skip(f"{self.name}, {backend}: {error}")

    def unusable(self, backend: str, dtype: torch.dtype) -> str | None:
        """What the backend itself says: why it cannot run here, or None."""
        from hf_packfree.ops.backend import Site

        found = import_module(self.module).BACKENDS[backend]
        capability = None if TRIAL else torch.cuda.get_device_capability()
        sizes = {"key_size": HEADS[2], "value_size": HEADS[2], "taps": 4, "head_size": ATTENTION[2]}
        return found.unusable(Site(DEVICE, capability, dtype, sizes))


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _delta_rule_leaves(tokens: int) -> dict[str, Tensor]:
    """Slow decay: A from 0.01 to 0.05, so that states live for hundreds of tokens."""
    keys, values, size = HEADS
    rate = torch.empty(values, dtype=torch.float64).uniform_(0.01, 0.05)
    return {
        "q": _random(1, tokens, keys, size), "k": _random(1, tokens, keys, size), "v": _random(1, tokens, values, size),
        "g": -rate * torch.nn.functional.softplus(_random(1, tokens, values)),
        "beta": _random(1, tokens, values).sigmoid(),
    }


def _attention_leaves(tokens: int) -> dict[str, Tensor]:
    heads, keys, size = ATTENTION
    return {name: _random(1, tokens, n, size) for name, n in {"q": heads, "k": keys, "v": keys}.items()}


def _gated_norm_leaves(tokens: int) -> dict[str, Tensor]:
    x, z = (_random(1, tokens, *HEADS[1:]) for _ in range(2))
    return {"x": x, "z": z, "weight": 1 + _random(HEADS[2]) / 4}


def _unit_qkv(function: Any, x: Tensor, weight: Tensor, packed: PackedSequence, backend: str) -> Tensor:
    """q and k of unit length beside v, [1, T, C], whether or not the backend divides by the norms."""
    keys, values, size = HEADS
    q, k, v, unit = function(x, weight, packed, (keys, values), (size, size), backend=backend)
    if not unit:
        q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    return torch.cat([part.flatten(2) for part in (q, k, v)], -1)


def _turned(function: Any, x: Tensor, weight: Tensor, backend: str) -> Tensor:
    """q is half of a projection, and a quarter of its channels turn, as in the published models."""
    size = x.shape[-1] // 2
    angle = torch.arange(size // 8, device=x.device).expand(1, x.shape[1], -1).to(x.dtype)
    cos, sin = (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))
    return function(x[..., :size], weight, cos, sin, 1e-6, backend=backend)


def _gates_leaves(tokens: int) -> dict[str, Tensor]:
    """b and a side by side, as one product leaves them; rates and biases as the published models start."""
    values = HEADS[1]
    rate, bias = torch.empty(values, dtype=torch.float64).uniform_(1, 16), _random(values) - 4
    return {"ba": _random(1, tokens, 2 * values), "A_log": rate.log(), "dt_bias": bias}


def _gates(function: Any, ba: Tensor, A_log: Tensor, dt_bias: Tensor, backend: str) -> Tensor:
    """Log decay beside write strength, [1, T, 2 HV]."""
    b, a = ba.chunk(2, -1)
    return torch.cat(function(a, b, A_log, dt_bias, backend=backend), -1)


def _swiglu_leaves(tokens: int) -> dict[str, Tensor]:
    shapes = {"gate": (3 * WIDTH, WIDTH), "up": (3 * WIDTH, WIDTH), "down": (WIDTH, 3 * WIDTH)}
    return {"x": _random(1, tokens, WIDTH)} | {name: _random(*shape) * shape[1] ** -0.5 for name, shape in shapes.items()}


def _channels() -> int:
    return (2 * HEADS[0] + HEADS[1]) * HEADS[2]


OPS = {
    op.name: op
    for op in (
        Op(
            "delta rule", "hf_packfree.ops.delta_rule", _delta_rule_leaves,
            lambda f, x, packed, backend: f(x["q"], x["k"], x["v"], x["g"], x["beta"], packed, backend=backend),
            "gated_delta_rule", exact=("fla", "flash_qla"),
        ),
        Op(
            "conv", "hf_packfree.ops.conv",
            lambda tokens: {"x": _random(1, tokens, _channels()), "weight": _random(_channels(), 4) / 2},
            lambda f, x, packed, backend: f(x["x"], x["weight"], packed, backend=backend),
            "causal_conv1d", shared=("weight",), exact=("torch", "triton", "fla", "causal_conv1d"),
        ),
        Op(
            "qkv conv", "hf_packfree.ops.conv",
            lambda tokens: {"x": _random(1, tokens, _channels()), "weight": _random(_channels(), 4) / 2},
            lambda f, x, packed, backend: _unit_qkv(f, x["x"], x["weight"], packed, backend),
            "qkv_conv", shared=("weight",), exact=("triton",), table="UNITS",
        ),
        Op(
            "attention", "hf_packfree.ops.attention", _attention_leaves,
            lambda f, x, packed, backend: f(x["q"], x["k"], x["v"], packed, backend=backend),
            "attention", exact=("triton", "varlen"),
        ),
        Op(
            "gated norm", "hf_packfree.ops.gated_norm",
            _gated_norm_leaves,
            lambda f, x, packed, backend: f(x["x"], x["z"], x["weight"], eps=1e-6, backend=backend),
            "gated_rms_norm", shared=("weight",), mixes=False, exact=("torch", "triton", "fla"),
        ),
        Op(
            "norm rope", "hf_packfree.ops.norm_rope",
            lambda tokens: {"x": _random(1, tokens, ATTENTION[0], 2 * ATTENTION[2]), "weight": _random(ATTENTION[2]) / 4},
            lambda f, x, packed, backend: _turned(f, x["x"], x["weight"], backend),
            "norm_rope", shared=("weight",), mixes=False, exact=("triton",),
        ),
        Op(
            "output gate", "hf_packfree.ops.output_gate",
            lambda tokens: {name: _random(1, tokens, ATTENTION[0], ATTENTION[2]) for name in ("x", "z")},
            lambda f, x, packed, backend: f(x["x"], x["z"], backend=backend),
            "output_gate", mixes=False, exact=("triton",),
        ),
        Op(
            "gates", "hf_packfree.ops.gates", _gates_leaves,
            lambda f, x, packed, backend: _gates(f, x["ba"], x["A_log"], x["dt_bias"], backend),
            "gates", shared=("A_log", "dt_bias"), mixes=False, exact=("triton",),
        ),
        Op(
            "swiglu", "hf_packfree.ops.swiglu", _swiglu_leaves,
            lambda f, x, packed, backend: f(x["x"], x["gate"], x["up"], x["down"], backend=backend),
            "swiglu_mlp", shared=("gate", "up", "down"), mixes=False, exact=("triton",),
        ),
        Op(
            "add norm", "hf_packfree.ops.add_norm",
            lambda tokens: {"x": _random(1, tokens, WIDTH), "branch": _random(1, tokens, WIDTH), "weight": _random(WIDTH) / 4},
            lambda f, x, packed, backend: torch.cat(f(x["x"], x["branch"], x["weight"], 1e-6, backend=backend), -1),
            "add_norm", shared=("weight",), mixes=False, exact=("triton",),
        ),
    )
}
FP32_ALWAYS = ("g",)
"""The log decay stays fp32 beside bf16 inputs, as in the layers."""


def op_cases(*, torch_too: bool) -> list[Any]:
    """(operation, backend) of everything there is."""
    return [
        pytest.param(op, backend, id=f"{op.name}-{backend}")
        for op in OPS.values()
        for backend in op.backends()
        if backend != "torch" or torch_too or TRIAL
    ]


def as_leaves(values: dict[str, Tensor], dtype: torch.dtype, device: str = DEVICE) -> dict[str, Tensor]:
    """The same values on the device in `dtype` (see `FP32_ALWAYS`), ready for gradients."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: value.detach().to(device, wide if name in FP32_ALWAYS else dtype).clone().requires_grad_()
        for name, value in values.items()
    }


def cut(op: Op, leaves: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """One document's leaves, of its own."""
    return {
        name: (leaf if name in op.shared else leaf[:, begin:end]).detach().clone().requires_grad_()
        for name, leaf in leaves.items()
    }


def spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of every document."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(end - length, end) for end, length in zip(ends, lengths)]


def record_of(lengths: Sequence[int]) -> PackedSequence:
    """The documents' record on the tests' device."""
    return PackedSequence.from_lengths(list(lengths), device=DEVICE)
