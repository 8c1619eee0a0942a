"""What a model with adapters answers about its modules during a step: what it would answer anyway,
whatever changed, and without a walk where nothing did.
"""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from hf_packfree import PackFreeCallback
from hf_packfree.trainer.remembered import REBUILT, Modules, Remembered, Remembering
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


class Other(nn.Linear):
    pass


def again(table, name):
    """Put an entry behind the others."""
    table[name] = table.pop(name)


def rebound(part):
    """As `del` of a list's last module binds another dictionary."""
    part._modules = {name: each for name, each in part._modules.items() if name != "second"}


CHANGES = {
    "nothing": lambda part: None,
    "another module": lambda part: setattr(part, "first", nn.Linear(1, 1)),
    "a module more": lambda part: part.add_module("third", nn.Linear(1, 1)),
    "a first module": lambda part: part.first.add_module("inner", nn.Linear(1, 1)),
    "none in its place": lambda part: setattr(part, "first", None),
    "a module less": lambda part: part._modules.pop("second"),
    "another table": rebound,
    "another order": lambda part: again(part._modules, "first"),
    "another class": lambda part: setattr(part.second, "__class__", Other),
    # of one element and the same value, which `==` takes for equal
    "another parameter": lambda part: setattr(
        part.second, "weight", nn.Parameter(part.second.weight.detach().clone())
    ),
    "a parameter more": lambda part: part.second.register_parameter(
        "more", nn.Parameter(torch.ones(()))
    ),
    "another name": lambda part: part.second.register_parameter(
        "renamed", part.second._parameters.pop("weight")
    ),
    "a parameter moves": lambda part: part.second._parameters.update(
        weight=part.second._parameters.pop("weight"), bias=part.first._parameters.pop("bias")
    ),
    "one is tied": lambda part: setattr(part, "third", part.second),
}


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([*CHANGES])), max_size=5))
def test_what_is_kept_holds_while_nothing_changed(changes):
    model = nn.ModuleList([Part(), Part(), Part()])
    for place, change in changes:
        before, classes, kept = walked(model), [*map(type, model.modules())], Modules(model)
        assert kept.holds() and same(kept.modules, before[0])
        try:
            CHANGES[change](model[place])
        # of what a change before took away
        except (AttributeError, KeyError):
            continue
        after = walked(model)
        is_same = all(map(same, after, before)) and classes == [*map(type, model.modules())]
        assert is_same or not kept.holds(), change
        assert kept.holds() or change != "nothing"


