"""What a model with adapters answers about its modules during a step: what it would answer anyway,
whatever changed, and without a walk where nothing did.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from hf_packfree import PackFreeCallback
from hf_packfree.trainer.remembered import REBUILT, Remembered, Remembering
from tests.integrations.marks import needs
from tests.support import tiny
from tests.test_trainer import train

# its dependencies deprecate things
pytestmark = [needs("peft"), pytest.mark.filterwarnings("default")]


def with_adapters():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny(), LoraConfig(r=2, target_modules="all-linear"))


def in_a_step(model):
    remembered = Remembered(model)
    remembered.put_on()
    assert isinstance(model, Remembering)
    return remembered


def walked(module, prefix="", seen=()):
    """Return the modules and parameters below, each once, by name."""
    seen = seen or ([], [])
    if any(module is each for _, each in seen[0]):
        return seen
    seen[0].append((prefix, module))
    start = f"{prefix}." if prefix else ""
    for name, child in module._modules.items():
        if child is not None:
            walked(child, start + name, seen)
    if not prefix:
        for name, part in [*seen[0]]:
            start = f"{name}." if name else ""
            for own, parameter in part._parameters.items():
                if parameter is not None and not any(parameter is each for _, each in seen[1]):
                    seen[1].append((start + own, parameter))
    return seen


def same(found, wanted):
    found = [*found]
    return [name for name, _ in found] == [name for name, _ in wanted] and all(
        one is other for (_, one), (_, other) in zip(found, wanted, strict=True)
    )


def answers_as_it_is(model):
    """Whether it says of its modules and parameters what is found in it."""
    modules, parameters = walked(model)
    return (
        same(model.named_modules(), modules)
        and same(model.named_parameters(), parameters)
        and [*model.modules()] == [each for _, each in modules]
        and [*map(id, model.parameters())] == [id(each) for _, each in parameters]
    )


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1, bias=False)


CHANGES = {
    "nothing": lambda part: None,
    "another module": lambda part: setattr(part, "first", nn.Linear(1, 1)),
    "a module more": lambda part: part.add_module("third", nn.Linear(1, 1)),
    "none in its place": lambda part: setattr(part, "first", None),
    "a module less": lambda part: part._modules.pop("second", None),
    # of one element and the same value, which `==` takes for equal
    "another parameter": lambda part: setattr(
        part.second, "weight", nn.Parameter(part.second.weight.detach().clone())
    ),
    "a parameter more": lambda part: part.second.register_parameter(
        "more", nn.Parameter(torch.ones(()))
    ),
    "a parameter moves": lambda part: part.register_parameter(
        "weight", part.second._parameters.pop("weight", None)
    ),
    "one is tied": lambda part: setattr(part, "third", part.second),
}


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([*CHANGES])), max_size=5))
def test_whatever_changes_in_a_step_is_seen(changes):
    model = nn.ModuleList([Part(), Part(), Part()])
    remembered = in_a_step(model)
    for place, change in changes:
        try:
            CHANGES[change](model[place])
        # of what a change before took away
        except AttributeError:
            continue
        assert answers_as_it_is(model), change
    remembered.take_off()
    remembered.put_on()
    assert answers_as_it_is(model)


def test_modules_are_switched_that_are_in_another_mode():
    model = with_adapters().train()
    in_a_step(model)
    inner = next(part for name, part in model.named_modules() if name.endswith("lora_A"))
    for mode in (True, False, True, True):
        inner.training = not mode
        assert model.train(mode) is model
        assert all(part.training is mode for part in model.modules())
    model.eval()
    assert not any(part.training for part in model.modules())


def test_nothing_is_walked_through_where_nothing_changed(monkeypatch):
    model = with_adapters().train()
    count = model.num_parameters(exclude_embeddings=True)
    in_a_step(model)
    assert model.num_parameters(exclude_embeddings=True) == count
    for name in ("named_modules", "train"):
        monkeypatch.setattr(nn.Module, name, None)
    monkeypatch.setattr(PreTrainedModel, "num_parameters", None)
    assert model.train().num_parameters(exclude_embeddings=True) == count
    assert len([*model.parameters()]) > 50
    model.zero_grad()


def test_a_count_follows_what_is_trained_and_what_is_asked():
    model = with_adapters()
    wanted = [model.num_parameters(), model.num_parameters(only_trainable=True)]
    in_a_step(model)
    found = [model.num_parameters(), model.num_parameters(only_trainable=True)]
    assert found == wanted and wanted[0] > wanted[1] > 0
    frozen = next(each for each in model.parameters() if each.requires_grad)
    frozen.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == wanted[1] - frozen.numel()


def test_copies_of_a_step_have_the_models_own_class():
    model = with_adapters()
    original = type(model)
    remembered = in_a_step(model)
    shallow, deep = copy.copy(model), copy.deepcopy(model)
    linear = nn.Sequential(nn.Linear(2, 2))
    in_a_step(linear)
    pickled = pickle.loads(pickle.dumps(linear))
    assert type(linear).__name__ == "Sequential" and type(pickled) is nn.Sequential
    assert type(deep) is original and answers_as_it_is(deep)
    assert answers_as_it_is(shallow) and isinstance(model, original)
    remembered.take_off()
    assert type(model) is original


def test_a_replica_answers_for_itself():
    """`nn.DataParallel` makes replicas of the attributes, class and all."""
    model = nn.Sequential(nn.Linear(2, 2))
    in_a_step(model)
    replica = model._replicate_for_data_parallel()
    replica._modules = {"0": nn.Linear(2, 2)}
    assert answers_as_it_is(replica) and answers_as_it_is(model)


class Own(nn.Linear):
    def train(self, mode=True):
        return super().train(False)


def test_a_module_with_a_way_of_its_own_to_be_switched_is_asked():
    model = nn.Sequential(nn.Linear(1, 1), Own(1, 1))
    Remembered(model).put_on()
    assert type(model) is nn.Sequential
    later = nn.Sequential(nn.Linear(1, 1))
    in_a_step(later)
    later[0] = Own(1, 1)
    assert not later.train()[0].training


def test_a_tree_that_changes_with_each_step_is_not_read_for_ever():
    model = nn.Sequential(nn.Linear(1, 1))
    remembered = Remembered(model)
    found = []
    for _ in range(REBUILT + 3):
        remembered.put_on()
        found.append(isinstance(model, Remembering))
        remembered.take_off()
        model[0] = nn.Linear(1, 1)
    assert found == [True] * (REBUILT + 1) + [False] * 2


class Seen(TrainerCallback):
    """Whether the model remembers, within steps and after them."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.found.append(isinstance(model, Remembering))

    on_step_end = on_pre_optimizer_step


