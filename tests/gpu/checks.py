"""Where GPU tests run, the operations as one table, and documents cut out of a row."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
"""FlashQLA computes parts of documents of 500 tokens and more apart, from an approximate state."""
HEADS = (2, 4, 16) if TRIAL else (16, 32, 128)
"""Key heads, value heads and their size in the linear layers: grouped, and the published models' size."""

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
    """

    name: str
    module: str
    leaves: Callable[[int], dict[str, Tensor]]
    call: Callable[[Any, dict[str, Tensor], PackedSequence, str], Tensor]
    function: str
    shared: tuple[str, ...] = ()
    mixes: bool = True
    exact: tuple[str, ...] = ()

    def backends(self) -> list[str]:
        """Names of the backends, or none where the operation does not exist."""
        found = importlib.util.find_spec(self.module) is not None
        return sorted(import_module(self.module).BACKENDS) if found else []

    def run(self, leaves: dict[str, Tensor], packed: PackedSequence, backend: str) -> Tensor:
        """Run it, or skip the test where the backend is not available, with its reason."""
        try:
            return self.call(getattr(import_module(self.module), self.function), leaves, packed, backend)
        except (BackendUnavailable, ImportError) as error:
            pytest.skip(f"{self.name}, {backend}: {error}")
        except RuntimeError as error:
            if "only support fp16 and bf16" not in str(error):
                raise
            pytest.skip(f"{self.name}, {backend}: {error}")


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
    heads, keys, size = (4, 2, 16) if TRIAL else (8, 2, 256)
    return {name: _random(1, tokens, n, size) for name, n in {"q": heads, "k": keys, "v": keys}.items()}


def _gated_norm_leaves(tokens: int) -> dict[str, Tensor]:
    x, z = (_random(1, tokens, *HEADS[1:]) for _ in range(2))
    return {"x": x, "z": z, "weight": 1 + _random(HEADS[2]) / 4}


def _channels() -> int:
    return (2 * HEADS[0] + HEADS[1]) * HEADS[2]


OPS = {
    op.name: op
    for op in (
        Op(
            "delta rule", "hf_packfree.ops.delta_rule", _delta_rule_leaves,
            lambda f, x, packed, backend: f(x["q"], x["k"], x["v"], x["g"], x["beta"], packed, backend=backend),
            "gated_delta_rule", exact=("fla, FlashQLA off",),
        ),
        Op(
            "conv", "hf_packfree.ops.conv",
            lambda tokens: {"x": _random(1, tokens, _channels()), "weight": _random(_channels(), 4) / 2},
            lambda f, x, packed, backend: f(x["x"], x["weight"], packed, backend=backend),
            "causal_conv1d", shared=("weight",), exact=("torch", "triton", "fla", "causal_conv1d"),
        ),
        Op(
            "attention", "hf_packfree.ops.attention", _attention_leaves,
            lambda f, x, packed, backend: f(x["q"], x["k"], x["v"], packed, backend=backend),
            "attention", exact=("varlen",),
        ),
        Op(
            "gated norm", "hf_packfree.ops.gated_norm",
            _gated_norm_leaves,
            lambda f, x, packed, backend: f(x["x"], x["z"], x["weight"], eps=1e-6, backend=backend),
            "gated_rms_norm", shared=("weight",), mixes=False, exact=("torch", "triton", "fla"),
        ),
    )
}
FP32_ALWAYS = ("g",)
"""The log decay stays fp32 beside bf16 inputs, as in the layers."""


def op_cases(*, torch_too: bool) -> list[Any]:
    """(operation, backend) of everything there is; "fla" of the delta rule also with FlashQLA off."""
    cases = []
    for op in OPS.values():
        for backend in op.backends():
            if backend != "torch" or torch_too or TRIAL:
                cases.append(pytest.param(op, backend, id=f"{op.name}-{backend}"))
            if (op.name, backend) == ("delta rule", "fla"):
                cases.append(pytest.param(op, "fla, FlashQLA off", id="delta rule-fla, FlashQLA off"))
    return cases


@contextmanager
def kernels(backend: str) -> Iterator[str]:
    """Turn FlashQLA off where the case says so; yields the backend's own name."""
    before = os.environ.get("FLA_FLASH_QLA")
    try:
        if backend.endswith("FlashQLA off"):
            os.environ["FLA_FLASH_QLA"] = "0"
        yield backend.split(",")[0]
    finally:
        os.environ.pop("FLA_FLASH_QLA", None)
        os.environ.update({} if before is None else {"FLA_FLASH_QLA": before})


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
