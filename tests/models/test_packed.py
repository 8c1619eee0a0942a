"""Packed rows in every class and setting: heads, cache flags, embeddings, checkpointing,
precision, outputs.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import transformers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hf_packfree import apply_patches, register_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.compat import CACHE
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.opaque import replaced
from tests.input_formats import block_mask, one_row, padded_rows, row_batch
from tests.models.forms import Largest, logits_alone
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    ROW,
    Batch,
    assert_exact,
    by_family,
    checkpoint_layers,
    documents,
    errors,
    pairwise,
    random_weights,
    relative_rms,
    run,
    run_alone,
    slow_decay,
    tiny,
    trunk_of,
    widen,
)

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"]


def test_the_lengths_of_the_promise_in_several_layers():
    config = by_family["qwen3_5"].tiny_config()
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": 8, "layer_types": None})
    model = slow_decay(transformers.Qwen3_5ForCausalLM(config)).train()
    batch = row_batch("positions", (513, 1, 200, 2, 129, 3, 128, 4, 127, 5, 65, 63, 64))
    weights = random_weights(batch, 128)
    wanted = run_alone(model, batch, weights)
    unpatched = errors(run(model, batch, weights), wanted, floor=0.0)
    ours = errors(run(apply_patches(model), batch, weights), wanted, floor=0.0)
    assert ours[0] <= LOGIT_TOL and ours[1] <= GRADIENT_TOL
    assert unpatched[0] >= CONTROL * LOGIT_TOL and unpatched[1] >= CONTROL * GRADIENT_TOL


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@example(lengths=[1, 2, 5, 5, 65, 3], key_heads=2, group=4, sizes=(8, 8))
@given(
    lengths=st.lists(
        st.sampled_from([1, 2, 3, 4, 5, 17, 63, 64, 65, 127, 128, 129]), min_size=2, max_size=6
    ),
    key_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    sizes=st.sampled_from([(8, 8), (16, 8), (8, 24)]),
)
def test_any_lengths_and_head_counts(lengths, key_heads, group, sizes):
    config = by_family["qwen3_5"].tiny_config().to_dict()
    config |= {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * group,
        "num_hidden_layers": 4,
    }
    config |= {"linear_key_head_dim": sizes[0], "linear_value_head_dim": sizes[1]}
    # of the same token they are padding, as far as positions can tell
    assume(lengths[-2:] != [1, 1])
    model = slow_decay(
        transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**config))
    ).train()
    batch = row_batch("positions", lengths)
    weights = random_weights(batch, 128)
    wanted, found = (
        run_alone(model, batch, weights),
        run(apply_patches(copy.deepcopy(model)), batch, weights),
    )
    logits, grads = errors(found, wanted, floor=1.0)
    assert logits <= LOGIT_TOL
    # then they cancel so far that it is rounding, of which fp64 has 2^-29 of fp32's
    if grads > GRADIENT_TOL:
        with pytest.MonkeyPatch.context() as patch:
            widen(patch)
            model, weights = model.double(), [weight.double() for weight in weights]
            wanted = run_alone(model, batch, weights)
            found = run(apply_patches(model), batch, weights)
        assert errors(found, wanted, floor=1.0)[1] <= 1e-10, "more than rounding moves"


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_across_documents_are_exactly_zero(family):
    model = apply_patches(tiny(family))
    batch = row_batch("positions", ROW)
    embeds = model.get_input_embeddings()(batch.inputs["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, position_ids=batch.inputs["position_ids"]).logits
    for index, (_, tokens) in enumerate(batch.places):
        (gradient,) = torch.autograd.grad(logits[0, tokens].pow(2).sum(), embeds, retain_graph=True)
        elsewhere = torch.ones(sum(ROW), dtype=torch.bool)
        elsewhere[tokens] = False
        assert torch.equal(gradient[0, elsewhere], torch.zeros_like(gradient[0, elsewhere])), (
            f"document {index}"
        )
        assert gradient[0, tokens].abs().sum() > 0


@pytest.mark.parametrize("use_cache", [True, None])
@pytest.mark.parametrize("input_format", ["positions", "all_flash", "indexed_mask"])
def test_use_cache_changes_nothing(input_format, use_cache):
    model, batch = apply_patches(tiny()), row_batch(input_format, ROW)
    wanted = model(**batch.inputs).logits
    found = model(**{**batch.inputs, "use_cache": use_cache})
    assert torch.equal(found.logits, wanted) and found.get(CACHE) is None


@pytest.mark.parametrize("input_format", ["positions", "cu_seq_lens", "indexed_mask", "block_mask"])
def test_embeddings_instead_of_ids(input_format):
    model, batch = apply_patches(tiny()), row_batch(input_format, ROW)
    wanted = model(**batch.inputs).logits
    embeds = model.get_input_embeddings()(batch.inputs["input_ids"])
    assert torch.equal(
        model(**{**batch.inputs, "input_ids": None, "inputs_embeds": embeds}).logits, wanted
    )


@pytest.mark.compat
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_checkpoints_and_stays_exact(family, reentrant):
    model = apply_patches(tiny(family))
    calls = []
    layers = trunk_of(model).layers
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda *_, layer=layer: calls.append(layer))
    batch = row_batch("positions", ROW)
    weights = random_weights(batch, 128)
    plain = run(model, batch, weights)
    assert len(calls) == len(layers)
    checkpoint_layers(model, reentrant)
    model.enable_input_require_grads()
    calls.clear()
    again = run(model, batch, weights)
    assert len(calls) == 2 * len(layers), "every layer is computed twice, once of them in backward"
    assert all(torch.equal(one, other) for one, other in zip(again[0], plain[0]))
    assert errors(again, plain)[1] <= 1e-6


@pytest.mark.parametrize("way", ["apply", "register"])
@pytest.mark.parametrize(
    "name", ["Qwen3_5ForTokenClassification", "Qwen3NextForTokenClassification"]
)
def test_token_classification(name, way):
    family = by_family["qwen3_5" if "3_5" in name else "qwen3_next"]
    # the head drops out while training
    model = build(name, family.tiny_config(), way).eval()
    assert_exact(model, row_batch("positions", ROW), width=2)


@pytest.mark.parametrize("way", ["apply", "register"])
@pytest.mark.parametrize(
    "name", ["Qwen3_5TextForSequenceClassification", "Qwen3NextForSequenceClassification"]
)
def test_sequence_classification_answers_for_the_last_document(name, way):
    family = by_family["qwen3_5" if "3_5" in name else "qwen3_next"]
    model = build(name, family.tiny_config(), way).eval()
    batch = row_batch("positions", ROW)
    alone = model(input_ids=batch.documents[-1][None]).logits
    assert relative_rms(model(**batch.inputs).logits, alone) <= LOGIT_TOL


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bare_trunk(family):
    trunk = apply_patches(tiny(family).model)
    assert_exact(
        trunk, row_batch("cu_seq_lens", ROW), width=64, output=lambda out: out.last_hidden_state
    )


def build(name, config, way):
    cls = getattr(transformers, name)
    if way == "apply":
        return slow_decay(apply_patches(cls(config))).train()
    with register_patches():
        return slow_decay(cls._from_config(config)).train()


def vision_language(family, way="apply"):
    upstream = f"{'Qwen3_5' if family == 'qwen3_5' else 'Qwen3_5Moe'}"
    text = by_family[family].tiny_config().to_dict()
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
    }
    cls = getattr(transformers, f"{upstream}Config")
    config = cls(text_config=text, vision_config=vision, image_token_id=1000, video_token_id=1001)
    return build(f"{upstream}ForConditionalGeneration", config, way)


TEXT_FORMATS = [
    "positions",
    "cu_seq_lens",
    "seq_idx",
    "all_flash",
    "indexed_mask",
    "positions_4rows",
]


@pytest.mark.parametrize(
    ("family", "input_format", "way"),
    pairwise(["qwen3_5", "qwen3_5_moe"], TEXT_FORMATS, ["apply", "register"]),
)
def test_vision_language_fed_text(family, input_format, way):
    batch = row_batch(input_format, ROW)
    found = run(vision_language(family, way), batch, random_weights(batch, 128))
    logits, grads = errors(found, text_alone(family))
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)


@cache
def text_alone(family):
    """What the vision-language class gives each document of ROW in a forward of its own."""
    batch = row_batch("positions", ROW)
    return run_alone(vision_language(family), batch, random_weights(batch, 128))


def test_vision_language_after_generation():
    """`generate` leaves rope_deltas behind, which upstream would add to the next row's
    positions.
    """
    model = vision_language("qwen3_5")
    batch = row_batch("indexed_mask", ROW)
    wanted = model(**batch.inputs).logits
    model.generate(
        input_ids=batch.documents[0][None], max_new_tokens=2, do_sample=False, pad_token_id=0
    )
    embeds = model.get_input_embeddings()(batch.inputs["input_ids"])
    found = model(**{**batch.inputs, "input_ids": None, "inputs_embeds": embeds}).logits
    assert relative_rms(found, wanted) <= LOGIT_TOL


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("family", "dtype", "attention"),
    [
        # a CPU takes a second for the rows of each of the others
        case if case[0] == "qwen3_5" else pytest.param(*case, marks=pytest.mark.slow)
        for case in pairwise(FAMILIES, HALF, ["eager", "sdpa"])
    ],
)
def test_half_precision_is_finite_and_rounds_no_worse_than_upstream(family, dtype, attention):
    """Gradients are finite on the last of several rows, over which values are averaged: a token
    whose rounding sends it to another expert weighs more than the rest.
    """
    ours = upstreams = 0.0
    exact, rounded = tiny(family, attention=attention), tiny(family, attention=attention).to(dtype)
    model = apply_patches(tiny(family, attention=attention).to(dtype))
    for seed in range(1, 4 if family == "qwen3_5" else 9):
        batch = row_batch("positions", ROW, seed=seed)
        with torch.no_grad():
            parts = batch.cut(model(**batch.inputs).logits)
        wanted, theirs = (torch.cat(logits_alone(model, batch)) for model in (exact, rounded))
        ours += relative_rms(torch.cat(parts), wanted)
        upstreams += relative_rms(theirs, wanted)
    assert ours <= 1.5 * upstreams, (ours, upstreams)
    parts, grads = run(model, batch, random_weights(batch, 128))
    assert all(found.isfinite().all() for found in (*parts, *grads.values()))


@torch.no_grad()
def test_forward_does_not_depend_on_the_neighbours():
    model = apply_patches(tiny()).eval()
    first = row_batch("positions", (129, 65, 3))
    parts = documents((7, 200))
    second_lengths = (7, 129, 200, 65, 3)
    ids = torch.cat([parts[0], first.documents[0], parts[1], *first.documents[1:]])[None]
    found = (
        model(input_ids=ids, position_ids=one_row(second_lengths)["position_ids"])
        .logits[0]
        .split(second_lengths)
    )
    wanted = model(**first.inputs).logits[0].split((129, 65, 3))
    for one, other in zip((found[1], found[3], found[4]), wanted):
        assert relative_rms(one, other) <= 1e-6


def test_sdpa_never_holds_a_square():
    """Neither upstream's mask nor ours: no tensor of T x T elements appears anywhere in forward
    or backward.
    """
    lengths = (1300, 2000, 796)
    batch, model = row_batch("positions", lengths), apply_patches(tiny())
    with Largest() as largest:
        model(**batch.inputs).logits.sum().backward()
    assert largest.bytes < sum(lengths) ** 2


def test_hidden_states_come_back_in_the_callers_shape():
    batch, numbers, _ = padded_rows(((5, 64, 3), (1, 70)))
    for family in FAMILIES:
        model = apply_patches(tiny(family)).eval()
        more = {"output_router_logits": True} if "moe" in family or family == "qwen3_next" else {}
        out = model(**batch.inputs, attention_mask=numbers, output_hidden_states=True, **more)
        assert all(layer.shape == (*numbers.shape, 64) for layer in out.hidden_states)
        last = batch.cut(model.model(**batch.inputs, attention_mask=numbers).last_hidden_state)
        assert all(torch.equal(a, b) for a, b in zip(batch.cut(out.hidden_states[-1]), last))
        if more:
            assert all(layer.shape == (numbers.numel(), 4) for layer in out.router_logits)


def test_tuples_instead_of_dicts():
    model, batch = apply_patches(tiny()).eval(), row_batch("positions", ROW)
    wanted = model(**batch.inputs).logits
    assert torch.equal(model(**batch.inputs, return_dict=False)[0], wanted)
    trunk = model.model(**batch.inputs, return_dict=False)
    assert isinstance(trunk, tuple) and trunk[0].shape == (1, sum(ROW), 64)


def test_attention_weights_of_a_packed_row():
    model, batch = apply_patches(tiny(attention="eager")).eval(), row_batch("positions", ROW)
    (weights,) = model(**batch.inputs, output_attentions=True).attentions
    outside = ~block_mask(one_row(ROW)["seq_idx"]).expand_as(weights)
    assert weights[outside].abs().max() == 0 and torch.allclose(weights.sum(-1), torch.ones(1))
    two, numbers, _ = padded_rows(((5, 64), (1, 70)))
    with pytest.raises(UnsupportedInput, match="output_attentions"):
        model(**two.inputs, attention_mask=numbers, output_attentions=True)


def test_a_tail_of_padding_is_one_segment_and_never_in_the_loss():
    model = apply_patches(tiny())
    lengths, tail = (64, 3, 65), 13
    parts = documents(lengths)
    row = torch.cat(parts)
    labels = torch.cat([torch.cat([torch.tensor([-100]), part[1:]]) for part in parts])
    facts = one_row(lengths)
    padded = {
        "input_ids": torch.cat([row, torch.zeros(tail, dtype=torch.long)])[None],
        "labels": torch.cat([labels, torch.full((tail,), -100)])[None],
        "position_ids": torch.cat(
            [facts["position_ids"], torch.zeros(1, tail, dtype=torch.long)], 1
        ),
    }
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda m, a, k: seen.append(k["packed_sequence"].lengths), with_kwargs=True
    )
    bare = model(input_ids=row[None], labels=labels[None], position_ids=facts["position_ids"]).loss
    wanted = torch.autograd.grad(bare, list(model.parameters()))
    loss = model(**padded).loss
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert seen == [list(lengths), [*lengths, tail]]
    assert relative_rms(loss, bare) <= 1e-6
    assert max(relative_rms(a, b) for a, b in zip(found, wanted)) <= 1e-5


def test_one_token_documents_at_the_end_stay_documents():
    batch = Batch(
        [torch.tensor(d) for d in ([5, 6, 7], [8], [9], [10])],
        {},
        [(0, torch.tensor([i])) for i in range(3)],
    )
    model = apply_patches(tiny()).eval()
    ids = torch.cat(batch.documents)[None]
    logits = model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 0, 0]])).logits
    for at in (3, 4, 5):
        assert (
            relative_rms(logits[0, at], model(input_ids=ids[:, at : at + 1]).logits[0, 0])
            <= LOGIT_TOL
        )


def test_a_flash_attention_gets_the_record_in_upstreams_spelling(monkeypatch):
    """A flash attention gets the four keywords, int32 offsets and host integers, and no mask."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def by_offsets(
        module, q, k, v, mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **kwargs
    ):
        assert mask is None
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        ends = [0, q.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
        if cu_seq_lens_q is not None:
            assert cu_seq_lens_q.dtype == torch.int32 and kwargs["cu_seq_lens_k"] is cu_seq_lens_q
            assert max_length_q == kwargs["max_length_k"] == max(ROW) and isinstance(
                max_length_q, int
            )
        attend = torch.nn.functional.scaled_dot_product_attention
        parts = [
            attend(*(x[:, :, a:b] for x in (q, k, v)), is_causal=True, scale=scaling)
            for a, b in zip(ends, ends[1:])
        ]
        return torch.cat(parts, 2).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", by_offsets)
    model = tiny()
    model.config._attn_implementation_internal = "flash_attention_2"
    assert_exact(apply_patches(model), row_batch("positions", ROW))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "kimi_linear"])
