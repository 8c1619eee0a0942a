"""What is around the attention of families of plain attention: adapters, heads, copies, reports,
flash attention, refusals.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_packfree import (
    apply_patches,
    patch_report,
    register_patches,
    remove_patches,
    verify_packing,
)
from hf_packfree.errors import BackendUnavailable, PatchConflict, UnsupportedInput, UnsupportedModel
from hf_packfree.models import attention_interface
from hf_packfree.models.compat import CACHE
from hf_packfree.parallel import ContextParallel
from hf_packfree.patching.plan import op_sizes
from tests.input_formats import (
    block_mask,
    one_row,
    row_batch,
    rows_batch,
)
from tests.integrations.compare import in_steps, labelled, per_document, worst
from tests.integrations.marks import needs
from tests.integrations.test_hf_trainer import ACCUMULATE, train
from tests.models.padded import padded_batch
from tests.models.test_door import ALL, CORE, EDGES, WINDOW
from tests.support import (
    GRADIENT_TOL,
    LOGIT_TOL,
    assert_exact,
    assert_patching_is_exact,
    by_family,
    documents,
    errors,
    random_weights,
    relative_rms,
    run,
    run_alone,
    tiny,
    trunk_of,
)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ALL)
def test_generation_is_upstreams(family, cache):
    model, batch = tiny(family).eval(), padded_batch("left")
    how = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    how["cache_implementation"] = cache
    prompts = {name: batch[name] for name in ("input_ids", "attention_mask")}
    wanted = model.generate(**prompts, **how)
    assert torch.equal(apply_patches(model).generate(**prompts, **how), wanted)


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_continuous_batching_is_upstreams():
    """Its cache keeps requests apart, and hands offsets of its own to every layer."""
    model = tiny("gemma3_text").eval()
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    config = transformers.GenerationConfig(**how)
    # without a number of pages, the cache takes most of the memory
    pages = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=128)
    prompts = [part.tolist() for part in documents((20, 33, 7))]

    def answers():
        found = model.generate_batch(
            inputs=prompts,
            generation_config=config,
            continuous_batching_config=pages,
            progress_bar=False,
        ).values()
        return sorted((tuple(one.prompt_ids), tuple(one.generated_tokens)) for one in found)

    wanted = answers()
    assert [len(answer) for _, answer in wanted] == [6, 6, 6]
    apply_patches(model)
    assert answers() == wanted


@needs("peft")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", CORE)
def test_lora_trains(family):
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False
    )
    model, batch = peft.get_peft_model(tiny(family), config), row_batch("positions", EDGES)
    weights = random_weights(batch, 128)
    alone = run_alone(model, batch, weights)
    found = run(apply_patches(model), batch, weights)
    assert errors(found, alone)[0] <= LOGIT_TOL and errors(found, alone)[1] <= GRADIENT_TOL
    assert found[1] and all("lora" in name for name in found[1])


@pytest.mark.parametrize("family", ALL)
def test_report_removal_copies_and_twice(family):
    model, row = tiny(family), by_family[family]
    before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    implementation = model.config._attn_implementation
    report = patch_report(apply_patches(apply_patches(model)))
    assert (report.family, report.patched, report.attention) == (family, True, implementation)
    mlps = sum(type(module).__name__ == row.mlp for module in model.modules())
    counts = {row.causal_lm: 1, row.trunk: 1, row.mixers[0].cls: 4, row.mlp: mlps}
    counts |= dict.fromkeys(row.layers, 4) if row.fused_layer else {}
    assert report.swaps == {name: count for name, count in counts.items() if name is not None}
    assert report.implementations["attention"] == "torch"
    batch = row_batch("positions", EDGES)
    wanted = model(**batch.inputs).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(other(**batch.inputs).logits, wanted)
    assert "packfree" not in model.config.to_json_string()
    assert not patch_report(remove_patches(model)).patched
    after = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    assert before == after and model.config._attn_implementation == implementation


@pytest.mark.parametrize("family", CORE)
def test_what_is_saved_of_a_patched_model_is_upstreams(family, tmp_path):
    """Whoever loads or unpickles it need not know the attention that ran."""
    model, ids = tiny(family).eval(), documents((40,))[0][None]
    attention, wanted = model.config._attn_implementation, model(input_ids=ids).logits
    apply_patches(model).save_pretrained(tmp_path)
    assert b"packfree" not in (tmp_path / "config.json").read_bytes()
    assert b"packfree" not in pickle.dumps(copy.deepcopy(model.config))
    loaded = type(tiny(family)).from_pretrained(tmp_path, attn_implementation=attention)
    assert not patch_report(loaded).patched and torch.equal(loaded(input_ids=ids).logits, wanted)
    default = type(loaded).from_pretrained(tmp_path).config._attn_implementation
    assert default == ("sdpa" if loaded._supports_sdpa and family != "gemma2" else "eager")


@pytest.mark.parametrize("family", CORE)
def test_verify_measures_it(family):
    report = verify_packing(apply_patches(tiny(family)), lengths=(5, 17, 1, 40))
    assert report.family == family and report.patched.influence == 0
    assert report.unpatched.influence > 1e-3


@pytest.mark.parametrize("family", CORE)
def test_registered_models_are_patched(family):
    with register_patches():
        model = transformers.AutoModelForCausalLM.from_config(by_family[family].tiny_config())
    assert patch_report(model).swaps == patch_report(apply_patches(tiny(family))).swaps


def test_weights_are_those_of_a_mask_where_they_are_wanted():
    batch = row_batch("positions", EDGES)
    outside = ~block_mask(one_row(EDGES)["seq_idx"])
    for family in ("qwen3", "gemma2"):
        model = apply_patches(tiny(family, attention="eager")).eval()
        out = model(**batch.inputs, output_attentions=True)
        for weights in out.attentions:
            assert weights[outside.expand_as(weights)].abs().max() == 0
            assert torch.allclose(weights.sum(-1), torch.ones(1))
        windowed = out.attentions[0][0, 0].nonzero()
        assert (windowed[:, 0] - windowed[:, 1]).max() == WINDOW - 1
        assert relative_rms(out.logits, model(**batch.inputs).logits) <= LOGIT_TOL


def test_a_flash_attention_gets_boundaries_and_the_layers_options(monkeypatch):
    seen = []

    def by_offsets(module, query, key, value, attention_mask, **keywords):
        seen.append((attention_mask, keywords))
        return query.transpose(1, 2).contiguous(), None

    model = apply_patches(tiny("gpt_oss"))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", by_offsets)
    model.config._attn_implementation_internal = "flash_attention_2"
    model(**row_batch("positions", EDGES).inputs)
    assert [keywords["sliding_window"] for _, keywords in seen] == [WINDOW, None] * 2
    for mask, keywords in seen:
        assert mask is None and keywords["cu_seq_lens_q"].tolist() == [
            0,
            *torch.tensor(EDGES).cumsum(0),
        ]
        assert keywords["max_length_q"] == 100 and keywords["s_aux"].shape == (4,)


def test_frozen_sinks_leave_the_rest_of_the_gradients():
    model = tiny("gpt_oss")
    for layer in model.model.layers:
        layer.self_attn.sinks.requires_grad_(False)
    assert_exact(apply_patches(model), row_batch("positions", EDGES))
    assert not any(layer.self_attn.sinks.grad is not None for layer in model.model.layers)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_latent_attention_of_published_sizes(family):
    """Keys of 192 and values of 128; without rotary embedding in Kimi Linear."""
    if family not in by_family:
        pytest.skip(f"this transformers has no {family}")
    row, heads = by_family[family], {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    model = tiny(replace(row, tiny={**row.tiny, **heads, **sizes}))
    found = op_sizes(model, row)
    assert (found["head_size"], found["other_value_size"]) == (192, 128)
    assert_patching_is_exact(model, row_batch("positions", EDGES))


def test_heads_of_512():
    """As Gemma 4's full layers have them, beside 256 in its windows."""
    row = by_family["gemma4_text"]
    sizes = {"head_dim": 256, "global_head_dim": 512, "num_attention_heads": 2}
    model = apply_patches(tiny(replace(row, tiny={**row.tiny, **sizes})))
    assert_exact(model, row_batch("positions", EDGES))
    wide = {layer.self_attn.head_dim for layer in model.model.layers}
    assert wide == {256, 512} and op_sizes(model, row)["head_size"] == 512


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("keep", [1, 30])
def test_kept_logits_are_those_of_their_documents(family, keep):
    """Gemma 4's text model drops the other tokens before its last layers, in its own forward."""
    batch = row_batch("positions", EDGES)
    model = apply_patches(tiny(family, attention="eager"))
    for attention in ("eager", "sdpa") if model._supports_sdpa else ("eager",):
        model.set_attn_implementation(attention)
        wanted = model(**batch.inputs).logits[:, -keep:]
        found = model(**batch.inputs, logits_to_keep=keep).logits
        assert relative_rms(found, wanted) <= LOGIT_TOL


