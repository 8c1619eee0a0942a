"""Absent, broken, too old and unused are different to the doctor, who says what would run."""

from __future__ import annotations

import configparser
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from hf_packfree import apply_patches, patch_report
from hf_packfree.cli import doctor as text
from hf_packfree.doctor import (
    REQUIREMENTS,
    Package,
    Requirement,
    diagnose,
    examine,
    probe,
    supported_models,
)
from hf_packfree.doctor.families import SERVED
from hf_packfree.doctor.machine import machine
from hf_packfree.doctor.packages import check_hopper, release, without_cuda
from hf_packfree.doctor.plans import find_plans
from hf_packfree.errors import PatchConflict, UnsupportedModel
from hf_packfree.models.state import Kernels, PatchState
from hf_packfree.ops.table import OPS
from hf_packfree.parallel import ContextParallel
from hf_packfree.patching.registry import FAMILIES
from hf_packfree.versions import Versions
from tests.support import by_family, tiny

pytestmark = pytest.mark.usefixtures("imports_tried_once")
ROW = Requirement(Versions("fake-kernels", "1.2", "are wrong"), "fakekernels", "kernels")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path into which packages can be put."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(
    site: Path,
    version: str | None = "1.3",
    code: str | None = "",
    name="fake-kernels",
    module="fakekernels",
) -> None:
    if version is not None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if code is not None:
        (site / module).mkdir()
        (site / module / "__init__.py").write_text(code)


def test_usable(site):
    install(site)
    (found,) = examine([ROW])
    assert (found.state, found.version, found.reason, found.wrong) == ("usable", "1.3", None, False)


def test_absent(site):
    (found,) = examine([ROW])
    assert (found.state, found.version, found.advice) == (
        "absent",
        None,
        "pip install 'fake-kernels>=1.2'",
    )
    assert not found.wrong
    assert examine([replace(ROW, required=True)])[0].wrong


def test_an_empty_folder_of_that_name_is_absent(site):
    (site / "fakekernels").mkdir()
    assert examine([ROW])[0].state == "absent"


def test_broken_keeps_the_exception(site):
    install(site, code="raise OSError('libfake.so.3: no such file')")
    (found,) = examine([ROW])
    assert (found.state, found.version, found.wrong) == ("broken", "1.3", True)
    assert found.reason == "OSError: libfake.so.3: no such file"


def test_installed_without_its_module_is_broken(site):
    install(site, code=None)
    (found,) = examine([ROW])
    assert found.state == "broken" and "no module fakekernels" in found.reason


@pytest.mark.parametrize(
    "version, state", [("1.1.9", "too old"), ("1.2", "usable"), ("1.10+cu130", "usable")]
)
def test_too_old(site, version, state):
    install(site, version=version)
    (found,) = examine([ROW])
    assert found.state == state
    if state == "too old":
        assert found.reason == "needs 1.2 or later: releases before it are wrong" and found.wrong


def test_the_version_of_a_module_without_a_distribution_is_its_own(site):
    install(site, version=None, code="__version__ = '1.1'")
    (found,) = examine([ROW])
    assert (found.state, found.version) == ("too old", "1.1")


def test_another_distribution_of_the_same_module_counts(site):
    install(site, name="flash-fake")
    assert examine([replace(ROW, other_names=("flash-fake",))])[0].version == "1.3"


def test_a_crash_or_chatter_at_import_harms_no_other(site, capfd):
    install(site, code="import os; os.abort()")
    install(site, name="loud", module="loud", code="print('hello'); import sys; sys.exit(3)")
    install(site, name="fine", module="fine", code="__version__ = '7'")
    found = probe(["fakekernels", "loud", "fine"])
    assert "SIGABRT" in found["fakekernels"].error
    assert found["loud"].error == "SystemExit: 3"
    assert (found["fine"].version, found["fine"].error) == ("7", None)
    assert capfd.readouterr() == ("", "")


def test_an_import_that_does_not_end_is_broken(site):
    install(site, code="import time; time.sleep(600)")
    assert "longer than 1 seconds" in probe(["fakekernels"], timeout=1.0)["fakekernels"].error


@pytest.mark.parametrize(
    "text, numbers",
    [("2.13.0+cpu", (2, 13, 0)), ("3.7", (3, 7)), ("0.5.2rc1", (0, 5, 2)), ("?", ())],
)
def test_release(text, numbers):
    assert release(text) == numbers


