"""Losses that are not finite, left out of the Trainer's logs without a wait for the device: what is
logged is what the Trainer itself would log.
"""

from __future__ import annotations

import gc
import math
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from hf_packfree import PackFreeCallback
from hf_packfree.trainer import callback
from hf_packfree.trainer.waits import _Filtered, copy_without_waiting, trainer_of
from tests.support import tiny
from tests.test_trainer import arguments, dataset

NAN, INF = math.nan, math.inf


class Disturbed(Trainer):
    """Adds a number to each loss, which leaves gradients as they are, and notes what it returned."""

    added: tuple[float, ...] = ()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses = []

    def compute_loss(self, *args, **kwargs):
        added = (*self.added, *[0.0] * 64)[len(self.losses)]
        return super().compute_loss(*args, **kwargs) + added

    def training_step(self, *args, **kwargs):
        self.losses.append(super().training_step(*args, **kwargs))
        return self.losses[-1]


def trainer_with(added, folder, callbacks, kind=Disturbed, **more):
    trainer = kind(
        model=tiny().train(),
        args=arguments(folder, **more),
        train_dataset=dataset() * 3,
        data_collator=DataCollatorWithFlattening(),
        callbacks=callbacks,
    )
    trainer.added = added
    return trainer


def logged(trainer):
    """Return every loss that a training logs, with the mean of all."""
    found = trainer.train().training_loss
    return [*(log["loss"] for log in trainer.state.log_history if "loss" in log), found]


