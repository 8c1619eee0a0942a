"""Mamba-2 hybrids: what is theirs alone; `test_hybrids.py` runs the rest."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_packfree import PackedSequence, apply_patches, patch_report, register_patches
from hf_packfree.errors import ContractError, PatchConflict, UnsupportedInput
from hf_packfree.models.context_parallel import resolve_ways
from hf_packfree.models.mamba2 import PackedMamba2
from hf_packfree.parallel import ContextParallel
from hf_packfree.patching.plan import op_sizes
from tests.input_formats import row_batch
from tests.models.forms import half_precision, logits_alone
from tests.models.padded import padded_batch
from tests.models.test_generation import IDS
from tests.models.test_hybrids import SSD as NAMES
from tests.support import (
    CONTROL,
    LOGIT_TOL,
    ROW,
    assert_patching_is_exact,
    by_family,
    errors,
    random_weights,
    relative_rms,
    run,
    run_alone,
    slow_decay,
    tiny,
)

pytestmark = pytest.mark.skipif(not NAMES, reason="this transformers has none of these families")


def tiny_with(family, **fields):
    """The family's tiny model, whose config has other values in these fields."""
    row = by_family[family]
    return tiny(dataclasses.replace(row, tiny={**row.tiny, **fields}))


def mixers(model):
    """The model's Mamba-2 layers, patched or not."""
    return [module for module in model.modules() if hasattr(module, "A_log")]


@pytest.mark.skipif("mamba2" not in NAMES, reason="this transformers has no Mamba-2 to pack")
def test_a_head_that_hands_nothing_on():
    """Pure Mamba-2: its loss, whose targets are documents', its text model alone, and text that it
    generates.
    """
    model, batch = tiny("mamba2"), row_batch("positions", ROW)
    labels = torch.cat([document for document in batch.documents])[None]
    alone = [
        model(input_ids=one[None], labels=one[None]).loss for one in batch.documents if len(one) > 1
    ]
    counts = [len(one) - 1 for one in batch.documents if len(one) > 1]
    wanted = sum(loss * count for loss, count in zip(alone, counts)) / sum(counts)
    hidden = torch.cat([model.backbone(one[None]).last_hidden_state for one in batch.documents], 1)
    text = model.generate(IDS, max_new_tokens=8, do_sample=False)
    apply_patches(model)
    found = model(**batch.inputs, labels=labels).loss
    assert abs(found.item() / wanted.item() - 1) <= LOGIT_TOL
    assert relative_rms(model.backbone(**batch.inputs).last_hidden_state, hidden) <= LOGIT_TOL
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), text)


def with_forward(where):
    """Pure Mamba-2 whose head has a forward of its own, which hands nothing on either."""
    model = tiny("mamba2")
    forward = type(model).forward
    if where == "on the instance":
        model.forward = lambda *args, **kwargs: forward(model, *args, **kwargs)
    else:
        own = {"forward": lambda self, *args, **kwargs: forward(self, *args, **kwargs)}
        model.__class__ = type("Mine", (type(model),), own)
    return model


@pytest.mark.skipif("mamba2" not in NAMES, reason="this transformers has no Mamba-2 to pack")
@pytest.mark.parametrize("where", ["on the instance", "of its class"])
def test_a_head_with_a_forward_of_its_own_would_lose_the_boundaries(where):
    model, batch = with_forward(where), row_batch("positions", ROW)
    hidden = torch.cat([model.backbone(one[None]).last_hidden_state for one in batch.documents], 1)
    with pytest.raises(PatchConflict, match=r"would leak; .* apply_patches\(model.backbone\)"):
        apply_patches(model)
    assert not patch_report(model).patched
    # as a forward that hands them on calls it
    apply_patches(model.backbone)
    assert relative_rms(model.backbone(**batch.inputs).last_hidden_state, hidden) <= LOGIT_TOL


@pytest.mark.skipif("mamba2" not in NAMES, reason="this transformers has no Mamba-2 to pack")
def test_such_a_head_is_refused_while_it_is_built_and_named_where_it_comes_later():
    kind = type(with_forward("of its class"))
    with register_patches(), pytest.raises(PatchConflict, match="found a Mine with a forward"):
        kind(by_family["mamba2"].tiny_config())
    model = apply_patches(tiny("mamba2"))
    model.forward = lambda *args, **kwargs: None
    (said,) = patch_report(model).left_alone.values()
    assert "documents of packed rows read each other" in said


@pytest.mark.compat(kernels=False)
@pytest.mark.parametrize("groups", [1, 8])
def test_any_number_of_groups(groups):
    """Also the norm's, since transformers 5.23."""
    assert_patching_is_exact(
        tiny_with("granitemoehybrid", mamba_n_groups=groups), row_batch("positions", ROW)
    )


