"""Which backend is chosen where: on a machine without GPUs, and on GPUs that are told of but not there."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from hf_packfree import apply_patches, patch_report
from hf_packfree.errors import BackendUnavailable
from hf_packfree.models.state import Kernels
from hf_packfree.ops import attention, backend, conv, delta_rule, fla, gated_norm
from hf_packfree.ops.backend import Site
from hf_packfree.patching import backends
from hf_packfree.patching.backends import choose_backends, model_sizes
from tests.support import tiny

INSTALLED = {"triton": "3.6.0", "fla-core": "0.6.0", "flash-qla": "0.1.3", "tilelang": "0.1.15"}
SIZES = {"key_heads": 16, "value_heads": 32, "key_size": 128, "value_size": 128, "taps": 4, "head_size": 256}


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that makes it look as if there were a GPU with these packages."""

    def pretend(capability=(9, 0), packages=INSTALLED, nvcc=True, broken=()):
        modules = {
            "triton": "triton", "fla": "fla-core", "flash_qla": "flash-qla", "tilelang": "tilelang",
            "causal_conv1d": "causal-conv1d",
        }

        def import_module(name):
            if name in broken:
                raise OSError("undefined symbol: _ZN3c10\nand more")

        def find_spec(name):
            return object() if modules.get(name) in packages else None

        for module in (fla, backend, conv.dao, delta_rule.flash_qla):
            if hasattr(module, "find_spec"):
                monkeypatch.setattr(module, "find_spec", find_spec)
        for module in (fla, backend):
            monkeypatch.setattr(module, "installed", packages.get)
        monkeypatch.setattr(backend, "import_module", import_module)
        backend.broken.cache_clear()
        monkeypatch.setattr(fla, "has_nvcc", lambda: nvcc)
        monkeypatch.setattr(delta_rule.flash_qla, "has_nvcc", lambda: nvcc)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
        monkeypatch.setattr(backends, "model_sizes", lambda config: config)

    yield pretend
    backend.broken.cache_clear()


@pytest.mark.parametrize(
    ("module", "package", "op", "name", "chosen"),
    [
        ("fla.ops.gated_delta_rule", "fla-core 0.6.0", "delta_rule", "fla", "flash_qla"),
        ("flash_qla", "flash-qla 0.1.3", "delta_rule", "flash_qla", "fla"),
        ("fla.modules.convolution", "fla-core 0.6.0", "conv", "fla", "triton"),
        ("causal_conv1d", "causal-conv1d 1.7.0", "conv", "causal_conv1d", "triton"),
        ("triton", "triton 3.6.0", "conv", "triton", "causal_conv1d"),
    ],
)
def test_what_is_installed_but_cannot_be_imported_is_told_when_patching(gpu, module, package, op, name, chosen):
    gpu(packages=INSTALLED | {"causal-conv1d": "1.7.0"}, broken=[module])
    state = choose_backends("auto", "upstream", SIZES)
    assert getattr(state.cuda_half, op) == chosen
    wanted = f"{package} is broken (OSError: undefined symbol: _ZN3c10); reinstall it"
    if chosen not in ("flash_qla", "triton"):
        assert state.why[op].startswith(f"not {name}: {wanted}")
    with pytest.raises(BackendUnavailable, match=re.escape(f"{op} backend '{name}' asked for, but {wanted}")):
        choose_backends({op: name}, "upstream", SIZES)


def test_nothing_is_imported_that_is_not_wanted(gpu, monkeypatch):
    gpu(packages=INSTALLED | {"causal-conv1d": "1.7.0"})
    imported = []
    monkeypatch.setattr(backend, "import_module", imported.append)
    choose_backends("torch", "upstream", SIZES)
    assert imported == []
    choose_backends({"delta_rule": "torch"}, "upstream", SIZES)
    assert imported == ["triton"]


def test_without_a_gpu_everything_is_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = choose_backends("auto", "upstream")
    kernels = state.kernels_for(torch.device("cpu"), torch.float32)
    assert set(vars(kernels).values()) == {"torch"} and state.why == {}
    with pytest.raises(BackendUnavailable, match="it runs on CUDA devices, this is a cpu.*delta_rule|delta_rule.*runs on CUDA"):
        choose_backends({"delta_rule": "fla"}, "upstream")


