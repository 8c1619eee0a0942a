"""Heads over packed rows and padded batches: targets that stop at edges, experts' statistics,
classifiers, vision-language.
"""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import DataCollatorWithFlattening
from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_packfree import apply_patches, patch_report, remove_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.heads import heads_of
from tests.input_formats import ROW_FORMATS, row_batch, rows_batch
from tests.models.padded import IGNORED, Seen, padded_batch, real_tokens, rounding
from tests.models.test_padded import LOSS_TOL, ONE_PARAMETER, assert_same
from tests.support import (
    GRADIENT_TOL,
    LOGIT_TOL,
    gradients,
    relative_rms,
    slow_decay,
    step,
    tiny,
    worst_gradient,
)

MOE = ["qwen3_5_moe", "qwen3_next"]
LENGTHS = (5, 64, 1, 30)


def per_document(model, documents, **more):
    """Return the mean loss over all targets of all documents, each in a forward of its own, and
    its gradients.
    """
    targets = sum(len(document) - 1 for document in documents)
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for document in documents:
        if len(document) > 1:
            part = model(
                input_ids=document[None],
                labels=document[None],
                use_cache=False,
                num_items_in_batch=targets,
                **more,
            )
            part.loss.backward()
            loss += part.loss.item()
    return loss, gradients(model)


@pytest.mark.compat
@pytest.mark.parametrize(
    "input_format",
    ["positions", "cu_seq_lens", "seq_idx", "all_flash", "indexed_mask", "block_mask"],
)
def test_no_document_predicts_the_next_ones_first_token(input_format):
    """Labels are the tokens themselves, unmasked: the head masks what the collator would have."""
    model, batch = tiny(), row_batch(input_format, LENGTHS)
    wanted, wanted_grads = per_document(model, batch.documents)
    ids = batch.inputs["input_ids"]
    labels = {"labels": ids.clone()}
    naive = torch.nn.functional.pad(ids, (0, 1), value=IGNORED)[:, 1:]
    for inputs in (labels, {**labels, "shift_labels": naive}):
        output, grads = step(apply_patches(model), {**batch.inputs, **inputs})
        assert (
            abs(output.loss.item() / wanted - 1) <= LOSS_TOL
            and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
        )
    if input_format == "positions":
        loss = modeling_qwen3_5.Qwen3_5ForCausalLM.loss_function.fget(model)(
            output.logits, ids, model.config.vocab_size
        )
        assert abs(loss.item() / wanted - 1) > 10 * LOSS_TOL, (
            "the control: masking nothing changes nothing here"
        )


@pytest.mark.parametrize(
    "input_format",
    [
        "indexed",
        "indexed_left",
        "mask_and_positions",
        "seq_idx",
        "block_mask",
        "positions_zero_tail",
    ],
)
def test_targets_of_several_rows(input_format):
    model, batch = tiny(), rows_batch(input_format)
    wanted, wanted_grads = per_document(model, batch.documents)
    labels = torch.full_like(batch.inputs["input_ids"], IGNORED)
    for (row, places), document in zip(batch.places, batch.documents):
        labels[row, places] = document
    output, grads = step(apply_patches(model), {**batch.inputs, "labels": labels})
    assert (
        abs(output.loss.item() / wanted - 1) <= LOSS_TOL
        and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    )
    assert output.logits.shape == (*labels.shape, 128)


@pytest.mark.parametrize("given", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}])
def test_the_upstream_collator_masks_first_tokens_itself(given):
    model, documents = tiny(), [torch.randint(2, 128, (n,)).tolist() for n in (9, 3, 20)]
    wanted, wanted_grads = per_document(model, [torch.tensor(document) for document in documents])
    batch = DataCollatorWithFlattening(return_tensors="pt", **given)(
        [{"input_ids": document} for document in documents]
    )
    assert batch["labels"][0, [0, 9, 12]].tolist() == [IGNORED] * 3
    output, grads = step(apply_patches(model), batch)
    assert (
        abs(output.loss.item() / wanted - 1) <= LOSS_TOL
        and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    )


