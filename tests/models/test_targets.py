"""What tokens are asked to predict, and what loss functions get: nothing lost, nothing added, whatever way rows take."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hf_packfree import apply_patches
from tests.input_formats import row_batch
from tests.models.padded import IGNORED, padded_batch, step, worst_gradient
from tests.models.test_heads import LENGTHS, MOE, with_tail
from tests.models.test_padded import LOSS_TOL
from tests.support import GRADIENT_TOL, tiny

IDS = torch.randint(2, 128, (3, 9), generator=torch.Generator().manual_seed(0))
SHIFTED = torch.randint(2, 128, (3, 9), generator=torch.Generator().manual_seed(1))
"""Explicit targets, of the rows' last tokens too."""


def padded_rows():
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[2, 6:] = 0
    return {"attention_mask": mask, "shift_labels": SHIFTED.masked_fill(mask == 0, IGNORED)}


@pytest.mark.parametrize("rows", ["full", "padded"])
@pytest.mark.parametrize("options", [{}, {"padded": "full"}, {"unpacked": "native"}, {"batch_invariant": True}], ids=str)
def test_explicit_targets_of_last_tokens_count(rows, options):
    given = {"shift_labels": SHIFTED} if rows == "full" else padded_rows()
    batch, model = {"input_ids": IDS, "labels": IDS, **given}, tiny()
    wanted, wanted_grads = step(model, batch)
    lost = given["shift_labels"].clone()
    lost[:2, -1] = IGNORED
    control = step(model, {**batch, "shift_labels": lost})[0]
    found, grads = step(apply_patches(model, **options), batch)
    assert abs(found.loss.item() / wanted.loss.item() - 1) <= LOSS_TOL and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    assert abs(control.loss.item() / wanted.loss.item() - 1) > 1e-4, "the control: these targets do not show"


def test_explicit_targets_of_packed_rows_count_at_row_ends_and_not_at_document_edges():
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]).expand(3, 9)
    model, given = apply_patches(tiny()), {"input_ids": IDS, "labels": IDS, "position_ids": positions}
    documents = [(IDS[row, part], SHIFTED[row, part]) for row in range(3) for part in (slice(0, 5), slice(5, 9))]
    cut = [F.pad(targets[:-1], (0, 1), value=IGNORED) if len(ids) == 5 else targets for ids, targets in documents]
    parts = [
        model(input_ids=ids[None], labels=ids[None], shift_labels=targets[None], num_items_in_batch=24, use_cache=False).loss
        for (ids, _), targets in zip(documents, cut)
    ]
    found = step(model, {**given, "shift_labels": SHIFTED})[0]
    assert abs(found.loss.item() / sum(part.item() for part in parts) - 1) <= LOSS_TOL


def plain_loss(logits, labels, vocab_size):
    """A loss of fixed arguments, which shifts by itself."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size).float(), labels[:, 1:].reshape(-1), ignore_index=IGNORED)


CALLS = {
    "full rows": {"input_ids": IDS, "labels": IDS},
    "full rows, eval": {"input_ids": IDS, "labels": IDS},
    "padded rows": padded_batch("right"),
    "padding that predicts": padded_batch("right") | {"labels": padded_batch("right")["input_ids"]},
}


@pytest.mark.parametrize("options", [{}, {"padded": "upstream"}, {"unpacked": "native"}], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_loss_function_of_fixed_arguments(call, options):
    model = tiny().train("eval" not in call)
    model.loss_function = plain_loss
    wanted, wanted_grads = step(model, CALLS[call])
    apply_patches(model, **options)
    found, grads = step(model, CALLS[call])
    assert abs(found.loss.item() / wanted.loss.item() - 1) <= LOSS_TOL and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    model.loss_function = lambda logits, labels, vocab_size: logits.sum() * 0 + 3
    assert step(model, CALLS[call])[0].loss.item() == 3, "a loss that is set later"


def test_a_loss_function_of_fixed_arguments_on_a_packed_row():
    batch, model = row_batch("positions", LENGTHS), apply_patches(tiny())
    batch.inputs["labels"] = batch.inputs["input_ids"]
    wanted = step(model, batch.inputs)[0]
    model.loss_function = plain_loss
    assert abs(step(model, batch.inputs)[0].loss.item() / wanted.loss.item() - 1) <= LOSS_TOL


@pytest.mark.parametrize("packed", [True, False])
def test_loss_functions_get_no_word_of_ours(packed):
    model, names = apply_patches(tiny()), []

    def watch(logits, labels, vocab_size, **kwargs):
        names.extend(kwargs)
        return logits.mean()

    model.loss_function = watch
    step(model, {"input_ids": IDS[:1], "labels": IDS[:1], "position_ids": torch.arange(9)[None] % (4 if packed else 9)})
    assert set(names) == ({"shift_labels", "num_items_in_batch"} if packed else set())


@pytest.mark.parametrize("keep", [1, 4])
@pytest.mark.parametrize("input_format", ["positions of zero", "as TRL sends it", "indexed mask", "seq_idx below zero"])
@pytest.mark.parametrize("family", MOE)
def test_experts_statistics_leave_padding_out_whatever_logits_are_kept(family, input_format, keep):
    without, with_, _ = with_tail(input_format)
    del without["labels"], with_["labels"]
    model = apply_patches(tiny(family))
    wanted = model(**without, output_router_logits=True).aux_loss
    found = model(**with_, output_router_logits=True, logits_to_keep=keep).aux_loss
    assert abs(found.item() / wanted.item() - 1) <= LOSS_TOL
