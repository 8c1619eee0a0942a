"""What tokens have to predict, and what loss functions get: nothing lost, nothing added,
whatever way rows take.
"""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from hf_packfree import PackedSequence, apply_patches
from hf_packfree.errors import CacheConflict, UnsupportedInput
from hf_packfree.models.compat import CACHE
from hf_packfree.models.labels import _predicts_nothing
from tests.input_formats import row_batch, rows_batch
from tests.models.padded import IGNORED, padded_batch
from tests.models.test_heads import LENGTHS, MOE, with_tail
from tests.models.test_padded import LOSS_TOL
from tests.support import GRADIENT_TOL, gradients, step, tiny, worst_gradient

IDS = torch.randint(2, 128, (3, 9), generator=torch.Generator().manual_seed(0))
SHIFTED = torch.randint(2, 128, (3, 9), generator=torch.Generator().manual_seed(1))
"""Explicit targets, of the rows' last tokens too."""


def padded_rows():
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[2, 6:] = 0
    return {"attention_mask": mask, "shift_labels": SHIFTED.masked_fill(mask == 0, IGNORED)}


@pytest.mark.parametrize("rows", ["full", "padded"])
@pytest.mark.parametrize(
    "options", [{}, {"unpacked": "native"}, {"batch_invariant": True}], ids=str
)
def test_explicit_targets_of_last_tokens_count(rows, options):
    given = {"shift_labels": SHIFTED} if rows == "full" else padded_rows()
    batch, model = {"input_ids": IDS, "labels": IDS, **given}, tiny()
    wanted, wanted_grads = step(model, batch)
    lost = given["shift_labels"].clone()
    lost[:2, -1] = IGNORED
    control = step(model, {**batch, "shift_labels": lost})[0]
    found, grads = step(apply_patches(model, **options), batch)
    assert (
        abs(found.loss.item() / wanted.loss.item() - 1) <= LOSS_TOL
        and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    )
    assert abs(control.loss.item() / wanted.loss.item() - 1) > 1e-4, (
        "the control: these targets do not show"
    )


@hypothesis.given(
    rows=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1), data=st.data()
)
def test_who_predicts_nothing_is_found_on_the_host(rows, data):
    """Last tokens of documents that another one follows in their row, and padding."""
    width = max(map(sum, rows))
    rows = [row + [width - sum(row)] * (sum(row) < width) for row in rows]
    lengths = [length for row in rows for length in row]
    padding = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1))))
    packed = PackedSequence.from_lengths(
        lengths, batch_shape=(len(rows), width), padding_segments=padding
    )
    wanted = []
    for row in rows:
        *inner, last = row
        wanted += [[False] * (length - 1) + [True] for length in inner] + [[False] * last]
    found = _predicts_nothing(packed, packed.batch_shape)[0].split(lengths)
    for segment, (mine, its) in enumerate(zip(found, wanted, strict=True)):
        assert mine.tolist() == ([True] * len(its) if segment in padding else its)


def test_explicit_targets_of_packed_rows_count_at_row_ends_and_not_at_document_edges():
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]).expand(3, 9)
    model, given = (
        apply_patches(tiny()),
        {"input_ids": IDS, "labels": IDS, "position_ids": positions},
    )
    documents = [
        (IDS[row, part], SHIFTED[row, part])
        for row in range(3)
        for part in (slice(0, 5), slice(5, 9))
    ]
    cut = [
        F.pad(targets[:-1], (0, 1), value=IGNORED) if len(ids) == 5 else targets
        for ids, targets in documents
    ]
    parts = [
        model(
            input_ids=ids[None],
            labels=ids[None],
            shift_labels=targets[None],
            num_items_in_batch=24,
            use_cache=False,
        ).loss
        for (ids, _), targets in zip(documents, cut)
    ]
    found = step(model, {**given, "shift_labels": SHIFTED})[0]
    assert abs(found.loss.item() / sum(part.item() for part in parts) - 1) <= LOSS_TOL


