"""PEFT on every projection, patched before and after; what is quantised; what cannot reach the
convolution.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen3_5ForCausalLM

from hf_packfree import apply_patches, patch_report, remove_patches
from hf_packfree.doctor import diagnose
from hf_packfree.errors import (
    CacheConflict,
    ContractError,
    PatchConflict,
    UnsupportedInput,
    UnsupportedModel,
)
from tests.integrations.compare import in_rows, in_steps, labelled, packed, per_document
from tests.integrations.marks import integration, needs
from tests.support import LOGIT_TOL, documents, gradients, relative_rms, slow_decay, tiny

# its dependencies deprecate things
pytestmark = [needs("peft"), pytest.mark.filterwarnings("default")]

LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def lora(model, targets=LINEAR + ATTENTION + MLP, **options):
    """Return the model with adapters, seeded and none of them zero, so that every one has a
    gradient.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=8, init_lora_weights=False, target_modules=list(targets), **options
    )
    torch.manual_seed(5)
    return get_peft_model(model, config)


KINDS = {"LoRA": {}, "DoRA": {"use_dora": True}}
WHAT = "LoRA and DoRA on `in_proj_*`, `out_proj`, attention and MLP"


@integration("PEFT", WHAT)
@pytest.mark.parametrize("order", ["patched before", "patched after"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters(kind, order, same_gradients):
    if order == "patched before":
        model = lora(apply_patches(tiny()), **KINDS[kind])
    else:
        model = apply_patches(lora(tiny(), **KINDS[kind]))
    found = in_rows(model)
    adapted = {name.split(".lora_")[0] for name in found[0]}
    count = 3 * len(LINEAR) + len(ATTENTION) + 4 * len(MLP)
    assert len(adapted) == count, "every projection is trained"
    assert patch_report(model).called == {}
    wanted = per_document(lora(tiny(), **KINDS[kind]), in_steps(labelled()))
    same_gradients(found, wanted, in_rows(lora(tiny(), **KINDS[kind])))
    assert not patch_report(remove_patches(model)).patched


def test_the_report_says_what_autocast_would_fuse():
    model = apply_patches(lora(tiny(), ATTENTION))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    kind = "LoRA in bfloat16 on activations in float32 (fused under autocast in bfloat16)"
    assert patch_report(model).called == {kind: len(ATTENTION)}
    with torch.autocast("cpu", torch.bfloat16):
        assert patch_report(model).called == {}


OTHERS = {
    "VERA": lambda targets: {"target_modules": targets, "r": 4, "vera_dropout": 0.0},
    "IA3": lambda targets: {"target_modules": targets, "feedforward_modules": ["down_proj"]},
    "LOHA": lambda targets: {"target_modules": targets, "r": 4, "init_weights": False},
}


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@integration("PEFT", "LoRA on experts' `target_parameters`, shared experts and attention")
def test_experts(same_gradients):
    def adapted():
        return lora(tiny("qwen3_5_moe"), target_parameters=EXPERTS)

    found = in_rows(apply_patches(model := adapted()))
    layers = len(model.base_model.model.model.layers)
    assert (
        sum("experts.lora_A" in name or "base_layer.lora_A" in name for name in found[0])
        == 2 * layers
    )
    assert patch_report(model).called == {"LoRA on Qwen3_5MoeExperts": layers}
    same_gradients(found, per_document(adapted(), in_steps(labelled())), in_rows(adapted()))


@integration(
    "PEFT",
    "VeRA, IA3, LoHa on `in_proj_*`, `out_proj`, attention and MLP, a projection in "
    "`modules_to_save`",
)
@pytest.mark.parametrize("kind", OTHERS)
def test_methods_that_are_called_as_they_are(kind, same_gradients):
    found = in_rows(apply_patches(model := other(kind)))
    # in the other layers what is no target is beside targets
    others = {"ModulesToSaveWrapper": 1, "one beside them that is called": 2}
    assert (
        patch_report(model).called
        == {kind: 3 * (len(LINEAR) - 1) + len(ATTENTION) + 4 * len(MLP)} | others
    )
    assert f"with {kind}" in str(patch_report(model))
    same_gradients(found, per_document(other(kind), in_steps(labelled())), in_rows(other(kind)))


def other(kind):
    """The model with adapters of another method on all projections but one, which is trained
    whole.
    """
    import peft

    torch.manual_seed(5)
    targets = [*LINEAR[1:], *ATTENTION, *MLP]
    config = getattr(peft, {"VERA": "VeraConfig", "IA3": "IA3Config", "LOHA": "LoHaConfig"}[kind])
    model = peft.get_peft_model(
        tiny(), config(**OTHERS[kind](targets), modules_to_save=["0.linear_attn.in_proj_qkv"])
    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "vera_lambda" in name:
            torch.nn.init.normal_(parameter.data, std=0.3)
    return model


@integration("PEFT", "`merge_and_unload`, adapters saved and loaded unpatched")
def test_merging_and_loading(tmp_path, record_property):
    from peft import PeftModel

    model = lora(apply_patches(tiny()))
    in_rows(model)
    batch, items = packed(labelled()[:4]), labelled()[:4]
    with torch.no_grad():
        adapted = model(**batch).logits
        model.save_pretrained(tmp_path)
        merged = model.merge_and_unload()
        error = relative_rms(merged(**batch).logits, adapted)
        loaded = PeftModel.from_pretrained(tiny(), tmp_path)
        alone = torch.cat(
            [loaded(input_ids=ids[None], use_cache=False).logits for ids, _ in items], 1
        )
    assert isinstance(merged, Qwen3_5ForCausalLM) and patch_report(merged).patched
    assert not patch_report(loaded).patched
    record_property("error", error)
    assert error <= 1e-5
    assert relative_rms(adapted, alone) <= 1e-5
    unpatched = tiny()
    unpatched.load_state_dict(merged.state_dict())
    assert type(unpatched.model.layers[0].linear_attn.in_proj_qkv) is nn.Linear


class TestConvolution:
    """Upstream and we read its weights without calling it, so an adapter there would never be
    trained.
    """

    WHAT, SAYS = (
        "LoRA on `conv1d`",
        "refused: `ContractError` when patching, `PatchConflict` at the first forward after",
    )

    @integration("PEFT", WHAT, SAYS)
    def test_refused_when_patching(self):
        with pytest.raises(ContractError, match="conv1d"):
            apply_patches(self.adapted(tiny()))

    @integration("PEFT", WHAT, SAYS)
    @pytest.mark.parametrize("row", ["packed", "one document"])
    def test_refused_after_patching(self, row):
        model = self.adapted(apply_patches(tiny()))
        inputs = packed(labelled()[:4] if row == "packed" else labelled()[1:2])
        with pytest.raises(PatchConflict, match="target_modules"):
            model(**inputs)

    @integration("PEFT", WHAT, SAYS)
    def test_upstream_ignores_it(self):
        model = self.adapted(tiny())
        loss = model(**packed(labelled()[1:2])).loss
        assert not loss.requires_grad, (
            "if this fails, upstream calls its convolution and the adapter may be allowed"
        )

    @staticmethod
    def adapted(model):
        """The smallest adapter that PEFT allows on a depthwise convolution: its rank is a
        multiple of the channels.
        """
        from peft import LoraConfig, get_peft_model

        channels = tiny().model.layers[0].linear_attn.conv1d.in_channels
        return get_peft_model(
            model, LoraConfig(r=channels, target_modules=["conv1d"], init_lora_weights=False)
        )


PROMPTS = {
    "PromptTuningConfig": {},
    "PromptEncoderConfig": {"encoder_hidden_size": 8},
    "MultitaskPromptTuningConfig": {"num_tasks": 2},
    "CPTConfig": {
        "num_virtual_tokens": None,
        "cpt_token_ids": [1, 2, 3],
        "cpt_mask": [1, 1, 1],
        "cpt_tokens_type_mask": [1, 2, 2],
    },
    "PrefixTuningConfig": {},
}


def prompted(kind, model):
    """The model under a method that learns virtual tokens."""
    import peft

    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3} | PROMPTS[kind]
    options = {name: value for name, value in options.items() if value is not None}
    return peft.get_peft_model(model, getattr(peft, kind)(**options))


class TestPrompts:
    """PEFT puts virtual tokens in front of the row and drops positions: one document arrives."""

    WHAT = "prompt tuning, P-tuning, multitask prompt tuning, CPT, prefix tuning"
    SAYS = (
        "refused: `UnsupportedModel` when patching, and at the first forward after (prefix tuning: "
        "`CacheConflict`, packed rows)"
    )

    @integration("PEFT", WHAT, SAYS)
    @pytest.mark.parametrize("kind", PROMPTS)
    def test_refused_when_patching(self, kind):
        model = prompted(kind, tiny())
        for around in (model, nn.DataParallel(model)):
            with pytest.raises(UnsupportedModel, match="found PEFT's [A-Z_]+, which puts virtual"):
                apply_patches(around)
        assert not patch_report(model).patched

    @integration("PEFT", WHAT, SAYS)
    @pytest.mark.parametrize("kind", [kind for kind in PROMPTS if not kind.startswith("Prefix")])
    @pytest.mark.parametrize("row", ["positions", "mask", "one document"])
    def test_refused_after_patching(self, kind, row):
        model = prompted(kind, apply_patches(tiny()))
        inputs = packed(labelled()[:4])
        tasks = {"task_ids": torch.tensor([0])} if "Multitask" in kind else {}
        if row == "mask":
            numbers = (inputs.pop("position_ids") == 0).cumsum(1)
            inputs["attention_mask"] = numbers
        elif row == "one document":
            inputs = packed(labelled()[1:2])
        with pytest.raises(UnsupportedModel, match="found PEFT's [A-Z_]+, which puts virtual"):
            model(**inputs, **tasks)

    @integration("PEFT", WHAT, SAYS)
    def test_a_prefix_is_a_cache(self):
        model = prompted("PrefixTuningConfig", apply_patches(tiny()))
        with pytest.raises(CacheConflict):
            model(**packed(labelled()[:4]))

    @pytest.mark.slow
    def test_through_wrappers_and_compiled(self):
        model = prompted("PromptTuningConfig", apply_patches(tiny()))
        compiled = torch.compile(model, backend="eager")
        for call in (nn.DataParallel(model), nn.Sequential(model)[0].forward, compiled):
            with pytest.raises(UnsupportedModel, match="PROMPT_TUNING"):
                call(**packed(labelled()[:4]))

    def test_disabled_and_embeddings_of_ones_own_are_fine(self):
        model = prompted("PromptTuningConfig", apply_patches(tiny()))
        inputs = packed(labelled()[:4])
        wanted = apply_patches(tiny())(**inputs).loss
        with model.disable_adapter():
            assert torch.equal(model(**inputs).loss, wanted)
        ids = inputs.pop("input_ids")
        embeds = model.base_model.get_input_embeddings()(ids)
        assert torch.equal(model.base_model(**inputs, inputs_embeds=embeds).loss, wanted)

    def test_what_would_be_lost(self):
        """The reason: unpatched and with PEFT around, another document changes this one's."""
        model = prompted("PromptTuningConfig", tiny()).eval()
        inputs = packed(labelled()[:2])
        other = dict(inputs, input_ids=inputs["input_ids"].clone())
        other["input_ids"][:, :3] = 7
        last = [model(**each).logits[:, -9:] for each in (inputs, other)]
        assert relative_rms(*last) > 1e-3


class TestInvocations:
    """The adapter is on behind the last invocation of a row, whichever document that is in."""

    WHAT = "activated LoRA (`alora_invocation_tokens`)"
    SAYS = "refused: `UnsupportedModel` when patching, and at the first packed or padded forward"

    @staticmethod
    def adapted(model):
        return lora(model, ATTENTION, alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")

    @staticmethod
    def row(*lengths):
        """Documents that call for the adapter at their fourth token."""
        parts = [torch.randint(10, 100, (length,)) for length in lengths]
        for part in parts:
            part[3:5] = torch.tensor([5, 6])
        positions = torch.cat([torch.arange(length) for length in lengths])
        return {"input_ids": torch.cat(parts)[None], "position_ids": positions[None]}

    @integration("PEFT", WHAT, SAYS)
    def test_refused_when_patching(self):
        with pytest.raises(UnsupportedModel, match="last invocation of a row"):
            apply_patches(self.adapted(tiny()))

    @integration("PEFT", WHAT, SAYS)
    @pytest.mark.parametrize("batch", ["packed", "padded"])
    def test_refused_after_patching(self, batch):
        model = self.adapted(apply_patches(tiny()))
        inputs = self.row(9, 12)
        if batch == "padded":
            mask = torch.ones(2, 21).tril(15)
            inputs = {"input_ids": inputs["input_ids"].repeat(2, 1), "attention_mask": mask}
        with pytest.raises(UnsupportedModel, match="last invocation of a row"):
            model(**inputs)

    def test_one_document_is_peft_s_own(self):
        model, inputs = self.adapted(apply_patches(tiny())).eval(), self.row(9)
        wanted = self.adapted(tiny()).eval()(**inputs).logits
        assert torch.equal(model(**inputs).logits, wanted)


def test_tasks_of_rows_need_rows():
    """Poly's: a padded batch runs as one row, unless it is left to upstream."""
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(5)
        targets = {"target_modules": list(ATTENTION), "n_tasks": 2, "n_skills": 2}
        return peft.get_peft_model(model, peft.PolyConfig(task_type="CAUSAL_LM", r=4, **targets))

    mask = torch.ones(2, 9)
    mask[1, 6:] = 0
    batch = {"input_ids": documents((18,))[0].view(2, 9), "attention_mask": mask}
    batch |= {"task_ids": torch.tensor([0, 1]), "use_cache": False}
    with pytest.raises(UnsupportedInput, match=r"found PEFT's task_ids for a batch \(2, 9\)"):
        adapted(apply_patches(tiny()))(**batch)
    found = adapted(apply_patches(tiny(), padded="upstream"))(**batch).logits
    wanted = adapted(tiny())(**batch).logits
    assert relative_rms(found[mask.bool()], wanted[mask.bool()]) <= LOGIT_TOL


@pytest.mark.parametrize("batch", ["padded", "packed"])
def test_adapters_of_rows_need_rows(batch):
    """`adapter_names`: PEFT counts them against rows, which are one where they become one."""

    def adapted(model):
        model = lora(model, ATTENTION).eval()
        model.add_adapter("other", model.peft_config["default"])
        return model

    inputs = {"input_ids": documents((18,))[0].view(2, 9), "use_cache": False}
    mask = torch.ones(2, 9)
    if batch == "padded":
        mask[1, 6:] = 0
        inputs["attention_mask"] = mask
    else:
        inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    inputs["adapter_names"] = ["other", "__base__"]
    with pytest.raises(UnsupportedInput, match=r"found PEFT's adapter_names for a batch \(2, 9\)"):
        adapted(apply_patches(tiny()))(**inputs)
    if batch == "padded":
        found = adapted(apply_patches(tiny(), padded="upstream"))(**inputs).logits
        wanted = adapted(tiny())(**inputs).logits
        assert relative_rms(found[mask.bool()], wanted[mask.bool()]) <= LOGIT_TOL


def test_scalings_of_rows_need_rows(tmp_path):
    """X-LoRA's are computed in PEFT, of the caller's shape; a packed row is one row already."""
    peft = pytest.importorskip("peft")
    lora(tiny(), ATTENTION).save_pretrained(tmp_path)

    def adapted(model):
        model.config.use_cache = False
        torch.manual_seed(5)
        adapters = {"hidden_size": 64, "adapters": {"0": str(tmp_path)}, "xlora_depth": 1}
        options = {"enable_softmax": False, "task_type": "CAUSAL_LM"}
        return peft.get_peft_model(model, peft.XLoraConfig(**adapters, **options)).eval()

    model = adapted(apply_patches(tiny()))
    items = labelled()[:4]
    inputs = packed(items)
    alone = [adapted(tiny())(input_ids=ids[None]).logits for ids, _ in items]
    assert relative_rms(model(**inputs).logits, torch.cat(alone, 1)) <= LOGIT_TOL
    mask = torch.ones(2, 9)
    mask[1, 6:] = 0
    batch = {"input_ids": documents((18,))[0].view(2, 9), "attention_mask": mask}
    last = {name: each[1:] for name, each in batch.items()}
    for each in (batch, last):
        with pytest.raises(UnsupportedInput, match="found PEFT's X-LoRA with scalings for a batch"):
            model(**each)
    upstream = adapted(apply_patches(tiny(), padded="upstream"))
    for each in (batch, last):
        assert torch.equal(upstream(**each).logits, adapted(tiny())(**each).logits)


def test_eva_chooses_tokens_of_rows():
    """EVA's hooks choose tokens of layers' inputs by the mask of the caller's shape."""
    peft = pytest.importorskip("peft")

    def started(model, batch, **options):
        eva = {"init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=1.0)}
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], **eva)
        model = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
        peft.initialize_lora_eva_weights(model, [batch] * 2, show_progress_bar=False, **options)
        return [each for name, each in model.named_parameters() if "lora_A" in name]

    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    batch = {"input_ids": documents((18,))[0].view(2, 9), "attention_mask": mask}
    batch["use_cache"] = False
    for each in (batch, {name: one if one is False else one[1:] for name, one in batch.items()}):
        with pytest.raises(UnsupportedInput, match="found PEFT's EVA with a choice of tokens"):
            started(apply_patches(tiny()), each)
    wanted = started(tiny(), batch)
    found = started(apply_patches(tiny(), padded="upstream"), batch)
    assert wanted and all(torch.equal(*pair) for pair in zip(found, wanted))
    # every token that a layer gets is real here
    started(apply_patches(tiny()), batch, prepare_layer_inputs_fn=None)


def refuses_hidden_states(model, why):
    """The text model inside refuses a packed row, and runs one document."""
    text_model = model.base_model.model.model
    row, alone = (
        {"input_ids": each["input_ids"], "position_ids": each["position_ids"]}
        for each in (packed(labelled()[:2]), packed(labelled()[1:2]))
    )
    with pytest.raises(UnsupportedModel, match=why):
        text_model(**row)
    text_model(**alone)


def row_or_rows(batch):
    """A packed row of two documents, or two rows of which the second is padded."""
    inputs = packed(labelled()[:2])
    if batch == "packed":
        return inputs
    mask = torch.ones_like(inputs["input_ids"]).repeat(2, 1)
    mask[1, -3:] = 0
    return {"input_ids": inputs["input_ids"].repeat(2, 1), "attention_mask": mask}


class TestRouters:
    """Lily's routers average over all tokens of a batch, whichever document they are of."""

    WHAT = "Lily"
    SAYS = "refused: `UnsupportedModel` when patching, and at the first packed or padded forward"

    @staticmethod
    def adapted(model):
        peft = pytest.importorskip("peft")
        if not hasattr(peft, "LilyConfig"):
            pytest.skip("a PEFT without Lily")
        torch.manual_seed(5)
        return peft.get_peft_model(
            model, peft.LilyConfig(r=4, target_modules=list(MLP), init_weights=False)
        )

    @integration("PEFT", WHAT, SAYS)
    def test_refused_when_patching(self):
        with pytest.raises(UnsupportedModel, match="found PEFT's Lily, whose routers"):
            apply_patches(self.adapted(tiny()))

    @integration("PEFT", WHAT, SAYS)
    @pytest.mark.parametrize("around", [True, False])
    @pytest.mark.parametrize("batch", ["packed", "padded"])
    def test_refused_after_patching(self, batch, around):
        model = self.adapted(apply_patches(tiny()))
        inputs = row_or_rows(batch)
        with pytest.raises(UnsupportedModel, match="found PEFT's Lily, whose routers"):
            (model if around else model.get_base_model())(**inputs)

    def test_the_text_model_alone_is_refused(self):
        """As losses call it for hidden states: without PEFT's forward, below what has a config."""
        model = self.adapted(apply_patches(tiny()))
        refuses_hidden_states(model, "found PEFT's Lily, whose routers")

    def test_what_would_be_lost(self):
        """The reason: a token of one row changes the other row, without any packing."""
        model = self.adapted(tiny()).eval()
        ids = packed(labelled()[1:2])["input_ids"].repeat(2, 1)
        other = ids.clone()
        other[0] = 7
        last = [model(input_ids=each).logits[1] for each in (ids, other)]
        assert relative_rms(*last) > 1e-4


class TestShadows:
    """Shadow calls a model of its own, which gets no boundaries but positions, before the patched
    one.
    """

    @staticmethod
    def adapted(model):
        peft = pytest.importorskip("peft")
        if not hasattr(peft, "ShadowConfig"):
            pytest.skip("a PEFT without Shadow")
        torch.manual_seed(5)
        return peft.get_peft_model(model, peft.ShadowConfig(task_type="CAUSAL_LM"))

    def test_refused_when_patching(self):
        model = self.adapted(tiny())
        with pytest.raises(UnsupportedModel, match="found PEFT's Shadow, whose own model"):
            apply_patches(model)
        assert not patch_report(model).patched

    def test_refused_after_patching(self):
        model = self.adapted(apply_patches(tiny()))
        with pytest.raises(PatchConflict, match="build the model anew"):
            model(**packed(labelled()[:2]))

    def test_what_would_be_lost(self):
        """The reason: with the base model's layers taking their boundaries from elsewhere, the
        shadow's linear attention goes on from one document into the next.
        """
        model = self.adapted(tiny()).eval()
        inputs = packed(labelled()[:2])
        other = dict(inputs, input_ids=inputs["input_ids"].clone())
        other["input_ids"][:, :3] = 7
        shadow = slow_decay(next(iter(model.base_model.shadow_backbone.values())))
        embed, place = model.get_input_embeddings(), inputs["position_ids"]
        calls = [{"inputs_embeds": embed(each["input_ids"])} for each in (inputs, other)]
        rows = [shadow(position_ids=place, use_cache=False, **each) for each in calls]
        last = [row.last_hidden_state[:, -9:] for row in rows]
        assert relative_rms(*last) > 1e-3


class TestAveragedGradients:
    """VeLoRA keeps a projection of activations for the backward pass: onto their mean, by
    default.
    """

    @staticmethod
    def adapted(model, init_type="batch_average"):
        peft = pytest.importorskip("peft")
        if "velora_config" not in peft.LoraConfig.__dataclass_fields__:
            pytest.skip("a PEFT without VeLoRA")
        model = lora(model, velora_config={"num_groups": 4, "init_type": init_type})
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.03)
        return model

    def test_refused_when_patching(self):
        with pytest.raises(UnsupportedModel, match="found PEFT's VeLoRA with .*init_type='random'"):
            apply_patches(self.adapted(tiny()))

    @pytest.mark.parametrize("batch", ["packed", "padded"])
    def test_refused_after_patching(self, batch):
        model = self.adapted(apply_patches(tiny()))
        inputs = row_or_rows(batch)
        with pytest.raises(UnsupportedModel, match="found PEFT's VeLoRA with"):
            model(**inputs)

    @pytest.mark.parametrize("init_type", ["batch_average", "batch_average_once"])
    def test_the_text_model_alone_is_refused(self, init_type):
        model = self.adapted(apply_patches(tiny()), init_type)
        refuses_hidden_states(model, "found PEFT's VeLoRA with")

    def test_random_projections_read_no_other_tokens(self, same_gradients):
        found = in_rows(apply_patches(self.adapted(tiny(), "random")))
        wanted = per_document(self.adapted(tiny(), "random"), in_steps(labelled()))
        same_gradients(found, wanted, in_rows(self.adapted(tiny(), "random")))

    def test_what_would_be_lost(self):
        """The reason: the gradient of a row's loss changes with another row, without packing."""
        found = []
        for other in (7, 9):
            model = self.adapted(tiny())
            ids = packed(labelled()[1:2])["input_ids"].repeat(2, 1)
            ids[0] = other
            model(input_ids=ids, use_cache=False).logits[1].logsumexp(-1).sum().backward()
            found.append(torch.cat([g.flatten() for n, g in gradients(model).items() if "_A" in n]))
        assert relative_rms(*found) > 1e-2


@integration("PEFT", "QLoRA: 4-bit base of bitsandbytes")
@needs("bitsandbytes")
@pytest.mark.parametrize("order", ["patched before", "patched after"])
def test_quantised_base(order, same_gradients, tmp_path):
    tiny().save_pretrained(tmp_path)
    if order == "patched before":
        model = lora(apply_patches(quantised(tmp_path)))
    else:
        model = apply_patches(lora(quantised(tmp_path)))
    found = in_rows(model)
    assert len(found[0]) == 2 * (3 * len(LINEAR) + len(ATTENTION) + 4 * len(MLP))
    wanted = per_document(lora(quantised(tmp_path)), in_steps(labelled()))
    # moving the weights by their last bit moves upstream's own third step by 1.3e-04
    same_gradients(found[:2], wanted[:2], in_rows(lora(quantised(tmp_path)))[:2])


@needs("bitsandbytes")
@pytest.mark.parametrize("computes_in", ["bfloat16", "float32"])
def test_a_4_bit_base_prepared_as_peft_documents_it(computes_in, tmp_path):
    """`prepare_model_for_kbit_training` makes norms and activations fp32: report and doctor say
    in which dtype projections are fused, and what would fuse them where they are not.
    """
    from peft import prepare_model_for_kbit_training

    tiny().save_pretrained(tmp_path / "whole")
    base = quantised(tmp_path / "whole", computes_in=getattr(torch, computes_in))
    base.save_pretrained(tmp_path / "in 4 bits")
    (plan,) = diagnose(str(tmp_path / "in 4 bits")).plans
    model = apply_patches(lora(prepare_model_for_kbit_training(base)))
    count, kind = 3 * len(LINEAR) + len(ATTENTION) + 4 * len(MLP), "LoRA on Linear4bit whose bnb"
    with torch.autocast("cpu", torch.bfloat16):
        trained = patch_report(model).called
    if computes_in == "bfloat16":
        said = "is bfloat16, not float32 (fused under autocast in bfloat16)"
        assert patch_report(model).called == {f"{kind}_4bit_compute_dtype {said}": count}
        assert trained == {} and "are fused under autocast in bfloat16" in plan.linear
    else:
        said = "is float32, not bfloat16"
        assert patch_report(model).called == {}
        assert trained == {f"{kind}_4bit_compute_dtype {said}": count}
        assert "are fused where activations and adapters are float32 (TRL makes" in plan.linear
        assert "load it with bnb_4bit_compute_dtype=torch.bfloat16" in plan.linear
        # as TRL makes adapters of a base in 4 bits
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.bfloat16()
        kind = "LoRA in bfloat16 on activations in float32"
        assert patch_report(model).called == {kind: count}


@integration(
    "PEFT",
    "LoRA on 8-bit bases: bitsandbytes, torchao's weight-only int8",
    "works; called as it is, not fused",
)
@pytest.mark.parametrize(
    "package", [pytest.param(name, marks=needs(name)) for name in ("bitsandbytes", "torchao")]
)
def test_bases_that_are_called_as_they_are(package, same_gradients, tmp_path):
    tiny().save_pretrained(tmp_path)
    model = apply_patches(lora(in_8_bits(tmp_path, package)))
    found = in_rows(model)
    kind = {"bitsandbytes": "Linear8bitLt", "torchao": "Int8Tensor"}[package]
    count = 3 * len(LINEAR) + len(ATTENTION) + 4 * len(MLP)
    assert patch_report(model).called == {f"LoRA on {kind}": count}
    assert patch_report(apply_patches(in_8_bits(tmp_path, package))).called == {kind: count}
    wanted = per_document(lora(in_8_bits(tmp_path, package)), in_steps(labelled()))
    same_gradients(found, wanted, in_rows(lora(in_8_bits(tmp_path, package))))


def in_8_bits(folder, package):
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if package == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return loaded(folder, TorchAoConfig(Int8WeightOnlyConfig()))
    return loaded(folder, BitsAndBytesConfig(load_in_8bit=True))


def loaded(folder, config):
    options = {"quantization_config": config, "device_map": "cpu", "dtype": torch.float32}
    return Qwen3_5ForCausalLM.from_pretrained(folder, **options).train()


def quantised(folder, computes_in=torch.float32, **options):
    """Load the tiny model with 4-bit linear layers that compute in this dtype."""
    from transformers import BitsAndBytesConfig

    options |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": computes_in}
    config = BitsAndBytesConfig(load_in_4bit=True, **options)
    model = loaded(folder, config)
    assert type(model.model.layers[0].linear_attn.in_proj_qkv).__name__ == "Linear4bit"
    return model
