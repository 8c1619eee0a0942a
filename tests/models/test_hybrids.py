"""Families made from upstream's whose mixers are not all attention: packed rows in every form,
padded batches, and everything else as transformers has it.

Every such family of the registry joins by itself; what only Mamba-2 hybrids have is in
`test_mamba2.py`, what only Kimi Delta Attention has in `test_kimi.py`. Trees of shared prefixes run
in `test_tree.py`.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle

import pytest
import torch
from packaging.version import Version
from torch import nn

from hf_packfree import apply_patches, patch_report, remove_patches, verify_packing
from hf_packfree.errors import ContractError, PatchConflict, UnsupportedInput, UnsupportedModel
from hf_packfree.models import compat
from hf_packfree.ops.backend import Target
from hf_packfree.ops.conv import OP as CONV
from hf_packfree.patching import registry
from hf_packfree.patching.plan import op_sizes
from hf_packfree.patching.registry import FAMILIES
from hf_packfree.patching.registry import ROWS as TABLE
from tests.input_formats import ROW_FORMATS, ROWS, ROWS_FORMATS, row_batch, rows_batch
from tests.integrations.marks import needs
from tests.models.forms import (
    assert_checkpointing_changes_nothing,
    assert_exact_in_fp64,
    assert_no_influence,
)
from tests.models.padded import IGNORED, Seen, padded_batch, real_tokens
from tests.models.padded import ROWS as SIDES
from tests.models.test_door import of_both, with_ones
from tests.models.test_generation import IDS, LEFT, WAYS, everything
from tests.models.test_unpacked import UNPACKED, assert_upstreams_bits, outcome
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    ROW,
    Batch,
    assert_patching_is_exact,
    by_family,
    documents_alone,
    errors,
    random_weights,
    recorded,
    relative_rms,
    run,
    run_alone,
    slow_decay,
    step,
    tiny,
    worst_gradient,
)

pytestmark = pytest.mark.usefixtures("lfm3_convolves_in_torch")
FOUND = [row for row in FAMILIES if row.made_from_upstream and {*row.mixer_ops} != {"attention"}]
SSD, KDA = ([row.name for row in FOUND if op in row.mixer_ops] for op in ("ssd", "kda"))
OTHERS = [row.name for row in FOUND if row.name not in (*SSD, *KDA)]
NAMES = [*OTHERS, *SSD, *KDA]
ATTENDING = [row.name for row in FOUND if "attention" in row.mixer_ops]
EXPERTS = [
    name for name in NAMES if "router_aux_loss_coef" in by_family[name].tiny_config().to_dict()
]
"""Whose routers have a loss."""


def is_there(row) -> bool:
    """Whether the installed transformers has the family at all."""
    return find_spec(row.upstream.rpartition(".")[0]) is not None


def spread(*cases):
    """Each case on the next family of each kind, so that a kind takes no longer than one family."""
    return list(dict.fromkeys(p for kind in (OTHERS, SSD, KDA) for p in zip(cycle(kind), cases)))


def upstreams(cases, names=NAMES):
    """Each case on two families: what is upstream's is so by the door, whatever the mixers are."""
    return list(dict.fromkeys(zip(cycle(names), [*cases, *reversed(cases)])))


def with_the_default_cache(batch: Batch) -> Batch:
    """What a plain call says, outside a Trainer: the config's use_cache is on."""
    inputs = {name: value for name, value in batch.inputs.items() if name != "use_cache"}
    return Batch(batch.documents, inputs, batch.places)


@pytest.mark.compat
@pytest.mark.parametrize("family", NAMES)
def test_packed_is_per_document_and_unpatched_leaks(family, record_property):
    model, batch = tiny(family), row_batch("positions", ROW)
    weights, wanted = random_weights(batch, 128), documents_alone(family, ROW)
    for given in (batch, with_ones(batch)):
        logits, grads = errors(*of_both(run(model, given, weights), wanted))
        assert logits >= CONTROL * LOGIT_TOL and grads >= CONTROL * GRADIENT_TOL, "unpatched leaks"
    apply_patches(model)
    for given in (batch, with_ones(batch), with_the_default_cache(batch)):
        found = recorded(record_property, errors(run(model, given, weights), wanted), model, "text")
        assert found[0] <= LOGIT_TOL and found[1] <= GRADIENT_TOL, found


