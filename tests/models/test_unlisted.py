"""Models of families that the table does not list: served where a tiny copy of them is exact,
refused by name and reason where it is not, before anything changes.
"""

from __future__ import annotations

import pickle
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.seed_oss import modeling_seed_oss

from hf_packfree import apply_patches, patch_report, remove_patches, verify_packing
from hf_packfree.errors import UnsupportedModel
from hf_packfree.models.compat import RELEASE
from hf_packfree.patching import selfcheck_unlisted, unlisted
from hf_packfree.patching.registry import ROWS
from hf_packfree.patching.shrunk import shrunk
from hf_packfree.refused_families import REFUSED
from tests.input_formats import row_batch
from tests.models.padded import padded_batch
from tests.models.test_door import EDGES, with_ones
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    assert_exact,
    errors,
    random_weights,
    relative_rms,
    run,
    run_alone,
    slow_decay,
    step,
    worst_gradient,
)

SERVED = {
    "ministral": {"head_dim": 16},
    "seed_oss": {},
    "ernie4_5": {},
    "exaone4": {},
    "glm": {},
    "minimax_m2": {},
    "granitemoe": {},
    "apertus": {},
    "ministral3": {},
    "gpt_neox": {},
    "gemma3n_text": {},
    "beam": {},
    "youtu": {},
    "deepseek_v2": {"num_experts_per_tok": 2},
}
"""{model type: what its config needs}; with windows, shared keys, gates, experts, partial and
scaled positions, layers without any between them."""
QUICK = "ministral", "exaone4", "granitemoe", "ministral3"
REFUSALS = {
    "phimoe": "sliding window is in its mask alone",
    "doge": "sliding window is in its mask alone",
    "bloom": "does not go through transformers' AttentionInterface",
    "mpt": "does not go through transformers' AttentionInterface",
    "mvp": "does not go through transformers' AttentionInterface",
    "trocr": "does not go through transformers' AttentionInterface",
    "stablelm": "hand no keywords to their attention",
    "llama4_text": "chunks of attention and its temperature follow the row",
    "jamba": "Mamba-1's selective scan",
    "mamba": "Mamba-1's selective scan",
    "gpt2": "does not hold its decoder layers as `layers`",
    "opt": "does not hold its decoder layers as `layers`",
    "moshi": "its config has audio_encoder_config, for more than text",
    "diffllama": "its 4 attention layers attend 8 times",
}


def built(kind, **more):
    """A small model of a type, of its own config's defaults, with strong weights."""
    config = CONFIG_MAPPING[kind](**more)
    small = type(config)(**(shrunk(config, longest=512) | more))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small, attn_implementation=None)
    return slow_decay(model).train()


def without_dropout(model):
    """Dropout off, in training mode: two forwards are one function."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "residual_dropout"):
            if hasattr(module, name):
                setattr(module, name, 0.0)
    return model


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in SERVED],
)
def test_served_ones_are_exact(kind, record_property):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    model, batch = without_dropout(built(kind, **SERVED[kind])), row_batch("positions", EDGES)
    weights = random_weights(batch, model.config.vocab_size)
    alone = run_alone(model, batch, weights)
    leaky = run(model, with_ones(batch), weights)
    assert relative_rms(torch.cat(leaky[0]), torch.cat(alone[0])) >= CONTROL * LOGIT_TOL
    padded = padded_batch("left")
    wanted, wanted_grads = step(model, padded)
    ids = batch.documents[4][None]
    unpacked = model(input_ids=ids).logits
    apply_patches(model)
    for given in (batch, with_ones(batch), row_batch("block_mask", EDGES)):
        logits, grads = errors(run(model, given, weights), alone)
        record_property("errors", (logits, grads))
        assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)
    found, grads = step(model, padded)
    assert abs(found.loss.item() / wanted.loss.item() - 1) <= LOGIT_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    assert torch.equal(model(input_ids=ids).logits, unpacked)


@pytest.mark.parametrize("kind", REFUSALS)
def test_others_are_refused_by_name_before_anything_changes(kind):
    model = built(kind)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(
        UnsupportedModel, match=rf"of {kind.removesuffix('_text')}, .*{REFUSALS[kind]}"
    ):
        apply_patches(model)
    assert classes == [type(module) for module in model.modules()]
    assert not patch_report(model).patched


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_the_table_refuses_would_not_be_served_without_it(kind, monkeypatch):
    """By its classes, its config or its tiny copy; windows where there are any."""
    monkeypatch.setattr(unlisted, "REFUSED", {})
    monkeypatch.setattr(selfcheck_unlisted, "_found", {})
    window = {"sliding_window": 16} if kind in ("phimoe", "doge") else {}
    model = built(kind, **window)
    with pytest.raises(UnsupportedModel, match=f"of {kind.removesuffix('_text')}, which is not"):
        apply_patches(model)
    assert not patch_report(model).patched


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (
            "nemotron",
            {"head_dim": 128, "num_key_value_heads": 8},
            "hand no keywords to their attention",
        ),
        ("blt", {}, "window is in its mask alone"),
    ],
)
def test_models_of_published_sizes_are_refused_by_name(kind, fields, reason):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields))
    with pytest.raises(UnsupportedModel, match=f"of {kind}, .*{reason}"):
        apply_patches(model)


def test_dropout_drops_while_training_and_not_in_evaluation():
    """Seed-OSS has it behind its attention's output, too."""
    model, batch = (
        built("seed_oss", residual_dropout=0.1, attention_dropout=0.1),
        row_batch("positions", EDGES),
    )
    apply_patches(model)
    assert not torch.equal(model(**batch.inputs).logits, model(**batch.inputs).logits)
    assert_exact(model.eval(), batch)


