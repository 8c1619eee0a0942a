"""Every backend in a whole graph, against the same backend in eager mode."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from tests.gpu.checks import LENGTHS, TRIAL, gpu, record_of
from tests.gpu.op import as_leaves
from tests.gpu.op_table import op_cases
from tests.gpu.test_ops import NOISE, adds_anyhow
from tests.support import relative_rms

pytestmark = gpu
# tables of others than operators have none of these
OPERATORS = {"gated_delta_rule", "kda", "ssd", "causal_conv1d", "qkv_conv", "attention"}
INVARIANT = ("delta rule", "delta rule, unit keys", "attention")
"""Whose gradients are the same bits from call to call."""


def cases():
    """(operation, backend) of what is an operator in graphs, called by its public function."""
    found = op_cases(torch_too=False)
    return [
        case
        for case in found
        if case.values[0].function in OPERATORS and case.values[0].needs in (None, "qkv_conv")
    ]


def results(call, values, packed):
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in values.items()}
    out = call(leaves, packed)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), list(leaves.values()))


@pytest.mark.parametrize(("op", "backend"), cases())
def test_values_and_gradients(op, backend):
    """The bits of eager mode, where nothing adds in whatever order programs end."""
    torch.compiler.reset()
    torch.manual_seed(0)
    packed, kind = record_of(LENGTHS), torch.float32 if TRIAL else torch.bfloat16
    values = as_leaves(op.leaves(sum(LENGTHS)), kind)

    # which skips where the backend cannot run
    op.run(values, packed, backend)
    function = getattr(import_module(op.module), op.function)

    def eager(leaves, packed):
        return op.call(function, leaves, packed, backend)

    wanted = results(eager, values, packed)
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True)
    for found, right in zip(results(compiled, values, packed), wanted, strict=True):
        if op.name in INVARIANT and not adds_anyhow(op, backend):
            assert torch.equal(found, right)
        assert relative_rms(found, right) < NOISE