@pytest.mark.compat
@pytest.mark.parametrize(
    "row",
    [row for row in TABLE if row.floor != "5.2.0" and is_there(row)],
    ids=lambda row: row.name,
)
def test_before_its_floor_it_is_refused(row, monkeypatch):
    """By the release to install; where the installed one is late enough, as if it were not."""
    model = tiny(row)
    if row.served:
        monkeypatch.setattr(compat, "RELEASE", Version("5.2.0"))
        monkeypatch.setattr(registry, "FAMILIES", [other for other in TABLE if other.served])
    classes = [type(module) for module in model.modules()]
    wanted = re.escape(f"{row.floor} or later; pip install -U 'transformers>={row.floor}'")
    with pytest.raises(UnsupportedModel, match=f"found {row.name} on .*transformers {wanted}"):
        apply_patches(model)
    assert classes == [type(module) for module in model.modules()]


@pytest.mark.parametrize(
    ("family", "form"), spread(*(form for form in ROW_FORMATS if "3rows" not in form))
)
def test_one_row_in_every_form(family, form):
    assert_patching_is_exact(tiny(family), row_batch(form, ROW), documents_alone(family, ROW))


@pytest.mark.parametrize("family", NAMES)
def test_eager_attention(family):
    model = tiny(family, attention="eager")
    assert_patching_is_exact(model, row_batch("positions", ROW), documents_alone(family, ROW))


@pytest.mark.parametrize("family", NAMES)
def test_fp64_is_exact(family, widened):
    assert_exact_in_fp64(family, row_batch("positions", ROW))


@pytest.mark.parametrize(("family", "form"), spread(*ROWS_FORMATS))
def test_several_rows(family, form):
    lengths = tuple(length for row in ROWS for length in row)
    assert_patching_is_exact(tiny(family), rows_batch(form), documents_alone(family, lengths))


@pytest.mark.parametrize("family", NAMES)
def test_no_document_has_influence_on_another(family):
    assert_no_influence(family, row_batch("positions", ROW), number=3)


@pytest.mark.parametrize(("family", "case"), upstreams(UNPACKED))
def test_unpacked_is_upstreams_bit_for_bit(family, case):
    assert_upstreams_bits(tiny(family), UNPACKED[case])


@pytest.mark.parametrize("family", NAMES)
def test_unpacked_rows_in_our_mixers(family):
    model, given = tiny(family), UNPACKED["ids"]
    wanted, wanted_grads = outcome(model, given)
    found, grads = outcome(apply_patches(model, unpacked="native"), given)
    assert relative_rms(found, wanted) <= LOGIT_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL


@pytest.mark.parametrize(("family", "side"), spread(*SIDES, *SIDES))
def test_padded_batches_run_real_tokens_documents_alone(family, side):
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


@pytest.mark.parametrize("family", OTHERS)
def test_padding_in_front_of_a_document_may_predict_it(family):
    model, batch = tiny(family), padded_batch("left")
    wanted, wanted_grads = step(model, batch)
    found, grads = step(apply_patches(model), batch)
    assert abs(found.loss.item() / wanted.loss.item() - 1) <= LOGIT_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL


@pytest.mark.parametrize("family", EXPERTS)
def test_the_routers_loss_counts_real_tokens_alone(family):
    """Packed, padded, and each document of a padded row in a row of its own: one mean."""
    model, batch = apply_patches(tiny(family)), padded_batch("right")
    del batch["labels"]
    documents = [ids[kept == 1] for ids, kept in zip(batch["input_ids"], batch["attention_mask"])]
    packed = {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids in documents])[None],
    }
    wanted = tiny(family)(**batch, output_router_logits=True).aux_loss.item()
    for given in (batch, packed):
        found = model(**given, output_router_logits=True).aux_loss.item()
        assert abs(found / wanted - 1) <= LOGIT_TOL