@pytest.mark.compat
@pytest.mark.parametrize("side", ["right", "left", "both", "an empty row"])
@pytest.mark.parametrize("family", MOE)
def test_padded_batches_balance_experts_as_upstream(family, side):
    model, batch = tiny(family), padded_batch(side)
    wanted = step(model, batch, output_router_logits=True)
    blind = step(
        model,
        {"input_ids": batch["input_ids"], "labels": batch["labels"]},
        output_router_logits=True,
    )
    rounded = rounding(model, batch, wanted[1], output_router_logits=True)
    assert rounded <= ONE_PARAMETER, "too blunt to see anything beside it"
    found = step(apply_patches(model), batch, output_router_logits=True)
    assert_same(found, wanted, batch, rounded=rounded)
    assert abs(found[0].aux_loss.item() / wanted[0].aux_loss.item() - 1) <= LOSS_TOL
    assert abs(blind[0].aux_loss.item() / wanted[0].aux_loss.item() - 1) > 10 * LOSS_TOL, (
        "the control: padding does not show"
    )


def with_tail(input_format: str, length: int = 11):
    """A row of documents and a tail of padding: the inputs without it, and with it in the named
    format.
    """
    whole = row_batch("positions", LENGTHS).inputs
    ids, positions = whole["input_ids"], whole["position_ids"]
    total = ids.shape[1]
    tail = torch.zeros(1, length, dtype=torch.long)
    padded = {
        "input_ids": torch.cat((ids, tail), 1),
        "labels": torch.cat((ids, tail + IGNORED), 1),
        "use_cache": False,
    }
    zeros = torch.cat((positions, tail), 1)
    offsets = torch.tensor([0, *LENGTHS, *[1] * length]).cumsum(0).to(torch.int32)
    numbers = torch.cat([torch.full((1, n), i) for i, n in enumerate(LENGTHS)], 1)
    more = {
        "positions of zero": {"position_ids": zeros},
        "as TRL sends it": {
            "position_ids": zeros,
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": 64,
            "max_length_k": 64,
        },
        "indexed mask": {"attention_mask": torch.cat((numbers + 1, tail), 1)},
        "seq_idx below zero": {"seq_idx": torch.cat((numbers, tail - 1), 1).to(torch.int32)},
    }[input_format]
    return {**whole, "labels": ids.clone()}, {**padded, **more}, total


@pytest.mark.compat
@pytest.mark.parametrize(
    "input_format", ["positions of zero", "as TRL sends it", "indexed mask", "seq_idx below zero"]
)
@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("length", [11, 1])
def test_a_tail_of_padding_counts_nowhere(family, input_format, length):
    without, with_, total = with_tail(input_format, length)
    model = apply_patches(tiny(family))
    # which is all that tells a single token of padding from a document
    model.config.pad_token_id = 0
    wanted, wanted_grads = step(model, without, output_router_logits=True)
    seen, shapes = Seen(model), []
    model.model.packfree.observers.append(
        lambda packed, shape, mask: shapes.append((packed, shape))
    )
    found, grads = step(model, with_, output_router_logits=True)
    for name in ("loss", "aux_loss"):
        assert abs(found[name].item() / wanted[name].item() - 1) <= LOSS_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    assert relative_rms(found.logits[:, :total], wanted.logits) <= LOGIT_TOL
    ((packed, shape),) = shapes
    assert (
        shape == (1, total + length)
        and packed.num_documents == len(LENGTHS)
        and packed.num_real_tokens == total
    )
    # stays in the row: an alignment to 16 holds
    kept = input_format in ("positions of zero", "as TRL sends it")
    assert seen.layer == (1, total + length if kept else total)
    told_apart = {"positions of zero": [length], "as TRL sends it": [1] * length}
    assert packed.lengths == [*LENGTHS, *told_apart.get(input_format, [])]
    model.config.pad_token_id = 1
    counted = step(
        model,
        {
            **without,
            "input_ids": with_["input_ids"],
            "labels": with_["labels"],
            "position_ids": torch.cat((without["position_ids"], torch.arange(length)[None]), 1),
        },
        output_router_logits=True,
    )[0]
    shows = abs(counted.aux_loss.item() / wanted.aux_loss.item() - 1)
    assert shows > (10 if length > 1 else 3) * LOSS_TOL, "the control: a tail does not show"


