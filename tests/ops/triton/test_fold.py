"""The kernel that folds segments' transitions and states."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.delta_rule.segments import fold
from tests.ops.triton.compare import random
from tests.support import relative_rms

KERNELS = {"fold_states"}


@pytest.mark.parametrize("given", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("keys, values", [(16, 32), (20, 40), (128, 16)])
def test_fold(keys, values, reverse, given, launched):
    transition, addend, states = random(
        (6, 2, keys, keys), (6, 2, keys, values), (3, 2, keys, values)
    )
    transition /= keys**0.5
    firsts = torch.tensor([0, 1, 5, 6], dtype=torch.int32)
    begins = states if given else None
    found = fold(transition, addend, begins, firsts, reverse=reverse, backend="triton")
    wanted = fold(transition.double(), addend.double(), begins, firsts, reverse=reverse)
    assert launched == KERNELS and relative_rms(found, wanted) < 1e-6
