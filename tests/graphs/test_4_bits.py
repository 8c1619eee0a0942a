"""Rows of models whose weights bitsandbytes keeps in 4 bits are replayed: with the stand-in of
`on_cpu`. The bits of real graphs are tested on GPUs (tests/gpu/test_graphs.py).
"""

from __future__ import annotations

import copy

import pytest
import torch

from hf_packfree import apply_patches
from hf_packfree.graphs.settings import Settings, why_not
from hf_packfree.models.state import state_of
from tests.graphs import on_cpu
from tests.integrations.marks import needs
from tests.integrations.test_peft import lora, quantised
from tests.support import difference, gradients, runner_of, tiny

pytestmark = [needs("peft", "bitsandbytes"), pytest.mark.filterwarnings("default")]
ROWS = (30, 11, 7), (9, 9, 9, 21), (47, 1)


@pytest.fixture
def model(tmp_path):
    tiny().save_pretrained(tmp_path)
    return quantised(tmp_path, bnb_4bit_use_double_quant=True)


def step(model, lengths):
    """Return the hidden states of a row, and the gradients of the adapters."""
    ids = torch.randint(1, 60, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    model.zero_grad()
    out = model.base_model(input_ids=ids, position_ids=positions).last_hidden_state
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return out.detach(), gradients(model)


def test_replayed_rows_train_as_rows_without_graphs_do(model, monkeypatch):
    on_cpu.let_capture_whole_documents(monkeypatch)
    model = apply_patches(lora(model), cuda_graphs="auto").base_model.model
    for lengths in ROWS:
        step(model, lengths)
    runner = runner_of(model)
    before = runner.replayed
    for lengths in ROWS:
        found, grads = step(model, lengths)
        state_of(model.base_model).__dict__["cuda_graphs"] = "never"
        wanted, its = step(model, lengths)
        state_of(model.base_model).__dict__["cuda_graphs"] = "auto"
        assert torch.equal(found, wanted) and grads.keys() == its.keys() and grads
        assert max(difference(grads[name], grad) for name, grad in its.items()) == 0
    assert runner.replayed == before + len(ROWS), runner.reasons


def test_constants_of_a_weight_in_4_bits_are_compared(model):
    settings, weight = Settings(model), model.model.layers[-1].mlp.down_proj.weight
    state = weight.quant_state
    for owner, name, other in (
        (weight, "quant_state", copy.deepcopy(state)),
        (weight, "quant_state", None),
        # as where a model moves to another device and back
        (state, "absmax", state.absmax.clone()),
        (state.state2, "absmax", state.state2.absmax.clone()),
        (state.absmax, "data", state.absmax.clone()),
    ):
        assert settings.hold()
        before = getattr(owner, name)
        setattr(owner, name, other)
        assert not settings.hold(), name
        setattr(owner, name, before)
    assert settings.hold()


def test_only_weights_in_4_bits_may_be_of_a_class_of_their_own(model):
    class Other(torch.Tensor):
        pass

    assert why_not(model.model) == "its weights are on cpu"
    norm = model.model.norm
    norm.register_buffer("table", torch.ones(3).as_subclass(Other))
    assert why_not(model.model) == "norm holds a Other"