CLASSIFIERS = [
    name
    for name in modeling_qwen3_next.__all__
    if "For" in name and not name.endswith("ForCausalLM")
]


def classifier(name: str):
    config = tiny("qwen3_next").config
    config.pad_token_id, config.num_labels = 0, 3
    torch.manual_seed(0)
    return slow_decay(getattr(modeling_qwen3_next, name)(config)).eval()


def classified(model, batch):
    model.zero_grad(set_to_none=True)
    name = type(model).__name__
    generator = torch.Generator().manual_seed(1)
    rows, tokens = batch["input_ids"].shape
    labels = {
        "ForSequenceClassification": {"labels": torch.randint(3, (rows,), generator=generator)},
        "ForTokenClassification": {"labels": torch.randint(3, (rows, tokens), generator=generator)},
        "ForQuestionAnswering": {
            "start_positions": torch.tensor([4] * rows),
            "end_positions": torch.tensor([20] * rows),
        },
    }[name.removeprefix("Qwen3Next")]
    if "TokenClassification" in name and batch.get("masked", True):
        labels["labels"] = labels["labels"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        use_cache=False,
        **labels,
    )
    output.loss.backward()
    return output, gradients(model)


@pytest.mark.parametrize("case", ["as it is", "what they read is padding"])
@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(name, side, case):
    model, batch = classifier(name), padded_batch(side)
    del batch["labels"]
    # a padding token that looks like a word, and labels on padding
    if case != "as it is":
        batch |= {
            "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7),
            "masked": False,
        }
    wanted, wanted_grads = classified(model, batch)
    apply_patches(model)
    widths = []
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
    layer.register_forward_hook(
        lambda module, args, output: widths.append(args[0].shape[:2].numel())
    )
    found, grads = classified(model, batch)
    assert (
        abs(found.loss.item() / wanted.loss.item() - 1) <= LOSS_TOL
        and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    )
    spans = name.endswith("QuestionAnswering")
    padding_is_read = spans or (
        case != "as it is" and not (name.endswith("SequenceClassification") and side == "left")
    )
    assert widths == [batch["attention_mask"].numel() if padding_is_read else real_tokens(batch)]
    if name.endswith("SequenceClassification"):
        assert relative_rms(found.logits, wanted.logits) <= LOGIT_TOL
    if padding_is_read:
        assert torch.equal(found.loss, wanted.loss)


@pytest.mark.parametrize("on_padding", [False, True])
def test_a_token_classifiers_labels_may_be_flat(on_padding):
    """transformers takes them in any shape of that many; another number is its error."""
    model, batch = classifier("Qwen3NextForTokenClassification"), padded_batch("right")
    mask, given = (
        batch["attention_mask"],
        {name: batch[name] for name in ("input_ids", "attention_mask")},
    )
    labels = (batch["input_ids"] % 3).masked_fill((mask == 0) & (not on_padding), IGNORED)
    wanted = model(**given, labels=labels).loss
    apply_patches(model)
    assert torch.allclose(model(**given, labels=labels.flatten()).loss, wanted, rtol=LOSS_TOL)
    with pytest.raises(ValueError, match="match target batch_size"):
        model(**given, labels=labels[:, 1:].contiguous())


