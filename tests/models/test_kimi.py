"""Kimi Delta Attention beside multi-head latent attention: packed rows in every form, padded batches,
and everything else as transformers has it.
"""

from __future__ import annotations

import functools

import accelerate
import pytest
import torch

from hf_packfree import (
    PackedSequence,
    apply_patches,
    patch_report,
    remove_patches,
    verify_packing,
)
from hf_packfree.errors import ContractError, LeakDetected, PatchConflict, UnsupportedInput
from hf_packfree.ops.backend import Target
from hf_packfree.ops.table import OPS
from hf_packfree.patching.plan import op_sizes
from tests.input_formats import ROW_FORMATS, ROWS, ROWS_FORMATS, row_batch, rows_batch
from tests.models.padded import Seen, padded_batch, real_tokens, step, worst_gradient
from tests.models.test_door import of_both, with_ones
from tests.models.test_generation import IDS, LEFT, everything
from tests.models.test_unpacked import UNPACKED, outcome
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    ROW,
    by_family,
    documents,
    errors,
    random_weights,
    recorded,
    relative_rms,
    run,
    run_alone,
    tiny,
)

NAMES = [name for name in ("kimi_linear", "bailing_hybrid") if name in by_family]
SHORT = (5, 33, 1, 70)
FORMS = [form for form in ROW_FORMATS if "3rows" not in form]
pytestmark = pytest.mark.skipif(not NAMES, reason="transformers has none of these families")


def spread(cases):
    """Every case with one family, the families in turn."""
    return [(NAMES[number % len(NAMES)], case) for number, case in enumerate(cases) if NAMES]


@functools.cache
def alone(family, lengths, dtype=torch.float32):
    """Logits and gradients of documents of these lengths, one by one, unpatched."""
    batch = row_batch("positions", lengths)
    weights = [weight.to(dtype) for weight in random_weights(batch, 128)]
    return run_alone(tiny_in(family, dtype), batch, weights)


def tiny_in(family, dtype):
    """Experts one at a time, where the product of all takes no float64."""
    model = tiny(family).to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    return model


def assert_exact(model, family, batch, lengths, record=None):
    found = errors(run(model, batch, random_weights(batch, 128)), alone(family, lengths))
    if record is not None:
        recorded(record, found, model, "text")
    assert found[0] <= LOGIT_TOL and found[1] <= GRADIENT_TOL, found


@pytest.mark.compat
@pytest.mark.parametrize("family", NAMES)
def test_one_row_is_exact_and_leaks_unpatched(family, record_property):
    model, batch = tiny(family), row_batch("positions", ROW)
    weights = random_weights(batch, 128)
    for given in (batch, with_ones(batch)):
        logits, grads = errors(*of_both(run(model, given, weights), alone(family, ROW)))
        assert logits >= CONTROL * LOGIT_TOL and grads >= CONTROL * GRADIENT_TOL, "unpatched leaks"
    assert_exact(apply_patches(model), family, batch, ROW, record_property)


@pytest.mark.parametrize(("family", "form"), spread(FORMS))
def test_one_row_in_every_form(family, form):
    assert_exact(apply_patches(tiny(family)), family, row_batch(form, SHORT), SHORT)


@pytest.mark.parametrize(("family", "form"), spread(ROWS_FORMATS))
def test_several_rows(family, form):
    lengths = tuple(length for row in ROWS for length in row)
    assert_exact(apply_patches(tiny(family)), family, rows_batch(form), lengths)


@pytest.mark.parametrize("family", NAMES)
def test_attention_that_was_loaded_as_eager(family):
    model = apply_patches(tiny(family, attention="eager"))
    assert_exact(model, family, row_batch("positions", SHORT), SHORT)


@pytest.mark.parametrize("family", NAMES)
def test_fp64_is_as_near_as_upstreams_fp32_parts(family):
    """Its norms, routers, gates and delta rule compute in fp32 whatever the model's dtype."""
    model, batch = tiny_in(family, torch.float64), row_batch("positions", SHORT)
    weights = [weight.double() for weight in random_weights(batch, 128)]
    found = errors(run(apply_patches(model), batch, weights), alone(family, SHORT, torch.float64))
    assert found[0] <= 1e-6 and found[1] <= 1e-5, found


