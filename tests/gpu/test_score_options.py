"""Attention with windows, sinks and values of another size than keys: every backend that takes them
against PyTorch eager in fp64, and a document in a row against the document alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_packfree.ops.attention import OP, attention
from hf_packfree.ops.backend import BATCH_INVARIANT, Target
from hf_packfree.packing import PackedSequence
from tests.gpu.checks import DEVICE, LENGTHS, LONG, TRIAL, gpu, record_of, spans
from tests.support import relative_rms

pytestmark = gpu
LIMITS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 1e-2)}
"""(values, gradients): relative RMS against fp64 on the same inputs."""
ROW = LENGTHS if TRIAL else LONG


@dataclass(frozen=True)
class Case:
    """One attention: heads of queries and keys, sizes of keys and values, options."""

    heads: int
    key_heads: int
    size: int
    value_size: int
    window: int | None = None
    sinks: bool = False

    def sizes(self) -> dict[str, int]:
        """As a model's layers give them to `Target`."""
        needs = {"window": self.window or 0, "sinks": int(self.sinks)}
        other = self.value_size if self.value_size != self.size else 0
        return {"head_size": self.size, **needs, "other_value_size": other}

    def inputs(self, tokens: int) -> list[Tensor]:
        """q, k, v and sinks, if there are any, fp64."""
        torch.manual_seed(0)
        shapes = (self.heads, self.size), (self.key_heads, self.size)
        found = [torch.randn(1, tokens, *shape, dtype=torch.float64) for shape in shapes]
        found.append(torch.randn(1, tokens, self.key_heads, self.value_size, dtype=torch.float64))
        return [*found, *[torch.randn(self.heads, dtype=torch.float64) * 2] * self.sinks]


CASES = {
    "gpt-oss, full": Case(64, 8, 64, 64, sinks=True),
    "gpt-oss, window": Case(64, 8, 64, 64, 128, True),
    "window of 1": Case(4, 1, 64, 64, 1),
    "window of 500, heads of 128": Case(8, 2, 128, 128, 500),
    "window wider than the row": Case(8, 8, 128, 128, 8192),
    "window of 512, heads of 256": Case(8, 4, 256, 256, 512),
    "window and sinks, heads of 256": Case(8, 2, 256, 256, 200, True),
    "MLA": Case(16, 16, 192, 128),
    "MLA with a window": Case(16, 16, 192, 128, 200),
}
if TRIAL:
    CASES = {
        "window and sinks": Case(4, 2, 16, 16, 16, True),
        "MLA": Case(2, 2, 24, 16),
    }
NAMED = pytest.mark.parametrize("name", CASES)
BACKENDS = pytest.mark.parametrize("backend", OP.backends)


def skip_unless_usable(case: Case, backend: str, dtype: torch.dtype) -> None:
    """Skip where the backend itself says why it cannot run."""
    capability = None if TRIAL else torch.cuda.get_device_capability()
    target = Target(DEVICE, capability, dtype, case.sizes())
    if (reason := OP.backends[backend].unusable(target)) is not None:
        pytest.skip(f"{backend}: {reason}")


def run(
    case: Case, inputs: list[Tensor], packed: PackedSequence, backend: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output, and the gradients of a fixed random functional."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    options: dict[str, Any] = {"window": case.window, "sinks": [*leaves[3:], None][0]}
    out = attention(*leaves[:3], packed, backend=backend + BATCH_INVARIANT, **options)
    torch.manual_seed(1)
    weight = torch.randn(1, sum(ROW), *out.shape[2:], dtype=torch.float64)[:, : out.shape[1]]
    return out.detach(), torch.autograd.grad((out * weight.to(out)).sum(), leaves)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@BACKENDS
@NAMED
def test_equals_pytorch_eager(name, backend, dtype, record, precise):
    case = CASES[name]
    skip_unless_usable(case, backend, dtype)
    packed = record_of(ROW)
    inputs = [x.to(DEVICE, dtype) for x in case.inputs(sum(ROW))]
    wide = [x.double() for x in inputs]
    found = run(case, inputs, packed, backend)
    wanted = run(case, wide, packed, "torch")
    control = run(case, wide, record_of([sum(ROW)]), "torch")
    values, gradients = LIMITS[dtype]
    facts = {"dtype": str(dtype)}
    record(f"{name}, {backend}: values", relative_rms(found[0], wanted[0]), values, **facts)
    leaves = ("q", "k", "v", "sinks")
    for leaf, one, other in zip(leaves, found[1], wanted[1]):
        # a query of one key, whose weight is 1, has none
        error = relative_rms(one, other, floor=1e-2)
        record(f"{name}, {backend}: gradient of {leaf}", error, gradients, **facts)
    if case.window != 1:
        assert relative_rms(control[0], wanted[0]) > 10 * values, "the control leaks"


@BACKENDS
@NAMED
def test_a_document_in_a_row_equals_the_document_alone(name, backend, record):
    case, dtype = CASES[name], torch.float32 if TRIAL else torch.bfloat16
    skip_unless_usable(case, backend, dtype)
    inputs = [x.to(DEVICE, dtype) for x in case.inputs(sum(ROW))]
    found, _ = run(case, inputs, record_of(ROW), backend)
    alone = []
    for begin, end in spans(ROW):
        document = [*(x[:, begin:end] for x in inputs[:3]), *inputs[3:]]
        alone.append(run(case, document, record_of([end - begin]), backend)[0])
    exact = OP.backends[backend].batch_invariant
    error = float((found - torch.cat(alone, 1)).abs().max())
    record(f"{name}, {backend}: values, packed against alone", error, 0.0 if exact else 1e-2)