def plain_loss(logits, labels, vocab_size):
    """A loss of fixed arguments, which shifts by itself."""
    return F.cross_entropy(
        logits[:, :-1].reshape(-1, vocab_size).float(),
        labels[:, 1:].reshape(-1),
        ignore_index=IGNORED,
    )


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
    assert (
        abs(found.loss.item() / wanted.loss.item() - 1) <= LOSS_TOL
        and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    )
    model.loss_function = lambda logits, labels, vocab_size: logits.sum() * 0 + 3
    assert step(model, CALLS[call])[0].loss.item() == 3, "a loss that is set later"


def test_a_loss_function_of_fixed_arguments_on_a_packed_row():
    batch, model = row_batch("positions", LENGTHS), apply_patches(tiny())
    batch.inputs["labels"] = batch.inputs["input_ids"]
    wanted = step(model, batch.inputs)[0]
    model.loss_function = plain_loss
    assert abs(step(model, batch.inputs)[0].loss.item() / wanted.loss.item() - 1) <= LOSS_TOL


@pytest.mark.parametrize("rows", ["packed", "left", "right", "labels on padding"])
@pytest.mark.parametrize("options", [{}, {"unpacked": "native"}], ids=str)
def test_a_loss_whose_targets_are_every_tokens_own_labels(options, rows):
    """transformers' of masked language modelling, first tokens of documents included."""
    model, batch = tiny(), padded_batch("left" if rows == "left" else "right")
    model.loss_type = "ForMaskedLM"
    real = batch["attention_mask"].bool()
    own = batch["input_ids"].masked_fill(~real & (rows != "labels on padding"), IGNORED)
    wanted, wanted_grads = step(model, {**batch, "labels": own})
    if rows == "packed":
        lengths = real.sum(1).tolist()
        batch = {
            "input_ids": batch["input_ids"][real][None],
            "position_ids": torch.cat([torch.arange(one) for one in lengths])[None],
        }
        own = own[real][None]
    found, grads = step(apply_patches(model, **options), {**batch, "labels": own})
    assert abs(found.loss.item() / wanted.loss.item() - 1) <= LOSS_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL


@pytest.mark.parametrize("rows", ["packed", "plain"])
@pytest.mark.parametrize("keep", [4, torch.tensor([1, 5, 6])], ids=str)
def test_own_labels_of_kept_tokens(keep, rows):
    model = apply_patches(tiny(), unpacked="native")
    model.loss_type = "ForMaskedLM"
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3] if rows == "packed" else [*range(9)]])
    batch = {"input_ids": IDS[:1], "position_ids": positions}
    kept = slice(-keep, None) if isinstance(keep, int) else keep
    labels, logits = IDS[:1, kept], model(**batch).logits[0, kept]
    found = model(**batch, logits_to_keep=keep, labels=labels).loss
    assert found.item() == pytest.approx(F.cross_entropy(logits, labels[0]).item(), rel=LOSS_TOL)


@pytest.mark.parametrize("packed", [True, False])
def test_loss_functions_get_no_word_of_ours(packed):
    model, names = apply_patches(tiny()), []

    def watch(logits, labels, vocab_size, **kwargs):
        names.extend(kwargs)
        return logits.mean()

    model.loss_function = watch
    step(
        model,
        {
            "input_ids": IDS[:1],
            "labels": IDS[:1],
            "position_ids": torch.arange(9)[None] % (4 if packed else 9),
        },
    )
    assert set(names) == ({"shift_labels", "num_items_in_batch"} if packed else set())


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_a_count_that_the_loss_has_no_name_for_is_an_error_as_ever(rows):
    model, batch = apply_patches(tiny()), padded_batch("right")
    if rows == "packed":
        batch = {"input_ids": IDS, "labels": IDS, "position_ids": torch.arange(9)[None] % 4}
    model.loss_function = plain_loss
    with pytest.raises(TypeError, match="num_items_in_batch"):
        model(**batch, num_items_in_batch=3)


def test_arguments_that_upstream_refuses_stay_refused():
    model = apply_patches(tiny())
    with pytest.raises(TypeError, match="multiple values.*input_ids"):
        model(IDS, input_ids=IDS)
    with pytest.raises(TypeError, match="positional argument"):
        model(IDS, *[None] * 30)