@pytest.mark.skipif("gemma4_text" not in by_family, reason="this transformers has no Gemma 4")
def test_inputs_per_layer_follow_the_row():
    """Of several rows and of padded ones, which run as one row."""
    model = apply_patches(tiny("gemma4_text"))
    for batch in (rows_batch("indexed").inputs, padded_batch("left")):
        given = {"attention_mask": batch["attention_mask"], "use_cache": False}
        ids = batch["input_ids"]
        wanted = model.model(ids, **given).last_hidden_state
        given["inputs_embeds"] = model.model.embed_tokens(ids)
        given["per_layer_inputs"] = model.model.get_per_layer_inputs(ids)
        found = model.model(**given).last_hidden_state
        assert relative_rms(found, wanted) <= LOGIT_TOL


EXPERTS = [
    getattr(param, "values", (param,))[0]
    for param in ALL
    if "router_aux_loss_coef"
    in by_family[getattr(param, "values", (param,))[0]].tiny_config().to_dict()
]


@pytest.mark.parametrize("family", EXPERTS)
def test_router_losses_count_real_tokens_alone(family):
    """Of a row, of padded rows, and of the documents one by one."""
    model, batch = apply_patches(tiny(family)), padded_batch("right")
    real = batch["attention_mask"].bool()
    row = {
        "input_ids": batch["input_ids"][real][None],
        "position_ids": (batch["attention_mask"].cumsum(1) - 1)[real][None],
    }
    losses = [
        model(
            **given, use_cache=False, output_router_logits=True, labels=given["input_ids"]
        ).aux_loss
        for given in (batch | {"labels": None}, row)
        if given.pop("labels", None) is None
    ]
    wanted = remove_patches(model)(
        **{name: batch[name] for name in ("input_ids", "attention_mask")},
        use_cache=False,
        output_router_logits=True,
    ).aux_loss
    assert all(abs(loss.item() / wanted.item() - 1) <= LOGIT_TOL for loss in losses)


