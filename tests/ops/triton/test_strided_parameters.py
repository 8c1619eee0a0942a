"""Parameters that are columns of a matrix, or one number for all channels, as `assign=True` of
`load_state_dict` leaves them.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.fused import add_norm, gated_rms_norm, gates, norm_rope
from hf_packfree.ops.fused.add_norm import NormOf, add_layer_norm
from tests.ops.triton.compare import random
from tests.support import relative_rms

X, Z, W, C = random((1, 3, 2, 8), (1, 3, 2, 8), (8,), (8,))
OPS = {
    "RMS norm": lambda w, c, **to: add_norm(X, Z, w, 1e-6, **to)[0],
    "layer norm": lambda w, c, **to: add_layer_norm(X, Z, w, c, 1e-6, **to)[0],
    "gated norm": lambda w, c, **to: gated_rms_norm(X, Z, w, 1e-6, **to),
    "norm and rotary": lambda w, c, **to: norm_rope(X, w, X[:, :, 0], Z[:, :, 0], 1e-6, **to),
    "gates": lambda w, c, **to: gates(X[:, :, 0], Z[:, :, 0], w, c, **to)[0],
}
STRIDED = {
    "columns": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0],
    "one number": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_values_and_gradients(op, strided):
    results = []
    for backend in ("triton", "torch"):
        leaves = [strided(x).detach().requires_grad_() for x in (W, C)]
        out = op(*leaves, backend=backend)
        found = torch.autograd.grad(
            out, leaves, Z[:, :, 0] if out.ndim == 3 else Z, allow_unused=True
        )
        results.append([out, *(x for x in found if x is not None)])
    for ours, theirs in zip(*results, strict=True):
        assert relative_rms(ours, theirs) <= 1e-6


@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
def test_a_norm_that_is_computed_again(strided):
    found = NormOf(X, strided(W), 1e-6, 1.0).again(torch.float32)
    assert relative_rms(found, add_norm(X, None, strided(W), 1e-6)[0]) <= 1e-6
