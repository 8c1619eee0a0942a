"""The Trainer's first batch: noise is no leak, a leak is one beside noise, and nothing stays on the
model.
"""

from __future__ import annotations

import copy
import io
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from hf_packfree import PackFreeCallback, apply_patches
from hf_packfree.errors import BlindMeasurement, LeakDetected, UnsupportedInput
from hf_packfree.models.call import UNPACKED
from hf_packfree.mtp import MTPOptions
from hf_packfree.trainer.training_run import PATIENCE, Counts, FirstBatch, TrainingRun
from hf_packfree.verify.first_batch import first_batch_influence
from tests.support import documents, leak_in_the_convolution, tiny
from tests.test_trainer import CHECKPOINTING, STEP, arguments, dataset
from tests.trees import TURNS, batch_of

SHORT = (5, 9, 1, 7, 3, 6, 2, 8)

pytestmark = pytest.mark.compat(kernels=False)


def trainer(model, folder, *callbacks, collator=None, verify=True, **more):
    return Trainer(
        model,
        arguments(folder, **more),
        collator or DataCollatorWithFlattening(),
        dataset(SHORT),
        dataset(SHORT[:STEP]),
        callbacks=[PackFreeCallback(verify_first_batch=verify), *callbacks],
    )


def influences(trained):
    return [
        entry["packfree/influence"]
        for entry in trained.state.log_history
        if "packfree/influence" in entry
    ]


def lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(tiny(), config)


def test_branches_of_a_tree_are_changed_and_their_prefixes_are_not(monkeypatch):
    """A prompt is read by all of its answers: to change it shows nothing."""
    model, row = apply_patches(tiny()).train(), batch_of(TURNS).inputs
    assert first_batch_influence(model.model, (), row) == 0.0
    leak_in_the_convolution(monkeypatch)
    with pytest.raises(LeakDetected, match="found documents of the first batch reacting"):
        first_batch_influence(model.model, (), row)


def test_in_a_vision_language_model_neither_half_of_the_branches_reacts(monkeypatch):
    """There the documents of both halves are changed in turn."""
    from tests.vision import tiny_vision

    model, row = apply_patches(tiny_vision("qwen3_5")).train(), batch_of(TURNS).inputs
    assert first_batch_influence(model.model, (), row) == 0.0
    leak_in_the_convolution(monkeypatch)
    with pytest.raises(LeakDetected, match="found documents of the first batch reacting"):
        first_batch_influence(model.model, (), row)


def test_smoothed_labels_of_a_tree_are_refused(tmp_path):
    """The Trainer shifts them by itself, across branches, and the head never sees them."""
    row = batch_of(TURNS).inputs
    given = trainer(
        tiny(),
        tmp_path,
        collator=lambda _: row | {"labels": row["input_ids"]},
        verify=False,
        label_smoothing_factor=0.1,
    )
    with pytest.raises(UnsupportedInput, match="a tree .* with label_smoothing_factor"):
        given.train()


def with_attention_dropout():
    model = tiny()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    return model


def row(lengths=(5, 9, 4)):
    parts = documents(lengths)
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    return {"input_ids": torch.cat(parts)[None], "position_ids": positions[None]}


@pytest.mark.parametrize("edge", [1, 2, 3])
def test_a_leak_at_one_edge_is_found(edge):
    """Into documents of either half: that into documents 2, 4 ... passed."""
    lengths = (5, 9, 7, 3)
    model = apply_patches(tiny()).train()
    assert first_batch_influence(model.model, (), row(lengths)) == 0.0
    start = sum(lengths[:edge])

    def leak(module, args, states):
        more = torch.zeros_like(states)
        more[:, start] = states[:, start - 1]
        return states + more

    model.model.layers[0].register_forward_hook(leak)
    with pytest.raises(LeakDetected, match="documents of the first batch reacting"):
        first_batch_influence(model.model, (), row(lengths))


def noisy(draw):
    """Return a patched model whose embeddings `draw` adds noise to."""
    model = apply_patches(tiny())
    model.model.embed_tokens.register_forward_hook(lambda module, args, x: x + draw(x))
    return model


