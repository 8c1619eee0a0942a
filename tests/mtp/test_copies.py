"""A head that PEFT copies (`modules_to_save`): the model around it is copied, saved, merged and
freed of it as with a head that is one module.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch

from hf_packfree import patch_report, remove_mtp, remove_patches
from hf_packfree.errors import PatchConflict
from hf_packfree.mtp.attached import AttachedHead, training_facts, training_of
from tests.integrations.marks import needs
from tests.mtp.heads import (
    build,
    in_peft,
    labelled,
    of_head,
    packed,
    targets_of,
    wanted_of,
    worst_gradient,
)
from tests.support import gradients

# what PEFT asks of transformers is deprecated
pytestmark = [needs("peft"), pytest.mark.filterwarnings("default")]


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def trained(model):
    """The gradients of the head's copy that is trained, and the facts of the step."""
    pairs = labelled()
    model.zero_grad(set_to_none=True)
    model(**packed(pairs), num_items_in_batch=targets_of(pairs)).loss.backward()
    return of_head(gradients(model)), training_facts(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved], ids=["copy", "torch.save"])
def test_a_copy_of_the_model_trains_its_own_head(copied):
    model = in_peft(build(depth=2))
    grads, facts = trained(model)
    other = copied(model)
    found, own = trained(other)
    assert training_facts(model) == {} and own == facts and len(facts) == 4
    assert found.keys() == grads.keys() and all(map(torch.equal, found.values(), grads.values()))
    copies = {name.removeprefix("modules_to_save.default."): one for name, one in found.items()}
    assert worst_gradient(copies, wanted_of(labelled())) <= 1e-4


def test_a_head_alone_is_copied_without_its_models_calls():
    model = build()
    other = copy.deepcopy(copy.deepcopy(model.mtp))
    assert all(map(torch.equal, other.parameters(), model.mtp.parameters()))
    assert isinstance(other, AttachedHead) and len(model._forward_hooks) == 1


def test_a_merged_model_goes_on_training_and_gives_its_head_back():
    peft = in_peft(build(depth=2))
    trained(peft)
    with pytest.raises(PatchConflict, match="found .*mtp as a ModulesToSaveWrapper"):
        remove_mtp(peft)
    learnt = peft.base_model.model.mtp.modules_to_save["default"]
    model = peft.merge_and_unload().requires_grad_(True)
    found, facts = trained(model)
    assert worst_gradient(found, wanted_of(labelled())) <= 1e-4 and len(facts) == 4
    report = patch_report(model)
    assert remove_mtp(model) is learnt is not None and remove_mtp(model) is None
    assert not model._forward_hooks and not model._forward_pre_hooks and training_of(model) is None
    assert not vars(model.model)["packfree"].followers and report.swaps
    assert not hasattr(model.config, "mtp_num_hidden_layers")
    remove_patches(model)
    assert trained(model)[1] == {}