@pytest.mark.parametrize("family", EXPERTS)
def test_router_logits_of_a_text_model_alone(family):
    """All tokens' where a mask tells who reads them what is padding, real ones' where none does."""
    model, batch = tiny(family), padded_batch("right")
    ids, real = batch["input_ids"], batch["attention_mask"].bool()
    how = {"use_cache": False, "output_router_logits": True}
    given = {"input_ids": ids, "attention_mask": batch["attention_mask"], **how}
    wanted = trunk_of(model)(**given).router_logits
    text = trunk_of(apply_patches(model))
    numbers = torch.arange(len(ids))[:, None].expand_as(ids).masked_fill(~real, -1)
    found = text(**given).router_logits
    alone = text(input_ids=ids, seq_idx=numbers.int(), **how).router_logits
    for whole, every, some in zip(wanted, found, alone, strict=True):
        assert every.shape == whole.shape and len(some) == real.sum() < len(whole)
        expected = whole[real.flatten()]
        assert relative_rms(every[real.flatten()], expected) <= LOGIT_TOL
        assert relative_rms(some, expected) <= LOGIT_TOL


@pytest.mark.parametrize("family", CORE)
def test_dropout_drops_while_training_and_not_in_evaluation(family, monkeypatch):
    model, batch, asked = tiny(family), row_batch("positions", EDGES), []
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    attend = attention_interface.attention
    monkeypatch.setattr(
        attention_interface,
        "attention",
        lambda *args, dropout, **more: (
            asked.append(dropout) or attend(*args, dropout=dropout, **more)
        ),
    )
    apply_patches(model)
    assert not torch.equal(model(**batch.inputs).logits, model(**batch.inputs).logits)
    assert asked == [0.2] * 8
    assert_exact(model.eval(), batch)
    assert {*asked[8:]} == {0.0}