def test_the_report_says_that_it_is_not_listed_and_what_was_done(capsys, monkeypatch):
    monkeypatch.delenv("PACKFREE_QUIET", raising=False)
    model = built("ministral", head_dim=16)
    before = [type(module) for module in model.modules()]
    report = patch_report(apply_patches(apply_patches(model)))
    assert (report.family, report.listed, report.patched) == ("ministral", False, True)
    said = "ministral is in no table; its packed rows were measured on a tiny copy"
    assert said in str(report) and f"({said})" in capsys.readouterr().err
    batch = row_batch("positions", EDGES)
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy(**batch.inputs).logits, model(**batch.inputs).logits)
    assert patch_report(copy).family == "ministral"
    found = verify_packing(model, lengths=(5, 40, 1, 17))
    assert found.family == "ministral" and found.patched.influence == 0
    remove_patches(model)
    assert before == [type(module) for module in model.modules()]
    assert patch_report(model).family is None


def test_a_copy_is_measured_once_for_every_set_of_options(monkeypatch):
    made = []
    whole = selfcheck_unlisted.tiny
    monkeypatch.setattr(selfcheck_unlisted, "_found", {})
    monkeypatch.setattr(
        selfcheck_unlisted,
        "tiny",
        lambda family, **how: made.append(family) or whole(family, **how),
    )
    for bias, width in ((False, 64), (True, 64), (False, 128)):
        apply_patches(built("seed_oss", attention_bias=bias, hidden_size=width))
    # sizes are those of a tiny copy
    assert [family.tiny["attention_bias"] for family in made] == [False, True]


def test_options_decide_too():
    """Qwen's first experts have a window, if any, in their masks alone."""
    apply_patches(built("qwen2_moe"))
    model = built("qwen2_moe", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    with pytest.raises(UnsupportedModel, match="differ from the same alone by .*: masks or posit"):
        apply_patches(model)


def test_padded_rows_are_left_to_upstream_where_they_count_padding():
    """Ministral 3 scales queries by their place in the padded row."""
    model = apply_patches(built("ministral3"))
    assert patch_report(model).padded == "upstream"
    with pytest.raises(UnsupportedModel, match="documents padded on the left change by"):
        apply_patches(remove_patches(model), batch_invariant=True)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"hidden_size": 63}, "no tiny copy of it can be built and measured"),
        ({"layer_types": ["full_attention", "ring_attention"] * 2}, "kind ring_attention"),
    ],
)
def test_what_no_copy_can_be_made_of_is_refused(change, found, monkeypatch):
    model = built("seed_oss")
    for name, value in change.items():
        setattr(model.config, name, value)
    if "hidden_size" in change:
        monkeypatch.setattr(type(model.config), "__init__", None)
        monkeypatch.setattr(selfcheck_unlisted, "_found", {})
    with pytest.raises(UnsupportedModel, match=found):
        apply_patches(model)


def test_a_text_model_of_ones_own_is_refused():
    class OwnModel(transformers.SeedOssModel):
        pass

    model = built("seed_oss")
    model.model.__class__ = OwnModel
    with pytest.raises(UnsupportedModel, match="its SeedOssDecoderLayer is not of tests.models"):
        apply_patches(model)


def test_code_of_a_checkpoint_is_served_alike(monkeypatch):
    """Which need not say what it exports."""
    source = Path(modeling_seed_oss.__file__)
    spec = spec_from_file_location("transformers.models.seed_oss.modeling_mine", source)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    del module.__all__
    config = CONFIG_MAPPING["seed_oss"]()
    model = module.SeedOssForCausalLM(type(config)(**shrunk(config)))
    assert_exact(apply_patches(slow_decay(model).eval()), row_batch("positions", EDGES))
    assert patch_report(model).swaps == {
        "SeedOssForCausalLM": 1,
        "SeedOssModel": 1,
        "SeedOssAttention": 4,
    }


def test_an_encoder_and_a_text_model_around_images_are_refused():
    sizes = {
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    with pytest.raises(
        UnsupportedModel, match="a T5Stack of t5, which .*: its encoder reads whole"
    ):
        apply_patches(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28}
    vision |= {"model_type": "clip_vision_model", "num_attention_heads": 2, "patch_size": 14}
    text = built("seed_oss").config.to_dict()
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    with pytest.raises(UnsupportedModel, match="around a SeedOssModel; wanted the language model"):
        apply_patches(transformers.LlavaForConditionalGeneration(config))


def test_a_layer_that_holds_another_mixer_is_refused():
    model = built("seed_oss")
    model.model.layers[2].mlp.conv1d = torch.nn.Conv1d(4, 4, 3)
    with pytest.raises(UnsupportedModel, match="its Conv1d mixes tokens apart from its attention"):
        apply_patches(model)


def test_families_are_in_one_table():
    assert not {row.name for row in ROWS} & REFUSED.keys()
    folders = {
        path.name for path in Path(transformers.__file__).parent.joinpath("models").iterdir()
    }
    assert RELEASE < Version("5.24.0") or folders >= REFUSED.keys()
