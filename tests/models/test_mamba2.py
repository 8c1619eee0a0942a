"""Mamba-2 hybrids: packed rows in every form, padded batches, and everything else as transformers
has it; and what is theirs alone.
"""

from __future__ import annotations

import copy
import dataclasses
from importlib import import_module
from itertools import cycle

import pytest
import torch

from hf_packfree import (
    PackedSequence,
    apply_patches,
    patch_report,
    remove_patches,
    verify_packing,
)
from hf_packfree.errors import ContractError, PatchConflict, UnsupportedInput
from hf_packfree.models.context_parallel import _refuse_whole_rows
from hf_packfree.models.mamba2 import PackedMamba2
from hf_packfree.patching.plan import op_sizes
from hf_packfree.patching.registry import FAMILIES
from tests.input_formats import ROW_FORMATS, ROWS_FORMATS, row_batch, rows_batch
from tests.integrations.marks import needs
from tests.models.padded import IGNORED, Seen, padded_batch, real_tokens, step, worst_gradient
from tests.models.padded import ROWS as SIDES
from tests.models.test_door import of_both, with_ones
from tests.models.test_generation import IDS, LEFT, WAYS, everything
from tests.models.test_packed import logits_alone
from tests.models.test_unpacked import UNPACKED, outcome
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    ROW,
    Batch,
    by_family,
    errors,
    random_weights,
    recorded,
    relative_rms,
    run,
    run_alone,
    tiny,
)

NAMES = [family.name for family in FAMILIES if "ssd" in family.mixer_ops]
pytestmark = pytest.mark.skipif(not NAMES, reason="this transformers has none of these families")


def spread(cases):
    """Each case on the next family, so that all of them together take no longer than one."""
    return list(zip(cycle(NAMES), cases)) if NAMES else []


def tiny_with(family, **fields):
    """The family's tiny model, whose config has other values in these fields."""
    row = by_family[family]
    return tiny(dataclasses.replace(row, tiny={**row.tiny, **fields}))


def mixers(model):
    """The model's Mamba-2 layers, patched or not."""
    return [module for module in model.modules() if hasattr(module, "A_log")]


def assert_exact(model, batch=None):
    """Of a model that is not patched yet."""
    batch = batch or row_batch("positions", ROW)
    weights = random_weights(batch, 128)
    alone = run_alone(model, batch, weights)
    logits, grads = errors(run(apply_patches(model), batch, weights), alone)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


@pytest.mark.compat
@pytest.mark.parametrize("family", NAMES)
def test_packed_is_per_document_and_unpatched_leaks(family, record_property):
    model, batch = tiny(family), row_batch("positions", ROW)
    weights = random_weights(batch, 128)
    alone = run_alone(model, batch, weights)
    logits, grads = errors(*of_both(run(model, batch, weights), alone))
    assert logits >= CONTROL * LOGIT_TOL and grads >= CONTROL * GRADIENT_TOL, "unpatched leaks"
    apply_patches(model)
    default_cache = Batch(batch.documents, dict(batch.inputs), batch.places)
    del default_cache.inputs["use_cache"]
    for given in (batch, with_ones(batch), default_cache):
        found = recorded(record_property, errors(run(model, given, weights), alone), model, "text")
        assert found[0] <= LOGIT_TOL and found[1] <= GRADIENT_TOL, found


FORMS = [form for form in ROW_FORMATS if "3rows" not in form]


@pytest.mark.parametrize(("family", "form"), spread(FORMS))
def test_one_row_in_every_form(family, form):
    assert_exact(tiny(family), row_batch(form, ROW))


@pytest.mark.parametrize(("family", "form"), spread(ROWS_FORMATS))
def test_several_rows(family, form):
    assert_exact(tiny(family), rows_batch(form))


@pytest.mark.parametrize("family", NAMES)
def test_eager_attention(family):
    assert_exact(tiny(family, attention="eager"))


