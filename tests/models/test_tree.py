"""Trees of shared prefixes through whole models: every sample against the sample alone, in values
and gradients.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings

from hf_packfree import PackedSequence, apply_patches
from hf_packfree.errors import BoundaryConflict, CacheConflict, UnsupportedInput
from hf_packfree.models.compat import CACHE
from hf_packfree.ops.table import OPS
from tests.models.padded import all_gradients
from tests.models.test_door import IMPLIED
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    assert_exact,
    by_family,
    checkpoint_layers,
    double,
    errors,
    forbid_layers,
    random_weights,
    relative_rms,
    run,
    run_alone,
    tiny,
    trunk_of,
)
from tests.trees import CHAIN, GROUP, TURNS, batch_of, forests

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl_moe"]
OTHERS = sorted(set(by_family) - set(FAMILIES))
# measured: at most 3e-15 and 7e-14
EXACT = 1e-10


def follows_trees(family):
    names = {mixer.cls for mixer in by_family[family].mixers}
    mixers = [cls for cls in by_family[family].pairs().values() if cls.__name__ in names]
    return all(cls.follows_trees for cls in mixers)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_sample_gets_what_it_gets_alone_in_fp64(family, attention, widened):
    stock, model = double(family, attention), apply_patches(double(family, attention))
    for tree in (GROUP, TURNS, CHAIN):
        batch = batch_of(tree)
        weights = [weight.double() for weight in random_weights(batch, 128)]
        wanted = run_alone(stock, batch, weights)
        assert max(errors(run(model, batch, weights), wanted, floor=1e-6)) <= EXACT


def assert_tree_exact(model, tree, stock, **inputs):
    batch, width = batch_of(tree, **inputs), model.get_output_embeddings().out_features
    alone = run_alone(stock, batch, random_weights(batch, width))
    assert_exact(model, batch, alone, width=width)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp32_and_the_control_leaks(family):
    model, batch = apply_patches(tiny(family)), batch_of(TURNS)
    weights = random_weights(batch, 128)
    alone = run_alone(tiny(family), batch, weights)
    assert_exact(model, batch, alone)
    for wrong in ([sum(TURNS.lengths)], TURNS.lengths):
        batch = batch_of(TURNS, packed_sequence=PackedSequence.from_lengths(wrong))
        found = errors(run(model, batch, weights), alone)
        assert found[0] >= CONTROL * LOGIT_TOL and found[1] >= CONTROL * GRADIENT_TOL


@pytest.mark.parametrize("family", OTHERS)
def test_every_other_family(family):
    model = apply_patches(tiny(family))
    if follows_trees(family):
        return assert_tree_exact(model, TURNS, tiny(family))
    with pytest.raises(UnsupportedInput, match="found a tree of shared prefixes with layers of"):
        run(model, batch_of(TURNS), None)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in IMPLIED else name
        for name in OTHERS
        if follows_trees(name)
    ],
)
def test_every_other_family_in_fp64(family, widened):
    stock, model = tiny(family).double(), tiny(family).double()
    for one in (stock, model):
        one.set_experts_implementation("eager")
    batch = batch_of(TURNS)
    weights = [weight.double() for weight in random_weights(batch, 128)]
    wanted = run_alone(stock, batch, weights)
    found = run(apply_patches(model), batch, weights)
    assert max(errors(found, wanted, floor=1e-6)) <= EXACT


MODEL, STOCK = apply_patches(tiny()), tiny()


@pytest.mark.slow
@settings(max_examples=10)
@example(tree=GROUP)
@example(tree=CHAIN)
@given(tree=forests(tokens=400))
def test_any_tree(tree):
    batch = batch_of(tree)
    weights = random_weights(batch, 128)
    logits, gradients = errors(
        run(MODEL, batch, weights), run_alone(STOCK, batch, weights), floor=1.0
    )
    assert logits <= LOGIT_TOL and gradients <= GRADIENT_TOL


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_branches_do_not_feel_each_other_and_prefixes_are_felt(family):
    model, packed = apply_patches(tiny(family)), TURNS.record
    of_token, seen = packed.seq_idx[0].long(), packed.tree.sees()
    ids = batch_of(TURNS).inputs["input_ids"]
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, packed_sequence=packed).logits[0]
    for segment in range(packed.num_segments):
        loss = logits[of_token == segment].square().sum()
        (gradient,) = torch.autograd.grad(loss, embeds, retain_graph=True)
        felt = gradient[0].abs().sum(1)
        path = seen[segment][of_token]
        assert felt[~path].eq(0).all() and felt[path].gt(0).all()


def test_the_trunk_alone_and_positions_that_agree():
    model, batch = apply_patches(tiny()), batch_of(TURNS)
    ids, packed = batch.inputs["input_ids"], TURNS.record
    wanted = model.model(input_ids=ids, packed_sequence=packed).last_hidden_state
    positions = packed.position_ids()
    for same in (positions, positions[0], positions[None].expand(3, -1, -1), positions.int()):
        found = model.model(input_ids=ids, packed_sequence=packed, position_ids=same)
        assert torch.equal(found.last_hidden_state, wanted)
    logits = model(input_ids=ids, packed_sequence=packed, attention_mask=torch.ones_like(ids))
    assert torch.equal(logits.logits, model.lm_head(wanted))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    model, batch = apply_patches(tiny()), batch_of(TURNS)
    weights = random_weights(batch, 128)
    plain = run(model, batch, weights)
    checkpoint_layers(model, reentrant)
    model.enable_input_require_grads()
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    again = run(model, batch, weights)
    assert len(calls) == 2
    assert max(errors(again, plain)) <= 1e-6


def test_autocast_is_no_farther_from_fp32_than_samples_alone():
    batch, stock = batch_of(TURNS), tiny()
    weights = random_weights(batch, 128)
    exact, model = run_alone(stock, batch, weights), apply_patches(tiny())
    with torch.autocast("cpu", torch.bfloat16):
        found, alone = run(model, batch, weights), run_alone(stock, batch, weights)
    far, best = (
        (relative_rms(torch.cat(one[0]), torch.cat(exact[0])), all_gradients(one[1], exact[1]))
        for one in (found, alone)
    )
    # measured: 1.3e-02 and 3.1e-02, alone 1.5e-02 and 3.9e-02
    assert 0 < far[0] <= best[0] and 0 < far[1] <= best[1]


# PEFT's dependencies deprecate things
@pytest.mark.filterwarnings("default")
def test_adapters():
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(1)
        targets = ["in_proj_qkv", "out_proj", "q_proj", "o_proj", "down_proj"]
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(model, config)

    assert_tree_exact(adapted(apply_patches(tiny())), TURNS, adapted(tiny()))


def test_a_group_is_two_calls_of_the_delta_rule_and_one_of_the_others(monkeypatch):
    calls = []
    fields = {"attention": "in_tree", "conv": "run", "delta_rule": "with_states"}
    for name, field in fields.items():
        backend = OPS[name].backends["torch"]

        def counting(*args, name=name, call=getattr(backend, field), **options):
            calls.append(name)
            return call(*args, **options)

        monkeypatch.setitem(OPS[name].backends, "torch", replace(backend, **{field: counting}))
    model = apply_patches(tiny())
    model(**batch_of(GROUP).inputs)
    # of four layers one attends
    assert sorted(calls) == ["attention"] + ["conv"] * 3 + ["delta_rule"] * 2 * 3


def test_labels_that_their_caller_has_shifted():
    """Where a token of a segment has one next token, as in TRL's rows."""
    model, ids = apply_patches(tiny()), batch_of(GROUP).inputs["input_ids"]
    targets = torch.where(torch.rand(ids.shape) < 0.5, ids.roll(-1, 1), -100)
    # the last of the prompt predicts one answer's first token, the last of an answer something
    targets[0, GROUP.lengths[0] - 1], targets[0, -1] = 7, 9
    row = {"input_ids": ids, "packed_sequence": GROUP.record}
    output = model(**row, labels=ids, shift_labels=targets)
    logits = model(**row).logits
    wanted = torch.nn.functional.cross_entropy(logits[0], targets[0])
    assert abs(output.loss - wanted) <= 1e-6 * wanted
    kept = model(**row, labels=ids, shift_labels=targets[:, -3:], logits_to_keep=3)
    few = torch.nn.functional.cross_entropy(logits[0, -3:], targets[0, -3:])
    assert abs(kept.loss - few) <= 1e-6 * few