def test_without_cuda_kernels_are_unused_whatever_else_they_are():
    usable = Package("fla-core", "0.6.0", "usable", "")
    broken = replace(usable, state="broken", imports=False, reason="ValueError: key")
    assert (
        without_cuda(usable).state == "unused" and without_cuda(usable).reason == "no CUDA device"
    )
    assert (
        without_cuda(broken).reason == "no CUDA device (ValueError: key)"
        and not without_cuda(broken).wrong
    )
    assert without_cuda(replace(usable, state="absent")).state == "absent"


@pytest.mark.parametrize(
    "triton, capability, helper, state",
    [
        ("3.6.0", "9.0", "tilelang without nvcc", "broken"),
        ("3.6.0", "9.0", "flash-qla without nvcc", "broken"),
        ("3.6.0", "9.0", None, "broken"),
        ("3.4.0", "9.0", None, "broken"),
        ("3.7.1", "9.0", None, "usable"),
        ("3.3.1", "9.0", None, "usable"),
        ("3.6.0", "8.0", None, "usable"),
        ("3.6.0", "9.0", "tilelang", "usable"),
        ("3.6.0", "9.0", "flash-qla", "usable"),
    ],
)
def test_hopper_with_a_triton_that_compiles_wrongly(monkeypatch, triton, capability, helper, state):
    helper, _, lacks = (helper or "").partition(" without ")
    monkeypatch.setattr("hf_packfree.doctor.packages.has_nvcc", lambda: not lacks)
    packages = {name: Package(name, None, "absent", "") for name in ("tilelang", "flash-qla")}
    packages |= {
        "triton": Package("triton", triton, "usable", ""),
        "fla-core": Package("fla-core", "0.6.0", "usable", ""),
    }
    if helper:
        packages[helper] = Package(helper, "1", "usable", "")
    found = check_hopper(packages, [capability])
    assert found.state == state
    assert state == "usable" or f"triton {triton}" in found.reason


@pytest.mark.parametrize("helper, state", [("tilelang", "broken"), ("flash-qla", "usable")])
def test_hopper_with_tilelang_switched_off(monkeypatch, helper, state):
    monkeypatch.setattr("hf_packfree.doctor.packages.has_nvcc", lambda: True)
    monkeypatch.setenv("FLA_TILELANG", "0")
    packages = {
        name: Package(name, "1", "usable" if name == helper else "absent", "")
        for name in ("tilelang", "flash-qla")
    }
    packages |= {
        "triton": Package("triton", "3.6.0", "usable", ""),
        "fla-core": Package("fla-core", "0.6.0", "usable", ""),
    }
    found = check_hopper(packages, ["9.0"])
    assert found.state == state
    assert state == "usable" or (
        "FLA_TILELANG=0" in found.reason and found.advice.startswith("unset FLA_TILELANG, or")
    )


@pytest.mark.parametrize(
    "name, old, floor, why",
    [
        ("flash-qla", "0.1.2", "0.1.3", "take no plan of packed rows"),
        ("causal-conv1d", "1.5.4", "1.6.0", "do not heed torch.use_deterministic_algorithms"),
    ],
)
def test_kernels_that_patching_passes_over_are_too_old(site, name, old, floor, why):
    row = next(row for row in REQUIREMENTS if row.versions.name == name)
    # whatever is installed on this machine
    fake = replace(row.versions, name=f"fake-{name}")
    row = replace(row, versions=fake, module="fakekernels")
    install(site, version=old, name=fake.name)
    (found,) = examine([row])
    assert (found.state, found.advice) == ("too old", f"pip install 'fake-{name}>={floor}'")
    assert found.reason == f"needs {floor} or later: releases before it {why}"


def test_a_plan_keeps_why_float32_is_slower(monkeypatch):
    why = {"attention": "not triton: a", "attention in float32": "not triton: b"}
    monkeypatch.setattr(
        "hf_packfree.patching.backends.choose_backends", lambda *_: PatchState(why=why)
    )
    found = diagnose()
    assert found.plans[0].why == why
    assert {"attention: not triton: a.", "attention in float32: not triton: b."} <= set(found.notes)


def test_every_operation_and_reason_is_shown(monkeypatch, capsys):
    why = {"fused": "not triton: a", "attention in float32": "not triton: b"}
    state = PatchState(elsewhere=Kernels(fused="shown"), why=why)
    monkeypatch.setattr("hf_packfree.patching.backends.choose_backends", lambda *_: state)
    # no cell broken
    monkeypatch.setenv("COLUMNS", "240")
    found = diagnose()
    text.diagnosis(found)
    shown = " ".join(capsys.readouterr().out.split())
    for plan in found.plans:
        ops = by_family[plan.name].ops
        others = ", ".join(op.replace("_", " ") for op in plan.packed if op != "fused")
        assert set(plan.packed) == set(ops) <= set(OPS) and plan.name in shown
        assert f"torch: {others}" in shown and "shown: fused" in shown
    assert "fused: not triton: a." in shown and "attention in float32: not triton: b." in shown