@pytest.mark.parametrize("bias", [True, False])
def test_biases_of_projections_and_convolution(bias):
    assert_patching_is_exact(
        tiny_with("bamba", mamba_conv_bias=bias, mamba_proj_bias=not bias),
        row_batch("positions", ROW),
    )


def test_biases_of_padding_in_front_are_not_read():
    """Transformers' convolution reads them, so that documents are not what they are alone."""
    model, batch = tiny_with("bamba", mamba_proj_bias=True), padded_batch("left")
    with torch.no_grad():
        for mixer in mixers(model):
            mixer.in_proj.bias.normal_()
        real = batch["attention_mask"] == 1
        rows = zip(batch["input_ids"], real)
        alone = torch.cat([model(input_ids=ids[kept][None]).logits[0] for ids, kept in rows])
        assert relative_rms(model(**batch).logits[real], alone) > CONTROL * LOGIT_TOL
        found = apply_patches(model)(**batch).logits[real]
    assert relative_rms(found, alone) <= LOGIT_TOL


def test_the_z_loss_counts_real_tokens_alone():
    model, batch = tiny_with("bamba", z_loss_coefficient=0.5), padded_batch("right")
    real = batch["attention_mask"] == 1
    wanted = model(**batch)
    counted = wanted.logits[real].logsumexp(-1).pow(2).mean()
    every = wanted.logits.logsumexp(-1).pow(2).mean()
    found = apply_patches(model)(**batch)
    assert abs(found.loss - (wanted.loss + 0.5 * (counted - every))) <= LOGIT_TOL * wanted.loss


def test_steps_have_limits():
    """A step that is clamped is none of padding's: documents keep to themselves all the same."""
    model = tiny("bamba")
    for mixer in mixers(model):
        # between which most of the steps are
        mixer.time_step_limit = (0.5, 0.8)
    assert_patching_is_exact(model, row_batch("positions", ROW))
    loose = tiny("bamba")
    batch = row_batch("positions", ROW)
    with torch.no_grad():
        found, wanted = (one(**batch.inputs).logits for one in (model, apply_patches(loose)))
    assert relative_rms(found, wanted) > CONTROL * LOGIT_TOL


@pytest.mark.parametrize("family", [name for name in ("nemotron_h", "zamba2") if name in NAMES])
def test_the_least_step_is_the_configs(family):
    """It is what the mixer's limits begin with, and most of the steps are below this one."""
    batch = row_batch("positions", ROW)
    model = tiny_with(family, time_step_min=0.5)
    assert {mixer.time_step_limit[0] for mixer in mixers(model)} == {0.5}
    assert_patching_is_exact(model, batch)
    with torch.no_grad():
        loose = apply_patches(tiny(family))(**batch.inputs).logits
        assert relative_rms(model(**batch.inputs).logits, loose) > CONTROL * LOGIT_TOL


@pytest.mark.parametrize("experts", [0, 4])
def test_granite_with_rotary_embeddings_and_with_experts_or_none(experts):
    """The tiny config has experts and no positions at all."""
    fields = {"position_embedding_type": "rope", "num_local_experts": experts}
    model = tiny_with("granitemoehybrid", **fields)
    assert model.model.rotary_emb is not None
    assert (getattr(model.model.layers[0], "block_sparse_moe", None) is not None) == (experts > 0)
    assert_patching_is_exact(model, row_batch("positions", ROW))


@pytest.mark.skipif("falcon_h1" not in NAMES, reason="this transformers has no Falcon-H1 to pack")
@pytest.mark.parametrize(
    "fields",
    [
        {"mamba_rms_norm": False},
        {"mamba_norm_before_gate": True},
        {"mamba_norm_before_gate": False, "mamba_d_ssm": 64, "mamba_d_head": 8},
    ],
    ids=["no norm", "norm first", "gate first"],
)
def test_the_norm_is_upstreams(fields):
    assert_patching_is_exact(tiny_with("falcon_h1", **fields), row_batch("positions", ROW))


@pytest.mark.skipif("falcon_h1" not in NAMES, reason="this transformers has no Falcon-H1 to pack")
def test_every_multiplier_counts():
    """One that the packed branch forgot would change unpacked rows alone."""
    batch = row_batch("positions", ROW)
    with torch.no_grad():
        usual = apply_patches(tiny("falcon_h1"))(**batch.inputs).logits
        for number in range(5):
            multipliers = list(by_family["falcon_h1"].tiny["ssm_multipliers"])
            multipliers[number] *= 1.5
            model = tiny_with("falcon_h1", ssm_multipliers=multipliers)
            wanted = torch.cat(logits_alone(model, batch))
            found = apply_patches(model)(**batch.inputs).logits
            assert relative_rms(torch.cat(batch.cut(found)), wanted) <= LOGIT_TOL
            assert relative_rms(found, usual) > CONTROL * LOGIT_TOL


