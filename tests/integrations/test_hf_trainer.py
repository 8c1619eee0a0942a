"""The Trainer over several optimizer steps: accumulation, evaluation, resuming, compiling,
autocast, smoothing.
"""

from __future__ import annotations

import logging

import pytest
import torch
from packaging.version import Version
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer

from hf_packfree import PackFreeCallback, apply_patches
from hf_packfree.models.compat import LOSS_WITH_MEDIA_TAKES_NO_COUNT, RELEASE
from hf_packfree.packing.lazy import LazyTensor
from tests.integrations.compare import (
    IGNORED,
    RATE,
    STEPS,
    KeepGradients,
    arguments,
    in_steps,
    labelled,
    per_document,
    rows,
    targets,
    token_loss,
    worst,
)
from tests.integrations.marks import integration
from tests.support import CONTROL, GRADIENT_TOL, gradients, relative_rms, slow_decay, tiny

ACCUMULATE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def train(
    model, folder, *, patch=True, callbacks=(), items=None, resume=None, kind=Trainer, **more
):
    """Train on packed rows and return the trainer and every step's gradients."""
    keep = KeepGradients()
    trainer = kind(
        model=model,
        args=arguments(folder, **more),
        train_dataset=rows(items or labelled()),
        data_collator=DataCollatorWithFlattening(),
        callbacks=[keep, *callbacks, *([PackFreeCallback()] if patch else [])],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, keep.steps


def vision_language() -> torch.nn.Module:
    """The class that released Qwen3.5 checkpoints name, with the tiny text model and an idle
    vision tower.
    """
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = tiny().config.to_dict()
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    torch.manual_seed(0)
    config = Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        image_token_id=1,
        video_token_id=1,
        vision_start_token_id=1,
    )
    return slow_decay(Qwen3_5ForConditionalGeneration(config)).train()


@integration("Trainer", "gradient accumulation, micro-batches of unequal token counts")
def test_accumulated_steps_weigh_tokens(same_gradients, tmp_path):
    wanted = per_document(tiny(), in_steps(labelled()))
    _, control = train(tiny(), tmp_path, patch=False, **ACCUMULATE)
    same_gradients(train(tiny(), tmp_path, **ACCUMULATE)[1], wanted, control)


