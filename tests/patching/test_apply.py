"""Apply, report, remove: as a whole or not at all, and back to exactly what was."""

from __future__ import annotations

import copy
import logging
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType

import pytest
import torch
import transformers
from torch import nn

from hf_packfree import apply_patches, patch_report, remove_patches
from hf_packfree.errors import BackendUnavailable, ContractError, PatchConflict, UnsupportedModel
from hf_packfree.patching import apply
from tests.support import by_family, tiny

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"]

SWAPS = {
    "qwen3_vl": [1, 1, 1, 1, 1, 3, 3, 3, 3],
    "qwen3_vl_moe": [1, 1, 1, 1, 1, 3, 3, 3, 3],
    "qwen2_5_vl": [1, 1, 1, 1, 1, 2, 3],
}
"""Head, vision-language model, trunk, tower, its patch embedding, blocks and attentions, and the
trunk's attentions and, but for Qwen2.5-VL, layers; of the others head, trunk, one attention, three Gated DeltaNets, four layers."""


def classes(model):
    return [(name, type(module)) for name, module in model.named_modules()]


def attributes(model):
    return [(name, sorted(vars(module))) for name, module in model.named_modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_apply_and_remove_restore_everything(family):
    model = tiny(family)
    before = (
        classes(model),
        attributes(model),
        model.config.to_dict(),
        copy.deepcopy(model.state_dict()),
    )
    assert apply_patches(model) is model
    report = patch_report(model)
    assert report.patched and report.family == family
    assert sorted(report.swaps.values()) == SWAPS.get(family, [1, 1, 1, 3, 4])
    assert model.config.to_dict() == before[2]
    assert [name for name in model.state_dict()] == [name for name in before[3]]
    assert all(torch.equal(value, before[3][name]) for name, value in model.state_dict().items())
    assert [cls.__name__ for _, cls in classes(model)] == [cls.__name__ for _, cls in before[0]]
    assert remove_patches(model) is model
    assert (classes(model), attributes(model)) == before[:2]
    assert not patch_report(model).patched


def test_one_log_line_says_what_runs(caplog, monkeypatch):
    # where a GPU is, what compiles is said too
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, logger="hf_packfree"):
        model = apply_patches(apply_patches(tiny()))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "3 Qwen3_5GatedDeltaNet" in line and "delta_rule: torch" in line
    assert line == str(patch_report(model))


def test_applying_twice_changes_nothing_but_options_may_not_change():
    model = apply_patches(tiny())
    before = classes(model)
    apply_patches(model)
    assert classes(model) == before
    for other in ({"unpacked": "native"}, {"padded": "upstream"}):
        with pytest.raises(PatchConflict, match="remove_patches"):
            apply_patches(model, **other)
    with pytest.raises(ValueError, match="'lazy' or 'upstream'"):
        apply_patches(tiny(), padded="no")


def test_unknown_options_are_refused():
    with pytest.raises(BackendUnavailable, match="wanted 'auto' or conv: triton"):
        apply_patches(tiny(), backend="cuda-magic")
    with pytest.raises(ValueError, match="'native'"):
        apply_patches(tiny(), unpacked="sometimes")


def test_a_model_of_no_family_is_refused():
    with pytest.raises(UnsupportedModel, match="qwen3_next"):
        apply_patches(nn.Linear(2, 2))


def test_layers_with_a_sliding_window_are_refused():
    config = by_family["qwen2_5_vl"].tiny_config().to_dict()
    config["text_config"] |= {"use_sliding_window": True, "sliding_window": 8}
    config["text_config"]["layer_types"] = [
        "full_attention",
        "sliding_attention",
        "sliding_attention",
    ]
    model = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**config))
    with pytest.raises(
        ContractError, match="layers.1, which the config says is 'sliding_attention'"
    ):
        apply_patches(model)


def test_failure_leaves_the_model_untouched():
    model = tiny()
    layer = model.model.layers[2].linear_attn
    layer.A_log = nn.Parameter(torch.zeros(7))
    before = classes(model), attributes(model)
    with pytest.raises(ContractError, match="A_log"):
        apply_patches(model)
    assert (classes(model), attributes(model)) == before


@pytest.mark.parametrize("part", ["in_proj_qkv", "dt_bias", "conv1d", "out_proj"])
def test_a_missing_part_is_named(part):
    model = tiny()
    delattr(model.model.layers[0].linear_attn, part)
    with pytest.raises(ContractError, match=part):
        apply_patches(model)


def test_a_replaced_layer_is_noticed():
    model = tiny()
    model.model.layers[1].linear_attn = nn.Identity()
    with pytest.raises(
        ContractError,
        match="found no known mixer in layers.1, .* a Qwen3_5GatedDeltaNet at linear_attn",
    ):
        apply_patches(model)


def test_an_adapter_on_the_convolution_is_refused():
    class Adapted(nn.Conv1d):
        pass

    model = tiny()
    model.model.layers[0].linear_attn.conv1d.__class__ = Adapted
    with pytest.raises(ContractError, match="conv1d"):
        apply_patches(model)


def test_kernelize_leaves_no_obstacle_and_finds_no_patched_layer():
    """Where it has no kernel for a layer, it binds the class's own forward to the instance; see
    tests/test_kernels.py.
    """
    model = tiny()
    layer = model.model.layers[0].linear_attn
    layer.forward = MethodType(type(layer).forward, layer)
    apply_patches(model)
    assert "forward" not in vars(layer)
    assert not any(hasattr(target, "kernel_layer_name") for target in (layer, type(layer)))
    assert type(remove_patches(model).model.layers[0].linear_attn) is type(
        tiny().model.layers[0].linear_attn
    )
    assert vars(layer)["forward"].__func__ is type(layer).forward, "exactly what was there"


