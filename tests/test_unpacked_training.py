"""A Trainer whose batches hold one document a row: with the callback they train in the patched
layers and without logits, and give what stock transformers gives.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from hf_packfree import PackFreeCallback, apply_patches, patch_report, remove_patches
from hf_packfree.ops.loss import chunked_loss
from tests.integrations.marks import needs
from tests.support import GRADIENT_TOL, LOGIT_TOL, documents, relative_rms, tiny
from tests.test_trainer import KeepGradients, arguments

TOKENS = 90
DOCUMENTS = documents((TOKENS, 61, 7), vocabulary=128)
WORDS = 131
"""A vocabulary's size that no other tensor has."""
COLLATORS = {"whole": lambda: as_they_are, "flattening": DataCollatorWithFlattening}


def as_they_are(features):
    """One long document with labels."""
    ids = torch.tensor([feature["input_ids"] for feature in features])
    return {"input_ids": ids, "labels": ids.clone()}


class Logits(TorchDispatchMode):
    """Counts tensors as large as the logits of the long document."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        shapes = [x.shape for x in tree_leaves(found) if type(x) is torch.Tensor]
        self.made += any(
            shape[-1:] == (WORDS,) and shape.numel() >= (TOKENS - 1) * WORDS for shape in shapes
        )
        return found


def trained(model, folder, callbacks, collator="whole", watched=None, **more):
    """Train on one document a step, the longest first; return the Trainer and its gradients."""
    settings = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, **more}
    keep = KeepGradients()
    rows = [{"input_ids": document.tolist()} for document in DOCUMENTS]
    trainer = Trainer(
        model,
        arguments(folder, **settings),
        COLLATORS[collator](),
        rows,
        rows,
        callbacks=[keep, *callbacks],
    )
    with watched or nullcontext():
        trainer.train()
    return trainer, keep.found


@pytest.mark.slow
@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_steps_are_stock_ones(family, collator, tmp_path):
    stock, wanted = trained(tiny(family), tmp_path, [], collator, max_steps=3)
    ours, found = trained(tiny(family), tmp_path, [PackFreeCallback()], collator, max_steps=3)
    assert patch_report(ours.model).unpacked == "native"
    assert max(relative_rms(found[name], wanted[name]) for name in wanted) <= GRADIENT_TOL
    for one, other in zip(ours.state.log_history[:3], stock.state.log_history[:3], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=LOGIT_TOL)
    assert "packfree/documents_per_row" in ours.state.log_history[0]


@pytest.fixture
def small_chunks(monkeypatch):
    """The loss sees logits of few tokens at a time, of a short document too."""
    monkeypatch.setattr(chunked_loss, "rows_of_a_chunk", lambda *sizes: 16)


def test_no_logits_are_made(tmp_path, small_chunks):
    ours, stock = Logits(), Logits()
    for watched, callback in (
        (ours, PackFreeCallback()),
        (stock, PackFreeCallback(unpacked="upstream")),
    ):
        model = tiny()
        model.resize_token_embeddings(WORDS, mean_resizing=False)
        trained(model, tmp_path, [callback], watched=watched)
    assert ours.made == 0 < stock.made


@needs("peft")
# PEFT asks by the older name
@pytest.mark.filterwarnings("default:.*is_gradient_checkpointing:FutureWarning")
def test_lora_runs_in_the_patched_layers_and_without_logits(tmp_path, small_chunks):
    from peft import LoraConfig, get_peft_model

    def run(callbacks):
        torch.manual_seed(0)
        model, watched, records = tiny(), Logits(), []
        model.resize_token_embeddings(WORDS, mean_resizing=False)
        model.model.layers[0].register_forward_pre_hook(
            lambda layer, args, kwargs: records.append(kwargs.get("packed_sequence")),
            with_kwargs=True,
        )
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)
        _, found = trained(model, tmp_path, callbacks, watched=watched)
        return watched.made, records, found

    made, [record], found = run([PackFreeCallback()])
    made_by_stock, _, wanted = run([])
    assert made == 0 < made_by_stock and record is not None
    assert max(relative_rms(found[name], wanted[name]) for name in wanted) <= GRADIENT_TOL


class EvaluateAndGenerate(TrainerCallback):
    """Does both in the middle of training."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.eval()
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        self.generated = [
            model.generate(
                DOCUMENTS[1][None],
                attention_mask=torch.ones(1, len(DOCUMENTS[1])).long(),
                return_dict_in_generate=True,
                output_logits=True,
                use_cache=use_cache,
                **options,
            )
            for use_cache in (True, False)
        ]
        with torch.no_grad():
            self.evaluated = model(input_ids=DOCUMENTS[0][None])
        model.train()


def test_evaluation_and_generation_inside_training(tmp_path):
    def run(*callbacks):
        inside = EvaluateAndGenerate()
        # a rate that moves nothing: both see the same weights
        options = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0}
        trainer, _ = trained(tiny(), tmp_path, [inside, *callbacks], **options)
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        return trainer.model, losses, inside

    (_, [wanted], stock), (model, [found], ours) = run(), run(PackFreeCallback())
    assert found == pytest.approx(wanted, rel=LOGIT_TOL)
    assert relative_rms(ours.evaluated.logits, stock.evaluated.logits) <= LOGIT_TOL
    for one, other in zip(ours.generated, stock.generated, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        pairs = list(zip(one.logits, other.logits, strict=True))
        assert max(relative_rms(*pair) for pair in pairs) <= LOGIT_TOL
    # with a cache bit for bit
    assert all(map(torch.equal, ours.generated[0].logits, stock.generated[0].logits))
    alone = {"input_ids": DOCUMENTS[0][None], "use_cache": False}
    assert torch.equal(remove_patches(model)(**alone).logits, tiny()(**alone).logits)


def test_a_model_patched_before_keeps_what_it_has(tmp_path):
    model = apply_patches(tiny())
    _, found = trained(model, tmp_path, [PackFreeCallback()])
    _, wanted = trained(tiny(), tmp_path, [])
    assert patch_report(model).unpacked == "upstream"
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
