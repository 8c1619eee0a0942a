"""A head with a forward on the instance (TRL, Liger): the layers are patched all the same, and
so are their outputs.
"""

from __future__ import annotations

from types import MethodType

import pytest
import torch

from hf_packfree import apply_patches, patch_report
from tests.models.padded import IGNORED, padded_batch
from tests.models.test_heads import LOSS_TOL, MOE, with_tail
from tests.support import GRADIENT_TOL, step, tiny, worst_gradient


def with_upstreams_head(model):
    """Patched, and upstream's own forward on the instance, as a library's that was written after
    it.
    """
    upstream = type(model).forward
    apply_patches(model)
    model.forward = MethodType(upstream, model)
    return model


@pytest.mark.parametrize(
    "input_format", ["positions of zero", "as TRL sends it", "seq_idx below zero"]
)
@pytest.mark.parametrize("family", MOE)
def test_a_tail_of_padding_counts_in_no_statistics(family, input_format):
    without, with_, _ = with_tail(input_format)
    model = with_upstreams_head(tiny(family))
    wanted, wanted_grads = step(model, without, output_router_logits=True)
    found, grads = step(model, with_, output_router_logits=True)
    assert abs(found.aux_loss.item() / wanted.aux_loss.item() - 1) <= LOSS_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL


@pytest.mark.parametrize("family", MOE)
def test_padded_batches_balance_experts_as_upstream(family):
    """With a mask beside them the router's logits keep the caller's shape."""
    batch = padded_batch("right")
    wanted = step(tiny(family), batch, output_router_logits=True)[0]
    found = step(with_upstreams_head(tiny(family)), batch, output_router_logits=True)[0]
    assert found.router_logits[0].shape == wanted.router_logits[0].shape
    assert abs(found.aux_loss.item() / wanted.aux_loss.item() - 1) <= LOSS_TOL


def test_the_report_says_that_such_a_head_is_not_ours():
    model = with_upstreams_head(tiny())
    assert "Qwen3_5ForCausalLM" not in patch_report(model).swaps and patch_report(model).patched
    assert "Qwen3_5ForCausalLM" in patch_report(apply_patches(tiny())).swaps


@pytest.mark.parametrize("items", [0, torch.tensor(0), None])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "packed"])
def test_nothing_to_learn_is_zero_whatever_the_trainer_counts(items, padded):
    ids = torch.arange(12).view(2, 6) + 5
    words = (
        {"attention_mask": torch.zeros_like(ids)}
        if padded
        else {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)}
    )
    model = apply_patches(tiny())
    loss = model(
        input_ids=ids, labels=torch.full_like(ids, IGNORED), num_items_in_batch=items, **words
    ).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_class_that_sharding_puts_in_front_keeps_the_head():
    """As `fully_shard` does: a class that is no module, and the model's."""
    model, batch = apply_patches(tiny()), padded_batch("right")
    wanted = model(**batch, use_cache=False)
    model.__class__ = type("Sharded", (type("NoModule", (), {}), type(model)), {})
    found = model(**batch, use_cache=False)
    assert torch.equal(found.loss, wanted.loss) and torch.equal(
        found.logits.contiguous(), wanted.logits.contiguous()
    )