def test_rows_of_graphs_attend_in_ours_whatever_attention_was_loaded(family, monkeypatch):
    """Which is captured with empty documents; the values are those of a model loaded with sdpa."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def never(*args, **kwargs):
        raise AssertionError("a flash attention was called")

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", never)
    packed = PackedSequence.from_lengths([5, 64, 3])
    ids = torch.arange(72)[None] % 100
    found = []
    for loaded in ("sdpa", "flash_attention_2"):
        model = apply_patches(tiny(family))
        model.config._attn_implementation_internal = loaded
        row = replaced(packed, bounded=True)
        out = model.base_model(input_ids=ids, packed_sequence=row, use_cache=False)
        found.append(out.last_hidden_state)
    assert torch.equal(*found)
    with pytest.raises(AssertionError, match="was called"):
        model.base_model(input_ids=ids, packed_sequence=packed, use_cache=False)


@pytest.mark.parametrize("stack", [3, 4])
def test_stacked_positions_of_several_rows(stack):
    batch, _, positions = padded_rows(((5, 64, 3), (1, 71)))
    batch.inputs["position_ids"] = positions[None].expand(stack, -1, -1)
    assert_exact(apply_patches(tiny()), batch)


def test_a_record_moves_like_a_tensor():
    """accelerate sends every keyword that has `.to` to the layer's device."""
    from accelerate.utils import send_to_device

    packed = row_batch_record()
    moved = send_to_device({"packed_sequence": packed}, torch.device("meta"))["packed_sequence"]
    assert moved.cu_seqlens.device.type == moved.seq_idx.device.type == "meta"
    assert moved.cu_seqlens_cpu is packed.cu_seqlens_cpu and packed.to("cpu") is packed


def row_batch_record():
    from hf_packfree import PackedSequence

    return PackedSequence.from_lengths(ROW)


def test_a_record_that_was_looked_at_in_inference_mode_trains():
    model, lengths = apply_patches(tiny()).train(), [5, 64, 3]
    packed = PackedSequence.from_lengths(lengths)
    ids = torch.cat(documents(lengths))[None]
    with torch.inference_mode():
        looked = model(input_ids=ids, packed_sequence=packed).logits
    logits = model(input_ids=ids, packed_sequence=packed).logits
    logits.sum().backward()
    assert torch.equal(logits, looked) and all(p.grad is not None for p in model.parameters())