class TestPackedClassifiers:
    """What is no loss of documents is refused in packed rows; the rest is that of each alone."""

    @pytest.mark.parametrize("labels", [1, 3])
    def test_labels_of_documents_are_refused_where_rows_answer(self, labels):
        """torch broadcasts them in a regression, and raises its own error elsewhere."""
        model = classifier("Qwen3NextForSequenceClassification")
        model.config.num_labels = model.num_labels = labels
        model.score = torch.nn.Linear(64, labels, bias=False)
        apply_patches(model)
        inputs = row_batch("positions", LENGTHS).inputs
        given = torch.ones(len(LENGTHS), dtype=torch.long if labels > 1 else torch.float)
        with pytest.raises(UnsupportedInput, match=r"found labels \(4,\) for 1 packed row"):
            model(**inputs, labels=given)
        assert model(**inputs, labels=given[:1]).loss.isfinite()

    @pytest.mark.parametrize("pad", [None, 0])
    def test_an_answer_read_from_padding_is_refused(self, pad):
        model = apply_patches(classifier("Qwen3NextForSequenceClassification"))
        ids, numbers = torch.full((1, 9), 7), torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0, 0]])
        model.config.pad_token_id = pad
        inputs = {"attention_mask": numbers, "use_cache": False}
        with pytest.raises(UnsupportedInput, match="found padding where a Qwen3NextForSeq"):
            model(input_ids=ids, **inputs)
        if pad is not None:
            found = model(input_ids=ids.masked_fill(numbers == 0, pad), **inputs).logits
            wanted = model(input_ids=ids[:, 3:7], use_cache=False).logits
            assert relative_rms(found, wanted) <= LOGIT_TOL

    def test_spans_of_several_documents_are_refused(self):
        """The softmax is over the row: another document's tokens would be in this one's loss."""
        model = apply_patches(classifier("Qwen3NextForQuestionAnswering"))
        inputs = row_batch("positions", LENGTHS).inputs
        with pytest.raises(UnsupportedInput, match="found start_positions and end_positions with"):
            model(**inputs, start_positions=torch.tensor([1]), end_positions=torch.tensor([3]))
        assert model(**inputs).start_logits.shape == inputs["input_ids"].shape

    def test_tokens_are_classified_as_in_documents_alone(self):
        model, batch = (
            classifier("Qwen3NextForTokenClassification"),
            row_batch("positions", LENGTHS),
        )
        labels = [document % 3 for document in batch.documents]
        for document, given in zip(batch.documents, labels):
            loss = model(input_ids=document[None], labels=given[None], use_cache=False).loss
            (loss * len(document) / sum(LENGTHS)).backward()
        wanted = gradients(model)
        inputs = batch.inputs | {"labels": torch.cat(labels)[None]}
        control = step(model, inputs)[1]
        found = step(apply_patches(model), inputs)[1]
        assert worst_gradient(found, wanted) <= GRADIENT_TOL
        assert worst_gradient(control, wanted) > 10 * GRADIENT_TOL


