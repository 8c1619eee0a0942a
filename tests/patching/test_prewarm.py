"""Compiling ahead leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_packfree import apply_patches, prewarm
from hf_packfree.errors import UnsupportedModel
from tests.support import tiny


def test_weights_gradients_and_random_state_stay():
    model = apply_patches(tiny())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    seen = []
    model.model.packfree.observers.append(lambda packed, shape, mask: seen.append(packed.lengths))
    assert prewarm(model) > 0
    assert seen == [[64, 64, 64], [131], [1, 66, 3]]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("model", [nn.Linear(2, 2), tiny()], ids=["no family", "not patched"])
def test_what_is_not_patched_is_refused(model):
    with pytest.raises(UnsupportedModel, match="call apply_patches first"):
        prewarm(model)