@pytest.mark.parametrize("family", NAMES)
def test_no_document_has_influence_on_another(family):
    model, batch = apply_patches(tiny(family)).eval(), row_batch("positions", ROW)
    wanted = batch.cut(model(**batch.inputs).logits)
    ids = batch.inputs["input_ids"].clone()
    changed = batch.places[3][1]
    ids[0, changed] = ids[0, changed].roll(1)
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


@pytest.mark.parametrize("family", NAMES)
def test_unpacked_rows_in_our_layers(family):
    ids = torch.stack(documents((70, 70)))
    model = tiny(family)
    wanted, wanted_grads = outcome(model, {"input_ids": ids})
    found, grads = outcome(apply_patches(model, unpacked="native"), {"input_ids": ids})
    assert relative_rms(found, wanted) <= LOGIT_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL


@pytest.mark.parametrize(("family", "side"), spread(["right", "left", "both", "an empty row"]))
def test_padded_batches_run_real_tokens_alone(family, side):
    model, batch = tiny(family), padded_batch(side)
    mask = batch["attention_mask"]
    batch["labels"] = batch["labels"].masked_fill(mask.cumsum(1) == 1, -100)
    wanted, wanted_grads = step(model, batch)
    seen = Seen(apply_patches(model))
    found, grads = step(model, batch)
    assert seen.layer == seen.head == (1, real_tokens(batch))
    assert abs(found.loss.item() / wanted.loss.item() - 1) <= LOGIT_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    assert relative_rms(found.logits[mask == 1], wanted.logits[mask == 1]) <= LOGIT_TOL


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", NAMES)
def test_checkpointing_changes_nothing(family, reentrant):
    model, batch = apply_patches(tiny(family)), row_batch("positions", SHORT)
    weights = random_weights(batch, 128)
    wanted = run(model, batch, weights)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = run(model, batch, weights)
    assert all(torch.equal(one, other) for one, other in zip(found[0], wanted[0]))
    assert errors(found, wanted)[1] <= 1e-6


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("family", NAMES)
def test_half_precision_rounds_no_worse_than_upstream(family, autocast):
    """Averaged over rows: a token whose rounding sends it to another expert weighs more than the
    rest.
    """
    ours = upstreams = 0.0
    exact, rounded = tiny(family), in_bfloat16(tiny(family), autocast)
    model = apply_patches(in_bfloat16(tiny(family), autocast))
    for seed in range(1, 7):
        batch = row_batch("positions", SHORT, seed=seed)
        with torch.no_grad():
            wanted = each_alone(exact, batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                theirs, found = each_alone(rounded, batch), model(**batch.inputs).logits[0]
        assert found.dtype == theirs.dtype
        ours += relative_rms(found, wanted)
        upstreams += relative_rms(theirs, wanted)
    assert ours <= 1.5 * upstreams, (ours, upstreams)


def in_bfloat16(model, autocast):
    """As `from_pretrained(dtype=torch.bfloat16)` loads it; whole where autocast rounds."""
    if autocast:
        return model
    wide = model._keep_in_fp32_modules_strict
    for name, parameter in model.named_parameters():
        if not any(part in name for part in wide):
            parameter.data = parameter.data.bfloat16()
    return model


def each_alone(model, batch):
    return torch.cat([model(input_ids=part[None]).logits[0] for part in batch.documents])


@pytest.mark.skipif("bailing_hybrid" not in by_family, reason="transformers has it from 5.20 on")
def test_a_convolution_and_gates_in_fp32_in_a_bfloat16_model():
    """A layer's output has upstream's dtype, and the convolution is one in fp32: rounding its weights
    would be seen.
    """
    model = in_bfloat16(tiny("bailing_hybrid"), False)
    mixer = model.model.layers[0].self_attn
    assert mixer.conv1d.weight.dtype == mixer.forget_gate.A_log.dtype == torch.float32
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    wanted = mixer(x)
    apply_patches(model)

    found = mixer(x, packed_sequence=PackedSequence.from_lengths([40]))
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert relative_rms(found, wanted) <= 2e-3
    mixer.conv1d.weight.data = mixer.conv1d.weight.data.bfloat16().float()
    rounded = mixer(x, packed_sequence=PackedSequence.from_lengths([40]))
    assert relative_rms(rounded, wanted) > 2e-3


# PEFT asks by the older name
@pytest.mark.filterwarnings("default:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("family", NAMES)
def test_lora_trains(family):
    peft = pytest.importorskip("peft")
    model, batch = tiny(family), row_batch("positions", SHORT)
    targets = ["q_proj", "o_proj", "b_proj"]
    torch.manual_seed(0)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    )
    weights = random_weights(batch, 128)
    wanted = run_alone(model, batch, weights)
    found = run(apply_patches(model), batch, weights)
    assert sum("lora_A" in name for name in found[1]) == 2 * 3 + 2 * 2
    logits, grads = errors(found, wanted)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL


def test_a_wrapped_convolution_is_refused():
    """Before and after patching: its weights are read, so that an adapter on it would not train."""
    model = tiny(NAMES[0])
    layer = model.model.layers[0].self_attn
    own, layer.conv1d = layer.conv1d, torch.nn.Sequential(layer.conv1d)
    with pytest.raises(ContractError, match="unlike its family's checkpoints"):
        apply_patches(model)
    layer.conv1d = own
    apply_patches(model)
    layer.conv1d = torch.nn.Sequential(own)
    with pytest.raises(PatchConflict, match="found conv1d wrapped in a Sequential"):
        model(**row_batch("positions", SHORT).inputs)


@pytest.mark.parametrize("family", NAMES)
def test_offloaded_weights_are_brought_in(family):
    """The convolution's too, which are read without a call of it."""
    inputs = row_batch("positions", SHORT).inputs
    model = apply_patches(tiny(family)).eval()
    with torch.no_grad():
        wanted = model(**inputs).logits
        offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.model.layers[0].self_attn.conv1d.weight.is_meta
        assert torch.equal(offloaded(**inputs).logits, wanted)


@pytest.mark.parametrize("family", NAMES)
def test_generation_is_upstreams(family):
    model = tiny(family, attention="eager").eval()
    prompt = {"input_ids": IDS * LEFT, "attention_mask": LEFT}
    wanted = everything(model, **prompt)
    found = everything(apply_patches(model), **prompt)
    assert len(found) == len(wanted) > 10
    assert all(torch.equal(one, other) for one, other in zip(found, wanted))


@pytest.mark.parametrize("family", NAMES)
def test_patches_are_named_and_go(family):
    model = tiny(family)
    classes = [type(module) for module in model.modules()]
    report = patch_report(apply_patches(model))
    assert {"conv", "kda", "attention", "loss"} == report.implementations.keys()
    swapped = [name for name in report.swaps if "Attention" in name]
    assert len(swapped) == 2 and f"2 {swapped[0]}" in str(report)
    assert "recurrent state" in by_family[family].swaps[swapped[0]]
    remove_patches(model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("family", NAMES)
def test_it_is_measured(family):
    model = tiny(family)
    with pytest.raises(LeakDetected, match="documents that influence each other"):
        verify_packing(model)
    found = verify_packing(apply_patches(model)).patched
    assert found.logits <= LOGIT_TOL and found.gradients <= GRADIENT_TOL and found.influence == 0


def test_a_tree_of_shared_prefixes_is_refused():

    model = apply_patches(tiny(NAMES[0]))
    tree = PackedSequence.from_tree([4, 3, 2], [None, 0, 0])
    with pytest.raises(UnsupportedInput, match="tree of shared prefixes"):
        model(input_ids=torch.ones(1, 9, dtype=torch.long), packed_sequence=tree)


@pytest.mark.parametrize("family", NAMES)
def test_kernels_without_values_of_another_size_are_ruled_out(family):
    sizes = op_sizes(tiny(family), by_family[family])
    assert sizes["head_size"] == 24 and sizes["other_value_size"] == 16 == sizes["key_size"]
    target = Target("cuda", (9, 0), sizes=sizes)
    reasons = {name: one.unusable(target) for name, one in OPS["attention"].backends.items()}
    lacks = "its kernels lack values of another size than keys"
    assert reasons == {"triton": lacks, "varlen": None, "torch": None}
