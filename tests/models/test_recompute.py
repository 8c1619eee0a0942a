"""What is computed again instead of kept: same gradients, nothing held, and nothing changed
under other hooks.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_packfree import apply_patches, remove_patches
from hf_packfree.errors import PatchConflict
from hf_packfree.models.recompute import recompute_saved
from tests.input_formats import row_batch
from tests.support import checkpoint_layers, tiny, whole_gradients, worst_gradient, wrap_layers


def gradients_of(run):
    torch.manual_seed(0)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    run(x, w).square().sum().backward()
    return x.grad, w.grad


def plain(x, w):
    return x.sin() @ w


class Counted:
    def __init__(self):
        self.calls = 0

    def __call__(self, x, w):
        def make():
            self.calls += 1
            return x.sin()

        y = make()
        with recompute_saved(y, make, True):
            return y.view(3, 4) @ w


def test_gradients_are_the_same_and_it_is_made_once_more():
    run = Counted()
    for found, wanted in zip(gradients_of(run), gradients_of(plain)):
        assert torch.equal(found, wanted)
    assert run.calls == 2


def test_what_is_made_again_is_not_kept():
    held = []
    torch.manual_seed(0)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def make():
        held.append(torch.ones(1))
        return x.sin()

    y = make()
    kept = weakref.ref(y.untyped_storage())
    with recompute_saved(y, make, True):
        out = y @ w
    del y
    storage_alive = kept() is not None
    out.sum().backward()
    assert len(held) == 2 and not storage_alive


def test_checkpointing_and_offloading_decide_themselves():
    run = Counted()
    for found, wanted in zip(
        gradients_of(lambda x, w: checkpoint(run, x, w, use_reentrant=False)), gradients_of(plain)
    ):
        assert torch.equal(found, wanted)
    assert run.calls == 2, "once, and once more by checkpointing alone"
    packed = []
    run = Counted()
    with saved_tensors_hooks(lambda kept: packed.append(kept) or kept, lambda kept: kept):
        gradients_of(run)
    assert run.calls == 1 and len(packed) >= 3, "the outer hooks see what is kept"


def test_without_gradients_nothing_is_arranged():
    run = Counted()
    with torch.no_grad():
        run(torch.ones(3, 4), torch.ones(4, 4))
    assert run.calls == 1


def test_where_hooks_are_forbidden_nothing_is_arranged():
    run = Counted()
    with disable_saved_tensors_hooks("forbidden"):
        found = gradients_of(run)
    assert all(map(torch.equal, found, gradients_of(plain)))
    assert run.calls == 1


def test_a_weight_that_is_changed_before_the_backward_pass_is_refused():
    """As torch does without hooks: the gradient of the input would be that of another weight."""
    for run in (plain, Counted()):
        x, w = torch.ones(3, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
        out = run(x, w)
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="in ?place"):
            out.sum().backward()


def test_a_result_that_is_changed_before_it_is_kept_is_kept():
    def changed(compute):
        def run(x, w):
            y = x.sin()
            with recompute_saved(y, x.sin, compute):
                return y.mul_(3) @ w

        return run

    for found, wanted in zip(gradients_of(changed(True)), gradients_of(changed(False))):
        assert torch.equal(found, wanted)


def packed_loss(model):
    return model(**row_batch("positions", [5, 20, 9]).inputs).logits.square().mean()


def loss_of_a_layer_before_the_last(model):
    output = model(**row_batch("positions", [5, 20, 9]).inputs, output_hidden_states=True)
    return output.hidden_states[-2].square().mean()


RECOMPUTED = {
    "not reentrant": lambda model: checkpoint_layers(model, False),
    "reentrant": lambda model: checkpoint_layers(model, True),
    "wrapped": wrap_layers,
}


@pytest.mark.parametrize("loss_of", [packed_loss, loss_of_a_layer_before_the_last])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "gemma2"])
@pytest.mark.parametrize("way", RECOMPUTED)
def test_layers_that_lost_their_patches_are_not_computed_again(family, way, loss_of):
    """They would read from one document into the next, and most of them say nothing of it."""
    model = apply_patches(tiny(family))
    loss_of(model).backward()
    wanted = whole_gradients(model)
    model.zero_grad()
    RECOMPUTED[way](model)
    loss = loss_of(model)
    remove_patches(model)
    with pytest.raises(PatchConflict, match="patches removed between the forward pass of a row"):
        loss.backward(retain_graph=True)
    model.zero_grad()
    apply_patches(model)
    loss_of(model).backward()
    assert worst_gradient(whole_gradients(model), wanted) <= 1e-5


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_layers_that_are_not_computed_again_need_no_patches_for_it(in_evaluation):
    model = apply_patches(tiny())
    packed_loss(model).backward()
    wanted = whole_gradients(model)
    model.zero_grad()
    if in_evaluation:
        checkpoint_layers(model)
        model.eval()
    loss = packed_loss(model)
    remove_patches(model)
    loss.backward()
    assert worst_gradient(whole_gradients(model), wanted) == 0
