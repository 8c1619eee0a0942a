"""RMS norm times a gate, with the projection that reads it and without."""

from __future__ import annotations

import pytest

from hf_packfree.ops.fused import gated_rms_norm
from tests.ops.triton.compare import TOKENS, assert_matches, random

KERNELS = {"gated_norm", "gated_norm_backward"}
SIZE = 24


@pytest.mark.parametrize("tokens", TOKENS)
def test_values_and_gradients(tokens, launched):
    def op(x, z, weight, *, backend):
        return gated_rms_norm(x, z, weight, 1e-6, backend=backend)

    assert_matches(op, random((1, tokens, 3, SIZE), (1, tokens, 3, SIZE), (SIZE,)))
    assert launched == KERNELS | {"sum_partials"}


@pytest.mark.parametrize("tokens", TOKENS)
def test_projected(tokens):
    def op(x, z, weight, projection, *, backend):
        return gated_rms_norm(x, z, weight, 1e-6, projection=projection, backend=backend)

    assert_matches(op, random((1, tokens, 3, SIZE), (1, tokens, 3, SIZE), (SIZE,), (20, 3 * SIZE)))