def test_a_gpu_that_torch_does_not_see_is_said(monkeypatch):
    """By a driver that fails, and by a torch for CPUs; hidden GPUs are nobody's fault."""
    seen = {
        "OS": "",
        "Python": "",
        "GPU, driver": "NVIDIA H100 (81559 MiB, driver 550)",
        "nvcc": "",
    }
    monkeypatch.setattr("hf_packfree.doctor.diagnosis.machine", lambda: dict(seen))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = diagnose()
    assert not found.healthy and "torch (broken)" in str(found)
    reason = found.packages[0].reason
    assert reason == "there is a GPU, and it sees no GPU (its CUDA: none, it is built without)"

    def fail():
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr("torch.cuda.is_available", fail)
    assert "driver initialization failed" in diagnose().packages[0].reason
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert diagnose().healthy


def test_the_driver_and_the_compiler_are_asked(tmp_path, monkeypatch):
    answers = {
        "nvidia-smi": "echo 'NVIDIA H100, 81559 MiB, 550.90, 9.0'",
        "nvcc": "echo release 12.8, V1",
    }
    for name, line in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = machine()
    assert found["GPU, driver"] == "NVIDIA H100 (81559 MiB, driver 550.90, capability 9.0)"
    assert found["nvcc"] == "12.8"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert machine()["GPU, driver"] == "nvidia-smi is not found, or fails"


def test_what_no_family_can_run_is_a_note_and_unhealthy(monkeypatch):
    def fail(*_):
        raise AttributeError("no Qwen3_5Config in this release")

    monkeypatch.setattr("hf_packfree.doctor.diagnosis.find_plans", fail)
    found = diagnose()
    assert not found.healthy and "what would run is not known" in str(found)
    assert any("no Qwen3_5Config" in note for note in found.notes)


def test_floors_are_those_of_the_package():
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[1] / "setup.cfg")
    wanted = dict(line.split(">=") for line in config["options"]["install_requires"].split())
    floors = {row.versions.name: row.versions.floor for row in REQUIREMENTS if row.required}
    assert floors == {name: wanted[name] for name in floors}


def test_this_machine():
    found = diagnose()
    by_name = {package.name: package for package in found.packages}
    assert [row.versions.name for row in REQUIREMENTS] == list(by_name)
    assert all(by_name[name].state == "usable" for name in ("torch", "transformers", "accelerate"))
    assert found.healthy and found.devices[-1].kind == "cpu"
    assert [plan.name for plan in found.plans] == list(by_family)
    assert {name for plan in found.plans for name in plan.packed.values()} == {"torch"}
    assert "in PyTorch eager" in str(found) and not found.plans[0].why
    assert json.loads(json.dumps(found.as_dict()))["sentence"] == str(found)


def test_broken_transformers_is_said_and_nothing_is_built(site):
    install(
        site,
        name="transformers",
        module="transformers",
        version="5.23.0",
        code="raise ImportError('no tokenizers')",
    )
    found = diagnose()
    assert not found.healthy and found.plans == ()
    assert "transformers (broken)" in str(found) and str(found).startswith("To be mended: ")


def test_fla_that_imports_without_cuda_is_unused_and_warned_of(site):
    install(site, version=None, module="fla", code="__version__ = '0.6.0'")
    (site / "fla" / "ops").mkdir()
    (site / "fla" / "ops" / "__init__.py").write_text("")
    (site / "fla" / "ops" / "gated_delta_rule.py").write_text("")
    found = diagnose()
    fla = next(package for package in found.packages if package.name == "fla-core")
    if found.devices[0].kind == "cuda":
        pytest.skip("a CUDA device is here")
    assert (fla.state, fla.reason) == ("unused", "no CUDA device") and found.healthy
    assert found.plans[0].unpacked == "transformers with fla-core, which fails here"
    assert "unpacked='native'" in found.notes[0]


@pytest.mark.parametrize(
    ("family", "code", "said"),
    [
        ("qwen3_vl", "raise OSError", True),
        ("qwen3_vl", "", False),
        ("llama", "raise OSError", False),
    ],
)
def test_what_lacks_torchvision_is_said_of_models_with_images(site, family, code, said):
    install(site, version="99", name="torchvision", module="torchvision", code=code)
    assert any("torchvision" in note for note in diagnose(family).notes) == said