def test_what_moves_to_the_next_module_is_seen():
    """The last parameter of one becomes the first of another: names and objects in one order."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Module())
    first, last = (part._parameters for part in model)
    last["weight"] = nn.Parameter(torch.ones(1))
    kept = Modules(model)
    bias, weight = first.pop("bias"), last.pop("weight")
    last.update(bias=bias, weight=weight)
    assert not kept.holds()


@pytest.mark.parametrize("change", ["add", "delete", "merge", "unload", "prune", "nothing"])
def test_whatever_changes_in_a_step_is_seen(change):
    model = with_adapters()
    remembered = in_a_step(model)
    layers = model.get_base_model().model.layers
    {
        "add": lambda: model.add_adapter("second", model.peft_config["default"]),
        "delete": lambda: model.delete_adapter("default"),
        "merge": model.merge_adapter,
        "unload": model.unload,
        "prune": lambda: layers.__delitem__(-1),
        "nothing": lambda: None,
    }[change]()
    assert answers_as_it_is(model)
    assert [name for name, _ in model.named_parameters("q")][0].startswith("q.base_model")
    assert [*model.named_parameters(recurse=False)] == []
    assert [name for name, _ in model.named_modules(prefix="q")][:2] == ["q", "q.base_model"]
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
    found = [model.num_parameters(), model.num_parameters(True)]
    assert found == wanted and wanted[0] > wanted[1] > 0
    frozen = next(each for each in model.parameters() if each.requires_grad)
    count, frozen.data = frozen.numel(), frozen.data[:1]
    assert model.num_parameters() == wanted[0] - count + frozen.numel()
    assert model.num_parameters(only_trainable=True) == wanted[1] - count + frozen.numel()
    frozen.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == wanted[1] - count


def test_copies_of_a_step_have_the_models_own_class():
    model = with_adapters()
    original = type(model)
    remembered = in_a_step(model)
    assert type(model).__name__ == original.__name__ and isinstance(model, original)
    shallow, deep = copy.copy(model), copy.deepcopy(model)
    for made in (shallow, deep, pickle.loads(pickle.dumps(model))):
        assert type(made) is original and answers_as_it_is(made)
    remembered.take_off()
    assert type(model) is original


def test_a_replica_answers_for_itself():
    """`nn.DataParallel` makes replicas of the attributes, class and all."""
    model = with_adapters()
    in_a_step(model)
    replica = model._replicate_for_data_parallel()
    assert isinstance(replica, Remembering)
    replica._modules = {"0": nn.Linear(2, 2)}
    assert answers_as_it_is(replica) and answers_as_it_is(model)


class Own(nn.Linear):
    def train(self, mode=True):
        return super().train(False)


def test_a_module_with_a_way_of_its_own_to_be_switched_is_asked():
    model, other = with_adapters(), with_adapters()
    model.get_base_model().extra = Own(1, 1)
    other.get_base_model().lm_head.train = lambda mode=True: None
    for each in (model, other):
        Remembered(each).put_on()
        assert not isinstance(each, Remembering)
    later = with_adapters().train()
    in_a_step(later)
    asked = []
    later.get_base_model().lm_head.train = asked.append
    assert later.train() is later and asked == [True]
    later.get_base_model().lm_head = Own(1, 1)
    assert not later.train().get_base_model().lm_head.training


def test_a_compiled_module_is_switched():
    """It hands its mode on to the module inside."""
    model = with_adapters().train()
    base = model.get_base_model()
    base.lm_head = torch.compile(base.lm_head, backend="eager")
    in_a_step(model)
    for mode in (True, False):
        model.train(mode)
        assert base.lm_head.training is mode


@pytest.mark.parametrize("kind", ["users", "scripted", "torch's"])
def test_other_models_are_left_alone(kind):
    model = with_adapters()
    if kind == "users":
        model.__class__ = type("Mine", (type(model),), {"__module__": __name__})
    elif kind == "scripted":
        model.get_base_model().extra = torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1))
    else:
        model = nn.Sequential(nn.Linear(1, 1))
    before = type(model)
    Remembered(model).put_on()
    assert type(model) is before


def test_a_class_of_somebody_elses_stays():
    model = with_adapters()
    remembered = in_a_step(model)
    within = type("Within", (type(model),), {})
    model.__class__ = within
    remembered.take_off()
    assert type(model) is within
    model = with_adapters()
    remembered = in_a_step(model)
    remembered.take_off()
    between = type("Between", (type(model),), {"__module__": "peft.peft_model"})
    model.__class__ = between
    remembered.put_on()
    assert isinstance(model, between)
    remembered.take_off()
    assert type(model) is between


def test_a_method_that_is_kept_works_after_the_step():
    model = with_adapters()
    remembered = in_a_step(model)
    train, named = model.train, model.named_parameters
    remembered.forget()
    assert train(False) is model and not model.training
    assert same(named(), walked(model)[1])


def test_what_is_remembered_is_freed_with_the_run():
    model = with_adapters()
    remembered = in_a_step(model)
    remembered.forget()
    gone = weakref.ref(model)
    del model, remembered
    # which `gc` would free later
    assert gone() is None


def test_modules_that_change_with_each_step_are_not_read_for_ever():
    model = with_adapters()
    remembered = Remembered(model)
    found = []
    for _ in range(REBUILT + 3):
        remembered.put_on()
        # as after each micro-batch
        remembered.put_on()
        found.append(isinstance(model, Remembering))
        remembered.take_off()
        model.get_base_model().extra = nn.Linear(1, 1)
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
