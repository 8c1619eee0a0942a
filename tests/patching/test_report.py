"""What patching and the report say of a machine's GPUs: what runs, why nothing faster, what
compiles.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hf_packfree import apply_patches, patch_report, prewarm, remove_patches
from hf_packfree.errors import UnsupportedModel
from hf_packfree.models.state import find_state
from hf_packfree.ops import delta_rule
from hf_packfree.ops.attention import cudnn
from hf_packfree.ops.backend import LongDocuments
from hf_packfree.ops.delta_rule import flash_qla_segments
from hf_packfree.patching import apply, report
from hf_packfree.patching.announce import announce
from tests.ops.triton.kernels import on_kernels
from tests.patching.machines import INSTALLED, SIZES
from tests.support import tiny


@pytest.mark.parametrize("call", [patch_report, remove_patches, apply_patches, prewarm])
@pytest.mark.parametrize("nothing", [None, "qwen3_5", torch.ones(1)])
def test_no_module_is_refused_in_a_sentence(call, nothing):
    with pytest.raises(UnsupportedModel, match=f"found a {type(nothing).__name__}.*; wanted"):
        call(nothing)


def test_an_unpatched_model_leaks_always_only_where_more_than_attention_mixes_tokens():
    """transformers keeps documents apart in attention, for some forms of input."""
    said = {family: str(patch_report(tiny(family))) for family in ("qwen3_5", "llama")}
    assert said == {
        "qwen3_5": "Qwen3_5ForCausalLM is not patched; packed rows leak between documents",
        "llama": "LlamaForCausalLM is not patched; packed rows leak between documents with some "
        "forms of input",
    }


def test_the_report_says_whether_long_documents_are_cut(monkeypatch):
    torch_native = delta_rule.OP.backends["torch"]
    long = LongDocuments(torch_native.run, "in segments", lambda device, _: device.type == "cpu")
    monkeypatch.setitem(delta_rule.OP.backends, "torch", replace(torch_native, long=long))
    found, whole = (
        patch_report(apply_patches(tiny(), batch_invariant=wanted)) for wanted in (False, True)
    )
    assert (
        found.long_documents == {"delta_rule": "in segments"}
        and str(found).count("(long documents in segments)") == 1
    )
    assert not whole.long_documents and "in segments" not in str(whole)


def test_hopper_without_a_backward_is_said_when_patching(gpu, monkeypatch, caplog):
    gpu(packages={"triton": "3.6.0", "fla-core": "0.6.0"})
    sizes = {
        "key_heads": 2,
        "value_heads": 4,
        "key_size": 16,
        "value_size": 16,
        "taps": 4,
        "head_size": 16,
    }
    monkeypatch.setattr(apply, "op_sizes", lambda *_: sizes)
    model = apply_patches(tiny())
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (
        "delta_rule runs in PyTorch eager on this GPU" in line and "pip install flash-qla" in line
    )
    found = patch_report(model)
    assert set(found.implementations.values()) == {"torch"} and "Hopper" in found.why["delta_rule"]


def patched_on_a_gpu(monkeypatch, **options):
    """Patch a tiny model as if it were on the GPU that is pretended, in float32."""
    monkeypatch.setattr(apply, "op_sizes", lambda *_: SIZES)
    model = apply_patches(tiny(), **options)
    there = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    for part in (model, model.model):
        monkeypatch.setattr(part, "parameters", lambda: iter([there]), raising=False)
    return model


def logged(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelname == level]


def test_the_delta_rule_in_float32_alone_without_a_backward_is_said_when_patching(
    gpu, monkeypatch, caplog
):
    gpu(packages={"triton": "3.6.0", "fla-core": "0.6.0", "flash-qla": "0.1.3"})
    for options in ({}, {"backend": {"delta_rule": "flash_qla"}}):
        caplog.clear()
        patched_on_a_gpu(monkeypatch, **options)
        line = logged(caplog, "WARNING")[0]
        assert line.startswith(
            "delta_rule in float32 runs in PyTorch eager on this GPU, which is slow: not "
            "flash_qla: it"
        )
        assert (
            "not fla: its backward refuses to run on Hopper with triton 3.6.0 (3.4.0 and later, "
            "before 3.7.1)" in line
        )
    caplog.clear()
    patched_on_a_gpu(monkeypatch, backend={"delta_rule": "torch"})
    assert logged(caplog, "WARNING") == [], "wanted"


def test_attention_dropout_that_no_kernel_has_is_said_when_patching(gpu, monkeypatch, caplog):
    gpu(packages={"triton": "3.7.1", "fla-core": "0.6.0"})
    monkeypatch.setattr(apply, "op_sizes", lambda *_: SIZES)
    for dropout, said in ((0.0, 0), (0.1, 1)):
        caplog.clear()
        model = tiny()
        for layer in model.model.layers:
            if hasattr(layer, "self_attn"):
                layer.self_attn.attention_dropout = dropout
        apply_patches(model)
        assert (
            len([line for line in logged(caplog, "WARNING") if "attention_dropout" in line]) == said
        )


def test_a_faster_backend_that_was_passed_over_is_said_when_patching(gpu, monkeypatch, caplog):
    gpu(packages={"triton": "3.7.1", "fla-core": "0.6.0"})
    with caplog.at_level(logging.INFO, logger="hf_packfree"):
        found = patch_report(patched_on_a_gpu(monkeypatch))
    said = logged(caplog, "INFO")[0].splitlines()
    reason = "not flash_qla: flash-qla is not installed; pip install flash-qla"
    assert f"  on this machine's GPUs, delta_rule: {reason}" in said[1:]
    assert len(said) == 1 + len(found.why) and said[1:] == str(found).splitlines()[1:]


@pytest.mark.parametrize(
    "machine, said",
    [
        (
            {"broken": ["flash_qla"]},
            "flash-qla 0.1.3 is broken (OSError: undefined symbol: _ZN3c10); reinstall it",
        ),
        (
            {"packages": INSTALLED | {"flash-qla": "0.1.2"}},
            "flash-qla 0.1.2 is too old for packed rows",
        ),
        (
            {"packages": {name: found for name, found in INSTALLED.items() if name != "flash-qla"}},
            None,
        ),
        ({"capability": (8, 0)}, None),
        ({}, None),
    ],
    ids=["broken", "too old", "absent", "another GPU", "nothing wrong"],
)
def test_what_is_installed_and_cannot_run_is_a_warning_once(
    gpu, monkeypatch, caplog, machine, said
):
    """What is absent, or made for other machines, is not wrong here: the report says it."""
    gpu(**machine)
    for _ in range(2):
        patched_on_a_gpu(monkeypatch)
    found = [line for line in logged(caplog, "WARNING") if "without what is installed" in line]
    assert len(found) == (said is not None)
    begins = "delta_rule runs on this GPU without what is installed for it: not flash_qla: "
    assert said is None or found[0].startswith(begins + said)


def test_what_compiles_for_seconds_is_said_when_patching(gpu, monkeypatch, caplog):
    gpu()
    with caplog.at_level(logging.INFO, logger="hf_packfree"):
        patched_on_a_gpu(monkeypatch)
        said = logged(caplog, "INFO")
        assert len(said) == 2 and said[1].startswith(
            "the first step on a GPU compiles kernels for seconds (conv: triton, "
        )
        assert "flash_qla" not in said[1] and said[1].endswith("prewarm(model) does that ahead")
        caplog.clear()
        patched_on_a_gpu(monkeypatch, backend="torch")
        assert len(logged(caplog, "INFO")) == 1 and logged(caplog, "WARNING") == [], (
            "torch compiles nothing"
        )


def test_what_compiles_for_minutes_is_a_warning_once(gpu, monkeypatch, caplog):
    gpu()
    for model in (tiny(), tiny().bfloat16(), tiny()):
        monkeypatch.setattr(apply, "op_sizes", lambda *_: SIZES)
        apply_patches(model)
    whole, half = logged(caplog, "WARNING")
    assert whole == (
        "the first step on a GPU compiles and tunes kernels for minutes, once for these head "
        "counts on a machine (delta_rule: flash_qla, delta_rule in float32: fla); prewarm(model) "
        "does that ahead, and TILELANG_CACHE_DIR and TRITON_CACHE_DIR name the folders that keep it"
    )
    assert "(delta_rule: flash_qla);" in half, "of a bfloat16 model"
    caplog.clear()
    patched_on_a_gpu(monkeypatch, backend={"delta_rule": "fla"})
    (line,) = logged(caplog, "WARNING")
    assert "(delta_rule: fla, delta_rule in float32: fla);" in line


def test_the_report_names_what_runs_under_autocast(gpu, monkeypatch):
    gpu()
    model = patched_on_a_gpu(monkeypatch)
    plain = patch_report(model).implementations
    assert (plain["delta_rule"], plain["attention"]) == ("fla", "torch")
    assert patch_report(model).autocast == ""
    before = torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        under_bf16 = patch_report(model)
        with_graphs = patch_report(patched_on_a_gpu(monkeypatch, cuda_graphs="auto"))
        torch.set_autocast_dtype("cuda", torch.float32)
        assert patch_report(model).autocast == ""
        assert patch_report(model).implementations == plain
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
    changed = {"delta_rule": "flash_qla", "attention": "triton"}
    assert under_bf16.implementations == plain | changed
    said = "float32 weights are rounded to bfloat16 where products read them, forward and backward"
    said += "; in training on GPUs once for each row, in copies that are kept"
    assert under_bf16.autocast in str(under_bf16)
    assert under_bf16.autocast == with_graphs.autocast == said
    assert patch_report(model).implementations == plain


@pytest.mark.parametrize(("family", "fuses"), [("llama", True), ("gpt_oss", False)])
def test_autocast_is_said_of_linear_layers_that_are_fused_alone(family, fuses):
    """Layers of experts fuse norms."""
    model = on_kernels(tiny(family), fused="triton")
    with torch.autocast("cpu", torch.bfloat16):
        found = patch_report(model)
    assert found.implementations["fused"] == "triton" and bool(found.autocast) == fuses


def test_what_is_logged_is_of_the_autocast_that_is_to_come(gpu, monkeypatch, caplog):
    """A Trainer patches fp32 weights outside of its autocast, and trains under it."""
    gpu()
    model = patched_on_a_gpu(monkeypatch)
    for autocast, runs in (
        (None, "fla"),
        (torch.bfloat16, "flash_qla"),
        (torch.float16, "flash_qla"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="hf_packfree"):
            announce(model, find_state(model), autocast)
        assert f"delta_rule: {runs} " in logged(caplog, "INFO")[0]
        assert not torch.is_autocast_enabled("cuda")


def test_every_operation_is_named_with_a_version(gpu, monkeypatch):
    gpu()
    monkeypatch.setattr(report, "installed", (INSTALLED | {"torch": "2.11.0"}).get)
    model = patched_on_a_gpu(monkeypatch)
    for words in (
        "conv: triton 3.6.0,",
        "delta_rule: fla (fla-core 0.6.0),",
        "attention: torch 2.11.0,",
        "fused: triton 3.6.0,",
        "loss: triton 3.6.0;",
    ):
        assert words in str(patch_report(model))
    there = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    monkeypatch.setattr(model.model, "parameters", lambda: iter([there]), raising=False)
    size = model.config.head_dim
    for sizes, words in (
        ({size}, "triton 3.6.0 (long documents by cuDNN),"),
        ({size + 8}, "triton 3.6.0,"),
    ):
        monkeypatch.setattr(
            cudnn, "takes", lambda head_size, device, sizes=sizes: head_size in sizes
        )
        assert f"attention: {words}" in str(patch_report(model))
    forced = patched_on_a_gpu(
        monkeypatch, backend={"attention": "varlen", "delta_rule": "flash_qla"}
    )
    monkeypatch.setattr(forced.model, "parameters", lambda: iter([there]), raising=False)
    monkeypatch.setattr(flash_qla_segments, "cuts_on", lambda device: False)
    said = "attention: varlen (FlashAttention of torch 2.11.0),"
    assert f"delta_rule: flash_qla (flash-qla 0.1.3), {said}" in str(patch_report(forced))


@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        ("eager", "attention: eager (the model's, torch 2.11.0),"),
        ("flash_attention_2", "attention: flash_attention_2 (the model's, flash-attn 2.8),"),
        (
            "flash_attention_3",
            "attention: flash_attention_3 (the model's, flash-attn-3 of unknown version),",
        ),
        (
            "kernels-community/flash-attn2",
            "attention: kernels-community/flash-attn2 (the model's, kernels 0.17.2),",
        ),
        ("somebody's flash", "attention: somebody's flash (the model's),"),
    ],
)
def test_an_attention_of_the_models_own_is_named_with_a_version(monkeypatch, loaded, said):
    packages = {"torch": "2.11.0", "flash-attn": "2.8", "kernels": "0.17.2"}
    monkeypatch.setattr(report, "installed", packages.get)
    model = apply_patches(tiny())
    model.config._attn_implementation = loaded
    assert said in str(patch_report(model))