def test_what_ranks_exchange_is_said_of_one_model(capsys):
    for model, said in ((None, False), ("qwen3_5", True)):
        text.diagnosis(diagnose(model))
        printed = " ".join(capsys.readouterr().out.split())
        assert "packed rows of text" in printed
        assert ("ranks of context parallelism exchange" in printed) == said


def test_a_model_is_planned_from_its_config_alone(tmp_path):
    config = by_family["qwen3_5_moe"].tiny_config()
    # no machine here could hold it
    config.hidden_size, config.num_hidden_layers = 65536, 40
    config.layer_types = None
    type(config)(**config.to_dict()).save_pretrained(tmp_path)
    (plan,) = diagnose(str(tmp_path)).plans
    assert (
        plan.name == f"{tmp_path} (Qwen3_5MoeForCausalLM)" and plan.packed["delta_rule"] == "torch"
    )
    # of four query heads
    assert plan.shared == (
        "exchange for Gated DeltaNet heads on 2 ranks, or states; "
        "for attention heads on 2, 4 ranks, else keys and values (gloo)"
    )


WITHOUT_SCANS = "a delta rule that gives no states"
BY_HEADS = (
    "for attention heads, else keys and values, but not with a sliding window, capped scores, "
    "attention sinks, values of another size than keys"
)


@pytest.mark.parametrize(
    ("missing", "shared"),
    [
        (
            ("torch.distributed.is_gloo_available", lambda: False),
            "have nothing here to exchange over: this torch has no gloo",
        ),
        (
            WITHOUT_SCANS,
            "exchange for Gated DeltaNet, which gives no states on torch, heads; "
            f"{BY_HEADS} (gloo)",
        ),
        (None, f"exchange for Gated DeltaNet heads, or states; {BY_HEADS} (gloo)"),
    ],
)
def test_what_ranks_would_exchange(monkeypatch, missing, shared):
    if missing is WITHOUT_SCANS:
        rules = OPS["delta_rule"].backends
        monkeypatch.setitem(rules, "torch", replace(rules["torch"], scans=None))
    elif missing is not None:
        monkeypatch.setattr(*missing)
    plans = {plan.name: plan.shared for plan in find_plans(None, "")}
    alone = shared if shared.startswith("have") else f"exchange {BY_HEADS} (gloo)"
    assert (plans["qwen3_5"], plans["qwen3_vl"]) == (shared, alone)
    assert plans["bamba"] == "are refused: ssd needs whole rows"


@pytest.mark.parametrize("family", [row.name for row in FAMILIES])
def test_ranks_are_said_to_share_what_patching_lets_them_share_alone(family):
    (plan,) = find_plans(family, "")
    with pytest.raises((PatchConflict, ValueError)) as refused:
        apply_patches(tiny(family), context_parallel=ContextParallel(None))
    if refused.type is ValueError:
        assert "Default process group" in str(refused.value), "the model itself is fit"
        assert "for attention heads on 2, 4 ranks, else keys and values (gloo)" in plan.shared
    else:
        (what,) = re.findall("found (.*) under context parallelism, which", str(refused.value))
        assert plan.shared == f"are refused: {what} needs whole rows"


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3_next", "linear layers are fused in"),
        ("qwen3_vl", "linear layers are fused in"),
        ("qwen2_5_vl", "linear layers of Qwen2_5_VLAttention are fused in"),
        ("llama", "linear layers of LlamaMLP are fused in"),
        ("gemma2", "none is fused, with LoRA or without"),
        # experts, in layers that are fused otherwise
        ("gpt_oss", "none is fused, with LoRA or without"),
    ],
)
def test_which_linear_layers_are_fused_is_the_familys(family, said):
    (plan,) = find_plans(family, "")
    assert said in plan.linear
    called = plan.linear.startswith("linear layers are called as they are here, in PyTorch; with")
    assert called == (plan.packed.get("fused") == "torch" and "none is fused" not in said)
    # as the report says it of a model
    report = str(patch_report(apply_patches(tiny(family))))
    assert (plan.linear in report) == (family in ("gemma2", "gpt_oss"))
    of = re.search(r"linear layers (of \w+)", said)
    assert (of is not None) == ("linear layers but those of" in report)
    assert of is None or f"linear layers but those {of[1]} are transformers' own" in report


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("options", "called"),
    [
        ({}, {}),
        (
            {"use_dora": True, "lora_dropout": 0.1},
            {"DoRA with dropout": 8, "one beside them that is called": 4},
        ),
    ],
)
def test_adapters_that_are_called_as_they_are_are_named(options, called, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["up_proj", "down_proj"], base_model_name_or_path="qwen3_5", **options
    )
    config.save_pretrained(tmp_path)
    found = diagnose(str(tmp_path))
    assert (
        found.plans[0].called == called
        and found.plans[0].name == f"{tmp_path} (Qwen3_5ForCausalLM)"
    )
    sentence = "projections called as they are, exact but not fused: 8 with DoRA with dropout, "
    sentence += "4 with one beside them that is called."
    assert (sentence in found.notes) == bool(called)