@pytest.mark.parametrize("where", ["", "model", "model.layers.0.linear_attn"])
def test_our_own_forward_on_an_instance_is_no_obstacle_to_removing(where):
    """A redirection of a forward puts back what it read, as an attribute."""
    model = apply_patches(tiny())
    module = model.get_submodule(where)
    module.forward = module.forward
    assert patch_report(remove_patches(model)).patched is False and "forward" not in vars(module)
    ids = torch.arange(2, 9)[None]
    assert torch.equal(model(input_ids=ids).logits, tiny()(input_ids=ids).logits)


@pytest.mark.parametrize("model", [None, "qwen3_5", 7])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(
        UnsupportedModel, match=f"found a {type(model).__name__}; wanted a torch.nn.Module"
    ):
        apply_patches(model)


@pytest.mark.parametrize(
    "where", ["model", "model.layers.0.linear_attn", "model.layers.3.self_attn"]
)
def test_an_instance_forward_is_refused_before_and_after(where):
    model = tiny()
    module = model.get_submodule(where)
    module.forward = partial(module.forward)
    with pytest.raises(PatchConflict, match=where):
        apply_patches(model)
    del module.forward
    apply_patches(model)
    module.forward = partial(module.forward)
    with pytest.raises(PatchConflict, match=where):
        remove_patches(model)
    del module.forward
    remove_patches(model)
    assert not patch_report(model).patched


def test_accelerate_hooks_are_named():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = tiny()
    add_hook_to_module(model.model.layers[0].linear_attn, AlignDevicesHook())
    with pytest.raises(PatchConflict, match="accelerate"):
        apply_patches(model)


@pytest.mark.parametrize("where", ["model", "model.layers.0.linear_attn"])
def test_a_class_on_top_is_refused_before_and_after(where):
    model = tiny()
    module, plain = model.get_submodule(where), type(model.get_submodule(where))
    module.__class__ = type("FSDP" + plain.__name__, (plain,), {})
    with pytest.raises(PatchConflict, match=where):
        apply_patches(model)
    module.__class__ = plain
    apply_patches(model)
    ours = type(module)
    module.__class__ = type("FSDP" + ours.__name__, (ours,), {})
    with pytest.raises(PatchConflict, match=where):
        remove_patches(model)
    assert patch_report(model).patched


def test_unknown_attention_is_refused():
    model = tiny()
    model.config._attn_implementation_internal = "my_own_attention"
    with pytest.raises(BackendUnavailable, match="my_own_attention"):
        apply_patches(model)


def test_removing_from_an_unpatched_model_changes_nothing():
    model = tiny()
    before = classes(model)
    assert remove_patches(model) is model and classes(model) == before


def test_copies_and_pickles_stay_patched_and_removable():
    for copied in (
        copy.deepcopy(apply_patches(tiny())),
        pickle.loads(pickle.dumps(apply_patches(tiny()))),
    ):
        assert patch_report(copied).patched
        assert not patch_report(remove_patches(copied)).patched


def test_save_and_load_round_trip(tmp_path):
    from safetensors.torch import load_file
    from transformers import Qwen3_5ForCausalLM

    unpatched = tiny()
    unpatched.save_pretrained(tmp_path / "unpatched")
    apply_patches(unpatched).save_pretrained(tmp_path / "patched")
    assert (tmp_path / "unpatched/config.json").read_text() == (
        tmp_path / "patched/config.json"
    ).read_text()
    one, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("unpatched", "patched")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    loaded = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "patched")
    assert not patch_report(loaded).patched and patch_report(apply_patches(loaded)).patched


def test_inside_wrappers():
    wrapper = nn.ModuleDict({"policy": tiny(), "other": nn.Linear(2, 2)})
    assert patch_report(apply_patches(wrapper)).swaps["Qwen3_5GatedDeltaNet"] == 3
    compiled = torch.compile(tiny(), backend="eager")
    assert patch_report(apply_patches(compiled)).swaps["Qwen3_5GatedDeltaNet"] == 3


def test_threads_that_patch_one_model_take_turns(monkeypatch):
    model, choose, inside, most = tiny(), apply.choose_backends, [], []

    def slowly(*args, **options):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return choose(*args, **options)

    monkeypatch.setattr(apply, "choose_backends", slowly)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(apply_patches, [model] * 4))
    states = [vars(part)["packfree"] for part in model.modules() if "packfree" in vars(part)]
    assert most == [1] * 4 and len({id(state) for state in states}) == 1
    assert not patch_report(remove_patches(model)).patched


@pytest.mark.parametrize("order", ["before", "after"])
def test_distributed_data_parallel_in_either_order(order, tmp_path):
    from torch.nn.parallel import DistributedDataParallel

    from tests.input_formats import row_batch
    from tests.support import GRADIENT_TOL, LOGIT_TOL, ROW, errors, random_weights, run, run_alone

    batch = row_batch("positions", ROW)
    weights = random_weights(batch, 128)
    wanted = run_alone(tiny(), batch, weights)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = apply_patches(tiny()) if order == "before" else tiny()
        wrapped = DistributedDataParallel(model)
        apply_patches(wrapped)
        parts, found = run(wrapped, batch, weights)
        found = {name.removeprefix("module."): grad for name, grad in found.items()}
        logits, grads = errors((parts, found), wanted)
        assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL
        assert not patch_report(remove_patches(wrapped)).patched
    finally:
        torch.distributed.destroy_process_group()