@pytest.mark.parametrize("keep", [1, 4])
@pytest.mark.parametrize(
    "input_format", ["positions of zero", "as TRL sends it", "indexed mask", "seq_idx below zero"]
)
@pytest.mark.parametrize("family", MOE)
def test_experts_statistics_leave_padding_out_whatever_logits_are_kept(family, input_format, keep):
    without, with_, _ = with_tail(input_format)
    del without["labels"], with_["labels"]
    model = apply_patches(tiny(family))
    wanted = model(**without, output_router_logits=True).aux_loss
    found = model(**with_, output_router_logits=True, logits_to_keep=keep).aux_loss
    assert abs(found.item() / wanted.item() - 1) <= LOSS_TOL


def keeping(shape):
    """{name: (logits_to_keep, what it keeps of a batch [B, S])}; across document edges, with
    gaps, and a token twice.
    """
    rows, tokens = shape
    some = torch.tensor([tokens - 1, 0, 3, 4, 5, 6, 7, tokens - 2, tokens - 1])
    each = torch.stack([some.roll(row) for row in range(rows)])
    every = torch.arange(rows * tokens).view(shape) % 3 != 1
    return {
        "last": (70, lambda batch: batch[:, -70:]),
        "all but the first": (-3, lambda batch: batch[:, 3:]),
        "more than there are": (tokens + 5, lambda batch: batch),
        "places": (some, lambda batch: batch[:, some]),
        "a mask of places": (every[0], lambda batch: batch[:, every[0]]),
        "places of each row": (each, lambda batch: batch.gather(1, each)),
        "a mask": (every, lambda batch: batch[every]),
    }


def loss_alone(model, batch, labels, kept):
    """The mean loss over kept tokens, of documents each in a forward of its own, and its gradients:
    a kept token's target is the next kept token's label, where that is of the same document.
    """
    model.zero_grad(set_to_none=True)
    numbers = torch.full(labels.shape, -1)
    logits = torch.zeros(*labels.shape, 128)
    for number, ((row, places), document) in enumerate(zip(batch.places, batch.documents)):
        numbers[row, places] = number
        logits = logits.index_put(
            (torch.tensor(row), places), model(input_ids=document[None], use_cache=False).logits[0]
        )
    numbers, targets = kept(numbers), F.pad(kept(labels), (0, 1), value=IGNORED)[..., 1:]
    follows = numbers == F.pad(numbers, (0, 1), value=-1)[..., 1:]
    kept_logits = torch.stack([kept(part) for part in logits.unbind(-1)], -1)
    loss = F.cross_entropy(kept_logits[follows & (numbers >= 0)], targets[follows & (numbers >= 0)])
    loss.backward()
    return (
        loss.item(),
        gradients(model),
        F.cross_entropy(kept_logits[numbers >= 0], targets[numbers >= 0]).item(),
    )


# releases hand these to heads; which format it was is read before
WITHOUT_KERNELS = pytest.mark.compat(kernels=False)
NEW_FORMS = ("places of each row", "a mask")


@pytest.mark.parametrize("form", keeping((1, 332)))
@pytest.mark.parametrize(
    "input_format",
    [
        pytest.param("positions", marks=WITHOUT_KERNELS),
        "block_mask",
        pytest.param("indexed", marks=WITHOUT_KERNELS),
        "indexed_left",
        "seq_idx of rows",
    ],
)
def test_kept_tokens_predict_none_of_another_document(input_format, form):
    one_row = input_format in ("positions", "block_mask")
    batch = (
        row_batch(input_format, LENGTHS)
        if one_row
        else rows_batch(input_format.removesuffix(" of rows"))
    )
    labels = torch.full_like(batch.inputs["input_ids"], IGNORED)
    for (row, places), document in zip(batch.places, batch.documents):
        labels[row, places] = document
    keep, kept = keeping(labels.shape)[form]
    model = tiny()
    if form in NEW_FORMS and not takes_places_of_each_row(model):
        pytest.skip("this release keeps the same places of every row")
    wanted, wanted_grads, leaking = loss_alone(model, batch, labels, kept)
    found, grads = step(
        apply_patches(model), {**batch.inputs, "labels": kept(labels), "logits_to_keep": keep}
    )
    assert found.logits.shape == (*kept(labels).shape, 128)
    assert (
        abs(found.loss.item() / wanted - 1) <= LOSS_TOL
        and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    )
    assert abs(leaking / wanted - 1) > 10 * LOSS_TOL, "the control: document edges do not show"


