"""Steps of a plan: class swaps and modules that are added, carried out and undone together, all
or none.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_packfree import apply_patches, patch_report, remove_patches
from hf_packfree.errors import PatchConflict
from hf_packfree.patching.apply import patches_lifted
from hf_packfree.patching.backends import choose_backends
from hf_packfree.patching.plan import plan_swaps
from hf_packfree.patching.steps import carry_out, plan_addition
from tests.support import by_family, tiny

NAME = "model.extra"
FAMILY = by_family["qwen3_5"]
STATE = replace(choose_backends("auto", ops=FAMILY.ops), mixers=FAMILY.mixers_by_kind)


def with_addition(model=None, name=NAME):
    """A tiny model that is patched and has a linear layer more, by one plan."""
    model = tiny() if model is None else model
    carry_out([*plan_swaps(model)[1], *plan_addition(model, name, nn.Linear(3, 2))], STATE)
    return model


def seen(model):
    """Everything that patching may change."""
    return [
        (name, type(module), sorted(vars(module)), list(module._modules))
        for name, module in model.named_modules()
    ]


def test_a_module_is_added_with_the_swaps_and_removed_with_them():
    model = tiny()
    before, weights = seen(model), copy.deepcopy(model.state_dict())
    added = with_addition(model)
    assert patch_report(added).patched and set(added.state_dict()) - set(weights) == {
        f"{NAME}.weight",
        f"{NAME}.bias",
    }
    assert {id(p) for p in added.model.extra.parameters()} <= {id(p) for p in added.parameters()}, (
        "it is trained"
    )
    remove_patches(model)
    assert seen(model) == before and list(model.state_dict()) == list(weights)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_adding_twice_is_once():
    model = with_addition()
    before, extra = seen(model), model.model.extra
    with_addition(model)
    apply_patches(model)
    assert seen(model) == before and model.model.extra is extra


@pytest.mark.parametrize(
    "name", ["model.norm", "model.gradient_checkpointing", "lm_head", "model.layers.0"]
)
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(
        PatchConflict,
        match=f"found {name} taken by a .*; wanted the name free for the Linear to add",
    ):
        plan_addition(tiny(), name, nn.Linear(3, 2))


def test_what_has_taken_its_place_is_not_removed():
    model = with_addition()
    extra, before = model.model.extra, seen(model)
    model.model.extra = other = nn.Linear(1, 1)
    with pytest.raises(
        PatchConflict,
        match="found model.extra as a Linear where a Linear was added; wanted that very module",
    ):
        remove_patches(model)
    assert model.model.extra is other and seen(model) == before, "nothing was changed"
    model.model.extra = extra
    remove_patches(model)
    assert not hasattr(model.model, "extra")


def test_one_that_is_gone_is_said():
    model = with_addition()
    del model.model.extra
    with pytest.raises(PatchConflict, match="found model.extra as a NoneType"):
        remove_patches(model)


class Failing:
    """A step that cannot be carried out."""

    undone = False

    def carry_out(self, state):
        raise RuntimeError("no memory")

    def undo(self):
        self.undone = True


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_step_that_fails_undoes_all_before_it(place):
    model, failing = tiny(), Failing()
    before = seen(model)
    steps = [*plan_swaps(model)[1][:1], *plan_addition(model, NAME, nn.Linear(3, 2))]
    with pytest.raises(RuntimeError, match="no memory"):
        carry_out([*steps[:place], failing, *steps[place:]], STATE)
    assert seen(model) == before and failing.undone


def test_without_patches_for_a_while_the_module_is_away():
    model = with_addition()
    with patches_lifted(model):
        assert seen(model)[0][1] is type(tiny()) and not hasattr(model.model, "extra")
    assert isinstance(model.model.extra, nn.Linear) and patch_report(model).patched
    assert not hasattr(remove_patches(model).model, "extra")


def test_patches_lifted_twice_are_back_once():
    model = with_addition()
    before = seen(model)
    with patches_lifted(model):
        away = seen(model)
        with patches_lifted(model):
            assert seen(model) == away
        assert seen(model) == away and not hasattr(model.model, "extra")
    assert seen(model) == before


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_copies_know_what_was_added(copied):
    model = copied(with_addition())
    assert not hasattr(remove_patches(model).model, "extra")


def test_it_is_added_at_the_top_too():
    model = with_addition(name="extra")
    assert isinstance(model.extra, nn.Linear) and not hasattr(remove_patches(model), "extra")