@pytest.mark.parametrize("kind", ["seq_idx", "attention_mask"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_of_nothing_but_padding_have_zero_loss(name, kind):
    model, ids = apply_patches(classifier(name)).train(), torch.full((2, 5), 7)
    given = (
        {"seq_idx": torch.full((2, 5), -1)}
        if kind == "seq_idx"
        else {"attention_mask": torch.zeros(2, 5)}
    )
    spans = name.endswith("QuestionAnswering")
    labels = (
        torch.tensor([1, 2])
        if not name.endswith("TokenClassification")
        else torch.full((2, 5), IGNORED)
    )
    given |= {"start_positions": labels, "end_positions": labels} if spans else {"labels": labels}
    output = model(input_ids=ids, **given)
    output.loss.backward()
    assert output.loss == 0 and not any(grad.any() for grad in gradients(model).values())


def vision_language():
    config = configuration_qwen3_5.Qwen3_5Config(
        text_config=tiny("qwen3_5").config.to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
        },
    )
    torch.manual_seed(0)
    return slow_decay(modeling_qwen3_5.Qwen3_5ForConditionalGeneration(config)).train()


@pytest.mark.compat
@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_vision_language_model_fed_padded_text(side):
    model, batch = vision_language(), padded_batch(side)
    wanted = step(model, batch)
    seen = Seen(apply_patches(model))
    assert_same(step(model, batch), wanted, batch)
    assert seen.head == seen.layer and seen.layer[0] == 1


def test_heads_keep_the_signature_that_trainers_read():
    model = tiny()
    before = inspect.signature(model.forward)
    assert inspect.signature(apply_patches(model).forward) == before
    batch = padded_batch("right")
    by_place = model(
        batch["input_ids"], batch["attention_mask"], labels=batch["labels"], use_cache=False
    )
    assert torch.equal(by_place.loss, model(**batch, use_cache=False).loss)


def test_a_wrapped_head_is_left_alone_and_the_layers_skip_padding_all_the_same():
    model, batch = tiny(), padded_batch("right")
    wanted = step(model, batch)
    upstream_forward = model.forward
    model.forward = types.MethodType(
        lambda self, *args, **kwargs: upstream_forward(*args, **kwargs), model
    )
    apply_patches(model)
    assert "Qwen3_5ForCausalLM" not in patch_report(model).swaps
    seen = Seen(model)
    assert_same(step(model, batch), wanted, batch)
    assert seen.layer == (1, real_tokens(batch)) and seen.head == batch["input_ids"].shape


def test_patches_can_be_removed_under_a_wrapper_of_the_head():
    """accelerate's autocast holds our bound method: afterwards that has to be upstream's."""
    model, batch = tiny(), padded_batch("right")
    wanted = step(model, batch)
    apply_patches(model)
    ours = model.forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: ours(*args, **kwargs), model)
    assert_same(step(model, batch), wanted, batch)
    remove_patches(model)
    assert type(model) is modeling_qwen3_5.Qwen3_5ForCausalLM
    assert torch.equal(step(model, batch)[0].loss, wanted[0].loss)


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_a_head_whose_instance_has_its_classes_own_forward_is_ours(when):
    """TRL's and Lightning's redirection of a forward, and accelerate's unwrap_model, leave it."""
    row = row_batch("positions", LENGTHS)
    batch = {**row.inputs, "labels": row.inputs["input_ids"]}
    wanted, model = apply_patches(tiny())(**batch).loss, tiny()
    own = model.forward
    if when != "after":
        model.forward = model.forward
    apply_patches(model)
    if when != "before":
        model.forward = model.forward
    assert torch.equal(model(**batch).loss, wanted)
    report = patch_report(model)
    assert not report.left_alone and "Qwen3_5ForCausalLM" in report.swaps
    assert report.implementations["loss"] == "torch"
    remove_patches(model)
    # as it was before
    assert vars(model).get("forward") == (None if when == "after" else own)
    assert torch.equal(apply_patches(model)(**batch).loss, wanted)


def test_a_head_is_ours_after_accelerate_took_its_autocast_off():
    """unwrap_model takes one wrapper off after the other, of whatever has `__wrapped__`."""
    row, model = row_batch("positions", LENGTHS), apply_patches(tiny())
    batch = {**row.inputs, "labels": row.inputs["input_ids"]}
    wanted = model(**batch).loss
    # another test's in this process may have no autocast
    AcceleratorState._reset_state(True)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare(model)
        assert prepared(**batch).loss != wanted, "under autocast"
        model = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    finally:
        AcceleratorState._reset_state(True)
    assert torch.equal(model(**batch).loss, wanted)
    assert not patch_report(model).left_alone


@pytest.mark.parametrize("annotation", ["torch.NoSuchThing", "'Cache' | None", "Unknown"])
def test_annotations_of_modeling_code_may_be_for_a_type_checker_alone(annotation):
    """As under `from __future__ import annotations`."""

    def forward(self, input_ids=None, labels=None, **kwargs): ...

    forward.__annotations__ = {"labels": annotation}
    module = types.ModuleType("modeling_mine")
    kind = type(tiny())
    own = {"forward": forward, "__module__": "modeling_mine"}
    module.MineForCausalLM = type("MineForCausalLM", (kind,), own)
    (ours,) = heads_of(module, __name__).values()
    assert ours.forward.__annotations__ == {"labels": annotation}


def test_a_word_of_trls_head_says_nothing_to_a_model_without_it():
    row = row_batch("positions", LENGTHS)
    batch, model = {**row.inputs, "labels": row.inputs["input_ids"]}, apply_patches(tiny())
    assert torch.equal(model(**batch, fused_lm_head=True).loss, model(**batch).loss)


def test_every_input_format_of_a_row_keeps_its_shape():
    for input_format in ROW_FORMATS:
        batch = row_batch(input_format, LENGTHS)
        model = apply_patches(tiny())
        assert model(**batch.inputs).logits.shape == (1, sum(LENGTHS), 128)