@pytest.mark.parametrize("family", NAMES)
def test_packed_rows_come_before_upstreams_fused_kernel(family, monkeypatch):
    """Which convolves, scans and projects at once, where mamba-ssm is installed."""
    upstream = import_module(by_family[family].upstream)
    fused = "mamba2_split_conv1d_scan_combined"
    if not hasattr(upstream, fused):
        pytest.skip("this release looks for the kernel elsewhere")

    def entered(*args, **kwargs):
        raise AssertionError("the fused kernel")

    model, batch = tiny(family), row_batch("positions", (3, 5))
    monkeypatch.setattr(upstream, fused, entered)
    with pytest.raises(AssertionError, match="the fused kernel"):
        model(**batch.inputs)
    apply_patches(model)(**batch.inputs).logits.sum().backward()
    assert all(mixer.out_proj.weight.grad.any() for mixer in mixers(model))


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("family", [name for name in ("bamba", "falcon_h1") if name in NAMES])
def test_half_precision_rounds_no_worse_than_upstream(family, autocast):
    """Where no rounding sends a token to another expert. Measured: .86 to 1.0 times upstream's."""
    dtype = torch.float32 if autocast else torch.bfloat16
    rounded, model = tiny(family).to(dtype), apply_patches(tiny(family).to(dtype))
    batches = [row_batch("positions", ROW)]
    ours, upstreams = half_precision(tiny(family), rounded, model, batches, autocast)
    assert ours <= 1.1 * upstreams, (ours, upstreams)


def test_fp64_is_exact():
    """But for upstream's own scan, whose arithmetic is fp32."""
    model, batch = tiny("bamba").double(), row_batch("positions", ROW)
    weights = [weight.double() for weight in random_weights(batch, 128)]
    alone = run_alone(model, batch, weights)
    assert errors(run(apply_patches(model), batch, weights), alone)[0] <= 1e-6


@pytest.mark.parametrize("family", NAMES)
def test_weights_that_other_code_reads_are_untouched(family):
    """Tied ones too: Zamba2's hybrid layers share theirs."""
    model = tiny(family)
    before = [(name, type(p), id(p)) for name, p in model.named_parameters()]
    classes = [type(module).__name__ for module in model.modules()]
    apply_patches(model)
    assert before == [(name, type(p), id(p)) for name, p in model.named_parameters()]
    assert classes == [type(module).__name__ for module in model.modules()]
    swapped = [mixer for mixer in mixers(model) if isinstance(mixer, PackedMamba2)]
    assert swapped == mixers(model) != []


def test_a_mixer_of_other_sizes_than_its_checkpoints_is_refused():
    model = tiny("bamba")
    mixers(model)[0].num_heads = 4
    wanted = r"found a BambaMixer unlike .*A_log is \(8,\) instead of \(4,\)"
    with pytest.raises(ContractError, match=wanted):
        apply_patches(model)


SAVED = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
}
"""By transformers 5.4 and 5.12."""


@pytest.mark.parametrize("family", [name for name in SAVED if name in NAMES])
def test_kinds_of_layers_as_older_releases_saved_them(family, tmp_path):
    """They are read as the same layers as today's names."""
    fields = by_family[family].tiny_config().to_dict()
    for name in ("layer_types", "layers_block_type"):
        fields.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(fields | SAVED[family], default=str))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    kinds = [type(module) for module in model.modules()]
    assert kinds == [type(module) for module in tiny(family).modules()]
    assert_patching_is_exact(slow_decay(model).train(), row_batch("positions", ROW))


@pytest.mark.skipif("nemotron_h" not in NAMES, reason="this transformers has no Nemotron-H to pack")
def test_a_pattern_of_layers():
    """As Nemotron-H's first checkpoints have it."""
    fields = {"layers_block_type": None, "hybrid_override_pattern": "M-M*E"}
    assert_patching_is_exact(tiny_with("nemotron_h", **fields), row_batch("positions", ROW))


def test_what_a_row_may_not_be():
    model = apply_patches(tiny("bamba"))
    record = PackedSequence.from_tree([3, 2, 2], [None, 0, 0])
    ids = torch.arange(7)[None] + 2
    with pytest.raises(UnsupportedInput, match="tree of shared prefixes with layers of BambaMixer"):
        model(input_ids=ids, packed_sequence=record)
    with pytest.raises(PatchConflict, match="found ssd under context parallelism, which needs"):
        resolve_ways(None, {}, ContextParallel(None), by_family["bamba"].ops, {})


def test_backends_see_the_sizes():
    sizes = op_sizes(tiny("bamba"), by_family["bamba"])
    assert (sizes["taps"], sizes["channels"]) == (4, 128 + 2 * 2 * 16)