@pytest.mark.parametrize(("every", "summed"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("added", [(), (NAN,), (0, NAN, 0, INF, -INF), (0, 0, 0, NAN), (INF,) * 64])
def test_the_log_is_the_trainers_own(added, every, summed, tmp_path, monkeypatch):
    more = {"logging_steps": every, "gradient_accumulation_steps": summed, "max_steps": 6}
    more |= {"logging_nan_inf_filter": True}
    asked = []
    finite = torch.isnan
    monkeypatch.setattr(torch, "isnan", lambda x: asked.append(type(x)) or finite(x))
    found = logged(trainer_with(added, tmp_path, [PackFreeCallback()], **more))
    assert {*asked} == {_Filtered}
    monkeypatch.setattr(callback, "filter_losses", lambda _: None)
    asked.clear()
    wanted = logged(trainer_with(added, tmp_path, [PackFreeCallback()], **more))
    assert {*asked} == {torch.Tensor}
    assert found == wanted and all(map(math.isfinite, wanted)), (found, wanted)
    # the control: unfiltered
    more |= {"logging_nan_inf_filter": False}
    found = logged(trainer_with(added, tmp_path, [PackFreeCallback()], **more))
    assert all(map(math.isfinite, found)) == (not added), found


def test_a_trainers_own_training_step_sees_the_loss_itself(tmp_path):
    trainer = trainer_with((0, NAN), tmp_path, [PackFreeCallback()], max_steps=3)
    trainer.train()
    assert [math.isnan(loss) for loss in trainer.losses[:3]] == [False, True, False]
    assert {*map(type, trainer.losses)} == {torch.Tensor}


class OwnLoop(Trainer):
    """Calls `training_step` in a loop of its own."""

    def _run_epoch(self, *args, **kwargs):
        batch, self.current_gradient_accumulation_steps = next(iter(self.get_train_dataloader())), 1
        self.seen = self.training_step(self.model, batch, None)
        self.control.should_training_stop = True


def test_a_loop_of_a_trainers_own_is_given_the_loss_itself(tmp_path):
    filters = {"logging_nan_inf_filter": True}
    trainer = trainer_with((), tmp_path, [PackFreeCallback()], OwnLoop, **filters)
    trainer.train()
    assert type(trainer.seen) is torch.Tensor


class Interrupting(TrainerCallback):
    """Stops the first training in its second step, and tries to pickle another callback."""

    seen = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen += 1
        if self.seen == 2:
            raise KeyboardInterrupt


class Pickling(TrainerCallback):
    """Pickles another callback in each step."""

    def __init__(self, callback):
        self.callback = callback

    def on_step_end(self, *args, **kwargs):
        pickle.dumps(self.callback)


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_is_left_on_a_trainer(number, tmp_path):
    more = {"logging_nan_inf_filter": True, "max_steps": 3}
    patching = [PackFreeCallback() for _ in range(number)]
    callbacks = [*patching, Interrupting(), Pickling(patching[0])]
    trainer = trainer_with((), tmp_path, callbacks, **more)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert vars(trainer)["training_step"].__wrapped__ == Disturbed.training_step.__get__(trainer)
    trainer.train()
    assert "training_step" not in vars(trainer)
    # a method that somebody put on this trainer stays, whenever they did
    calls = []

    def theirs(*args, **kwargs):
        calls.append(None)
        return Disturbed.training_step(trainer, *args, **kwargs)

    trainer.training_step = theirs
    trainer.train()
    assert vars(trainer)["training_step"] is theirs and calls


class Wrapping(TrainerCallback):
    """Puts its own method around a trainer's, for a training."""

    def on_train_begin(self, *args, **kwargs):
        self.step = step = self.trainer.training_step
        self.trainer.training_step = lambda *args: step(*args)

    def on_train_end(self, *args, **kwargs):
        self.trainer.training_step = self.step


def test_who_wraps_the_method_finds_no_more_of_ours_after_each_training(tmp_path):
    wrapping = Wrapping()
    more = {"logging_nan_inf_filter": True, "max_steps": 2}
    wrapping.trainer = trainer = trainer_with((), tmp_path, [PackFreeCallback(), wrapping], **more)
    for _ in range(3):
        trainer.train()
    depth, step = 0, vars(trainer)["training_step"]
    while hasattr(step, "__wrapped__"):
        depth, step = depth + 1, step.__wrapped__
    assert depth == 1


class Weighing(Disturbed):
    """Notes each batch, without keeping it."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.batches.append(weakref.ref(inputs["input_ids"]))
        return super().training_step(model, inputs, *args, **kwargs)


def trained(callback, folder):
    """Train; return weak references to batches, the trainer, its model and what this function
    had.
    """
    mine = nn.Linear(1, 1)
    more = {"logging_nan_inf_filter": True, "max_steps": 3}
    trainer = trainer_with((), folder, [callback], Weighing, **more)
    trainer.batches = []
    trainer.train()
    return [*trainer.batches, *map(weakref.ref, (trainer, trainer.model, mine))]


def test_nothing_is_kept_even_where_nothing_collects_cycles(tmp_path):
    gc.collect()
    gc.disable()
    try:
        found = trained(PackFreeCallback(), tmp_path)
        assert not [each() for each in found if each() is not None]
    finally:
        gc.enable()


def test_a_callback_does_not_keep_the_trainer_of_an_interrupted_training(tmp_path):
    callback = PackFreeCallback()
    trainer = trainer_with((), tmp_path, [callback, Interrupting()], max_steps=3)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    found = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert found() is None


def test_a_filtered_loss_computes_as_any_tensor():
    loss = torch.tensor(2.0).as_subclass(_Filtered)
    assert torch.stack([loss, loss]).tolist() == [2.0, 2.0]
    assert torch.add(torch.ones(()), other=loss) == 3 and not loss.isfinite().logical_not()
    total = torch.ones(())
    total += loss
    assert type(total) is torch.Tensor and total == 3


def test_the_trainer_is_the_one_that_calls(tmp_path):
    found = []

    class Asking(TrainerCallback):
        def on_train_begin(self, args, *rest, **kwargs):
            found.append(trainer_of(args))

    other = arguments(tmp_path)
    trainer = trainer_with((), tmp_path, [PackFreeCallback(), Asking()])
    trainer.train()
    assert found == [trainer] and trainer_of(other) is None


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_batches_are_copied_to_a_gpu_without_a_wait(device):
    config = SimpleNamespace(non_blocking=False)
    of_device = SimpleNamespace(device=torch.device(device))
    trainer = SimpleNamespace(args=of_device, accelerator=SimpleNamespace(dataloader_config=config))
    copy_without_waiting(trainer)
    assert config.non_blocking == (device == "cuda")


def test_what_is_set_is_what_the_data_loader_reads(tmp_path):
    trainer = trainer_with((), tmp_path, [PackFreeCallback()])
    trainer.accelerator.dataloader_config.non_blocking = True
    assert trainer.get_train_dataloader()._non_blocking