@pytest.fixture
def model():
    return forbid_layers(apply_patches(tiny()))


@pytest.mark.parametrize("part", ["head", "trunk"])
def test_what_disagrees_with_a_tree_is_refused(model, part):
    call, row = model if part == "head" else model.model, batch_of(GROUP).inputs
    tokens = sum(GROUP.lengths)
    with pytest.raises(BoundaryConflict, match="position_ids and packed_sequence in disagreement"):
        call(**row, position_ids=torch.arange(tokens)[None])
    with pytest.raises(BoundaryConflict, match="of 137 tokens for a row of 136"):
        call(**row | {"input_ids": row["input_ids"][:, 1:]})
    with pytest.raises(UnsupportedInput, match="found seq_idx with a tree"):
        call(**row, seq_idx=GROUP.record.seq_idx)
    with pytest.raises(UnsupportedInput, match="found attention_mask with a tree"):
        call(**row, attention_mask=torch.tensor([[1] * (tokens - 1) + [0]]))
    with pytest.raises(UnsupportedInput, match="a tree .* in a batch of 2 rows"):
        call(**row | {"input_ids": row["input_ids"].expand(2, -1)})
    cached = tiny().eval()(input_ids=torch.arange(9)[None], use_cache=True)[CACHE]
    with pytest.raises(CacheConflict, match=CACHE):
        call(**row, **{CACHE: cached})


