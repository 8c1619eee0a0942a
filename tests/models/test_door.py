"""Families of plain attention, whose classes are made from upstream's: packed rows in every form,
padded batches, and everything else as transformers has it.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree import apply_patches
from hf_packfree.patching.registry import FAMILIES
from tests.input_formats import (
    ROW_FORMATS,
    ROWS,
    ROWS_FORMATS,
    row_batch,
    rows_batch,
)
from tests.models.forms import (
    Largest,
    assert_checkpointing_changes_nothing,
    assert_exact_in_fp64,
    assert_no_influence,
    half_precision,
    logits_alone,
)
from tests.models.padded import IGNORED, Seen, padded_batch, real_tokens
from tests.models.test_unpacked import UNPACKED, assert_upstreams_bits, outcome
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    ROW,
    Batch,
    assert_exact,
    by_family,
    documents,
    documents_alone,
    errors,
    pairwise,
    random_weights,
    recorded,
    relative_rms,
    run,
    run_alone,
    step,
    tiny,
    worst_gradient,
)

NAMES = [
    family.name
    for family in FAMILIES
    if family.made_from_upstream and set(family.mixer_ops) == {"attention"}
]
CORE = NAMES[:7]
"""Which have, between them, all that attention calls pass."""
IMPLIED = NAMES[7:]
"""The others, of which one exact row implies much."""
ALL = [*CORE, *(pytest.param(name, marks=pytest.mark.slow) for name in IMPLIED)]
FORMS = [form for form in ROW_FORMATS if "3rows" not in form]
WINDOW = 16
EDGES = (1, 15, 16, 17, 33, 2, 32, 48, 100)
"""Documents below a window, of it, above it, and of several."""


def with_ones(batch):
    """A mask of ones beside positions that restart, as tokenizers make it: upstream reads it alone."""
    ones = torch.ones_like(batch.inputs["input_ids"])
    return Batch(batch.documents, {**batch.inputs, "attention_mask": ones}, batch.places)


def of_both(found, wanted):
    """Leave out gradients that one run has not: a leak sends tokens to other experts."""
    names = found[1].keys() & wanted[1].keys()
    return [(logits, {name: grads[name] for name in names}) for logits, grads in (found, wanted)]


@pytest.mark.compat
@pytest.mark.parametrize("family", NAMES)
def test_documents_around_the_window(family, record_property):
    model, batch = tiny(family), row_batch("positions", EDGES)
    weights, leaky = random_weights(batch, 128), with_ones(batch)
    alone = run_alone(model, batch, weights)
    logits, grads = errors(*of_both(run(model, leaky, weights), alone))
    assert logits >= CONTROL * LOGIT_TOL and grads >= CONTROL * GRADIENT_TOL, "unpatched leaks"
    apply_patches(model)
    for given in (batch, leaky):
        found = recorded(record_property, errors(run(model, given, weights), alone), model, "text")
        assert found[0] <= LOGIT_TOL and found[1] <= GRADIENT_TOL, found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "form"), [(CORE[i % len(CORE)], f) for i, f in enumerate(FORMS)]
)
def test_one_row_in_every_form(family, form, attention):
    supported = tiny(family).config._attn_implementation == "sdpa"
    attention = attention if supported else "eager"
    model = apply_patches(tiny(family, attention=attention))
    assert_exact(model, row_batch(form, ROW), wanted=documents_alone(family, ROW, attention))


@pytest.mark.parametrize(("family", "form", "_"), pairwise(CORE, list(ROWS_FORMATS), [None]))
def test_several_rows(family, form, _):
    lengths = tuple(length for row in ROWS for length in row)
    assert_exact(
        apply_patches(tiny(family)), rows_batch(form), wanted=documents_alone(family, lengths)
    )


@pytest.mark.parametrize("family", ALL)
def test_a_square_mask_of_blocks_keeps_the_window(family):
    """Upstream takes it as it is, in layers with a window too."""
    batch = row_batch("block_mask", EDGES)
    model, weights = tiny(family), random_weights(batch, 128)
    alone = run_alone(model, batch, weights)
    has_windows = any(
        "window" in str(value) for value in model.config.to_dict().get("layer_types") or ()
    )
    if has_windows or family == "mistral":
        assert errors(run(model, batch, weights), alone)[0] >= CONTROL * LOGIT_TOL
    logits, grads = errors(run(apply_patches(model), batch, weights), alone)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL


@pytest.mark.parametrize("family", ALL)
def test_upstream_keeps_documents_apart_by_positions_where_the_table_says_so(family):
    model, batch = tiny(family), row_batch("positions", EDGES)
    with torch.no_grad():
        alone = torch.cat(logits_alone(model, batch))
        found = torch.cat(batch.cut(model(**batch.inputs).logits))
    error = relative_rms(found, alone)
    assert error <= LOGIT_TOL if by_family[family].attends_only else error >= CONTROL * LOGIT_TOL


@pytest.mark.parametrize("family", ALL)
def test_no_document_has_influence_on_another(family):
    assert_no_influence(family, row_batch("positions", EDGES), number=4)


@pytest.mark.parametrize("family", NAMES)
def test_fp64_is_exact(family, widened):
    assert_exact_in_fp64(family, row_batch("positions", EDGES))


@pytest.mark.parametrize(
    ("family", "case"),
    [(CORE[i % len(CORE)], case) for i, case in enumerate([*UNPACKED] * 2)]
    + [pytest.param(one, "ids", marks=pytest.mark.slow) for one in NAMES[7:]],
)
def test_unpacked_is_upstreams_bit_for_bit(family, case):
    assert_upstreams_bits(tiny(family), UNPACKED[case])


@pytest.mark.parametrize("family", CORE)
def test_unpacked_rows_in_our_attention(family):
    ids = torch.stack(documents((70, 70)))
    model = tiny(family)
    wanted, wanted_grads = outcome(model, {"input_ids": ids})
    found, grads = outcome(apply_patches(model, unpacked="native"), {"input_ids": ids})
    assert relative_rms(found, wanted) <= LOGIT_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL


SIDES = ["right", "left", "both", "an empty row"]


@pytest.mark.parametrize("labels", ["of the collator", "none for a document's first token"])
@pytest.mark.parametrize(
    ("family", "side"),
    [(family, side) for family in CORE for side in SIDES]
    + [pytest.param(one, "both", marks=pytest.mark.slow) for one in IMPLIED],
)
def test_padded_batches_run_real_tokens_documents_alone(family, side, labels):
    model, batch = tiny(family), padded_batch(side)
    mask = batch["attention_mask"]
    if labels != "of the collator":
        batch["labels"] = batch["labels"].masked_fill(mask.cumsum(1) == 1, IGNORED)
    kept = int((batch["labels"][:, 1:] != IGNORED)[mask[:, :-1] == 0].sum())
    wanted, wanted_grads = step(model, batch)
    seen = Seen(apply_patches(model))
    found, grads = step(model, batch)
    # eager attention attends to padding, from which a label is to be predicted
    reads = model.config._attn_implementation == "eager" or family == "glm4"
    padded = kept > 0 and reads
    tokens = (1, real_tokens(batch) + kept)
    assert seen.layer == seen.head == (tuple(mask.shape) if padded else tokens)
    assert abs(found.loss.item() / wanted.loss.item() - 1) <= LOGIT_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    assert relative_rms(found.logits[mask == 1], wanted.logits[mask == 1]) <= LOGIT_TOL


@pytest.mark.parametrize("family", CORE)
def test_the_loss_of_a_row_is_that_of_its_documents(family):
    batch = row_batch("positions", EDGES)
    labels = torch.cat([part.index_fill(0, torch.tensor([0]), -100) for part in batch.documents])
    model, items = tiny(family), int((labels != -100).sum())
    wanted = [
        model(input_ids=part[None], labels=part[None], use_cache=False).loss * (len(part) - 1)
        for part in batch.documents
        if len(part) > 1
    ]
    total = sum(wanted) / items
    model.zero_grad()
    total.backward()
    wanted_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    out, grads = step(apply_patches(model), {**batch.inputs, "labels": labels[None]})
    assert abs(out.loss.item() / total.item() - 1) <= LOGIT_TOL
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_kinds_of_layers_in_a_config_without_any(family):
    """As converters write them; upstream reads none."""
    model = tiny(family)
    model.config.layer_types = ["full_attention"] * 4
    assert_exact(apply_patches(model), row_batch("positions", EDGES))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", CORE)
def test_checkpointing_changes_nothing(family, reentrant):
    assert_checkpointing_changes_nothing(family, row_batch("positions", EDGES), reentrant)


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize(
    "family", [CORE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CORE[1:])]
)
def test_half_precision_rounds_no_worse_than_upstream(family, autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    rounded, model = tiny(family).to(dtype), apply_patches(tiny(family).to(dtype))
    batches = [row_batch("positions", EDGES, seed=seed) for seed in range(1, 9)]
    ours, upstreams = half_precision(tiny(family), rounded, model, batches, autocast)
    assert ours <= 1.5 * upstreams, (ours, upstreams)


@pytest.mark.parametrize("family", CORE)
def test_no_tensor_is_a_square_of_the_row(family):
    lengths = (700, 1300, 96)
    batch, model = row_batch("positions", lengths), apply_patches(tiny(family))
    with Largest() as largest:
        model(**batch.inputs).logits.sum().backward()
    # a softcap makes the scores of each document, in four heads of four bytes
    scores = 16 * 1536**2 if family == "gemma2" else 0
    assert largest.bytes <= max(scores, sum(lengths) ** 2 - 1)
