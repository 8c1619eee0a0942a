"""The sum of partial sums: one rounding, in a fixed order."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.fused.reduce import sum_partials
from tests.ops.triton.compare import TOKENS, random
from tests.support import relative_rms

KERNELS = {"sum_partials"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("width", [3, 1200])
@pytest.mark.parametrize("partials", TOKENS)
def test_sum(partials, width, dtype, launched):
    (parts,) = random((partials, width, 7))
    found = sum_partials(parts.mT, dtype)
    assert found.dtype == dtype and found.shape == (7, width) and launched == KERNELS
    assert relative_rms(found, parts.double().sum(0).T) < 2 * torch.finfo(dtype).eps