@pytest.mark.parametrize(("family", "reentrant"), spread(*[True, False] * 3))
def test_checkpointing_changes_nothing(family, reentrant):
    assert_checkpointing_changes_nothing(family, row_batch("positions", ROW), reentrant)


def mixers_of(model, family, *, attention=False):
    """Return the names of the model's mixers, with the mixers."""
    rows = by_family[family].mixers
    names = {mixer.cls for mixer in rows if attention or mixer.ops != ("attention",)}
    return [(name, part) for name, part in model.named_modules() if type(part).__name__ in names]


@needs("peft")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", NAMES)
def test_adapters_on_every_projection_of_a_mixer_train(family, monkeypatch):
    """Upstream's fused kernels would read some projections past their adapters: PEFT refuses some
    of these for that.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners import tuners_utils

    monkeypatch.setattr(tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
    model, batch = tiny(family), row_batch("positions", (5, 65, 1, 3))
    targets = [
        f"{name}.{part}"
        # whose attention has projections of its own kind, too
        for name, mixer in mixers_of(model, family, attention=family in KDA)
        for part, layer in mixer.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    adapted = get_peft_model(model, config)
    weights = random_weights(batch, 128)
    wanted = run_alone(adapted, batch, weights)
    found = run(apply_patches(adapted), batch, weights)
    assert len(targets) > 1 and len(found[1]) == 2 * len(targets)
    logits, grads = errors(found, wanted)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


@pytest.mark.parametrize("family", NAMES)
def test_a_wrapped_convolution_is_refused(family):
    """Before and after patching: its weights are read past whatever wraps it."""
    model, batch = tiny(family), row_batch("positions", (3, 5))
    _, mixer = mixers_of(model, family)[0]
    conv = next(part for part, layer in mixer.named_children() if isinstance(layer, nn.Conv1d))
    own, wrapped = getattr(mixer, conv), nn.Sequential(getattr(mixer, conv))
    setattr(mixer, conv, wrapped)
    with pytest.raises(ContractError, match="unlike its family's checkpoints"):
        apply_patches(model)
    setattr(mixer, conv, own)
    apply_patches(model)
    setattr(mixer, conv, wrapped)
    with pytest.raises(
        PatchConflict, match=f"found {conv} wrapped in a Sequential .*; leave {conv} out"
    ):
        model(**batch.inputs)


@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "kimi_linear", "olmo_hybrid"])
def test_another_activation_is_refused_by_its_name(family):
    if family not in by_family:
        pytest.skip("a family of later releases")
    config = by_family[family].tiny_config()
    config.hidden_act = "gelu"
    with pytest.raises(ContractError, match="checkpoints: activation is gelu instead of silu"):
        apply_patches(
            getattr(import_module(by_family[family].upstream), by_family[family].causal_lm)(config)
        )


@pytest.mark.skipif("lfm3" not in NAMES, reason="this transformers has no LFM3 to pack")
def test_rotary_types_of_kinds_that_no_layer_has_are_not_asked():
    """LFM3 has parameters for two kinds of attention, and may have convolutions alone."""
    model = tiny(replace(by_family["lfm3"], tiny={"layer_types": ["conv"] * 4}))
    assert_patching_is_exact(model, row_batch("positions", ROW))


@pytest.mark.parametrize("family", NAMES)
def test_an_offloaded_convolution_is_brought_in(family):
    from accelerate import cpu_offload

    batch, wanted = row_batch("positions", ROW), apply_patches(tiny(family)).eval()
    model = apply_patches(tiny(family)).eval()
    cpu_offload(model, execution_device="cpu")
    assert mixers_of(model, family)[0][1]
    with torch.no_grad():
        assert torch.equal(model(**batch.inputs).logits, wanted(**batch.inputs).logits)


@pytest.mark.parametrize(("family", "way"), upstreams(WAYS, ATTENDING))
def test_generation_is_upstreams(family, way):
    # which alone returns attention weights
    model = tiny(family, attention="eager").eval()
    for prompt in ({"input_ids": IDS}, {"input_ids": IDS * LEFT, "attention_mask": LEFT}):
        wanted = everything(model, **prompt, **WAYS[way])
        found = everything(apply_patches(copy.deepcopy(model)), **prompt, **WAYS[way])
        assert len(wanted) > 10 and len(found) == len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted))


@pytest.mark.parametrize("family", NAMES)
def test_it_is_reported_measured_and_removed(family):
    model, row = tiny(family), by_family[family]
    before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    weights = copy.deepcopy(model.state_dict())
    report = patch_report(apply_patches(apply_patches(model)))
    assert (report.family, report.patched) == (family, True)
    assert {row.causal_lm, *row.swaps} == report.swaps.keys()
    for (name, before_it, _), module in zip(before, model.modules(), strict=True):
        swapped = before_it.__name__ in report.swaps
        assert (type(module) is not before_it) == swapped, name
    assert {*row.mixer_ops, "loss"} == report.implementations.keys()
    measured = verify_packing(model, lengths=(5, 17, 1, 9))
    assert measured.family == family and measured.patched.influence == 0
    assert measured.unpatched.influence > 1e-3
    assert not patch_report(remove_patches(model)).patched
    assert before == [
        (name, type(module), sorted(vars(module))) for name, module in model.named_modules()
    ]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


needs_lfm3 = pytest.mark.skipif("lfm3" not in NAMES, reason="a family of later releases")
needs_olmo = pytest.mark.skipif("olmo_hybrid" not in NAMES, reason="a family of later releases")


@needs_lfm3
def test_seven_taps_run_where_causal_conv1d_is_installed(stand_ins, monkeypatch):
    """Upstream's own fails there, on any input."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    batch, model = row_batch("positions", ROW), tiny("lfm3")
    weights = random_weights(batch, 128)
    wanted = run_alone(model, batch, weights)
    upstream = import_module(by_family["lfm3"].upstream)
    given = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
    monkeypatch.setattr(upstream, "causal_conv1d_fn", given(upstream.causal_conv1d_fn))
    with pytest.raises(RuntimeError, match="width 7: wanted 2 to 4"):
        model(input_ids=batch.inputs["input_ids"])
    found = errors(run(apply_patches(model), batch, weights), wanted)
    assert found[0] <= LOGIT_TOL and found[1] <= GRADIENT_TOL, found


