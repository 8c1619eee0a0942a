"""While a model runs nobody finds it changed: what a call needs of its head belongs to the call."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from torch import nn

from hf_packfree import apply_patches
from hf_packfree.models.head_loss import HeadOfCall
from hf_packfree.mtp import MTPOptions
from hf_packfree.mtp.attached import training_of
from hf_packfree.packing.lazy import LazyTensor
from tests.input_formats import row_batch
from tests.models.padded import padded_batch
from tests.support import tiny


def packed_batch(lengths=(5, 64, 1, 30), seed=0):
    batch = {**row_batch("positions", lengths).inputs}
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 100, batch["input_ids"].shape, generator=generator)
    return {**batch, "input_ids": ids, "labels": ids.clone()}


def during(model, look, batch):
    """Return what `look` finds when the text model has run, and the output."""
    found = []
    hook = model.model.register_forward_hook(lambda *call: found.append(look()))
    try:
        output = model(**batch)
    finally:
        hook.remove()
    assert isinstance(output.logits, LazyTensor), "a step without logits"
    return found[0], output


@pytest.mark.parametrize("mtp", [None, MTPOptions(from_scratch=True)], ids=["alone", "mtp"])
@pytest.mark.parametrize("batch", [packed_batch(), padded_batch("left")], ids=["packed", "padded"])
def test_the_last_layer_is_there(batch, mtp):
    model = apply_patches(tiny(), mtp=mtp).train()
    layer, names = model.lm_head, vars(model).keys()

    def look():
        assert vars(model).keys() == names
        return model.lm_head, model.get_output_embeddings(), dict(model.named_modules())["lm_head"]

    assert all(one is layer for one in during(model, look, batch)[0])


def test_a_copy_that_is_made_meanwhile_trains():
    model, batch = apply_patches(tiny()).train(), packed_batch()
    copied, output = during(model, lambda: copy.deepcopy(model), batch)
    assert type(copied.lm_head) is nn.Linear and copied.lm_head is not model.lm_head
    again = copied(**batch)
    assert isinstance(again.logits, LazyTensor) and torch.equal(again.loss, output.loss)
    copied.lm_head.weight.data.zero_()
    assert copied(**batch).loss != output.loss


def test_what_is_set_meanwhile_is_set():
    model, batch = apply_patches(tiny()).train(), packed_batch()
    during(model, lambda: setattr(model.lm_head, "seen", 3), batch)
    assert model.lm_head.seen == 3
    other = nn.Linear(64, 128)
    _, output = during(model, lambda: setattr(model, "lm_head", other), batch)
    assert model.lm_head is other
    assert torch.equal(output.loss, model(**batch).loss) and output.logits.shape[-1] == 128


def test_a_hook_that_is_added_meanwhile_is_called():
    model, calls = apply_patches(tiny()).train(), []
    batch = packed_batch()
    wanted = model(**batch).loss
    text = model.model.register_forward_hook(
        lambda *call: model.lm_head.register_forward_hook(lambda *call: calls.append(1)) and None
    )
    found = model(**batch).loss
    text.remove()
    assert calls == [1] and found.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_a_call_is_its_head_but_for_two_things():
    model = apply_patches(tiny())
    call = HeadOfCall(model, {})
    assert isinstance(call, type(model)) and call.config is model.config
    call.rope_deltas = 5
    assert model.rope_deltas == 5 and call.model is model.model


@pytest.mark.parametrize(
    "family, more", [("qwen3_5", {}), ("qwen3_5_moe", {"output_router_logits": True})]
)
@pytest.mark.parametrize("mtp", [None, MTPOptions(from_scratch=True)], ids=["alone", "mtp"])
def test_threads_train_one_model(family, more, mtp):
    model = apply_patches(tiny(family), mtp=mtp).train()
    batches = [packed_batch(seed=seed) | more for seed in range(3)]
    wanted, found = [model(**batch).loss.item() for batch in batches], []
    assert len({round(one, 4) for one in wanted}) == 3

    def go(number):
        for _ in range(4):
            found.append((number, model(**batches[number]).loss.item()))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=go, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(found) == 12
    assert all(loss == pytest.approx(wanted[number], rel=1e-5) for number, loss in found)


def test_a_call_that_fails_leaves_nothing():
    model, names = apply_patches(tiny(), mtp=MTPOptions(from_scratch=True)).train(), None
    batch = packed_batch()
    wanted, names = model(**batch).loss, vars(model).keys()
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError)):
            model(**batch | {"labels": torch.full((1, 100), 1000)})
    assert vars(model).keys() == names and torch.equal(model(**batch).loss, wanted)
    # a text model alone, which is in no call
    model.model(input_ids=batch["input_ids"])
    assert training_of(model)._warned


def test_a_model_that_runs_within_its_own_call():
    """As a check of the first batch does."""
    model, batch = apply_patches(tiny(), mtp=MTPOptions(from_scratch=True)).train(), packed_batch()
    wanted, inner = model(**batch).loss, []

    def again(*call):
        if not inner:
            inner.append(None)
            inner[0] = model(**batch).loss

    model.model.register_forward_pre_hook(again)
    assert torch.equal(model(**batch).loss, wanted) and torch.equal(inner[0], wanted)
