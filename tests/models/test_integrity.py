"""Layers that were changed after patching: one that would leak in silence is refused, one that
holds ours is not.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hf_packfree import apply_patches, patch_report
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
    assert patch_report(model).refused.startswith(f"packed rows are refused, because {name} ")
    assert "documents get what they get alone" not in str(patch_report(model))
    with pytest.raises(PatchConflict, match=f"{name} changed since"):
        model(input_ids=ids, position_ids=positions)
    # one document: as ever
    model(input_ids=ids)
    del mixer.forward
    model.set_submodule(where, other)
    with pytest.raises(PatchConflict, match=f"{name} changed since"):
        model(input_ids=ids, position_ids=positions)
    assert name in patch_report(model).refused
    model.set_submodule(where, Holder(mixer))
    assert patch_report(model).refused == ""
    assert torch.equal(model(input_ids=ids, position_ids=positions).logits, wanted), (
        "what holds ours is fine"
    )


def test_a_text_model_that_hands_on_what_is_a_heads_is_named():
    """A forward on its instance: the report cannot know what it calls, and layers notice upstream's
    in rows that it reads itself.
    """
    model, ids = apply_patches(tiny()), torch.tensor([[5, 6, 7, 8]])
    wanted = model(input_ids=ids).logits
    text_model, ours = model.model, model.model.forward
    text_model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    assert torch.equal(model(input_ids=ids).logits, wanted)
    assert "runs in front of ours" in patch_report(model).left_alone[type(text_model).__name__]
    text_model.forward = partial(type(tiny().model).forward, text_model)
    assert "exact only if it calls the forward that was there" in str(patch_report(model))
    with pytest.raises(PatchConflict, match="called by a text model whose forward is not ours"):
        model(input_ids=ids)
    del text_model.forward
    assert patch_report(model).left_alone == {}


def test_a_text_model_that_our_class_built_has_a_report(tmp_path):
    """As transformers' own tests load base models: by the class of one that was patched."""
    apply_patches(tiny()).save_pretrained(tmp_path)
    model = type(apply_patches(tiny()).base_model).from_pretrained(tmp_path)
    assert patch_report(apply_patches(model)).refused == ""
