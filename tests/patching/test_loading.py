"""Patching at load time: built patched, with the same report, checks and undo."""

from __future__ import annotations

import inspect
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from hf_packfree import apply_patches, patch_report, register_patches, remove_patches
from hf_packfree.errors import BackendUnavailable, ContractError, PatchConflict
from hf_packfree.models import compat
from hf_packfree.patching import selfcheck
from tests.input_formats import row_batch
from tests.support import (
    LOGIT_TOL,
    ROW,
    assert_exact,
    auto_class,
    by_family,
    relative_rms,
    slow_decay,
    tiny,
)

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"]


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch):
    recorders = dict(upstream.Qwen3_5PreTrainedModel._can_record_outputs)
    names = {name: getattr(upstream, name) for name in by_family["qwen3_5"].swaps}
    init = upstream.Qwen3_5TextModel.__init__
    yield
    monkeypatch.undo()
    assert upstream.Qwen3_5TextModel.__init__ is init
    assert upstream.Qwen3_5PreTrainedModel._can_record_outputs == recorders
    assert {name: getattr(upstream, name) for name in names} == names


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_from_config(family):
    config = by_family[family].tiny_config()
    with register_patches():
        model = auto_class(family).from_config(config)
    by_hand = apply_patches(auto_class(family).from_config(config))
    assert patch_report(model) == patch_report(by_hand)
    assert [type(m) for m in model.modules()] == [type(m) for m in by_hand.modules()]
    assert_exact(slow_decay(model).train(), row_batch("positions", ROW))
    assert [type(m) for m in remove_patches(model).modules()] == [
        type(m) for m in remove_patches(by_hand).modules()
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained(family, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    with register_patches():
        model = auto_class(family).from_pretrained(tmp_path)
    assert patch_report(model).patched
    unpatched = tiny(family).state_dict()
    assert all(torch.equal(value, unpatched[name]) for name, value in model.state_dict().items())
    assert_exact(model.train(), row_batch("positions", ROW))


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
    with pytest.raises(PatchConflict, match="in force already.*remove"):
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


@pytest.mark.compat
def test_a_bare_trunk_too(tmp_path):
    tiny().model.save_pretrained(tmp_path)
    with register_patches():
        trunk = transformers.AutoModel.from_pretrained(tmp_path)
    assert patch_report(trunk).patched
    batch = row_batch("positions", ROW)
    alone = [trunk(input_ids=ids[None]).last_hidden_state for ids in batch.documents]
    error = relative_rms(trunk(**batch.inputs).last_hidden_state, torch.cat(alone, 1))
    assert error <= LOGIT_TOL


def test_a_failed_build_leaves_transformers_as_it_was():
    config = by_family["qwen3_5"].tiny_config()
    config.hidden_act = "gelu"
    with register_patches():
        with pytest.raises(ContractError, match="activation"):
            transformers.AutoModelForCausalLM.from_config(config)
        assert upstream.Qwen3_5TextModel.__module__ == upstream.__name__
    config = by_family["qwen3_5"].tiny_config()
    assert not patch_report(transformers.AutoModelForCausalLM.from_config(config)).patched


@pytest.mark.compat
@pytest.mark.parametrize("then", ["nothing", "another load"])
def test_a_load_that_fails_in_the_block_leaves_later_models_plain(tmp_path, then):
    tiny().save_pretrained(tmp_path)
    with register_patches():
        # transformers 5.2 loads it, and we refuse
        with pytest.raises((ImportError, ValueError, BackendUnavailable)):
            load(tmp_path, attn_implementation="nobodys/attention-of-no-hub")
        if then == "another load":
            assert patch_report(load(tmp_path)).patched
    assert not patch_report(load(tmp_path)).patched


@pytest.fixture
def quick_switches():
    """Threads that take turns often, so that a race shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_threads_in_the_block_all_get_patched_models_and_later_ones_are_plain(tmp_path):
    tiny().save_pretrained(tmp_path)
    with register_patches(), ThreadPoolExecutor(4) as threads:
        models = list(threads.map(load, [tmp_path] * 8))
    names = [[type(module).__module__ for module in model.modules()] for model in models]
    assert all(patch_report(model).patched for model in models)
    assert names == [names[0]] * 8
    assert not patch_report(load(tmp_path)).patched


def test_a_thread_that_is_still_building_when_the_block_ends(monkeypatch):
    built, left = threading.Event(), threading.Event()
    init = upstream.Qwen3_5TextModel.__init__

    def slow(self, config):
        init(self, config)
        built.set()
        assert left.wait(60)

    monkeypatch.setattr(upstream.Qwen3_5TextModel, "__init__", slow)
    with ThreadPoolExecutor(1) as threads:
        with register_patches():
            model = threads.submit(tiny)
            assert built.wait(60)
        left.set()
        assert not patch_report(model.result()).patched
    assert upstream.Qwen3_5TextModel.__init__ is slow


def test_what_somebody_puts_around_the_constructor_stays(monkeypatch):
    calls = []
    with register_patches():
        ours = upstream.Qwen3_5TextModel.__init__

        def counted(self, *args, **kwargs):
            calls.append(1)
            ours(self, *args, **kwargs)

        monkeypatch.setattr(upstream.Qwen3_5TextModel, "__init__", counted)
        assert patch_report(tiny()).patched
    assert upstream.Qwen3_5TextModel.__init__ is counted
    assert not patch_report(tiny()).patched and calls == [1, 1]
    with register_patches():
        assert patch_report(tiny()).patched
    monkeypatch.undo()
    upstream.Qwen3_5TextModel.__init__ = inspect.unwrap(ours)


def test_one_registration_at_a_time_in_generators_too():
    def registered():
        with register_patches():
            yield

    suspended = registered()
    next(suspended)
    with pytest.raises(PatchConflict, match="in force already"), register_patches():
        pytest.fail("a second registration was taken")
    assert patch_report(tiny()).patched, "the first one is in force still"
    suspended.close()
    assert not patch_report(tiny()).patched
    with register_patches():
        assert patch_report(tiny()).patched


@pytest.mark.parametrize("option", [{"unpacked": "x"}, {"mtp": "x"}, {"backend": "x"}])
def test_a_registration_that_is_refused_leaves_nothing(option):
    with pytest.raises((ValueError, BackendUnavailable)), register_patches(**option):
        pytest.fail("it was taken")
    assert not patch_report(tiny()).patched


def test_a_text_model_of_the_users_own_class_is_left_alone_and_named(caplog):
    class Mine(upstream.Qwen3_5TextModel):
        pass

    with register_patches():
        model = Mine(by_family["qwen3_5"].tiny_config())
    assert not patch_report(model).patched
    assert caplog.text.count("Mine is left alone by register_patches()") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_release_that_nobody_tried_is_checked_while_loading(dtype, monkeypatch, tmp_path, caplog):
    tiny().save_pretrained(tmp_path)
    monkeypatch.setattr(compat, "NEWEST_TRIED", Version("5.1.0"))
    monkeypatch.setattr(selfcheck, "_checked", set())
    with register_patches():
        model = load(tmp_path, dtype=dtype)
    assert patch_report(model).patched and model.dtype == dtype
    assert caplog.text.count("checking qwen3_5 on a tiny model") == 1


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