@integration(
    "Trainer", "whole steps without logits; `output.logits` is read in `compute_loss` all the same"
)
def test_logits_are_made_where_they_are_read(same_gradients, tmp_path):
    seen = []

    class Reads(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, output = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            if isinstance(output.logits, LazyTensor) and not seen:
                seen.append(output.logits.detach() + 0)
            return (loss, output) if return_outputs else loss

    with torch.no_grad():
        logits = torch.cat(
            [tiny()(input_ids=ids[None], use_cache=False).logits for ids, _ in labelled()[:4]], 1
        )
    _, found = train(tiny(), tmp_path, kind=Reads)
    same_gradients(
        found, per_document(tiny(), in_steps(labelled())), train(tiny(), tmp_path, patch=False)[1]
    )
    assert relative_rms(seen[0], logits) <= 1e-5


def micro_batch_means(model, micro_batches, rate=RATE):
    """Per document, but every micro-batch counts the same however many tokens it holds."""
    kept = []
    for step in in_steps(micro_batches, 2):
        model.zero_grad(set_to_none=True)
        for part in step:
            count = sum(targets(labels) for _, labels in part)
            for ids, labels in part:
                if targets(labels):
                    logits = model(input_ids=ids[None], use_cache=False).logits[0]
                    (token_loss(logits, labels) / count / len(step)).backward()
        kept.append(gradients(model))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    return kept


class TestVisionLanguageClass:
    """It says `accepts_loss_kwargs = False`, so the Trainer hands it no token count."""

    WHAT = "gradient accumulation with `...ForConditionalGeneration`"
    SAYS = (
        "works if `model.accepts_loss_kwargs = True` is set before the Trainer is built; else "
        "micro-batches count equally"
    )

    @integration("Trainer", WHAT, SAYS)
    def test_micro_batches_count_equally_as_upstream_says(self, same_gradients, tmp_path, caplog):
        with caplog.at_level(logging.WARNING, logger="hf_packfree"):
            _, found = train(vision_language(), tmp_path, **ACCUMULATE)
        assert "model.accepts_loss_kwargs = True" in caplog.text
        assert ("install transformers 5.17" in caplog.text) is LOSS_WITH_MEDIA_TAKES_NO_COUNT
        same_gradients(found, micro_batch_means(vision_language(), in_steps(labelled(), 2)))
        assert (
            worst(found, per_document(vision_language(), in_steps(labelled())))
            >= CONTROL * GRADIENT_TOL
        )

    @pytest.mark.skipif(
        LOSS_WITH_MEDIA_TAKES_NO_COUNT,
        reason="transformers 5.2 to 5.16 give this class's loss no count",
    )
    @integration("Trainer", WHAT, SAYS)
    def test_tokens_count_equally_once_the_attribute_is_set(self, same_gradients, tmp_path, caplog):
        model = vision_language()
        model.accepts_loss_kwargs = True
        _, found = train(model, tmp_path, **ACCUMULATE)
        assert "accepts_loss_kwargs" not in caplog.text
        control = train(vision_language(), tmp_path, patch=False, **ACCUMULATE)[1]
        same_gradients(found, per_document(vision_language(), in_steps(labelled())), control)


def smoothed(logits, labels, epsilon=0.1):
    """The Trainer's label smoothing, summed over one document's targets."""
    return F.cross_entropy(
        logits[:-1], labels[1:], reduction="sum", ignore_index=IGNORED, label_smoothing=epsilon
    )


@integration("Trainer", "label smoothing")
def test_label_smoothing(same_gradients, tmp_path):
    wanted = per_document(tiny(), in_steps(labelled()), loss=smoothed)
    _, control = train(tiny(), tmp_path, patch=False, label_smoothing_factor=0.1)
    same_gradients(train(tiny(), tmp_path, label_smoothing_factor=0.1)[1], wanted, control)


def smoothed_unshifted(logits, labels, epsilon=0.1):
    """What the Trainer makes of a class that is not in its list of causal language models: every
    token predicts itself.
    """
    return F.cross_entropy(
        logits[1:], labels[1:], reduction="sum", ignore_index=IGNORED, label_smoothing=epsilon
    )


@integration(
    "Trainer",
    "label smoothing with `...ForConditionalGeneration`",
    "packing is exact, the loss is not: the Trainer does not shift the labels of this class, "
    "padded or packed",
)
def test_label_smoothing_of_the_vision_language_class(same_gradients, tmp_path):
    wanted = per_document(vision_language(), in_steps(labelled()), loss=smoothed_unshifted)
    same_gradients(train(vision_language(), tmp_path, label_smoothing_factor=0.1)[1], wanted)
    assert (
        worst(per_document(vision_language(), in_steps(labelled()), loss=smoothed), wanted)
        >= CONTROL * GRADIENT_TOL
    )


@integration("Trainer", "evaluation, packed rows, with `compute_metrics`")
def test_evaluation_sees_every_token_once(tmp_path, record_property):
    seen = {}

    def metrics(prediction):
        seen["logits"], seen["labels"] = map(
            torch.from_numpy, (prediction.predictions, prediction.label_ids)
        )
        return {"tokens": int((seen["labels"] != IGNORED).sum())}

    items = labelled()[:4]
    trainer = Trainer(
        model=tiny(),
        args=arguments(tmp_path, per_device_eval_batch_size=4),
        data_collator=DataCollatorWithFlattening(),
        compute_metrics=metrics,
        callbacks=[PackFreeCallback()],
    )
    found = trainer.evaluate(rows(items))
    unpatched = tiny().eval()
    with torch.no_grad():
        alone = torch.cat(
            [unpatched(input_ids=ids[None], use_cache=False).logits[0] for ids, _ in items]
        )
        loss = sum(
            token_loss(unpatched(input_ids=ids[None]).logits[0], labels)
            for ids, labels in items
            if targets(labels)
        )
    assert found["eval_tokens"] == sum(targets(labels) for _, labels in items)
    error = relative_rms(seen["logits"].reshape(alone.shape), alone)
    record_property("error", error)
    assert error <= 1e-5
    assert found["eval_loss"] == pytest.approx(float(loss) / found["eval_tokens"], rel=1e-6)


@pytest.mark.skipif(
    Version("5.8") > RELEASE,
    reason="transformers 5.2 to 5.4 save names that their Trainer does not find when it resumes",
)
@integration("Trainer", "checkpoint and resume, Qwen3.5", "works, bit-equal to not stopping")
def test_resuming_is_bit_equal(tmp_path):
    straight, _ = train(tiny(), tmp_path / "straight", optim="adamw_torch")
    saved = tmp_path / "stopped"
    train(tiny(), saved, optim="adamw_torch", save_strategy="steps", save_steps=1)
    resumed, steps = train(tiny(), saved, optim="adamw_torch", resume=str(saved / "checkpoint-2"))
    assert len(steps) == STEPS - 2, "the steps before the checkpoint are not taken again"
    wanted = straight.model.state_dict()
    assert all(
        torch.equal(value, wanted[name]) for name, value in resumed.model.state_dict().items()
    )
    fresh = tiny().state_dict()
    assert not all(torch.equal(value, fresh[name]) for name, value in wanted.items()), (
        "nothing was trained"
    )


@integration(
    "Trainer",
    "checkpoint and resume, Qwen3.5-MoE and Qwen3-Next",
    "works if `from_pretrained(checkpoint)` made the model: transformers' Trainer, packed or not, "
    "finds no experts in a "
    "checkpoint, warns of missing keys, and goes on with those of the model it was given",
)
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_resuming_experts(family, tmp_path):
    whole, _ = train(
        tiny(family), tmp_path, optim="adamw_torch", save_strategy="steps", save_steps=2
    )
    wanted = {name: value.clone() for name, value in whole.model.state_dict().items()}
    checkpoint = tmp_path / "checkpoint-2"
    off = []
    for model in (AutoModelForCausalLM.from_pretrained(checkpoint).train(), tiny(family)):
        resumed, steps = train(model, tmp_path, optim="adamw_torch", resume=str(checkpoint))
        assert len(steps) == STEPS - 2
        off.append(
            max(
                relative_rms(value, wanted[name])
                for name, value in resumed.model.state_dict().items()
            )
        )
    assert off[0] <= 1e-6 and off[1] > 1e-2, "the second is a model that was made otherwise"


HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@integration(
    "Trainer",
    "`bf16=True`, `fp16` autocast",
    "works; half precision rounds as much packed as per document",
)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_rounds_no_more_than_per_document(dtype, record_property):
    """Against fp32 per document: the packed row's error is that of unpatched documents under the
    same autocast.
    """
    exact = per_document(tiny(), in_steps(labelled())[:1])
    with torch.autocast("cpu", dtype):
        rounded = per_document(tiny(), in_steps(labelled())[:1])
        packed, leaking = (_packed_step(model) for model in (apply_patches(tiny()), tiny()))
    allowed = worst(rounded, exact)
    error, leak = worst([packed], exact), worst([leaking], exact)
    record_property("error", error)
    record_property("control", leak)
    assert error <= 2 * allowed < leak / 2


def _packed_step(model):
    items = labelled()[:4]
    batch = DataCollatorWithFlattening()(rows(items))
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return gradients(model)


@integration(
    "Trainer",
    "`bf16=True`, `fp16` autocast",
    "works; half precision rounds as much packed as per document",
)
def test_bf16_through_the_trainer(tmp_path, record_property):
    exact = per_document(tiny(), in_steps(labelled()))
    _, found = train(tiny(), tmp_path, bf16=True)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = per_document(tiny(), in_steps(labelled()))
    error = worst(found, exact)
    record_property("error", error)
    assert error <= 2 * worst(rounded, exact)
