"""Which backend is chosen where: on a machine without GPUs, and on GPUs that are pretended."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from hf_packfree import apply_patches
from hf_packfree.errors import BackendUnavailable
from hf_packfree.models.state import Kernels
from hf_packfree.ops import backend, conv
from hf_packfree.ops.backend import Target
from hf_packfree.ops.table import OPS
from hf_packfree.patching.backends import choose_backends
from hf_packfree.patching.plan import op_sizes
from tests.patching.machines import INSTALLED, SIZES
from tests.support import by_family, tiny


@pytest.mark.parametrize(
    ("module", "package", "op", "name", "chosen"),
    [
        ("fla.ops.gated_delta_rule", "fla-core 0.6.0", "delta_rule", "fla", "flash_qla"),
        ("flash_qla", "flash-qla 0.1.3", "delta_rule", "flash_qla", "fla"),
        ("causal_conv1d", "causal-conv1d 1.7.0", "conv", "causal_conv1d", "triton"),
        ("triton", "triton 3.6.0", "conv", "triton", "causal_conv1d"),
    ],
)
def test_what_is_installed_but_cannot_be_imported_is_named_when_patching(
    gpu, module, package, op, name, chosen
):
    gpu(packages=INSTALLED | {"causal-conv1d": "1.7.0"}, broken=[module])
    state = choose_backends("auto", SIZES)
    assert state.cuda_half[op] == chosen
    wanted = f"{package} is broken (OSError: undefined symbol: _ZN3c10); reinstall it"
    if chosen not in ("flash_qla", "triton"):
        assert state.why[op].startswith(f"not {name}: {wanted}")
    with pytest.raises(
        BackendUnavailable, match=re.escape(f"{op} backend '{name}' forced, but {wanted}")
    ):
        choose_backends({op: name}, SIZES)


def test_nothing_is_imported_that_is_not_wanted(gpu, monkeypatch):
    gpu(packages=INSTALLED | {"causal-conv1d": "1.7.0"})
    imported = []
    monkeypatch.setattr(backend, "import_module", imported.append)
    choose_backends("torch", SIZES)
    assert imported == []
    choose_backends({"delta_rule": "torch"}, SIZES, by_family["qwen3_5"].ops)
    assert imported == ["triton"]


def test_without_a_gpu_everything_is_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = choose_backends("auto")
    kernels = state.kernels_for(torch.device("cpu"), torch.float32)
    assert set(kernels.values()) == {"torch"} and state.why == {}
    with pytest.raises(
        BackendUnavailable,
        match="it runs on CUDA devices, this is a cpu.*delta_rule|delta_rule.*runs on CUDA",
    ):
        choose_backends({"delta_rule": "fla"})


def test_hopper_with_everything_takes_the_fastest(gpu):
    gpu()
    state = choose_backends("auto", SIZES)
    assert state.cuda_half == {
        "conv": "triton",
        "delta_rule": "flash_qla",
        "ssd": "torch",
        "kda": "fla",
        "attention": "triton",
        "fused": "triton",
        "loss": "triton",
        "tower_attention": "varlen",
    }
    assert (state.cuda_single["delta_rule"], state.cuda_single["attention"]) == ("fla", "torch")
    assert "bfloat16 and float16" in state.why["attention in float32"]
    assert set(state.elsewhere.values()) == {"torch"}


def test_the_tensors_decide_not_what_imports(gpu):
    gpu()
    state = choose_backends("auto", SIZES)
    assert state.kernels_for(torch.device("cuda", 0), torch.bfloat16) is state.cuda_half
    assert state.kernels_for(torch.device("cuda", 0), torch.float32) is state.cuda_single
    for device, dtype in (("cpu", torch.bfloat16), ("mps", torch.float16), ("cuda", torch.float64)):
        assert state.kernels_for(torch.device(device), dtype) is state.elsewhere


def test_under_torch_compile_what_mixes_no_tokens_is_left_to_it(gpu, monkeypatch):
    # with which FLA runs Mamba-2 on Hopper, too
    gpu(packages=INSTALLED | {"triton": "3.7.1"})
    state, mixes = (
        choose_backends("auto", SIZES),
        ("conv", "delta_rule", "ssd", "kda", "attention", "tower_attention"),
    )
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled = state.kernels_for(torch.device("cuda", 0), torch.bfloat16)
    assert all(compiled[op] == state.cuda_half[op] != "torch" for op in mixes)
    assert {name for op, name in compiled.items() if op not in mixes} == {"torch", "upstream"}


@pytest.mark.parametrize(
    ("arguments", "chosen", "reason"),
    [
        ({"packages": {}}, "torch", "fla: triton is not installed; pip install 'triton>=3.6'"),
        (
            {"packages": {"triton": "3.5.1", "fla-core": "0.6.0"}},
            "torch",
            "triton 3.5.1 is too old (the kernels are tested with 3.6.0 to 3.9.0); pip install "
            "'triton>=3.6'",
        ),
        ({"packages": {"triton": "3.6.0"}}, "torch", "fla: fla-core is not installed"),
        (
            {"packages": {"triton": "3.8.0", "fla-core": "0.5.2"}},
            "torch",
            "fla-core 0.5.2 is too old for packed rows",
        ),
        (
            {"packages": {"triton": "3.6.0", "fla-core": "0.6.0"}},
            "torch",
            "refuses to run on Hopper with triton 3.6.0",
        ),
        (
            {"packages": {"triton": "3.7.1", "fla-core": "0.6.0"}},
            "fla",
            "flash-qla is not installed",
        ),
        ({"packages": INSTALLED, "nvcc": False}, "torch", "nvcc"),
        (
            {"packages": INSTALLED | {"flash-qla": "0.1.2"}},
            "fla",
            "flash-qla 0.1.2 is too old for packed rows; pip install 'flash-qla>=0.1.3'",
        ),
        (
            {
                "capability": (8, 0),
                "others": [(9, 0)],
                "packages": {"triton": "3.6.0", "fla-core": "0.6.0"},
            },
            "torch",
            "Hopper",
        ),
        (
            {"others": [(12, 0)]},
            "fla",
            "exact on compute capability 9.0 and use it on 9.0, 10.0 and 10.3, this is 12.0",
        ),
        (
            {"others": [(9, 0), (7, 5)]},
            "torch",
            "it needs an Ampere GPU or later (8.0), this is 7.5",
        ),
        (
            {"packages": {"triton": "3.6.0", "fla-core": "0.6.0", "tilelang": "0.1.15"}},
            "fla",
            "flash-qla is not installed",
        ),
        (
            {"capability": (8, 0)},
            "fla",
            "exact on compute capability 9.0 and use it on 9.0, 10.0 and 10.3, this is 8.0",
        ),
        ({"capability": (7, 5)}, "torch", "it needs an Ampere GPU or later (8.0), this is 7.5"),
    ],
)
def test_what_is_missing_is_named(gpu, arguments, chosen, reason):
    gpu(**arguments)
    state = choose_backends("auto", SIZES)
    assert state.cuda_half["delta_rule"] == chosen
    assert reason in state.why["delta_rule"]


def test_sizes_that_a_kernel_lacks(gpu):
    gpu()
    assert choose_backends("auto", SIZES | {"key_size": 64}).cuda_half["delta_rule"] == "fla"
    assert choose_backends("auto", SIZES | {"key_size": 512}).cuda_half["delta_rule"] == "torch"
    assert choose_backends("auto", SIZES | {"taps": 5}).cuda_half["conv"] == "torch"
    assert choose_backends("auto", SIZES | {"head_size": 512}).cuda_half["attention"] == "torch"
    state = choose_backends("auto", SIZES | {"head_size": 96})
    assert state.cuda_half["attention"] == "varlen"
    assert (
        "not triton: it takes heads of 64, 128, 256 channels; the model has 96"
        in state.why["attention"]
    )


def test_attention_made_for_hopper_runs_there_alone(gpu):
    gpu(capability=(8, 0))
    state = choose_backends("auto", SIZES)
    assert state.cuda_half["attention"] == "varlen"
    assert (
        "not triton: its blocks are sized for Hopper (9.0), this is 8.0" in state.why["attention"]
    )


def test_a_backend_is_forced_by_its_name(gpu):
    gpu()
    assert choose_backends({"conv": "torch"}, SIZES).cuda_half["conv"] == "torch"
    qwen = ("conv", "delta_rule", "fused", "attention")
    forced = choose_backends("fla", SIZES, qwen).cuda_half
    chosen = [forced[op] for op in qwen]
    assert chosen == ["triton", "fla", "triton", "triton"]
    with pytest.raises(
        BackendUnavailable,
        match="conv backend 'causal_conv1d' forced, but causal-conv1d is not installed",
    ):
        choose_backends({"conv": "causal_conv1d"}, SIZES)


def test_a_name_that_nothing_has_is_refused(gpu):
    gpu()
    found = "found backend='frob'; wanted 'auto' or conv: triton"
    with pytest.raises(BackendUnavailable, match=re.escape(found)):
        choose_backends("frob", SIZES)
    with pytest.raises(
        BackendUnavailable,
        match=re.escape("found delta=fla in backend={'delta': 'fla'}; wanted conv: triton"),
    ):
        choose_backends({"delta": "fla"}, SIZES)


@pytest.mark.parametrize(
    "backend", [None, 3, ["torch"], {"conv": None}, {"conv": ["torch"]}, {None: "torch"}]
)
def test_what_is_no_name_is_refused_in_a_sentence(backend):
    with pytest.raises(BackendUnavailable, match="wanted .*conv: .*torch"):
        choose_backends(backend)


def test_nothing_is_chosen_for_ops_that_a_family_lacks(gpu):
    gpu(packages={})
    state = choose_backends({"delta_rule": "torch"}, SIZES, ("conv", "attention"))
    assert {op.removesuffix(" in float32") for op in state.why} == {"conv", "attention"}
    with pytest.raises(BackendUnavailable, match="conv backend 'causal_conv1d' forced"):
        choose_backends("causal_conv1d", SIZES, ("conv", "attention"))
    with pytest.raises(BackendUnavailable, match="found delta_rule=nothing"):
        choose_backends({"delta_rule": "nothing"}, SIZES, ("conv",))


def test_torch_compile_gets_what_it_can_trace():
    kernels = {"conv": "triton", "delta_rule": "fla"}
    chosen = Kernels(kernels, fused="triton", loss="triton")
    assert chosen.compiled() == {**kernels, "fused": "torch", "loss": "upstream"}
    assert chosen["fused"] == "triton" and chosen["tower_attention"] == "torch"


def test_what_is_made_for_one_card_alone_runs_on_none_of_several_kinds(gpu):
    gpu(others=[(12, 0)])
    state = choose_backends("auto", SIZES)
    assert (state.cuda_half["attention"], state.cuda_half["conv"]) == ("varlen", "triton")
    assert (
        "not triton: its blocks are sized for Hopper (9.0), this is 12.0" in state.why["attention"]
    )
    with pytest.raises(
        BackendUnavailable,
        match="'flash_qla' forced, but we know .*, this is 12.0; .*: fla, torch;",
    ):
        choose_backends({"delta_rule": "flash_qla"}, SIZES)


@pytest.mark.parametrize(
    ("version", "chosen"), [("1.5.0.post8", "torch"), ("1.6.0", "causal_conv1d")]
)
def test_causal_conv1d_runs_where_it_can_be_deterministic(gpu, monkeypatch, version, chosen):
    gpu(packages=INSTALLED | {"causal-conv1d": version})
    ours = conv.OP.backends["triton"]
    elsewhere = replace(ours, unusable=lambda target: "it is made for another GPU")
    monkeypatch.setitem(conv.OP.backends, "triton", elsewhere)
    state = choose_backends("auto", SIZES)
    assert (state.cuda_half["conv"], state.cuda_single["conv"]) == (chosen, chosen)
    if chosen == "torch":
        old = (
            f"causal-conv1d {version} is too old to be deterministic under "
            f"torch.use_deterministic_algorithms"
        )
        assert state.why["conv"].endswith(
            f"not causal_conv1d: {old}; pip install 'causal-conv1d>=1.6.0'"
        )


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            Target("cuda", (7, 0), sizes=SIZES),
            "it is compiled for Turing GPUs and later (7.5), this is 7.0",
        ),
        (
            Target("cuda", (6, 1), torch.float64, SIZES),
            "it is compiled for Turing GPUs and later (7.5), this is 6.1",
        ),
        (
            Target("cuda", (9, 0), torch.float64, SIZES),
            "it runs in bfloat16, float16 and float32, this is float64",
        ),
        (Target("cuda", (9, 0), sizes=SIZES | {"taps": 5}), "it has 2 to 4 taps, the model 5"),
        (
            Target(
                "cuda", (9, 0), sizes=SIZES | {"key_size": 6, "value_heads": 3, "value_size": 7}
            ),
            "it takes channels in multiples of 8, the model has 213",
        ),
        (
            Target("cuda", (9, 0), sizes={"taps": 3, "channels": 36}),
            "it takes channels in multiples of 8, the model has 36",
        ),
        (Target("cuda", (9, 0), sizes={"key_size": 6, "value_size": 7}), None),
        (Target("cuda", (7, 5), torch.float16, SIZES), None),
        (Target("cuda", None, torch.float32), None),
    ],
)
def test_what_causal_conv1d_was_not_made_for_is_named(gpu, target, reason):
    gpu(packages=INSTALLED | {"causal-conv1d": "1.7.0"})
    assert conv.OP.backends["causal_conv1d"].unusable(target) == reason


def test_a_forced_convolution_runs_torch_in_float64(gpu):
    gpu(packages=INSTALLED | {"causal-conv1d": "1.7.0"})
    state = choose_backends({"conv": "causal_conv1d"}, SIZES)
    assert state.cuda_half["conv"] == state.cuda_single["conv"] == "causal_conv1d"
    assert state.kernels_for(torch.device("cuda", 0), torch.float64)["conv"] == "torch"


def test_a_forced_name_that_half_precision_alone_can_run_is_replaced_in_float32_and_said(gpu):
    gpu()
    state = choose_backends({"delta_rule": "flash_qla"}, SIZES)
    assert (state.cuda_half["delta_rule"], state.cuda_single["delta_rule"]) == ("flash_qla", "fla")
    assert "delta_rule" not in state.why
    assert (
        state.why["delta_rule in float32"]
        == "not flash_qla: it runs in bfloat16 and float16, this is float32"
    )


def test_sizes_come_from_the_mixers():
    wanted = {
        "key_heads": 2,
        "value_heads": 4,
        "key_size": 16,
        "value_size": 16,
        "taps": 4,
        "head_size": 16,
    }
    wanted["query_heads"] = 4
    for model in (tiny(), apply_patches(tiny())):
        assert op_sizes(model.model, by_family["qwen3_5"]) == wanted


def test_every_op_has_a_torch_reference_that_always_runs():
    for op in OPS:
        assert OPS[op].backends["torch"].unusable(Target("cpu")) is None
        names = list(OPS[op].backends)
        assert names[-1] == "torch" or (op, names[-2:]) == ("loss", ["torch", "upstream"]), (
            "what auto ends with"
        )
