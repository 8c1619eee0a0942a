"""The decoder layer's packed branch: what it hands on, which norms a kernel may compute, and
which layers are left alone.
"""

from __future__ import annotations

import copy
import functools
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn

from hf_packfree import apply_patches, patch_report, remove_patches
from hf_packfree.errors import ContractError, PatchConflict
from hf_packfree.models import compat
from hf_packfree.models.base import upstream_of
from hf_packfree.models.fused_layer import FusedDecoderLayer
from hf_packfree.models.plain_layers import epsilon, norm_offset
from hf_packfree.ops.fused import add_norm
from hf_packfree.packing import PackedSequence
from hf_packfree.patching import registry, selfcheck
from tests.input_formats import row_batch
from tests.models.kernels import on_kernels, watched
from tests.support import (
    CONTROL,
    LOGIT_TOL,
    ROW,
    assert_exact,
    by_family,
    errors,
    random_weights,
    relative_rms,
    run,
    run_alone,
    tiny,
    trunk_of,
)

FAMILIES = [family.name for family in registry.FAMILIES if family.fused_layer]
PLUS_ONE = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
# of plain attention
PLAIN = [name for name in FAMILIES if by_family[name].made_from_upstream]
BATCH = row_batch("positions", ROW)
MASKED = row_batch("positions", ROW)
# beside positions that restart, as tokenizers make it: upstream's attention reads the mask alone
MASKED.inputs["attention_mask"] = torch.ones_like(MASKED.inputs["input_ids"])


WEIGHTS = random_weights(MASKED, 128)


class NotTheFamilys(nn.Module):
    """Other maths under familiar attributes, as a wrapper around the norm shows them."""

    def __init__(self, norm):
        super().__init__()
        self.inner, self.eps = norm, norm.eps

    @property
    def weight(self):
        return self.inner.weight

    def forward(self, x):
        return 2 * self.inner(x)


def ligers(norm, x):
    return type(norm).forward(norm, x)


ligers.__module__ = "liger_kernel.transformers.rms_norm"


def as_liger_does(norm, offset=1.0, casting="gemma"):
    norm.offset, norm.casting_mode = offset, casting
    norm.variance_epsilon = epsilon(norm)
    norm.forward = MethodType(ligers, norm)