@pytest.mark.parametrize("family", ALL)
def test_a_cache_is_never_built_of_a_packed_row(family):
    model, batch = apply_patches(tiny(family)), row_batch("positions", EDGES)
    wanted = model(**batch.inputs).logits
    hidden = trunk_of(model)(**batch.inputs).last_hidden_state
    for use_cache in (True, None):
        given = {**batch.inputs, "use_cache": use_cache}
        found, text = model(**given), trunk_of(model)(**given)
        assert torch.equal(found.logits, wanted) and found.get(CACHE) is None
        assert torch.equal(text.last_hidden_state, hidden) and text.get(CACHE) is None


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_classifiers(family, head):
    name = by_family[family].causal_lm.replace("ForCausalLM", head)
    model, batch = tiny(family, head=name).eval(), row_batch("positions", EDGES)
    wanted = [model(input_ids=part[None]).logits[0] for part in batch.documents]
    found = apply_patches(model)(**batch.inputs).logits
    if head == "ForTokenClassification":
        assert relative_rms(found[0], torch.cat(wanted)) <= LOGIT_TOL
    else:
        assert relative_rms(found[0], wanted[-1]) <= LOGIT_TOL


def test_the_bare_text_model():
    model, batch = apply_patches(tiny("gemma3_text").model), row_batch("cu_seq_lens", EDGES)
    weights = random_weights(batch, 64)
    how = {"output": lambda out: out.last_hidden_state}
    logits, grads = errors(
        run(model, batch, weights, **how), run_alone(model, batch, weights, **how)
    )
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_the_trainer_trains_as_on_documents_one_by_one(family, tmp_path):
    _, steps = train(tiny(family), tmp_path, **ACCUMULATE)
    wanted = per_document(tiny(family), in_steps(labelled()))
    assert worst(steps, wanted) <= GRADIENT_TOL


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_compiled_rows_are_the_same_and_need_no_new_graphs(family):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = apply_patches(tiny(family))
    compiled, counts = torch.compile(model, backend=backend), []
    for lengths in (EDGES, (5, 60, 3), (7, 61, 33, 2), (100, 30)):
        batch = row_batch("positions", lengths)
        weights = random_weights(batch, 128)
        found = run(compiled, batch, weights)
        found[1].update(
            {name.removeprefix("_orig_mod."): found[1].pop(name) for name in [*found[1]]}
        )
        assert errors(found, run(model, batch, weights)) == (0, 0)
        counts.append(len(graphs))
    assert 0 < counts[0] and counts[1] == counts[2] == counts[3]
    torch.compiler.reset()


def test_what_it_cannot_serve_is_refused_by_name():
    config = by_family["gemma3_text"].tiny_config()
    config.use_bidirectional_attention = True
    with pytest.raises(UnsupportedModel, match="found use_bidirectional_attention in the config"):
        apply_patches(transformers.Gemma3ForCausalLM(config))
    text = by_family["gemma3_text"].tiny_config()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28}
    vision |= {"num_attention_heads": 2, "patch_size": 14}
    both = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    images = transformers.Gemma3ForConditionalGeneration(both)
    with pytest.raises(UnsupportedModel, match="around a Gemma3TextModel; wanted the language"):
        apply_patches(images)
    assert patch_report(apply_patches(images.model.language_model)).patched
    with register_patches():
        images = transformers.Gemma3ForConditionalGeneration(both)
        llava = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                text_config=by_family["llama"].tiny_config().to_dict(),
                vision_config={"model_type": "clip_vision_model", **vision},
            )
        )
    assert not patch_report(images).patched and not patch_report(llava).patched
    with pytest.raises(UnsupportedModel, match="around a LlamaModel; wanted the language"):
        apply_patches(llava)
    with pytest.raises(UnsupportedModel, match="ViTModel, which holds no text model.*gpt_oss"):
        apply_patches(
            transformers.ViTModel(
                transformers.ViTConfig(
                    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
                )
            )
        )
    with pytest.raises(BackendUnavailable, match="attn_implementation='flex_attention'"):
        model = tiny("llama")
        model.config._attn_implementation_internal = "flex_attention"
        apply_patches(model)