def takes_places_of_each_row(model):
    places = torch.tensor([[0], [1], [2]])
    return model(input_ids=IDS, logits_to_keep=places, use_cache=False).logits.shape == (3, 1, 128)


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("options", [{}, {"unpacked": "native"}], ids=str)
def test_kept_tokens_of_padded_rows_are_upstreams(side, options):
    """Labels that padding predicts among them, of first tokens of left-padded rows."""
    batch, model = padded_batch(side), tiny()
    batch |= {"labels": batch["labels"][:, -30:], "logits_to_keep": 30}
    wanted, wanted_grads = step(model, batch)
    found, grads = step(apply_patches(model, **options), batch)
    assert (
        abs(found.loss.item() / wanted.loss.item() - 1) <= LOSS_TOL
        and worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    )


@pytest.mark.parametrize("nothing", ["to learn", "but padding"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_kept_tokens_with_nothing_to_learn_have_zero_loss(nothing, family):
    model, more = (
        apply_patches(tiny(family)),
        {"output_router_logits": True} if family != "qwen3_5" else {},
    )
    model.router_aux_loss_coef = 0.0
    words = {
        "to learn": {"position_ids": torch.arange(9)[None] % 4},
        "but padding": {"attention_mask": torch.zeros_like(IDS)},
    }
    labels = torch.full((3, 4), IGNORED)
    output, grads = step(
        model, {"input_ids": IDS, "labels": labels, "logits_to_keep": 4, **words[nothing], **more}
    )
    assert output.loss.item() == 0 and all((grad == 0).all() for grad in grads.values())
    assert nothing == "to learn" or not more or output.aux_loss.item() == 0


@pytest.mark.parametrize("options", [{}, {"unpacked": "native"}], ids=str)
@pytest.mark.parametrize("rows", ["packed", "padded", "full"])
def test_labels_in_one_dimension_are_those_in_two(rows, options):
    model = tiny()
    mask = (torch.arange(9) < 6).long()[None]
    words = {
        "packed": {"position_ids": torch.arange(9)[None] % 4},
        "full": {},
        "padded": {"attention_mask": mask},
    }
    batch = {"input_ids": IDS[:1], **words[rows]}
    labels = IDS[:1].masked_fill(batch.get("attention_mask", torch.ones(1, 9)) == 0, IGNORED)
    wanted = None if rows == "packed" else step(model, {**batch, "labels": labels[0]})
    apply_patches(model, **options)
    wanted = wanted or step(model, {**batch, "labels": labels})
    for given in (
        {"labels": labels[0]},
        {"labels": labels[0], "shift_labels": F.pad(labels[0], (0, 1), value=IGNORED)[1:]},
    ):
        found, grads = step(model, {**batch, **given})
        assert abs(found.loss.item() / wanted[0].loss.item() - 1) <= LOSS_TOL
        assert worst_gradient(grads, wanted[1]) <= GRADIENT_TOL


def test_flat_labels_of_several_packed_rows_stop_at_row_ends():
    model, batch = (
        apply_patches(tiny()),
        {"input_ids": IDS, "position_ids": torch.arange(9)[None].expand(3, -1) % 4},
    )
    wanted = step(model, {**batch, "labels": IDS})[0].loss
    assert torch.equal(step(model, {**batch, "labels": IDS.flatten()})[0].loss, wanted)


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize(
    ("labels", "keep"), [(IDS[:1, :5], 0), (IDS[0, :5], 0), (IDS[:1], 4), (IDS[:2], 0), (5, 0)]
)
def test_labels_of_another_size_are_refused_in_packed_rows(name, labels, keep):
    batch = {
        "input_ids": IDS[:1],
        "position_ids": torch.arange(9)[None] % 4,
        "labels": IDS[:1],
        "logits_to_keep": keep,
    }
    with pytest.raises(
        UnsupportedInput, match=f"found {name} of .*; wanted one for each of these tokens"
    ):
        apply_patches(tiny())(**batch | {name: labels})


@pytest.mark.parametrize("options", [{}, {"unpacked": "native"}], ids=str)
@pytest.mark.parametrize(
    "words", [{}, {"attention_mask": torch.ones(3, 9).tril(6).long()}], ids=["full", "padded"]
)
def test_labels_that_only_a_loss_of_the_callers_understands(words, options):
    """One per row, say: no shifting, and all padding runs, as without patches."""
    model = tiny()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: (
        (logits[:, -1].sum(-1) - labels).square().mean()
    )
    batch = {"input_ids": IDS, "labels": torch.tensor([1.0, 2.0, 3.0]), **words}
    wanted = step(model, batch)[0].loss
    assert torch.equal(step(apply_patches(model, **options), batch)[0].loss, wanted)


def test_a_record_from_the_caller_is_read_for_the_loss():
    model, batch = (
        apply_patches(tiny()),
        {"input_ids": IDS[:1], "labels": IDS[:1], "use_cache": False},
    )
    wanted = step(model, {**batch, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])})[0]
    record = PackedSequence.from_lengths([4, 5])
    found = step(model, {**batch, "packed_sequence": record})[0]
    assert torch.equal(found.loss, wanted.loss) and torch.equal(found.logits, wanted.logits)
    cache = model(input_ids=IDS[:1], use_cache=True)[CACHE]
    with pytest.raises(CacheConflict, match=f"found a PackedSequence together with {CACHE}"):
        model(input_ids=IDS[:1], packed_sequence=record, **{CACHE: cache})


