"""Alarms for the next release of transformers: what we rely on, and a sentence when it changes."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from typing import get_type_hints

import pytest
import torch
from packaging.version import Version
from transformers.utils import logging as upstream_logging

from hf_packfree import apply_patches, patch_report
from hf_packfree.errors import LeakDetected
from hf_packfree.models import compat
from hf_packfree.models.base import contract_violations, kinds_of_layers
from hf_packfree.patching import selfcheck
from hf_packfree.patching.registry import FAMILIES
from tests.support import leak_in_the_convolution, tiny, trunk_of

pytestmark = pytest.mark.compat
NAMES = [family.name for family in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_the_trunk_takes_the_keywords_it_gets(family):
    found = set(inspect.signature(family.trunk_class().forward).parameters)
    wanted = {
        "input_ids",
        "attention_mask",
        "position_ids",
        compat.CACHE,
        "inputs_embeds",
        "use_cache",
    }
    if set(family.mixer_ops) == {"conv", "ssd"}:
        # no layer of it reads positions, which go down with the other keywords; its cache has a
        # name of its own until 5.24
        wanted -= {"position_ids", compat.CACHE}
        assert {"cache_params", "cache"} & found, f"{family.trunk}.forward takes no cache"
    assert wanted <= found, f"{family.trunk}.forward no longer takes {wanted - found}"


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_every_layer_holds_its_checkpoint_contract(family):
    model = tiny(family)
    for before, after in family.pairs().items():
        for module in (
            module
            for module in model.modules()
            if type(module) is before and hasattr(after, "checkpoint_sizes")
        ):
            assert not contract_violations(module, after.checkpoint_sizes), before.__name__


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_layers_pass_keywords_on_and_masks_are_not_made(family):
    """The record reaches every layer once, and nobody builds a mask the size of the row squared."""
    model, seen = apply_patches(tiny(family)), []
    mixers = {mixer.cls for mixer in family.mixers}
    for name, module in trunk_of(model).named_modules():
        if type(module).__name__ in mixers:
            module.register_forward_pre_hook(
                lambda m, a, k, name=name: seen.append((name, k)), with_kwargs=True
            )
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    model(input_ids=torch.arange(2, 14)[None], position_ids=positions, use_cache=False)
    kinds = kinds_of_layers(trunk_of(model).config)
    wanted = sum(len(family.mixers_by_kind[kind]) for kind in kinds)
    assert len(seen) == wanted, "a layer was called another way"
    for name, keywords in seen:
        record = keywords.get("packed_sequence", keywords.get("attention_mask"))
        assert record is not None and record.lengths == [5, 7], f"the record does not reach {name}"
        mask = keywords.get("attention_mask")
        assert not isinstance(mask, torch.Tensor) or mask.numel() == 1, (
            f"a mask was built for {name}"
        )


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_replacements_answer_to_upstreams_names(family):
    for before, after in family.pairs().items():
        for attribute in ("__name__", "__qualname__", "__module__"):
            assert getattr(after, attribute) == getattr(before, attribute)
        assert str(after) == str(before)


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_replacements_show_upstreams_signatures(family):
    """Trainers, PEFT and transformers' own tests choose by a forward's parameters and
    annotations what they pass and try.
    """
    heads = family.head_pairs()
    for before, after in (family.pairs() | heads).items():
        assert inspect.signature(after.forward) == inspect.signature(before.forward), after.__name__
        # a head's are resolved: outside of upstream's module nothing knows the names in them
        shown = get_type_hints(before.forward) if before in heads else None
        wanted = shown or before.forward.__annotations__
        assert after.forward.__annotations__ == wanted, after.__name__
        # Python 3.10 reads an Optional out of a default of None
        if sys.version_info >= (3, 11):
            assert get_type_hints(after.forward) == get_type_hints(before.forward), after.__name__


@pytest.fixture
def unknown_release(monkeypatch):
    monkeypatch.setattr(compat, "NEWEST_TRIED", Version("5.1.0"))
    monkeypatch.setattr(selfcheck, "_checked", set())


def test_an_unknown_release_is_logged_once_and_measured(unknown_release, caplog):
    with caplog.at_level(logging.WARNING, logger="hf_packfree"):
        apply_patches(tiny())
        assert patch_report(apply_patches(tiny())).patched
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hf_packfree"]
    assert "tested up to 5.1.0" in line


def test_an_unknown_release_that_leaks_is_refused_and_the_model_untouched(
    unknown_release, monkeypatch
):
    leak_in_the_convolution(monkeypatch)
    model = tiny()
    with pytest.raises(LeakDetected, match="tiny qwen3_5 model"):
        apply_patches(model)
    assert not patch_report(model).patched


def test_an_unknown_release_with_another_norm_is_refused(unknown_release, monkeypatch):
    """On GPUs a kernel computes the norms: the CPU has to check whether upstream still computes
    the same.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

    whole = upstream.Qwen3_5RMSNorm.forward

    def forward(self, x):
        return whole(self, x) * 1.001

    forward.__module__ = upstream.__name__
    monkeypatch.setattr(upstream.Qwen3_5RMSNorm, "forward", forward)
    with pytest.raises(
        LeakDetected, match="documents, norms or MLPs of a tiny qwen3_5 model off by 1.0e-03"
    ):
        apply_patches(tiny())


@pytest.mark.parametrize(
    "broken", ["norms_against_formula", "mlps_against_formula", "packed_against_alone"]
)
def test_an_unknown_release_that_gives_nan_is_refused(unknown_release, monkeypatch, broken):
    monkeypatch.setattr(selfcheck, broken, lambda *arguments: float("nan"))
    with pytest.raises(LeakDetected, match="off by nan"):
        apply_patches(tiny())


def test_a_norm_that_gives_nan_is_seen_among_those_that_do_not():
    model = apply_patches(tiny())
    assert selfcheck.norms_against_formula(model) < selfcheck.LIMIT
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[0] = float("nan")
    assert not selfcheck.norms_against_formula(model) <= selfcheck.LIMIT


def test_an_mlp_of_another_formula_is_seen(monkeypatch):
    model = apply_patches(tiny())
    assert selfcheck.mlps_against_formula(model) < selfcheck.LIMIT
    wanted = type(model.model.layers[0].mlp).forward

    def clamped(mlp, x):
        # as other families do
        return wanted(mlp, x).clamp(-7, 7)

    clamped.__module__ = wanted.__module__
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", clamped)
    assert not selfcheck.mlps_against_formula(model) <= selfcheck.LIMIT


def test_this_release_was_tried():
    advice = "run tests/compat/run.py on it, then raise transformers in hf_packfree/versions.py"
    assert compat.RELEASE <= compat.NEWEST_TRIED, advice


@pytest.mark.parametrize("call", ["warning", "warning_once"])
def test_a_deprecation_that_is_only_logged_is_an_error(call):
    log = getattr(upstream_logging.get_logger(FAMILIES[0].upstream), call)
    with pytest.raises(DeprecationWarning, match="modeling_qwen3_5: `cu_seq_lens_q` is deprecated"):
        log("`cu_seq_lens_q` is deprecated")
    with pytest.raises(DeprecationWarning, match="removed in v6"):
        log("`seq_idx` will be removed in v6")
    log("the fast path is not available")


def test_a_deprecation_that_is_warned_of_is_an_error():
    with pytest.raises(FutureWarning, match="deprecated"):
        warnings.warn("`cu_seq_lens_q` is deprecated", FutureWarning, stacklevel=2)