def test_the_trainer_trains_and_counts_as_without(tmp_path, monkeypatch):
    results = []
    for remembers in (True, False):
        if not remembers:
            monkeypatch.setattr(Remembered, "put_on", lambda self: None)
        torch.manual_seed(0)
        model, seen = with_adapters(), Seen()
        trainer, _ = train(model, tmp_path, [PackFreeCallback(), seen], max_steps=3)
        # of 3 batches
        assert seen.found == [remembers, False] * 3
        logs = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        trained = [each for each in model.parameters() if each.requires_grad]
        results.append((logs, trainer.state.total_flos, torch.cat([*map(torch.flatten, trained)])))
    (logs, flos, trained), (wanted_logs, wanted_flos, wanted) = results
    assert logs == wanted_logs and flos == wanted_flos > 0 and len(logs) == 3
    torch.testing.assert_close(trained, wanted, rtol=0, atol=0)


def test_a_run_that_broke_off_within_a_step_leaves_nothing(tmp_path):
    class Breaks(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            raise RuntimeError("broke off")

    model = with_adapters()
    original = type(model)
    with pytest.raises(RuntimeError, match="broke off"):
        train(model, tmp_path, [PackFreeCallback(), Breaks()])
    assert isinstance(model, Remembering)
    train(model, tmp_path, [PackFreeCallback()])
    assert type(model) is original