@pytest.mark.parametrize("family", NAMES)
def test_no_document_has_influence_on_another(family):
    model, batch = apply_patches(tiny(family)).eval(), row_batch("positions", ROW)
    wanted = batch.cut(model(**batch.inputs).logits)
    ids = batch.inputs["input_ids"].clone()
    ids[0, batch.places[3][1]] += 1
    found = batch.cut(model(**{**batch.inputs, "input_ids": ids}).logits)
    # experts multiply the tokens of a row together, and round accordingly
    same = [relative_rms(one, other) <= 1e-6 for one, other in zip(found, wanted)]
    assert same == [number != 3 for number in range(len(ROW))]


@pytest.mark.parametrize(("family", "case"), spread(UNPACKED))
def test_unpacked_is_upstreams_bit_for_bit(family, case):
    model = tiny(family)
    logits, grads = outcome(model, UNPACKED[case])
    ours, our_grads = outcome(apply_patches(model, padded="upstream"), UNPACKED[case])
    assert torch.equal(ours, logits) and grads.keys() == our_grads.keys()
    assert all(torch.equal(our_grads[name], grads[name]) for name in grads)


@pytest.mark.parametrize(("family", "side"), spread([*SIDES, *SIDES]))
def test_padded_batches_run_real_tokens_alone(family, side):
    model, batch = tiny(family), padded_batch(side)
    mask = batch["attention_mask"]
    # which padding in front of it would have to predict
    batch["labels"] = batch["labels"].masked_fill(mask.cumsum(1) == 1, IGNORED)
    wanted, wanted_grads = step(model, batch)
    seen = Seen(apply_patches(model))
    found, grads = step(model, batch)
    assert seen.layer == seen.head == (1, real_tokens(batch))
    assert abs(found.loss.item() / wanted.loss.item() - 1) <= LOGIT_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    assert relative_rms(found.logits[mask == 1], wanted.logits[mask == 1]) <= LOGIT_TOL


def test_the_routers_loss_counts_real_tokens_alone():
    """Padded, packed, and by upstream: one mean."""
    model, batch = apply_patches(tiny("granitemoehybrid")), padded_batch("right")
    del batch["labels"]
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    documents = [ids[kept == 1] for ids, kept in rows]
    positions = torch.cat([torch.arange(len(ids)) for ids in documents])[None]
    packed = {"input_ids": torch.cat(documents)[None], "position_ids": positions}
    wanted = tiny("granitemoehybrid")(**batch, output_router_logits=True).aux_loss.item()
    for given in (batch, packed):
        found = model(**given, output_router_logits=True).aux_loss.item()
        assert abs(found / wanted - 1) <= LOGIT_TOL


@pytest.mark.parametrize(("family", "reentrant"), spread([True, False] * 3))
def test_checkpointing_changes_nothing(family, reentrant):
    model, batch = apply_patches(tiny(family)), row_batch("positions", ROW)
    weights = random_weights(batch, 128)
    wanted = run(model, batch, weights)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
        {"use_reentrant": reentrant}
    )
    model.enable_input_require_grads()
    found = run(model, batch, weights)
    assert all(torch.equal(one, other) for one, other in zip(found[0], wanted[0]))
    assert errors(found, wanted)[1] <= 1e-6