def test_windows_that_only_masks_have_are_refused():
    """Without `use_sliding_window`, SmolLM3's attention is called without the window of its mask:
    packed documents would be another model's than the same alone.
    """
    config = by_family["smollm3"].tiny_config()
    config.use_sliding_window = False
    model = transformers.SmolLM3ForCausalLM(config)
    with pytest.raises(UnsupportedModel, match="layers.0.*SmolLM3Attention that has no window"):
        apply_patches(model)
    assert not patch_report(model).patched
    config.layer_types = ["full_attention"] * 4
    assert patch_report(apply_patches(transformers.SmolLM3ForCausalLM(config))).patched


def test_a_text_model_that_looks_ahead_is_left_alone_while_it_is_built(caplog):
    """As embedding models are: a registration is in force for whatever else is loaded."""
    config = by_family["gemma3_text"].tiny_config()
    config.use_bidirectional_attention = True
    with register_patches():
        model = transformers.Gemma3TextModel(config)
        other = transformers.Gemma3TextModel(by_family["gemma3_text"].tiny_config())
    assert not patch_report(model).patched and patch_report(other).patched
    assert "left alone by register_patches(): its config says use_bidirec" in caplog.text


def test_sdpa_that_drops_the_cap_of_scores_is_refused():
    """Releases up to 5.19 run Gemma 2 so by default: documents alone have no cap."""
    model, batch = apply_patches(tiny("gemma2")), row_batch("positions", EDGES)
    model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(BackendUnavailable, match="sdpa', which drops the cap that a Gemma2Attent"):
        model(**batch.inputs)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert model(**batch.inputs).logits.isfinite().all()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_frequencies_that_depend_on_the_row_are_refused_past_their_limit(family):
    config, limit = by_family[family].tiny_config(), 64
    kind = "longrope" if family == "phi3" else "dynamic"
    turns = config.rope_parameters
    turns = turns["full_attention"] if family == "gemma3_text" else turns
    turns |= {"rope_type": kind, "factor": 4.0}
    config.max_position_embeddings = limit
    if kind == "longrope":
        config.original_max_position_embeddings = limit
        turns |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        turns |= {"original_max_position_embeddings": limit}
    torch.manual_seed(0)
    model = apply_patches(getattr(transformers, by_family[family].causal_lm)(config))
    short = row_batch("positions", (40, 63, 3))
    alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in short.documents]
    assert relative_rms(model(**short.inputs).logits[0], torch.cat(alone)) <= LOGIT_TOL
    with pytest.raises(UnsupportedInput, match=f"rope_type='{kind}'"):
        model(**row_batch("positions", (40, 65, 3)).inputs)


@pytest.mark.parametrize("dynamic", ["full_attention", "sliding_attention"])
def test_the_lowest_limit_of_all_kinds_of_layers_counts(dynamic):
    """Of a dynamic type up to 31 positions, and of longrope up to 64 in layers of another kind."""
    config = by_family["gemma3_text"].tiny_config()
    for kind, turns in config.rope_parameters.items():
        turns |= {"rope_type": "dynamic" if kind == dynamic else "longrope", "factor": 4.0}
        if kind != dynamic:
            turns |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
            turns |= {"original_max_position_embeddings": 64}
    config.max_position_embeddings = 32
    torch.manual_seed(0)
    model = apply_patches(transformers.Gemma3ForCausalLM(config))
    short = row_batch("positions", (5, 31, 3))
    alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in short.documents]
    assert relative_rms(model(**short.inputs).logits[0], torch.cat(alone)) <= LOGIT_TOL
    with pytest.raises(UnsupportedInput, match="rope_type='dynamic'.*at most 31 tokens"):
        model(**row_batch("positions", (5, 40, 3)).inputs)


@pytest.mark.parametrize(
    ("family", "found"), [("qwen3", "a sliding window"), ("mistral", "a sliding window")]
)
def test_windows_are_refused_under_context_parallelism(family, found):
    with pytest.raises(PatchConflict, match=f"attention with {found} under context parallelism"):
        apply_patches(tiny(family), context_parallel=ContextParallel(None))


@pytest.mark.parametrize(("family", "name"), [("llama", "Llama"), ("qwen3_5", "Qwen3_5")])
def test_layers_that_look_ahead_are_refused(family, name):
    """LLM2Vec says so on the layers alone."""
    model = apply_patches(tiny(family))
    batch = row_batch("positions", (5, 9))
    model(**batch.inputs)
    model.model.layers[-1].self_attn.is_causal = False
    with pytest.raises(UnsupportedInput, match=f"{name}Attention with is_causal=False"):
        model(**batch.inputs)
