"""A family of another shape than Qwen's is added by one row and one file: no shared code knows
attributes or layers by name.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_packfree
from hf_packfree import apply_patches, patch_report, remove_patches, verify_packing
from hf_packfree.errors import ContractError, PatchConflict, UnsupportedModel
from hf_packfree.models.attention_interface import NAME, InterfaceAttention
from hf_packfree.models.base import classes_of, stands_for
from hf_packfree.models.gated_delta_net import SeparateProjections, SplitProjections
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.models.vision_language import PackedVisionLanguage
from hf_packfree.patching import prewarm, registry
from tests.input_formats import padded_rows, row_batch
from tests.models import brook, marsh
from tests.models.padded import padded_batch, real_tokens
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    ROW,
    checkpoint_layers,
    errors,
    random_weights,
    run,
    run_alone,
    step,
    tiny,
    worst_gradient,
)

MIXERS = {
    "brook": {"BrookShortConv": 1, "BrookDelta": 2, "BrookAttention": 1},
    "marsh": {"MarshShortConv": 2, "MarshAttention": 2},
}


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, brook.ROW, marsh.ROW))


@pytest.fixture(params=[brook.ROW, marsh.ROW], ids=lambda row: row.name)
def row(request, added):
    return request.param


def test_the_longest_ending_decides_what_stands_in_front():
    upstream = ModuleType("stream")
    names = "StreamModel", "StreamTextModel", "StreamHybridGatedDeltaNet", "StreamPreTrainedModel"
    for name in names:
        setattr(upstream, name, type(name, (nn.Module,), {"__module__": "stream"}))
    upstream.OtherModel = brook.upstream.BrookModel
    mixins = SeparateProjections, SplitProjections, PackedTrunk, PackedVisionLanguage
    ours = classes_of(upstream, __name__, *mixins)
    assert {name: cls.__bases__ for name, cls in ours.items()} == {
        "StreamModel": (PackedVisionLanguage, upstream.StreamModel),
        "StreamTextModel": (PackedTrunk, upstream.StreamTextModel),
        "StreamHybridGatedDeltaNet": (SeparateProjections, upstream.StreamHybridGatedDeltaNet),
    }


@pytest.mark.parametrize(
    "row", [row for row in registry.ROWS if not row.made_from_upstream], ids=lambda row: row.name
)
def test_classes_are_named_in_the_row_alone(row):
    file = Path(hf_packfree.__file__).parents[1] / f"{row.replacement.replace('.', '/')}.py"
    prefix = row.trunk.removesuffix("Model").removesuffix("Text")
    said = [name for name in row.swaps if f'{name.removeprefix(prefix)}"' in file.read_text()]
    assert said == []


def test_a_text_model_that_derives_from_another_familys_has_its_own_row(added, monkeypatch):
    class Derived(brook.upstream.BrookModel):
        pass

    row = SimpleNamespace(upstream=brook.upstream.__name__, trunk_class=lambda: Derived)
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, row))
    model = tiny(brook.ROW)
    assert registry.family_of(model) is brook.ROW
    model.model.__class__ = Derived
    assert registry.family_of(model) is row


def test_without_its_row_it_is_refused():
    with pytest.raises(
        UnsupportedModel, match="found a BrookModel .*of kind conv, linear_attention are"
    ):
        apply_patches(tiny(brook.ROW))


def test_before_its_floor_it_is_refused_by_name(monkeypatch):
    """There the record would be dropped on its way, and the row leak."""
    row = dataclasses.replace(brook.ROW, floor="99.0")
    monkeypatch.setattr(registry, "ROWS", (*registry.ROWS, row))
    with pytest.raises(UnsupportedModel, match=r"found brook on .*; wanted transformers 99.0 or"):
        apply_patches(tiny(row))


def batch_of(form):
    if form != "several rows":
        return row_batch(form, ROW)
    batch, _, batch.inputs["position_ids"] = padded_rows(((5, 64, 3), (1, 71)))
    return batch


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("form", ["positions", "cu_seq_lens", "several rows"])
def test_packed_is_per_document_and_unpatched_leaks(row, form, attention):
    batch = batch_of(form)
    model, weights = tiny(row, attention=attention), random_weights(batch, 128)
    alone = run_alone(model, batch, weights)
    control = run(model, batch, weights)
    logits, grads = errors(control, alone)
    assert logits >= CONTROL * LOGIT_TOL and grads >= CONTROL * GRADIENT_TOL
    logits, grads = errors(run(apply_patches(model), batch, weights), alone)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


def test_padded_batches_skip_padding(row):
    batch = padded_batch("right")
    wanted, wanted_grads = step(tiny(row), batch)
    model, seen = apply_patches(tiny(row)), []
    model.model.layers[0].register_forward_hook(
        lambda layer, args, out: seen.append(args[0].shape[1])
    )
    found, grads = step(model, batch)
    assert seen[0] == real_tokens(batch) < batch["input_ids"].numel()
    assert (
        abs(found.loss.item() / wanted.loss.item() - 1) <= LOGIT_TOL
        and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    )


def test_checkpointing_changes_nothing(row):
    model, batch = apply_patches(tiny(row)), row_batch("positions", ROW)
    weights = random_weights(batch, 128)
    wanted = run(model, batch, weights)
    checkpoint_layers(model)
    found = run(model, batch, weights)
    assert all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])


def test_report_removal_and_twice(row):
    model = tiny(row)
    before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    weights = copy.deepcopy(model.state_dict())
    report = patch_report(apply_patches(apply_patches(model)))
    assert (report.family, report.patched) == (row.name, True)
    assert report.swaps == {row.causal_lm: 1, row.trunk: 1, **MIXERS[row.name]}, "no layer"
    assert row.swaps.keys() == {row.trunk, *MIXERS[row.name]}
    assert not patch_report(remove_patches(model)).patched
    assert before == [
        (name, type(module), sorted(vars(module))) for name, module in model.named_modules()
    ]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_transformers_knows_our_attention_where_a_familys_own_file_has_it(monkeypatch):
    """A `KeyError` in the first packed row otherwise, unless a family without a file was there."""
    known = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    monkeypatch.delitem(known, NAME, raising=False)
    upstream = brook.upstream
    cls = type("BrookAttention", (InterfaceAttention, upstream.BrookAttention), {})
    monkeypatch.setattr(brook, "BrookAttention", stands_for(upstream)(cls))
    added = dataclasses.replace(brook.ROW, replacement=brook.__name__)
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, added))
    batch, model = row_batch("positions", ROW), tiny(added)
    weights = random_weights(batch, 128)
    alone = run_alone(model, batch, weights)
    logits, grads = errors(run(apply_patches(model), batch, weights), alone)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


def test_verify_measures_it(row):
    report = verify_packing(apply_patches(tiny(row)), lengths=(5, 17, 1, 9))
    assert (
        report.family == row.name
        and report.patched.influence == 0
        and report.unpatched.influence > 1e-3
    )
    prewarm(apply_patches(tiny(row)))


def test_unpacked_rows_are_upstreams(row):
    ids = torch.arange(2, 62).view(2, 30)
    wanted = tiny(row)(input_ids=ids).logits
    assert torch.equal(apply_patches(tiny(row))(input_ids=ids).logits, wanted)


@pytest.mark.parametrize("where", ["layers.0.token_mix", "layers.1.token_mix", "layers.2.attend"])
def test_a_mixer_that_was_replaced_is_refused_before_and_after(added, where):
    batch = row_batch("positions", (3, 5))
    model, other = tiny(brook.ROW), tiny(brook.ROW).model.get_submodule(where)
    ours = model.model.get_submodule(where)
    model.model.set_submodule(where, nn.Identity())
    layer, _, path = where.rpartition(".")
    with pytest.raises(
        ContractError, match=f"no known mixer in {layer}, .* a {type(other).__name__} at {path}"
    ):
        apply_patches(model)
    model.model.set_submodule(where, ours)
    apply_patches(model)(**batch.inputs)
    model.model.set_submodule(where, other)
    with pytest.raises(PatchConflict, match=f"{where} changed since"):
        model(**batch.inputs)


def test_a_kind_of_layer_that_no_mixer_has_is_refused(added):
    model = tiny(brook.ROW)
    model.config.layer_types[2] = "sliding_attention"
    with pytest.raises(
        ContractError,
        match="layers.2, which the config says is 'sliding_attention'; wanted a kind that",
    ):
        apply_patches(model)


def test_a_mixer_beside_or_in_place_of_an_mlp_is_known_by_the_kind_of_its_layer(added):
    batch = row_batch("positions", (3, 5))
    model = tiny(marsh.ROW)
    ours = model.model.layers[1].mixer
    model.model.layers[1].mixer = tiny(marsh.ROW).model.layers[2].mixer
    with pytest.raises(ContractError, match="found MarshShortConv in layers.1, .*'moe'; wanted no"):
        apply_patches(model)
    model.model.layers[1].mixer = ours
    apply_patches(model)(**batch.inputs)
    for where in ("layers.0.mixer", "layers.0.attend", "layers.3.mixer"):
        patched = apply_patches(tiny(marsh.ROW))
        patched.model.set_submodule(where, tiny(marsh.ROW).model.get_submodule(where))
        with pytest.raises(PatchConflict, match=f"{where} changed since"):
            patched(**batch.inputs)


def test_a_layer_that_may_drop_the_record_is_refused(added):
    class Own(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.token_mix = layer.token_mix

        def forward(self, x, *args, **kwargs):
            return x + self.token_mix(x)

    model = tiny(brook.ROW)
    model.model.layers[1] = Own(model.model.layers[1])
    with pytest.raises(
        ContractError,
        match="layers.1 as a Own; wanted a BrookStreamLayer or a BrookPoolLayer, or a wrapper",
    ):
        apply_patches(model)


def test_no_shared_file_names_a_familys_mixers():
    """Attributes and classes of mixers are in the table and in the family's own file."""
    own = {"registry.py", "rows.py", *(f"{family.name}.py" for family in registry.ROWS)}
    mixers = [mixer for family in registry.ROWS for mixer in family.mixers]
    # a word of the field, as `conv` is, only where it is read as an attribute of a layer
    words = {mixer.cls for mixer in mixers} | {
        mixer.path if "_" in mixer.path else rf"layer\.{mixer.path}" for mixer in mixers
    }
    shared = [
        file for file in Path(hf_packfree.__file__).parent.rglob("*.py") if file.name not in own
    ]
    assert len(shared) > 50 and words >= {"linear_attn", "self_attn"}
    # Nemotron-H says `embeddings`
    words.add("embed_tokens")
    named = re.compile(rf"\b(?:{'|'.join(words)})\b")
    assert [(file.name, word) for file in shared for word in named.findall(file.read_text())] == []
