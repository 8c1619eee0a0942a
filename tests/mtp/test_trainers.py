"""The head's loss is counted once whoever computes the main one: the Trainer, TRL, a forward
like Liger's, PEFT.
"""

from __future__ import annotations

import types

import pytest
import torch
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from hf_packfree import MTPOptions, PackFreeCallback, apply_patches
from hf_packfree.errors import PatchConflict, UnsupportedInput
from hf_packfree.mtp.attached import training_facts, training_of
from tests.integrations.compare import KeepGradients, arguments
from tests.integrations.marks import integration, needs
from tests.integrations.test_trl import sft, tokenizer, words
from tests.mtp.heads import WEIGHT, build, labelled, of_head, packed, wanted_of, worst_gradient
from tests.support import documents, gradients, slow_decay, tiny
from tests.vision import documents as media_documents
from tests.vision import media_arguments, packed_batch, padded_batch, tiny_vision

LENGTHS = (5, 64, 2, 129, 3, 63, 2, 65)
OPTIONS = MTPOptions(from_scratch=True, depth=2, weight=WEIGHT)
HEAD = "multi-token prediction head"
WITH_PEFT = f"{HEAD}: adapters on it, merged, or the whole of it in `modules_to_save`"
REFUSED = 'refused as its loss, by name: `UnsupportedInput`; `mtp="keep"` carries the head through'


def check(found, wanted, record_property) -> None:
    record_property("error", error := worst_gradient(found, wanted))
    assert error <= 1e-4


def trained(tmp_path, **more):
    keep, model = KeepGradients(), build(depth=2)
    items = [{"input_ids": ids.tolist()} for ids in documents(LENGTHS)]
    trainer = Trainer(
        model,
        arguments(tmp_path, TrainingArguments, max_steps=1, **more),
        train_dataset=items,
        data_collator=DataCollatorWithFlattening(),
        callbacks=[keep, PackFreeCallback(mtp=OPTIONS)],
    )
    trainer.train()
    return trainer, of_head(keep.steps[0])


@pytest.mark.slow
@integration("Trainer", f"{HEAD}, gradient accumulation", "works with `PackFreeCallback(mtp=...)`")
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_the_trainer_with_accumulation(micro, record_property, tmp_path):
    trainer, found = trained(
        tmp_path, per_device_train_batch_size=micro, gradient_accumulation_steps=4 // micro
    )
    pairs = [(ids, ids) for ids in documents(LENGTHS)[:4]]
    check(found, wanted_of(pairs), record_property)
    (log,) = [row for row in trainer.state.log_history if "packfree/mtp_loss_2" in row]
    whole = build(depth=2)
    whole(**packed(pairs))
    facts = training_facts(whole)
    assert {name: log[name] for name in log if "mtp" in name} == pytest.approx(
        facts, rel=1e-5
    ) and len(facts) == 4


def test_the_head_runs_in_the_models_precision(tmp_path):
    """accelerate's autocast ends with the model's forward; the head's loss comes after it."""
    model, seen = build(), []
    model.mtp.fc.register_forward_hook(lambda layer, args, out: seen.append(out.dtype))
    Trainer(
        model,
        arguments(tmp_path, TrainingArguments, max_steps=1, bf16=True),
        data_collator=DataCollatorWithFlattening(),
        train_dataset=[{"input_ids": ids.tolist()} for ids in documents(LENGTHS[:4])],
    ).train()
    assert seen == [torch.bfloat16] and model.mtp.fc.weight.dtype == torch.float32


@pytest.mark.slow
@integration("TRL SFTTrainer", HEAD)
@needs("trl", "datasets")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("steps", [1, 2])
def test_trl_which_makes_the_loss_afterwards(steps, record_property, tmp_path):
    model = build(depth=2)
    trainer, found = sft(
        tmp_path,
        {"input_ids": [ids.tolist() for ids in documents(LENGTHS * 2)]},
        model=model,
        padding_free=True,
        max_steps=1,
        per_device_train_batch_size=4 // steps,
        gradient_accumulation_steps=steps,
    )
    rows = list(trainer.train_dataset)[:4]
    pairs = [(torch.tensor(row["input_ids"]), torch.tensor(row["labels"])) for row in rows]
    check(of_head(found[0]), wanted_of(pairs), record_property)


def test_a_forward_that_calls_the_base_model_itself():
    """As Liger's: on the instance, in front of our head."""
    model, pairs = build(depth=2), labelled()

    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        targets = labels.masked_fill(kwargs["position_ids"] == 0, -100)[0, 1:]
        loss = F.cross_entropy(self.lm_head(hidden)[0, :-1], targets)
        return type("Output", (dict,), {"loss": property(lambda self: self["loss"])})(loss=loss)

    model.forward = types.MethodType(forward, model)
    model(**packed(pairs)).loss.backward()
    assert worst_gradient(of_head(gradients(model)), wanted_of(pairs)) <= 1e-4