IN_4_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "are fused in the dtype of its files and under autocast in autocast's."),
        ({"dtype": "bfloat16"}, "are fused in bfloat16, the config's dtype, and under autocast"),
        ({"torch_dtype": "bfloat16"}, "are fused in bfloat16, the config's dtype, and"),
        (
            {"dtype": "float32"},
            "are fused in float32, the config's dtype, and under autocast in autocast's; load it "
            "with dtype=torch.bfloat16, or train under autocast (bf16=True)",
        ),
        (
            {"quantization_config": IN_4_BITS | {"bnb_4bit_compute_dtype": "bfloat16"}},
            "in 4 bits (bnb_4bit_compute_dtype=bfloat16) are fused under autocast in bfloat16 "
            "(bf16=True), and without it where activations are bfloat16, which "
            "prepare_model_for_kbit_training makes float32",
        ),
        (
            # what transformers takes where none is named
            {"quantization_config": IN_4_BITS},
            "(bnb_4bit_compute_dtype=float32) are fused where activations and adapters are float32 "
            "(TRL makes these bfloat16) and autocast is off; elsewhere they are called as they are, "
            "also under TRL's autocast",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "linear layers are fused, but not those that are quantised by fp8 (bitsandbytes' 4 bits",
        ),
    ],
)
def test_where_linear_layers_are_fused_is_read_from_the_config(settings, said, tmp_path):
    fields = by_family["qwen3_5"].tiny_config().to_dict()
    fields = {name: value for name, value in fields.items() if name != "dtype"} | settings
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = diagnose(str(tmp_path))
    assert said in found.plans[0].linear + "."
    assert f"{found.plans[0].linear}." in found.notes


def test_adapters_that_fit_no_model_are_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "qwen3_5", "peft_type": "NO"}'
    )
    with pytest.raises(UnsupportedModel, match="cannot be put on their model"):
        diagnose(str(tmp_path))


@pytest.mark.filterwarnings("default")
def test_adapters_that_packed_rows_cannot_have_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    config.base_model_name_or_path = "qwen3_5"
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="found PEFT's PROMPT_TUNING, which puts virtual"):
        diagnose(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"peft_type": "LORA"}']
    # of a model that was built in memory PEFT knows no name
    + [f'{{"base_model_name_or_path": {name}}}' for name in ("null", '""', "3")],
)
def test_damaged_adapters_are_refused(text, tmp_path):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match="adapter_config.json damaged"):
        diagnose(str(tmp_path))


@pytest.mark.filterwarnings("default")
def test_adapters_import_no_module_that_they_name(tmp_path, monkeypatch):
    """PEFT imports `megatron_core`, which may be a file beside them."""
    peft = pytest.importorskip("peft")
    (tmp_path / "beside_adapters.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    peft.LoraConfig(
        target_modules=["up_proj"],
        base_model_name_or_path="qwen3_5",
        megatron_core="beside_adapters",
        megatron_config={"a": 1},
    ).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="they name code to import"):
        diagnose(str(tmp_path))


def test_a_model_of_no_family_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="found no config under"):
        diagnose(str(tmp_path))


def test_supported_models_are_the_table():
    rows = {row.name: row for row in supported_models()}
    assert list(rows) == list(by_family)
    assert all(rows[name].swaps == family.swaps for name, family in by_family.items())
    assert "Qwen3_5ForCausalLM" in rows["qwen3_5"].heads and rows["qwen3_5"].transformers == ">=5.2"


def test_the_families_that_are_shown_at_once_are_the_tables():
    """Names, media, releases, and the Auto class that loads what its checkpoints are saved from."""
    known = {row.name: (row.media, row.transformers) for row in supported_models()}
    assert {row.name: (row.media, row.transformers) for row in SERVED} == known
    for row in SERVED:
        family, auto = by_family[row.name], getattr(transformers, row.auto_class)
        whole = family.vision_language or family.causal_lm
        if not row.auto_class.startswith("Auto"):
            assert row.auto_class == family.causal_lm
            continue
        # of these alone, as loading the classes would import every modeling file of transformers
        names = {*auto._model_mapping._model_mapping.values()}
        wanted = (
            family.causal_lm if row.media == ("text",) else f"{whole[:-5]}ForConditionalGeneration"
        )
        assert wanted in names, row.name
