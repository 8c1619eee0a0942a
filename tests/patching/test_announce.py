"""What everybody sees when a model is patched, by whichever door, and what silences it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator
from transformers import PhiConfig, PhiForCausalLM, Trainer, TrainingArguments

from hf_packfree import (
    PackFreeCallback,
    PatchConflict,
    UnsupportedModel,
    apply_patches,
    patch_report,
    register_patches,
    remove_patches,
)
from hf_packfree.models.state import Kernels
from hf_packfree.patching import announce, apply
from hf_packfree.patching.announce import line
from tests.support import tiny
from tests.vision import tiny_vision

LINE = "hf_packfree: Qwen3_5ForCausalLM patched (10 modules); packed rows exact; torch (CPU)\n"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shown(monkeypatch):
    """As in a process in which nobody set up logging, as pytest does."""
    monkeypatch.delenv("PACKFREE_QUIET", raising=False)
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    logger = logging.getLogger("hf_packfree")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    logging.Manager._clear_cache(logging.root.manager)
    return logger


def patched(capfd) -> str:
    capfd.readouterr()
    apply_patches(tiny())
    return capfd.readouterr().err


def test_one_line_by_default_and_none_for_what_is_patched_already(shown, capfd):
    assert patched(capfd) == LINE
    model = apply_patches(tiny())
    capfd.readouterr()
    apply_patches(model)
    assert capfd.readouterr().err == ""


def test_every_door_says_it(shown, capfd, tmp_path):
    tiny().save_pretrained(tmp_path)
    capfd.readouterr()
    with register_patches():
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "hf_packfree: Qwen3_5TextModel patched (" in capfd.readouterr().err
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    Accelerator(cpu=True)
    PackFreeCallback().on_init_end(arguments, None, None, model=tiny())
    assert capfd.readouterr().err == LINE


def test_settings_and_levels_silence_it(shown, capfd, monkeypatch):
    for value, wanted in {"1": "", "0": LINE, "": LINE}.items():
        monkeypatch.setenv("PACKFREE_QUIET", value)
        assert patched(capfd) == wanted
    monkeypatch.setenv("RANK", "1")
    assert patched(capfd) == "", "each process would say it"
    monkeypatch.delenv("RANK")
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        shown.setLevel(level)
        assert "modules)" not in patched(capfd)
    shown.setLevel(logging.NOTSET)
    logging.disable(logging.CRITICAL)
    try:
        assert patched(capfd) == ""
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("settings", "launched_with", "autocast"),
    [
        ({"bf16": True}, "no", torch.bfloat16),
        ({"fp16": True}, "no", torch.float16),
        ({}, "no", None),
        ({}, "bf16", torch.bfloat16),
    ],
)
def test_the_trainer_s_line_is_of_its_autocast(
    monkeypatch, tmp_path, settings, launched_with, autocast
):
    """Also where `accelerate launch --mixed_precision` chose it, which the arguments say nothing
    of.
    """
    found = []
    monkeypatch.setattr(apply, "announce", lambda model, state, autocast: found.append(autocast))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched_with)
    chosen = TrainingArguments(tmp_path, use_cpu=True, report_to="none", **settings)
    Trainer(tiny(), chosen, callbacks=[PackFreeCallback()])
    assert found == [autocast]


def test_the_line_says_what_is_slow_and_what_is_not_fused():
    from dataclasses import replace

    found = patch_report(apply_patches(tiny()))
    found = replace(found, called={"LoRA on Linear4bit": 31})
    text = line(found, ("delta_rule",))
    assert "slow for want of kernels: delta_rule" in text
    assert "not fused: 31 with LoRA on Linear4bit" in text


def test_a_triton_that_starts_kernels_itself_is_said(monkeypatch):
    ours, others = Kernels(conv="triton"), Kernels(conv="torch", delta_rule="fla")
    monkeypatch.setattr(announce, "installed", lambda _: "3.99.0")
    monkeypatch.setattr(announce, "is_known", lambda: True)
    assert announce._why_slow_to_start(ours) is None
    monkeypatch.setattr(announce, "is_known", lambda: False)
    said = announce._why_slow_to_start(ours)
    assert said is not None and said.startswith("Triton 3.99.0 starts our kernels itself")
    assert said.endswith("with 3.6 to 3.9")
    assert announce._why_slow_to_start(others) is None


@pytest.mark.parametrize(
    ("before", "after", "found", "wanted"),
    [
        ({}, {"padded": "upstream"}, "padded='lazy'", "padded='upstream'"),
        ({"unpacked": "native"}, {}, "unpacked='native'", "unpacked='upstream'"),
        (
            {"batch_invariant": True},
            {"padded": "upstream"},
            "batch_invariant=True, padded='lazy'",
            "batch_invariant=False, padded='upstream'",
        ),
    ],
)
def test_a_conflict_names_the_options_that_differ_alone(before, after, found, wanted):
    model = apply_patches(tiny(), **before)
    with pytest.raises(PatchConflict) as refused:
        apply_patches(model, **after)
    text = f"found the model patched with {found}; wanted {wanted}; call remove_patches(model)"
    assert str(refused.value).startswith(text)
    remove_patches(model)
    assert patch_report(apply_patches(model, **after)).patched


def test_a_backend_that_differs_is_named():
    model = apply_patches(tiny())
    with pytest.raises(PatchConflict, match="wanted backend={'loss': 'upstream'}; call"):
        apply_patches(model, backend={"loss": "upstream"})


def test_what_is_no_model_of_ours_is_said_so():
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    phi = PhiForCausalLM(PhiConfig(**sizes))
    assert "leak" not in str(patch_report(phi))
    assert str(patch_report(phi)).startswith("PhiForCausalLM holds no text model of a supp")
    with pytest.raises(UnsupportedModel, match="load the model first"):
        apply_patches("qwen3_5")


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModelForImageTextToText"])
def test_a_vision_tower_that_was_dropped_is_said(auto, tmp_path, caplog):
    tiny_vision("qwen3_5").save_pretrained(tmp_path)
    model = getattr(transformers, auto).from_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="hf_packfree"):
        apply_patches(model)
    said = [record for record in caplog.records if "has a vision tower" in record.getMessage()]
    assert len(said) == (auto == "AutoModelForCausalLM")
    assert not said or "AutoModelForImageTextToText" in said[0].getMessage()


def test_a_text_checkpoint_has_nothing_to_drop(tmp_path, caplog):
    tiny().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="hf_packfree"):
        apply_patches(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert "vision tower" not in caplog.text


@pytest.mark.slow
def test_a_process_of_its_own_says_it_and_no_advice_that_a_patched_model_does_not_need():
    """In a process of its own, where transformers, which says it once, has not said it."""
    code = (
        "from hf_packfree import apply_patches, verify_packing; from hf_packfree.verify import "
        "build_model; verify_packing(apply_patches(build_model('qwen3_5')), lengths=[5, 3], "
        "gradients=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stderr == LINE