def test_a_forward_that_returns_no_loss_is_refused():
    model = build()
    model.forward = types.MethodType(
        lambda self, labels=None, **kwargs: self.model(**kwargs), model
    )
    with pytest.raises(UnsupportedInput, match="found a .* without a loss for labels"):
        model(**packed(labelled()))


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (lambda model: model, "found a training step of Qwen3_5ForCausalLM without labels"),
        (
            lambda model: model.base_model,
            "found a training step that calls the Qwen3_5TextModel alone",
        ),
    ],
    ids=["the model", "the text model"],
)
def test_a_step_without_labels_is_said_once(of, said, caplog):
    model, inputs = build(), packed(labelled((5, 3)))
    del inputs["labels"]
    with torch.no_grad():
        of(model)(**inputs)
    assert not caplog.records
    for _ in range(2):
        of(model)(**inputs)
    (record,) = caplog.records
    assert (
        record.levelname == "WARNING"
        and record.message.startswith(said)
        and "mtp='keep'" in record.message
    )


@integration("TRL DPOTrainer", f"{HEAD}; GRPOTrainer too", REFUSED)
@pytest.mark.parametrize("trainer", ["rewards", "preferences"])
@needs("trl", "datasets")
@pytest.mark.filterwarnings("default")
def test_trls_other_losses_are_refused(trainer, tmp_path):
    """They raise some answers' likelihood and lower others': what is left as their mean may
    teach the head the reverse.
    """
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    prompt, chosen, rejected = (words(ids) for ids in documents((5, 7, 9)))
    given = {"model": build(depth=2), "processing_class": tokenizer()}
    if trainer == "rewards":
        settings = {"num_generations": 4, "max_completion_length": 4}
        given |= {
            "reward_funcs": lambda completions, **_: [
                float(place) for place, _ in enumerate(completions)
            ]
        }
        kind, config, rows = GRPOTrainer, GRPOConfig, {"prompt": [prompt]}
    else:
        given |= {"ref_model": slow_decay(tiny(), seed=1)}
        kind, config, settings = DPOTrainer, DPOConfig, {}
        rows = {"prompt": [prompt], "chosen": [" " + chosen], "rejected": [" " + rejected]}
    settings = arguments(tmp_path, config, **settings, max_steps=1)
    with pytest.raises(
        UnsupportedInput, match=r"makes some labels less likely, .* \(GRPO, DPO\).*mtp='keep'"
    ):
        kind(args=settings, train_dataset=Dataset.from_dict(rows), **given).train()


def test_some_logits_alone_are_refused():
    with pytest.raises(UnsupportedInput, match="found logits_to_keep in a training step"):
        build()(**packed(labelled()) | {"labels": torch.ones(1, 4).long()}, logits_to_keep=4)


