"""TRL's AsyncGRPOTrainer on a model with linear layers, with a stub in place of vLLM: it trains on
trees as on the same samples packed without sharing.
"""

from __future__ import annotations

import queue

import pytest
import torch

from hf_packfree import patch_report
from hf_packfree.errors import PatchConflict
from hf_packfree.trainer.async_grpo import patched_for_async_grpo
from tests.integrations.marks import integration, needs
from tests.integrations.test_trl import tokenizer
from tests.support import documents, tiny

# its dependencies deprecate things
pytestmark = [needs("trl", "datasets"), pytest.mark.filterwarnings("default")]

STEPS, ANSWERS = 2, 4


@pytest.fixture
def trl(monkeypatch):
    from trl.experimental.async_grpo import async_grpo_trainer

    # TRL asks for the GPU's name
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1e12)
    return async_grpo_trainer


class Stub:
    """Stands for the worker, whose samples are there, and for the transfer of weights."""

    def __init__(self, trl):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        prompt, *answers = documents((20, *range(5, 5 + ANSWERS)))
        for number in range(8 * ANSWERS):
            answer = answers[number % ANSWERS]
            tokens = torch.cat([prompt, answer])
            sample = {
                "input_ids": tokens,
                "completion_mask": (torch.arange(len(tokens)) >= len(prompt)).int(),
                "old_log_probs": torch.full((len(tokens),), -4.8),
                "advantage": (1.0, -1.0, 0.5, -0.5)[number % ANSWERS],
                "group_id": number // ANSWERS,
            }
            known = {"prompt": [], "completion": [], "model_version": 0, "metrics": {"reward": 1.0}}
            self.rollout_buffer.put(trl.RolloutSample(**sample, **known))

    def __getattr__(self, name):
        return lambda *arguments: None

    def send_weights(self, iterator):
        list(iterator)


def train(trl, folder, checkpoint):
    """Return the trainer after two steps."""
    from datasets import Dataset

    arguments = trl.AsyncGRPOConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        per_device_train_batch_size=ANSWERS,
        gradient_accumulation_steps=1,
        num_generations=ANSWERS,
        token_budget=0,
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
    )
    stub = Stub(trl)
    trainer = trl.AsyncGRPOTrainer(
        model=str(checkpoint),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * ANSWERS}),
        processing_class=tokenizer(),
        rollout_worker=stub,
        weight_transfer=stub,
    )
    return trainer


def logged(trainer):
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [[float(entry[name]) for name in ("loss", "grad_norm", "entropy")] for entry in steps]


@integration("TRL trainers", "AsyncGRPOTrainer in `patched_for_async_grpo()`: trees of rollouts")
def test_it_trains_on_trees_as_without_sharing(trl, tmp_path, monkeypatch, record_property):
    tiny().save_pretrained(tmp_path / "checkpoint")
    kinds, rows = tiny().config.layer_types, []

    def trained():
        with patched_for_async_grpo():
            trainer = train(trl, tmp_path / "out", tmp_path / "checkpoint")
        assert patch_report(trainer.model).patched and trainer.model.config.layer_types == kinds
        trainer.model.model.register_forward_pre_hook(
            lambda module, args, given: rows.append(given["packed_sequence"]), with_kwargs=True
        )
        return logged(trainer)

    shared = trained()

    class Alone(trl.TreeRow):
        """Every sample with a root of its own."""

        def add(self, sample):
            before, self.roots = self.roots, {}
            super().add(sample)
            self.roots = before | {(len(self.samples), key): one for key, one in self.roots.items()}

    monkeypatch.setattr(trl, "TreeRow", Alone)
    alone = trained()
    assert len(shared) == STEPS and shared[0] != shared[1]
    trees = [packed.tree is not None for packed in rows]
    assert trees == [True] * STEPS + [False] * STEPS
    assert rows[0].num_tokens < 0.6 * rows[-1].num_tokens
    error = max(
        abs(a - b) / max(abs(b), 1e-2)
        for one, other in zip(shared, alone, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    record_property("error", error)
    assert error <= 1e-4


def test_without_us_linear_layers_are_refused_and_nothing_stays(trl, tmp_path):
    tiny().save_pretrained(tmp_path)
    before = trl.create_model_from_path, trl.add_fused_lm_head
    with patched_for_async_grpo():
        assert trl.create_model_from_path is not before[0]
    assert (trl.create_model_from_path, trl.add_fused_lm_head) == before
    with pytest.raises(ValueError, match="has .'linear_attention'. layers"):
        train(trl, tmp_path / "out", tmp_path)


def test_another_constructor_is_refused(trl, monkeypatch):
    monkeypatch.delattr(trl, "add_fused_lm_head")
    with (
        pytest.raises(PatchConflict, match="found no add_fused_lm_head in trl"),
        patched_for_async_grpo(),
    ):
        pass