@needs_lfm3
@pytest.mark.parametrize("name", ["triton", "causal_conv1d"])
def test_kernels_of_four_taps_are_passed_over_for_seven(name):
    """The width and the channels come from the convolution itself."""
    model = tiny("lfm3")
    sizes = op_sizes(model, by_family["lfm3"])
    assert (sizes["taps"], sizes["channels"]) == (7, 64)
    target = Target("cuda", (9, 0), torch.bfloat16, sizes)
    assert re.search("taps.*, the model 7", CONV.backends[name].unusable(target))


@needs_lfm3
def test_frequencies_that_grow_with_a_document_are_refused_in_one_kind_of_layer_too():
    config = by_family["lfm3"].tiny_config()
    config.max_position_embeddings = 32
    config.rope_parameters["full_attention"] = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
    }
    torch.manual_seed(0)
    model = apply_patches(tiny("lfm3").__class__(config))
    model(**row_batch("positions", (5, 31)).inputs)
    with pytest.raises(UnsupportedInput, match="position 32 in a row of 2, and rope_type='dynami"):
        model(**row_batch("positions", (5, 32)).inputs)


@needs_olmo
@pytest.mark.parametrize("given", [None, {"rope_type": "default", "rope_theta": None}])
@pytest.mark.parametrize("doubled", [True, False])
def test_without_rotary_embeddings_and_with_beta_up_to_one_or_two(given, doubled):
    config = by_family["olmo_hybrid"].tiny_config()
    config.rope_parameters, config.linear_allow_neg_eigval = given, doubled
    torch.manual_seed(0)
    model = slow_decay(tiny("olmo_hybrid").__class__(config))
    assert model.model.rotary_emb is None
    assert_patching_is_exact(model, row_batch("positions", ROW))