NOISE = {
    "lora_dropout": (lora, {}),
    "attention_dropout": (with_attention_dropout, {}),
    "neftune": (tiny, {"neftune_noise_alpha": 5.0}),
    "lora_dropout, recomputed": (lora, {CHECKPOINTING: True}),
    "neftune, autocast": (tiny, {"neftune_noise_alpha": 5.0, "bf16": True}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("noise", NOISE)
def test_noise_is_no_leak(noise, tmp_path):
    model, options = NOISE[noise][0](), NOISE[noise][1]
    run = trainer(model, tmp_path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run.train()
    assert influences(run) == [0.0]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("noise", ["lora_dropout", "neftune"])
def test_a_leak_is_seen_beside_noise(noise, tmp_path, monkeypatch):
    model, options = NOISE[noise][0](), NOISE[noise][1]
    leak_in_the_convolution(monkeypatch)
    with pytest.raises(LeakDetected, match="documents of the first batch reacting"):
        trainer(model, tmp_path, **options).train()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: random.random(),
        lambda x: float(np.random.rand()),
        lambda x: torch.randn_like(x),
        lambda x: nn.functional.dropout(x),
    ],
)
def test_all_common_generators_are_as_before(draw):
    model = noisy(draw)
    states = random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert first_batch_influence(model.model, (), row()) == 0.0
    assert states == (
        random.getstate()[1],
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize(
    ("found", "draw"),
    [
        (
            "relative RMS apart when it runs twice",
            lambda x, own=torch.Generator(): torch.randn(x.shape, generator=own),
        ),
        ("NaN or Inf", lambda x: float("nan")),
    ],
)
def test_what_cannot_be_compared_is_said_and_training_goes_on(found, draw, tmp_path, caplog):
    with pytest.raises(BlindMeasurement, match=found):
        first_batch_influence(noisy(draw).model, (), row())
    run = trainer(noisy(draw), tmp_path, max_steps=2)
    run.train()
    assert run.state.global_step == 2 and influences(run) == []
    assert sum(found in record.message for record in caplog.records) == 1


def of_some_tokens(x):
    """Dropout on the tokens that a layer chooses by their values, as routed experts do."""
    chosen = x.sum(-1) > 0
    return torch.zeros_like(x).index_put((chosen,), nn.functional.dropout(x[chosen]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        of_some_tokens,
        lambda x: [random.random() for _ in range(int((x > 0).sum()))][-1],
        lambda x: float(np.random.rand(int((x > 0).sum()))[-1]),
    ],
)
def test_where_other_tokens_draw_other_numbers_nothing_is_called_a_leak(draw, tmp_path, caplog):
    with pytest.raises(BlindMeasurement, match="how many random numbers are drawn"):
        first_batch_influence(noisy(draw).model, (), row())
    run = trainer(noisy(draw), tmp_path, max_steps=2)
    run.train()
    assert run.state.global_step == 2 and influences(run) == []
    assert sum("random numbers are drawn" in record.message for record in caplog.records) == 1


def forwards_of(model):
    seen = []
    model.model.layers[0].register_forward_hook(lambda *args: seen.append(None))
    return seen


def alone(features):
    ids = torch.tensor([features[0]["input_ids"]])
    return {"input_ids": ids, "labels": ids}


def test_where_no_batch_is_packed_it_gives_up_says_so_and_costs_nothing(tmp_path, caplog):
    steps, model = PATIENCE + 2, tiny()
    seen = forwards_of(model)
    trainer(model, tmp_path, collator=alone, max_steps=steps, per_device_train_batch_size=1).train()
    assert len(seen) == steps
    (said,) = [record for record in caplog.records if "nothing was verified" in record.message]
    assert f"no packed batch to verify among the first {PATIENCE}" in said.message


def test_training_that_ends_before_a_packed_batch_says_so(tmp_path, caplog):
    trainer(tiny(), tmp_path, collator=alone, max_steps=2, per_device_train_batch_size=1).train()
    assert "no packed batch to verify among the first 2" in caplog.text


def test_a_packed_batch_behind_others_is_checked_once(tmp_path, caplog):
    flat, count = DataCollatorWithFlattening(), iter(range(9))
    model = tiny()
    seen = forwards_of(model)
    run = trainer(
        model,
        tmp_path,
        collator=lambda features: flat(features[: 1 if next(count) < 3 else STEP]),
        max_steps=6,
    )
    run.train()
    # as it is twice, and with other tokens of either half
    assert len(seen) == 6 + 4 and influences(run) == [0.0]
    assert "nothing was verified" not in caplog.text


@pytest.mark.parametrize("group", [False, True])
def test_processes_of_a_group_run_the_same_forwards(monkeypatch, caplog, group):
    """A row of one document on one rank: as many forwards there too, and no later batch is checked
    by that rank alone.
    """
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: group)
    model = apply_patches(tiny())
    seen = forwards_of(model)
    (check,) = TrainingRun(model, verify=True).checks
    alone = {"input_ids": documents([9])[0][None], "use_cache": False}
    for _ in range(2):
        check(model.model, (), alone)
    # one for each batch, or all for the first
    assert len(seen) == (4 if group else 2)
    assert ("on every process in its first" in caplog.text) is group
    assert first_batch_influence(model.model, (), alone | {"packed_sequence": UNPACKED}) is None
    assert len(seen) == (8 if group else 2)


class At(TrainerCallback):
    """Does something at an event of each step."""

    def __init__(self, event, do):
        setattr(self, event, lambda *args, model=None, **kwargs: do(model))


def left_on(model):
    modules = list(model.modules())
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules)
    return hooks, len(model.model.packfree.observers)


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("event", ["on_step_end", "on_save", "on_log", "on_train_begin"])
def test_training_that_breaks_off_between_steps_leaves_nothing(event, tmp_path):
    model = tiny()
    run = trainer(model, tmp_path, At(event, interrupt), save_strategy="steps", save_steps=1)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert left_on(model) == (0, 0)


