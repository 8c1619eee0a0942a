"""Layers that were changed after patching: one that would leak in silence is refused, one that
holds ours is not.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hf_packfree import apply_patches
from hf_packfree.errors import PatchConflict
from tests.support import tiny


class Holder(nn.Module):
    """A wrapper that calls what it holds."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("where", ["model.layers.0.linear_attn", "model.layers.3.self_attn"])
def test_a_mixer_that_was_changed_after_patching_is_refused_before_it_leaks(where):
    ids, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    model, unpatched = apply_patches(tiny()), tiny()
    wanted = model(input_ids=ids, position_ids=positions).logits
    mixer, other = model.get_submodule(where), unpatched.get_submodule(where)
    mixer.forward = partial(type(other).forward, mixer)
    name = where.removeprefix("model.")
    with pytest.raises(PatchConflict, match=f"{name} changed since"):
        model(input_ids=ids, position_ids=positions)
    # one document: as ever
    model(input_ids=ids)
    del mixer.forward
    model.set_submodule(where, other)
    with pytest.raises(PatchConflict, match=f"{name} changed since"):
        model(input_ids=ids, position_ids=positions)
    model.set_submodule(where, Holder(mixer))
    assert torch.equal(model(input_ids=ids, position_ids=positions).logits, wanted), (
        "what holds ours is fine"
    )