def test_a_record_of_rows_that_become_one_row_has_the_loss_of_documents():
    """Each shape of a record has its own last tokens of rows: the next label is none of theirs."""
    model, ids = apply_patches(tiny()), IDS[:2]
    record = PackedSequence.from_lengths([4, 5, 3, 6], batch_shape=(2, 9))
    losses = []
    for shape in ((2, 9), (1, 18)):
        row = {"input_ids": ids.view(shape), "labels": ids.view(shape), "use_cache": False}
        losses.append(model(**row, packed_sequence=record.for_shape(shape)).loss)
    assert torch.allclose(*losses, rtol=LOSS_TOL)


@pytest.mark.parametrize("items", [0.5, torch.tensor(0.25), -3])
def test_a_count_is_the_callers_whatever_it_is(items):
    """Only nothing is counted as one: trainers may divide by a weight, which can be below 1."""
    ids, mask = IDS[:2], torch.ones(2, IDS.shape[1]).tril(IDS.shape[1] - 2).long()
    call = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        "num_items_in_batch": items,
    }
    wanted = tiny()(**call).loss
    assert torch.allclose(apply_patches(tiny())(**call).loss, wanted, rtol=1e-5)


@pytest.mark.parametrize("word", [-1, 128])
@pytest.mark.parametrize("rows", ["packed", "padded"])
@pytest.mark.parametrize("train", [True, False])
def test_a_label_that_is_no_word_is_an_error_as_ever(word, rows, train):
    """-1 is a common slip for -100: ignored in silence, it would hide it."""
    mask = torch.ones(3, 9, dtype=torch.long).tril(6)
    given = {"attention_mask": mask} if rows == "padded" else {"attention_mask": 1 + mask}
    labels = IDS.masked_fill(mask == 0, IGNORED)
    labels[0, 3] = labels[2, 1] = word
    with pytest.raises(IndexError, match=f"Target {word} is out of bounds"):
        apply_patches(tiny().train(train))(input_ids=IDS, labels=labels, **given)