def test_hopper_with_everything_takes_the_fastest(gpu):
    gpu()
    state = choose_backends("auto", "upstream", SIZES)
    assert vars(state.cuda_half) == {
        "conv": "triton", "delta_rule": "flash_qla", "attention": "triton", "gated_norm": "triton", "norm_rope": "triton",
        "output_gate": "triton", "gates": "triton", "add_norm": "triton", "swiglu": "triton",
    }
    assert (state.cuda_single.delta_rule, state.cuda_single.attention) == ("fla", "torch")
    assert "bfloat16 and float16" in state.why["attention in float32"]
    assert set(vars(state.elsewhere).values()) == {"torch"}


def test_the_tensors_decide_not_what_imports(gpu):
    gpu()
    state = choose_backends("auto", "upstream", SIZES)
    assert state.kernels_for(torch.device("cuda", 0), torch.bfloat16) is state.cuda_half
    assert state.kernels_for(torch.device("cuda", 0), torch.float32) is state.cuda_single
    for device, dtype in (("cpu", torch.bfloat16), ("mps", torch.float16), ("cuda", torch.float64)):
        assert state.kernels_for(torch.device(device), dtype) is state.elsewhere


def test_under_torch_compile_what_mixes_no_tokens_is_left_to_it(gpu, monkeypatch):
    gpu()
    state, mixes = choose_backends("auto", "upstream", SIZES), ("conv", "delta_rule", "attention")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled = state.kernels_for(torch.device("cuda", 0), torch.bfloat16)
    assert all(getattr(compiled, op) == getattr(state.cuda_half, op) != "torch" for op in mixes)
    assert {name for op, name in vars(compiled).items() if op not in mixes} == {"torch"}


@pytest.mark.parametrize(
    ("arguments", "chosen", "reason"),
    [
        ({"packages": {}}, "torch", "fla: triton is not installed; pip install triton"),
        ({"packages": {"triton": "3.6.0"}}, "torch", "fla: fla-core is not installed"),
        ({"packages": {"triton": "3.8.0", "fla-core": "0.5.1"}}, "torch", "fla-core 0.5.1 is too old for packed rows"),
        ({"packages": {"triton": "3.6.0", "fla-core": "0.6.0"}}, "torch", "refuses to run on Hopper with triton 3.6.0"),
        ({"packages": {"triton": "3.7.1", "fla-core": "0.6.0"}}, "fla", "flash-qla is not installed"),
        ({"packages": INSTALLED, "nvcc": False}, "torch", "nvcc"),
        ({"packages": {"triton": "3.6.0", "fla-core": "0.6.0", "tilelang": "0.1.15"}}, "fla", "flash-qla is not installed"),
        ({"capability": (8, 0)}, "fla", "it trains on Hopper and Blackwell data centre GPUs, this is 8.0"),
        ({"capability": (7, 5)}, "torch", "it needs an Ampere GPU or later (8.0), this is 7.5"),
    ],
)
def test_what_is_missing_is_told_apart(gpu, arguments, chosen, reason):
    gpu(**arguments)
    state = choose_backends("auto", "upstream", SIZES)
    assert state.cuda_half.delta_rule == chosen
    assert reason in state.why["delta_rule"]


def test_sizes_that_a_kernel_lacks(gpu):
    gpu()
    assert choose_backends("auto", "upstream", SIZES | {"key_size": 64}).cuda_half.delta_rule == "fla"
    assert choose_backends("auto", "upstream", SIZES | {"key_size": 512}).cuda_half.delta_rule == "torch"
    assert choose_backends("auto", "upstream", SIZES | {"taps": 5}).cuda_half.conv == "fla"
    assert choose_backends("auto", "upstream", SIZES | {"head_size": 512}).cuda_half.attention == "torch"
    state = choose_backends("auto", "upstream", SIZES | {"head_size": 96})
    assert state.cuda_half.attention == "varlen"
    assert "not triton: it takes heads of 64, 128, 256 channels; the model has 96" in state.why["attention"]


def test_attention_made_for_hopper_runs_there_alone(gpu):
    gpu(capability=(8, 0))
    state = choose_backends("auto", "upstream", SIZES)
    assert state.cuda_half.attention == "varlen"
    assert "not triton: its blocks are made for Hopper (9.0), this is 8.0" in state.why["attention"]


