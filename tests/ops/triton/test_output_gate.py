"""The sigmoid gate on the output of attention, with the projection that reads it and without."""

from __future__ import annotations

import pytest

from hf_packfree.ops.fused import output_gate
from tests.ops.triton.compare import TOKENS, assert_matches, random

KERNELS = {"output_gate", "output_gate_backward"}
SIZE = 24


@pytest.mark.parametrize("tokens", TOKENS)
def test_values_and_gradients(tokens, launched):
    def op(x, z, *, backend):
        return output_gate(x, z[..., SIZE:], backend=backend)

    assert_matches(op, random((1, tokens, 3, SIZE), (1, tokens, 3, 2 * SIZE)))
    assert launched == KERNELS


@pytest.mark.parametrize("tokens", TOKENS)
def test_projected(tokens):
    def op(x, z, projection, *, backend):
        return output_gate(x, z[..., SIZE:], projection=projection, backend=backend)

    assert_matches(op, random((1, tokens, 3, SIZE), (1, tokens, 3, 2 * SIZE), (20, 3 * SIZE)))