@needs("peft")
@pytest.mark.filterwarnings("default")
class TestPeft:
    @integration("PEFT", WITH_PEFT)
    def test_adapters_reach_it_and_merge(self):
        from peft import LoraConfig, get_peft_model

        pairs = labelled()
        model = get_peft_model(
            build(depth=2), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
        model(**packed(pairs)).loss.backward()
        adapted = {
            name
            for name, one in gradients(model).items()
            if "mtp." in name and float(one.norm()) > 0
        }
        assert len(adapted) == 2 * 8, "fc, four of attention, three of the MLP"
        assert (
            len([name for name in model.merge_and_unload().state_dict() if name.startswith("mtp.")])
            == 15
        )

    @integration("PEFT", WITH_PEFT)
    def test_the_full_head_beside_adapters(self, tmp_path):
        from peft import LoraConfig, get_peft_model
        from safetensors.torch import load_file

        pairs = labelled()
        config = LoraConfig(
            r=4, target_modules="all-linear", modules_to_save=["mtp"], exclude_modules=r"mtp\..*"
        )
        model = get_peft_model(build(depth=2), config)
        model(**packed(pairs)).loss.backward()
        found = {name: one for name, one in gradients(model).items() if "mtp." in name}
        assert len(found) == 15 and all("modules_to_save" in name for name in found)
        model.save_pretrained(tmp_path)
        assert (
            len(
                [
                    name
                    for name in load_file(tmp_path / "adapter_model.safetensors")
                    if "mtp." in name
                ]
            )
            == 15
        )
        with torch.no_grad():
            model.base_model.model.mtp.modules_to_save["default"].fc.weight.fill_(0.5)
        merged = model.merge_and_unload().state_dict()
        assert len(of_head(merged)) == 15 and bool((merged["mtp.fc.weight"] == 0.5).all()), (
            "what was trained"
        )

    def test_the_trainer_saves_and_resumes_the_full_head(self, tmp_path):
        """By the recipe that refusals name; a run in two parts ends as one in one."""

        def trained(steps, resume=None):
            model = self.adapted(modules_to_save=["mtp"], exclude_modules=r"mtp\..*")
            trainer = self.trainer(
                model, tmp_path, max_steps=steps, save_steps=1, save_strategy="steps"
            )
            trainer.train(resume_from_checkpoint=resume)
            return {name: one.detach().clone() for name, one in model.named_parameters()}

        whole = trained(2)
        first = str(tmp_path / "checkpoint-1")
        resumed = trained(2, resume=first)
        heads = [name for name in whole if "mtp.modules_to_save" in name]
        assert len(heads) == 15
        assert all(torch.equal(resumed[name], whole[name]) for name in whole)
        start = dict(self.adapted(modules_to_save=["mtp"]).named_parameters())
        assert not any(torch.equal(start[name], whole[name]) for name in heads), "it learnt"

    def adapted(self, model=None, **more):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        target = more.pop("target_modules", ["in_proj_qkv"])
        return get_peft_model(
            build(depth=2) if model is None else model,
            LoraConfig(r=4, target_modules=target, task_type="CAUSAL_LM", **more),
        )

    def trainer(self, model, tmp_path, mtp=OPTIONS, **more):
        return Trainer(
            model,
            arguments(tmp_path, TrainingArguments, learning_rate=0.01, **more),
            train_dataset=[{"input_ids": ids.tolist()} for ids in documents(LENGTHS)],
            data_collator=DataCollatorWithFlattening(),
            callbacks=[PackFreeCallback(mtp=mtp)],
        )

    def test_a_head_to_train_is_not_added_beside_adapters(self, tmp_path):
        """The Trainer saves adapters alone."""
        model = self.adapted(build(patched=False))
        with pytest.raises(PatchConflict, match="found PEFT's adapters .*modules_to_save="):
            self.trainer(model, tmp_path)
        assert not hasattr(model.base_model.model, "mtp")
        with pytest.raises(PatchConflict, match="found PEFT's adapters"):
            apply_patches(model.base_model.model, mtp=OPTIONS)
        apply_patches(model.merge_and_unload(), mtp=OPTIONS)

    def test_a_head_to_train_that_nothing_of_learns_is_refused(self, tmp_path):
        with pytest.raises(PatchConflict, match="found base_model.model.mtp frozen"):
            self.trainer(self.adapted(), tmp_path)
        self.trainer(self.adapted(target_modules="all-linear"), tmp_path)


class TestVisionLanguage:
    def step(self, model, batch, labels):
        model.zero_grad(set_to_none=True)
        model(
            **batch.inputs, **media_arguments(batch.documents, batch.pixels), labels=labels
        ).loss.backward()
        return of_head(gradients(model)), training_of(model).take()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("family", "form"),
        [("qwen3_5", "packed"), ("qwen3_5", "padded"), ("qwen3_5_moe", "packed")],
    )
    def test_images_are_embedded_as_they_are(self, family, form):
        """A row against every document alone; a placeholder's embedding instead of its features
        gives another loss.
        """
        model = slow_decay(apply_patches(tiny_vision(family), mtp=OPTIONS))
        given = media_documents(model.model)
        batch = (
            packed_batch("4 rows", given, model.model)
            if form == "packed"
            else padded_batch("right", given)
        )
        labels = torch.full_like(batch.inputs["input_ids"], -100)
        for one, (row, place) in zip(given, batch.places):
            labels[row, place] = torch.tensor(one.ids)
            labels[row, place[0]] = -100
        found, facts = self.step(model, batch, labels)
        alone, total = {}, 0.0
        for one in given:
            ids = torch.tensor([one.ids])
            gradient, own = self.step(model, padded_batch("right", [one]), ids.clone())
            counts = [max(ids.shape[1] - k - 1, 0) for k in (1, 2)]
            total += sum(
                own.get(f"packfree/mtp_loss_{k}", 0.0) * count for k, count in zip((1, 2), counts)
            )
            share = (ids.shape[1] - 1) / sum(len(one.ids) - 1 for one in given)
            alone = {name: alone.get(name, 0) + share * part for name, part in gradient.items()}
        assert worst_gradient(found, alone) <= 1e-4
        counts = [sum(max(len(one.ids) - k - 1, 0) for one in given) for k in (1, 2)]
        packed_total = sum(
            facts[f"packfree/mtp_loss_{k}"] * count for k, count in zip((1, 2), counts)
        )
        assert packed_total == pytest.approx(total, rel=1e-5)
        follow = training_of(model).follow

        def re_embedded(of_text, hidden):
            ids, packed = batch.inputs["input_ids"], of_text.packed
            if packed is not None and packed.indices is not None:
                ids = ids.flatten()[packed.indices][None]
            follow(of_text.having(inputs_embeds=None, input_ids=ids), hidden)

        followers = vars(model)["packfree"].followers
        followers[:] = [re_embedded]
        other, _ = self.step(model, batch, labels)
        assert worst_gradient(other, alone) > 0.01