def test_labels_whose_shift_would_cross_branches(model):
    row = batch_of(GROUP).inputs
    with pytest.raises(UnsupportedInput, match="found labels for a tree .* wanted shift_labels"):
        model(**row, labels=row["input_ids"])
    with pytest.raises(UnsupportedInput, match="found labels for a tree"):
        model(**row, labels=row["input_ids"], logits_to_keep=9)
    # of Trainer(compute_loss_func=...) and label smoothing
    with pytest.raises(UnsupportedInput, match="found shift_labels without labels for a tree"):
        model(**row, shift_labels=row["input_ids"])


def test_what_knows_documents_alone_is_refused():
    row = batch_of(GROUP).inputs
    with pytest.raises(UnsupportedInput, match="a tree .* batch_invariant=True"):
        apply_patches(tiny(), batch_invariant=True)(**row)
    model = apply_patches(tiny())
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnsupportedInput, match="a tree .* attn_implementation='flash_attention_2'"):
        model(**row)
    model = apply_patches(tiny())
    model.packfree = replace(model.packfree, context_parallel="a group")
    with pytest.raises(UnsupportedInput, match="a tree .* under context parallelism"):
        model(**row)
    model = apply_patches(tiny(head="Qwen3_5ForTokenClassification"))
    with pytest.raises(UnsupportedInput, match="a tree .* with a Qwen3_5ForTokenClassification"):
        model(**row)
    model = apply_patches(tiny())
    trunk_of(model).packfree.followers.append(SimpleNamespace())
    with pytest.raises(UnsupportedInput, match="a tree .* multi-token prediction head"):
        model(**row)


def test_a_layer_that_follows_no_trees_is_refused(monkeypatch):
    model = apply_patches(tiny())
    monkeypatch.setattr(type(model.model.layers[3].self_attn), "follows_trees", False)
    with pytest.raises(UnsupportedInput, match="a tree .* with layers of Qwen3_5Attention"):
        model(**batch_of(GROUP).inputs)


def test_images_beside_a_tree():
    from tests.vision import tiny_vision

    model, row = apply_patches(tiny_vision("qwen3_5")), batch_of(GROUP).inputs
    pixels = {"pixel_values": torch.zeros(4, 24), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    with pytest.raises(UnsupportedInput, match="a tree .* with images, videos or audio"):
        model(**row, **pixels)


def test_text_alone_in_a_vision_language_model():
    from tests.vision import tiny_vision

    assert_tree_exact(apply_patches(tiny_vision("qwen3_5")), TURNS, tiny_vision("qwen3_5"))