def test_forcing_by_argument_and_by_variable(gpu, monkeypatch):
    gpu()
    assert choose_backends({"conv": "fla"}, "upstream", SIZES).cuda_half.conv == "fla"
    forced = choose_backends("fla", "upstream", SIZES).cuda_half
    assert (forced.conv, forced.delta_rule, forced.gated_norm, forced.attention) == ("fla", "fla", "fla", "triton")
    monkeypatch.setenv(backends.VARIABLE, "conv=fla,delta_rule=torch")
    by_variable = choose_backends("auto", "upstream", SIZES).cuda_half
    assert (by_variable.conv, by_variable.delta_rule) == ("fla", "torch")
    assert choose_backends("torch", "upstream", SIZES).cuda_half.conv == "torch", "an argument goes before the variable"
    monkeypatch.setenv(backends.VARIABLE, "delta=fla")
    with pytest.raises(BackendUnavailable, match="found backend delta=fla; wanted conv: triton"):
        choose_backends("auto", "upstream", SIZES)
    monkeypatch.setenv(backends.VARIABLE, "conv=fla,delta_rule")
    with pytest.raises(BackendUnavailable, match="found backend delta_rule=; wanted conv: triton"):
        choose_backends("auto", "upstream", SIZES)
    with pytest.raises(BackendUnavailable, match="conv backend 'causal_conv1d' asked for, but causal-conv1d is not installed"):
        choose_backends({"conv": "causal_conv1d"}, "upstream", SIZES)


def test_a_forced_name_that_half_precision_alone_can_run_is_replaced_in_float32_and_said(gpu):
    gpu()
    state = choose_backends({"delta_rule": "flash_qla"}, "upstream", SIZES)
    assert (state.cuda_half.delta_rule, state.cuda_single.delta_rule) == ("flash_qla", "fla")
    assert "delta_rule" not in state.why
    assert state.why["delta_rule in float32"] == "not flash_qla: it runs in bfloat16 and float16, this is float32"


def test_what_is_not_exact_runs_only_where_it_is_asked_for(gpu):
    gpu()
    assert choose_backends("auto", "upstream", SIZES).cuda_half.delta_rule == "flash_qla"
    state = choose_backends("flash_qla_cut", "upstream", SIZES)
    assert (state.cuda_half.delta_rule, state.cuda_single.delta_rule) == ("flash_qla_cut", "fla")


def test_the_report_says_what_is_not_exact(monkeypatch):
    exact, model = patch_report(apply_patches(tiny())), tiny()
    assert exact.inexact == {} and "documents get what they get alone" in str(exact)
    anywhere = replace(delta_rule.BACKENDS["flash_qla_cut"], unusable=lambda site: None)
    monkeypatch.setitem(delta_rule.BACKENDS, "flash_qla_cut", anywhere)
    report = patch_report(apply_patches(model, backend={"delta_rule": "flash_qla_cut"}))
    assert report.inexact == {"delta_rule": "flash_qla_cut"}
    assert "do not get exactly what they get alone, as asked for by delta_rule: flash_qla_cut" in str(report)


def test_the_report_names_what_is_not_exact_wherever_the_model_is_now(monkeypatch):
    model = apply_patches(tiny())
    state = replace(model.model.packfree, cuda_half=Kernels(delta_rule="flash_qla_cut"))
    for module in model.modules():
        if getattr(module, "packfree", None) is not None:
            monkeypatch.setattr(module, "packfree", state)
    report = patch_report(model)
    assert report.implementations["delta_rule"] == "torch" and report.inexact == {"delta_rule": "flash_qla_cut"}


def test_hopper_without_a_backward_is_said_when_patching(gpu, caplog):
    gpu(packages={"triton": "3.6.0", "fla-core": "0.6.0"})
    monkey = {"key_heads": 2, "value_heads": 4, "key_size": 16, "value_size": 16, "taps": 4, "head_size": 16}
    backends.model_sizes = lambda config: monkey
    model = apply_patches(tiny())
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "delta_rule runs in plain torch on this GPU" in line and "pip install flash-qla" in line
    report = patch_report(model)
    assert set(report.implementations.values()) == {"torch"} and "Hopper" in report.why["delta_rule"]


def test_sizes_come_from_the_config():
    config = tiny().config
    wanted = {"key_heads": 2, "value_heads": 4, "key_size": 16, "value_size": 16, "taps": 4, "head_size": 16}
    assert model_sizes(config) == wanted


def test_every_op_has_a_torch_twin_that_always_runs():
    for module in (*backends.OPS.values(), attention, gated_norm):
        assert module.BACKENDS["torch"].unusable(Site("cpu")) is None
        assert [name for name, found in module.BACKENDS.items() if found.exact][-1] == "torch", "what auto ends with"
