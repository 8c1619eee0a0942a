"""Patching at load time: built patched, with the same report, checks and undo."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from hf_packfree import apply_patches, patch_report, register_patches, remove_patches
from hf_packfree.errors import ContractError, PatchConflict
from tests.input_formats import row_batch
from tests.support import (
    GRADIENT_TOL,
    LOGIT_TOL,
    ROW,
    auto_class,
    by_family,
    errors,
    random_weights,
    run,
    run_alone,
    slow_decay,
    tiny,
)

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"]
monkey_patching = pytest.importorskip(
    "transformers.monkey_patching", reason="transformers 5.2 has no class mapping"
)


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    recorders = dict(upstream.Qwen3_5PreTrainedModel._can_record_outputs)
    names = {name: getattr(upstream, name) for name in by_family["qwen3_5"].swaps}
    yield
    assert monkey_patching.get_patch_mapping() == {}
    assert upstream.Qwen3_5PreTrainedModel._can_record_outputs == recorders
    assert {name: getattr(upstream, name) for name in names} == names


def assert_exact(model):
    batch = row_batch("positions", ROW)
    weights = random_weights(batch, 128)
    logits, grads = errors(run(model, batch, weights), run_alone(model, batch, weights))
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_from_config(family):
    config = by_family[family].tiny_config()
    with register_patches():
        model = auto_class(family).from_config(config)
    by_hand = apply_patches(auto_class(family).from_config(config))
    assert patch_report(model) == patch_report(by_hand)
    assert [type(m) for m in model.modules()] == [type(m) for m in by_hand.modules()]
    assert_exact(slow_decay(model).train())
    assert [type(m) for m in remove_patches(model).modules()] == [
        type(m) for m in remove_patches(by_hand).modules()
    ]


@pytest.mark.compat
def test_an_alias_of_upstream_that_cannot_be_loaded_stops_nothing(monkeypatch):
    alias = ModuleType("transformers.alias")
    alias.__dir__ = lambda: dir(import_module("a_package_nobody_has"))
    monkeypatch.setitem(sys.modules, alias.__name__, alias)
    with register_patches():
        model = transformers.AutoModelForCausalLM.from_config(by_family["qwen3_5"].tiny_config())
    assert patch_report(model).patched
    with pytest.raises(ModuleNotFoundError, match="a_package_nobody_has"):
        dir(alias)


@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained(family, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    with register_patches():
        model = auto_class(family).from_pretrained(tmp_path)
    assert patch_report(model).patched
    unpatched = tiny(family).state_dict()
    assert all(torch.equal(value, unpatched[name]) for name, value in model.state_dict().items())
    assert_exact(model.train())


def test_same_random_weights_as_upstream():
    config = by_family["qwen3_5"].tiny_config()
    torch.manual_seed(3)
    unpatched = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    torch.manual_seed(3)
    with register_patches():
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert all(torch.equal(value, unpatched[name]) for name, value in model.state_dict().items())


def test_registered_until_removed():
    registration = register_patches(unpacked="native")
    with pytest.raises(PatchConflict, match="remove"):
        register_patches()
    config = by_family["qwen3_5"].tiny_config()
    assert patch_report(transformers.AutoModelForCausalLM.from_config(config)).unpacked == "native"
    registration.remove()
    registration.remove()
    assert not patch_report(transformers.AutoModelForCausalLM.from_config(config)).patched


def test_models_built_outside_still_record():
    with register_patches():
        transformers.AutoModelForCausalLM.from_config(by_family["qwen3_5_moe"].tiny_config())
    model = tiny("qwen3_5_moe", attention="eager").eval()
    out = model(
        input_ids=torch.arange(9)[None],
        output_attentions=True,
        output_hidden_states=True,
        output_router_logits=True,
    )
    assert len(out.attentions) == 1 and len(out.hidden_states) == 5 and len(out.router_logits) == 4


def test_a_bare_trunk_is_refused_at_its_first_forward_and_mended(tmp_path):
    tiny().model.save_pretrained(tmp_path)
    with register_patches():
        trunk = transformers.AutoModel.from_pretrained(tmp_path)
    with pytest.raises(PatchConflict, match="apply_patches"):
        trunk(input_ids=torch.arange(9)[None])
    assert patch_report(apply_patches(trunk)).patched
    assert trunk(input_ids=torch.arange(9)[None]).last_hidden_state.isfinite().all()


def test_a_failed_build_leaves_transformers_as_it_was():
    config = by_family["qwen3_5"].tiny_config()
    config.hidden_act = "gelu"
    with register_patches():
        with pytest.raises(ContractError, match="activation"):
            transformers.AutoModelForCausalLM.from_config(config)
        assert upstream.Qwen3_5TextModel.__module__ == upstream.__name__
    config = by_family["qwen3_5"].tiny_config()
    assert not patch_report(transformers.AutoModelForCausalLM.from_config(config)).patched


def test_where_there_is_no_class_mapping_it_says_so(monkeypatch):
    from hf_packfree.errors import UnsupportedModel
    from hf_packfree.patching import loading

    monkeypatch.setattr(loading, "monkey_patching", None)
    with pytest.raises(UnsupportedModel, match="5.3 or later"):
        register_patches()