@needs("peft")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", NAMES)
def test_adapters_on_both_projections_train(family):
    """PEFT itself refuses `out_proj` in some families, since upstream reads past its adapter."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners import tuners_utils

    model, batch = tiny(family), row_batch("positions", ROW)
    config = LoraConfig(r=4, target_modules=["in_proj", "out_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
        adapted = get_peft_model(model, config)
    weights = random_weights(batch, 128)
    alone = run_alone(adapted, batch, weights)
    found = run(apply_patches(adapted), batch, weights)
    assert len(found[1]) == 4 * len(mixers(model))
    logits, grads = errors(found, alone)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


@pytest.mark.parametrize("family", NAMES[:1])
def test_a_convolution_that_something_wraps_is_refused(family):
    model = apply_patches(tiny(family))
    mixers(model)[0].conv1d = torch.nn.Sequential(mixers(model)[0].conv1d)
    with pytest.raises(PatchConflict, match="found conv1d wrapped in a Sequential"):
        model(**row_batch("positions", (3, 5)).inputs)


@pytest.mark.parametrize(("family", "way"), spread(WAYS))
def test_generation_is_upstreams(family, way):
    # which alone returns attention weights
    model = tiny(family, attention="eager").eval()
    ours = apply_patches(copy.deepcopy(model))
    for prompt in ({"input_ids": IDS}, {"input_ids": IDS * LEFT, "attention_mask": LEFT}):
        wanted, found = (everything(one, **prompt, **WAYS[way]) for one in (model, ours))
        assert len(found) == len(wanted) > 10
        assert all(torch.equal(one, other) for one, other in zip(found, wanted))


@pytest.mark.parametrize("family", NAMES)
def test_it_is_reported_measured_and_removed(family):
    model, row = tiny(family), by_family[family]
    before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    report = patch_report(apply_patches(apply_patches(model)))
    assert (report.family, report.patched) == (family, True)
    assert {row.causal_lm, *row.swaps} == report.swaps.keys()
    assert report.implementations["ssd"] == "torch"
    measured = verify_packing(model, lengths=(5, 17, 1, 9))
    assert measured.patched.influence == 0 and measured.unpatched.influence > 1e-3
    assert not patch_report(remove_patches(model)).patched
    assert before == [
        (name, type(module), sorted(vars(module))) for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("groups", [1, 8])
def test_any_number_of_groups(groups):
    """Also the norm's, since transformers 5.23."""
    assert_exact(tiny_with("granitemoehybrid", mamba_n_groups=groups))


@pytest.mark.parametrize("bias", [True, False])
def test_biases_of_projections_and_convolution(bias):
    assert_exact(tiny_with("bamba", mamba_conv_bias=bias, mamba_proj_bias=not bias))


def test_steps_have_limits():
    """A step that is clamped is none of padding's: documents keep to themselves all the same."""
    model = tiny("bamba")
    for mixer in mixers(model):
        # between which most of the steps are
        mixer.time_step_limit = (0.5, 0.8)
    assert_exact(model)
    loose = tiny("bamba")
    batch = row_batch("positions", ROW)
    with torch.no_grad():
        found, wanted = (one(**batch.inputs).logits for one in (model, apply_patches(loose)))
    assert relative_rms(found, wanted) > CONTROL * LOGIT_TOL


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
    assert_exact(tiny_with("falcon_h1", **fields))


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
    exact, dtype = tiny(family), torch.float32 if autocast else torch.bfloat16
    rounded, model = tiny(family).to(dtype), apply_patches(tiny(family).to(dtype))
    batch = row_batch("positions", ROW)
    with torch.no_grad():
        wanted = torch.cat(logits_alone(exact, batch))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            theirs = torch.cat(logits_alone(rounded, batch))
            found = torch.cat(batch.cut(model(**batch.inputs).logits))
    assert found.dtype == theirs.dtype
    assert relative_rms(found, wanted) <= 1.1 * relative_rms(theirs, wanted)


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
    with pytest.raises(ContractError, match=r"found a BambaMixer unlike .*A_log is \(8,\), its"):
        apply_patches(model)


def test_kinds_of_layers_as_older_releases_saved_them():
    kinds = ["mamba", "attention"] * 2
    assert_exact(tiny_with("granitemoehybrid", layer_types=kinds))


@pytest.mark.skipif("nemotron_h" not in NAMES, reason="this transformers has no Nemotron-H to pack")
def test_a_pattern_of_layers():
    """As Nemotron-H's first checkpoints have it."""
    fields = {"layers_block_type": None, "hybrid_override_pattern": "M-M*E"}
    assert_exact(tiny_with("nemotron_h", **fields))


def test_what_a_row_may_not_be():
    model = apply_patches(tiny("bamba"))
    record = PackedSequence.from_tree([3, 2, 2], [None, 0, 0])
    ids = torch.arange(7)[None] + 2
    with pytest.raises(UnsupportedInput, match="tree of shared prefixes with layers of BambaMixer"):
        model(input_ids=ids, packed_sequence=record)
    with pytest.raises(PatchConflict, match="found ssd under context parallelism, which needs"):
        _refuse_whole_rows(by_family["bamba"].ops)


def test_backends_see_the_sizes():
    sizes = op_sizes(tiny("bamba"), by_family["bamba"])
    assert (sizes["taps"], sizes["channels"]) == (4, 128 + 2 * 2 * 16)