@pytest.fixture
def fused(monkeypatch):
    """The weights of the norms that the fused op computes, here by its reference under the
    kernel's name.
    """
    return watched(monkeypatch, "add_norm", place=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_on_the_mixers_see_the_record(family):
    model, seen = apply_patches(tiny(family)), []
    layers = trunk_of(model).layers
    for layer in layers:
        mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        mixer.register_forward_hook(
            lambda module, args, kwargs, out: seen.append(kwargs), with_kwargs=True
        )
    model(**BATCH.inputs)
    assert len(seen) == len(layers)
    assert all(kwargs["packed_sequence"] is seen[0]["packed_sequence"] for kwargs in seen)
    assert isinstance(seen[0]["packed_sequence"], PackedSequence)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_of_a_layer_is_fused_and_exact(family, fused):
    model = on_kernels(tiny(family))
    assert_exact(model, BATCH)
    wanted = [
        norm.weight
        for layer in trunk_of(model).layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    assert len(fused) == len(wanted) and all(a is b for a, b in zip(fused, wanted))


def test_ligers_norms_are_fused_too_and_those_of_another_formula_called(fused):
    model = on_kernels(tiny())
    for layer, offset in zip(model.model.layers, (1.0, 1.0, 0.0, 1.0)):
        as_liger_does(layer.input_layernorm, offset)
    model(**BATCH.inputs)
    assert len(fused) == 7 and not any(
        weight is model.model.layers[2].input_layernorm.weight for weight in fused
    )


@pytest.mark.parametrize("family", PLAIN)
def test_ligers_norms_of_llamas_formula_are_fused_and_exact(family, fused):
    model = on_kernels(tiny(family))
    first, second, *_ = model.model.layers
    as_liger_does(first.input_layernorm, 0.0, "llama")
    as_liger_does(second.input_layernorm, 1.0, "llama")
    assert_exact(model, BATCH)
    assert len(fused) == 2 * len(model.model.layers) - 1
    assert not any(weight is second.input_layernorm.weight for weight in fused)


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_the_formulas_are_those_of_upstreams_norms_and_mlps(family):
    """Of weights that are neither zero nor one, for which formulas agree."""
    model = apply_patches(selfcheck.tiny(by_family[family]))
    layers = [part for part in model.modules() if isinstance(part, FusedDecoderLayer)]
    offset = 1.0 if family in PLUS_ONE else 0.0
    assert {norm_offset(layer.input_layernorm, layer) for layer in layers} == {offset}
    assert selfcheck.norms_against_formula(model) <= 1e-6
    assert selfcheck.mlps_against_formula(model) <= 1e-6
    for layer in layers:
        vars(layer)["norm_offset"] = 1.0 - offset
    assert selfcheck.norms_against_formula(model) > 0.1, "the other formula is seen"


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_of_an_unpatched_model_leak_and_of_a_fused_one_do_not(family, fused):
    model, weights = tiny(family), random_weights(MASKED, 128)
    alone = run_alone(model, MASKED, weights)
    assert errors(run(model, MASKED, weights), alone)[0] >= CONTROL * LOGIT_TOL
    assert_exact(on_kernels(model), MASKED, alone)
    assert len(fused) >= 2 * len(trunk_of(model).layers)


@pytest.mark.parametrize("family", PLAIN)
def test_arguments_by_place_are_those_of_upstreams_forward(family, fused):
    layer, rotary = on_kernels(tiny(family)).model.layers[0], tiny(family).model.rotary_emb
    lengths, x = (3, 5), torch.randn(1, 8, layer.hidden_size)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    record = PackedSequence.from_lengths(lengths)
    embeddings = rotary(x, positions)
    named = {
        "attention_mask": None,
        "position_ids": positions,
        "position_embeddings": embeddings,
    }
    by_place = [named.get(name) for name in type(layer).positional_names[1:]]
    found = layer(x, *by_place, packed_sequence=record)
    assert torch.equal(found, layer(x, **named, packed_sequence=record)) and len(fused) == 4
    with pytest.raises(TypeError, match="multiple values"):
        layer(x, *by_place, position_ids=positions, packed_sequence=record)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_llamas_norm_is_called_where_it_widens_and_somebody_reads_it(dtype, autocast, fused):
    """A norm in fp32 on activations in bf16 is fp32, unless all that read it round it again."""
    layer = on_kernels(tiny("llama")).model.layers[0]
    layer.mlp.to(torch.bfloat16 if dtype == torch.bfloat16 and not autocast else torch.float32)
    x, readers = torch.randn(1, 3, layer.hidden_size, dtype=dtype), [layer.mlp.gate_proj]
    wanted = layer.input_layernorm(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, _ = layer._add_norm(x, None, layer.input_layernorm, readers)
    called = dtype == torch.bfloat16 and not autocast
    assert len(fused) == (not called)
    assert found.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert torch.allclose(found.float(), wanted, atol=0.02)
    layer.mlp.gate_proj.register_forward_hook(lambda *_: None)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, _ = layer._add_norm(x, None, layer.input_layernorm, readers)
    assert found.dtype == wanted.dtype and torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("wide", [False, True])
def test_gpt_oss_norm_returns_its_inputs_dtype(wide, fused):
    """In bf16 it is fused, to the bit; with weights in fp32, which fp16 checkpoints are loaded
    with, it is called.
    """
    layer = on_kernels(tiny("gpt_oss").bfloat16()).model.layers[0]
    norm = layer.input_layernorm
    nn.init.normal_(norm.weight)
    norm.to(torch.float32 if wide else torch.bfloat16)
    x, branch = torch.randn(2, 1, 9, layer.hidden_size).bfloat16().split(1)
    found, total = layer._add_norm(x, branch, norm, [None, None])
    assert len(fused) == (not wide) and found.dtype == torch.bfloat16
    assert torch.equal(total, x + branch) and torch.equal(found, norm(x + branch))


def test_hooked_and_foreign_norms_are_called(fused):
    model, calls = tiny(), []
    hooked, own, wrapped, _ = model.model.layers
    hooked.input_layernorm.register_forward_hook(lambda *call: calls.append("hook"))
    own.input_layernorm.forward = lambda x: calls.append("forward") or torch.zeros_like(x)
    wrapped.post_attention_layernorm = NotTheFamilys(wrapped.post_attention_layernorm)
    on_kernels(model)(**BATCH.inputs)
    called = (hooked.input_layernorm, own.input_layernorm, wrapped.post_attention_layernorm)
    assert calls == ["hook", "forward"]
    assert len(fused) == 5 and not any(weight is norm.weight for weight in fused for norm in called)


def test_norms_of_a_class_whose_forward_somebody_replaced_are_called(fused, monkeypatch):
    model, calls = tiny(), []
    kind = type(model.model.layers[0].input_layernorm)
    whole = kind.forward
    monkeypatch.setattr(kind, "forward", lambda norm, x: calls.append(1) or whole(norm, x))
    on_kernels(model)(**BATCH.inputs)
    assert not fused and len(calls) >= 2 * len(model.model.layers)


def test_a_wrapped_layer_is_left_alone_where_upstreams_hands_the_record_on(monkeypatch):
    def wrapped():
        model = tiny()
        model.model.layers[1].forward = partial(model.model.layers[1].forward)
        return model

    monkeypatch.setattr(compat, "LAYERS_DROP_KEYWORDS", True)
    with pytest.raises(PatchConflict, match="model.layers.1 with a forward of its own"):
        apply_patches(wrapped())
    monkeypatch.undo()
    if compat.LAYERS_DROP_KEYWORDS:
        return
    model = apply_patches(wrapped())
    assert patch_report(model).swaps["Qwen3_5DecoderLayer"] == 3
    assert_exact(model, BATCH)
    assert not patch_report(remove_patches(model)).patched


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_wrapped_layer_of_plain_attention_is_left_alone_in_every_release(
    family, drop, fused, monkeypatch
):
    monkeypatch.setattr(compat, "LAYERS_DROP_KEYWORDS", drop)
    model, alone = tiny(family), run_alone(tiny(family), MASKED, WEIGHTS)
    layer = model.model.layers[1]
    layer.forward = partial(layer.forward)
    assert patch_report(apply_patches(model)).swaps[by_family[family].layers[0]] == 3
    assert_exact(on_kernels(model), MASKED, alone)
    assert len(fused) == 6


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5"])
def test_a_forward_that_somebody_put_into_the_layers_class_is_run(
    family, wraps, fused, monkeypatch
):
    model = on_kernels(apply_patches(tiny(family)))
    if compat.LAYERS_DROP_KEYWORDS and family == "qwen3_5":
        pytest.skip("this release's layers do not hand the record on")
    kind = upstream_of(type(trunk_of(model).layers[0]))
    forward, calls = kind.forward, []

    def counted(layer, *args, **kwargs):
        calls.append(layer)
        return forward(layer, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", functools.wraps(forward)(counted) if wraps else counted)
    alone = run_alone(tiny(family), MASKED, WEIGHTS)
    calls.clear()
    assert_exact(model, MASKED, alone)
    assert len(calls) == len(trunk_of(model).layers) and fused == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_layer_with_a_forward_of_its_own_runs_it(when, fused):
    """Of a subclass before patching, on the instance after; exact, and the others are fused."""
    model = tiny("llama")
    kind, calls = type(model.model.layers[1]), []

    class Twice(kind):
        def forward(self, hidden_states, **more):
            calls.append(more["position_ids"].shape)
            return 2 * kind.forward(self, hidden_states, **more)

    if when == "after":
        on_kernels(model)
        layer = model.model.layers[1]
        layer.forward = MethodType(
            lambda *args, **more: 2 * type(layer).forward(*args, **more), layer
        )
        wanted = tiny("llama")
        wanted.model.layers[1].__class__ = Twice
    else:
        model.model.layers[1].__class__ = Twice
        wanted = copy.deepcopy(model)
        on_kernels(model)
    assert_exact(model, MASKED, run_alone(wanted, MASKED, WEIGHTS))
    assert calls and len(fused) == (6 if when == "before" else 8)


@pytest.mark.parametrize("family", PLAIN)
def test_hidden_states_of_layers_are_those_of_documents_alone(family, fused):
    stock, model = tiny(family).eval(), on_kernels(tiny(family)).eval()
    with torch.no_grad():
        found = model(**MASKED.inputs, output_hidden_states=True).hidden_states
        alone = [
            stock(input_ids=document[None], output_hidden_states=True, use_cache=False)
            for document in MASKED.documents
        ]
    assert len(found) == len(alone[0].hidden_states) and fused
    for index, states in enumerate(found):
        wanted = torch.cat([one.hidden_states[index][0] for one in alone])
        assert relative_rms(torch.cat(MASKED.cut(states)), wanted) <= LOGIT_TOL


@pytest.mark.parametrize("autocast", [False, True])
def test_a_wrapper_around_the_mixer_reads_upstreams_dtype(autocast, fused):
    """It may do more with the norm than multiply it."""

    class Holder(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states, **more):
            seen.append(hidden_states.dtype)
            return self.inner(hidden_states, **more)

    model, seen = on_kernels(tiny("llama")), []
    for layer in model.model.layers:
        layer.self_attn = Holder(layer.self_attn)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**BATCH.inputs)
    assert set(seen) == {torch.float32} and len(fused) == 8


@pytest.mark.parametrize(
    "part", ["input_layernorm", "post_attention_layernorm", "mlp", "self_attn"]
)
def test_a_layer_unlike_its_familys_is_refused(part):
    model = tiny()
    delattr(model.model.layers[3], part)
    with pytest.raises(ContractError, match=part):
        apply_patches(model)


def test_a_norm_of_another_width_is_refused():
    model = tiny()
    model.model.layers[0].input_layernorm.weight = nn.Parameter(torch.zeros(7))
    with pytest.raises(ContractError, match="input_layernorm"):
        apply_patches(model)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("branch", [True, False])
def test_the_torch_reference_is_its_formula_and_differentiable(branch, offset):
    torch.manual_seed(0)
    x, z, weight = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 5, 6), (1, 5, 6), (6,))
    )
    normed, total = add_norm(x, z if branch else None, weight, 1e-6, offset=offset)
    assert torch.equal(total, x + z if branch else x)
    wanted = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (offset + weight)
    assert torch.allclose(normed, wanted, rtol=1e-14, atol=0)
    leaves = (x, z, weight) if branch else (x, weight)
    assert torch.autograd.gradcheck(
        lambda x, *rest: add_norm(x, rest[0] if branch else None, rest[-1], 1e-6, offset=offset),
        leaves,
    )


def test_the_torch_reference_rounds_as_upstreams_norm():
    norm = tiny().bfloat16().model.layers[0].input_layernorm
    torch.manual_seed(0)
    nn.init.normal_(norm.weight)
    x = torch.randn(1, 9, norm.weight.numel(), dtype=torch.bfloat16)
    assert torch.equal(add_norm(x, None, norm.weight, norm.eps)[0], norm(x))


def test_a_self_check_leaves_all_generators_as_they_were(monkeypatch):
    """GPUs' as well, from which dropout draws: nobody restores those."""
    seeded, before = [], torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    one, other = (selfcheck.tiny(by_family["llama"]).lm_head.weight for _ in range(2))
    assert torch.equal(one, other) and torch.equal(torch.get_rng_state(), before)
    assert not seeded
