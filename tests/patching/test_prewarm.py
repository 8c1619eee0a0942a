"""Compiling ahead leaves no trace."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

from hf_packfree import apply_patches, prewarm
from hf_packfree.errors import UnsupportedModel
from hf_packfree.models.state import PatchState
from hf_packfree.ops import delta_rule
from hf_packfree.ops.backend import LongDocuments
from tests.support import tiny


def test_weights_gradients_and_random_state_stay():
    model = apply_patches(tiny())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    seen = []
    model.model.packfree.observers.append(lambda packed, shape, mask: seen.append(packed.lengths))
    assert prewarm(model) > 0
    assert seen == [[131], [1, 66], [64, 64, 64], [1, 66, 3, 5, 64, 2]]
    # where FlashQLA 0.1.3 takes other tiles
    assert {1, 2, 3} < set(map(len, seen)) and max(map(len, seen)) * 16 > 0.7 * 132
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_kernels_of_cut_documents_are_compiled_too(monkeypatch):
    module = import_module("hf_packfree.patching.prewarm")
    monkeypatch.setattr(module, "CUT", (40,))
    torch_native = delta_rule.OP.backends["torch"]
    long = LongDocuments(torch_native.run, "in segments", lambda device, sizes: True)
    monkeypatch.setitem(delta_rule.OP.backends, "torch", replace(torch_native, long=long))
    seen, model = [], apply_patches(tiny())
    model.model.packfree.observers.append(lambda packed, shape, mask: seen.append(packed.lengths))
    prewarm(model)
    assert seen[-1] == [40] and len(seen) == len(module.ROWS) + 1


def test_under_autocast_it_runs_what_a_step_runs_there(monkeypatch):
    """The tensors decide which kernels run: who asks, and for which dtype."""
    asked, choose = set(), PatchState.kernels_for

    def watched(self, device, dtype):
        # the report's
        if (caller := sys._getframe(1).f_code.co_name) != "_implementations":
            asked.add((caller, dtype))
        return choose(self, device, dtype)

    monkeypatch.setattr(PatchState, "kernels_for", watched)
    model = apply_patches(tiny())
    inputs = {
        "input_ids": torch.arange(131)[None] % 128,
        "position_ids": torch.arange(131)[None] % 66,
    }

    def step():
        asked.clear()
        model(**inputs, use_cache=False).logits.float().square().mean().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return gradients, set(asked)

    with torch.autocast("cpu", torch.bfloat16):
        wanted, ran = step()
    with torch.autocast("cpu", torch.bfloat16):
        asked.clear()
        prewarm(model)
        # a step with labels has a loss and reads no logits, the step above the other way round
        read, loss = ("_multiplied", torch.bfloat16), ("_run_loss", torch.bfloat16)
        assert read in ran and asked == (ran - {read}) | {loss}
        # also where autocast still holds the casts of the weights
        found, _ = step()
    bf16, fp32 = torch.bfloat16, torch.float32
    mixers = {("project", fp32), ("project", bf16), ("_mix", bf16), ("_attend_packed", bf16)}
    assert ran == mixers | {("_add_norm", fp32), ("_feed_forward", fp32), read}
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("model", [nn.Linear(2, 2), tiny()], ids=["no family", "not patched"])
def test_what_is_not_patched_is_refused(model):
    with pytest.raises(UnsupportedModel, match="call apply_patches first"):
        prewarm(model)