def test_a_leak_leaves_nothing(tmp_path, monkeypatch):
    model = tiny()
    leak_in_the_convolution(monkeypatch)
    with pytest.raises(LeakDetected):
        trainer(model, tmp_path).train()
    assert left_on(model) == (0, 0)


def test_a_check_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    model = tiny()
    monkeypatch.setattr("hf_packfree.verify.first_batch.relative_rms", interrupt)
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        trainer(model, tmp_path).train()
    assert left_on(model) == (0, 0) and not torch.equal(state, torch.get_rng_state())


def test_the_next_run_takes_away_what_a_broken_step_left(tmp_path):
    """An exception in a forward or backward reaches no callback."""
    model = tiny()
    handle = model.lm_head.register_forward_pre_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trainer(model, tmp_path, collator=alone, per_device_train_batch_size=1).train()
        assert left_on(model) == (1, 1), "the hook of this test, and what counts"
    handle.remove()
    run = trainer(model, tmp_path)
    run.train()
    assert left_on(model) == (0, 0)
    assert run.state.log_history[0]["packfree/documents_per_row"] == STEP


def test_copies_and_pickles_made_during_training_are_free_of_it(tmp_path):
    """In a step too, before anything was verified."""
    found = []

    def copies(model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        found.extend([copy.deepcopy(model), torch.load(file, weights_only=False)])

    model = tiny()
    run = trainer(model, tmp_path, At("on_step_begin", copies), At("on_step_end", copies))
    run.train()
    assert len(found) == 4 and influences(run) == [0.0]
    for each in found:
        hooks = [*each.model._forward_pre_hooks.values(), *each.model.packfree.observers]
        assert not any(isinstance(hook, (Counts, FirstBatch)) for hook in hooks)
        batch = row() | {"labels": row()["input_ids"]}
        each(**batch).loss.backward()


def test_one_callback_serves_two_trainers(tmp_path):
    callback = PackFreeCallback(verify_first_batch=True)
    runs = [
        Trainer(
            model,
            arguments(tmp_path),
            DataCollatorWithFlattening(),
            dataset(),
            callbacks=[callback],
        )
        for model in (tiny(), tiny("qwen3_next"))
    ]
    for run in runs:
        run.train()
        assert influences(run) == [0.0] and left_on(run.model) == (0, 0)


def test_evaluation_in_between_and_resuming(tmp_path):
    model = tiny()
    seen = forwards_of(model)
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "per_device_eval_batch_size": STEP,
    }
    run = trainer(model, tmp_path, max_steps=1, **options)
    run.train()
    # a step, the check's four, and two evaluations
    assert len(seen) == 1 + 4 + 2 and influences(run) == [0.0]
    again = trainer(tiny(), tmp_path, max_steps=2, **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    assert [entry.get("packfree/influence") for entry in again.state.log_history][-3:].count(0.0)


def test_a_head_in_training_does_not_see_the_check():
    model = apply_patches(tiny(), mtp=MTPOptions(from_scratch=True)).train()
    batch = row() | {"labels": row()["input_ids"]}
    wanted = model(**batch).loss
    (check,) = TrainingRun(model, verify=True).checks
    check.put_on()
    found = model(**batch).loss
    assert check.influence == 0.0 and torch.equal(found, wanted)
