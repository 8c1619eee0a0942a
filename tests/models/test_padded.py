"""Padded batches run on real tokens only: loss, values and gradients are transformers', and so
are the shapes.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_packfree import apply_patches
from hf_packfree.models.compat import CACHE
from hf_packfree.packing.lazy import LazyTensor
from tests.models.padded import (
    IGNORED,
    ROWS,
    WIDTH,
    Seen,
    all_gradients,
    padded_batch,
    real_tokens,
    rounding,
)
from tests.support import LOGIT_TOL, pairwise, relative_rms, step, tiny, worst_gradient

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl_moe", "qwen2_5_vl"]
LOSS_TOL = 1e-6
"""Relative: fp32 sums of some hundred terms in another order."""
GRADIENT_TOL = 1e-5
"""Relative RMS of the worst parameter: nothing but rounding differs."""
ONE_PARAMETER = 1e-4
"""The same against another length of row: transformers' own in fp32 are up to 7e-05 from fp64.
All together 1e-05.
"""


def thinned(labels, seed=0):
    """A third of all labels dropped, anywhere."""
    keep = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed)) > 1 / 3
    return labels.masked_fill(~keep, IGNORED)


def completion_only(labels):
    """No loss on the first half of each document."""
    known = (labels != IGNORED).cumsum(1)
    return labels.masked_fill(known <= known.max(1, keepdim=True).values // 2, IGNORED)


LABELS = {"all": lambda labels: labels, "thinned": thinned, "completion only": completion_only}
ITEMS = {"mean": None, "int": 77, "tensor": torch.tensor(77)}


def assert_same(found, wanted, batch, limit=LOGIT_TOL, rounded=0.0):
    (output, grads), (unpatched, unpatched_grads) = found, wanted
    real = batch["attention_mask"].bool()
    assert abs(output.loss.item() / unpatched.loss.item() - 1) <= LOSS_TOL
    assert output.logits.shape == unpatched.logits.shape
    assert relative_rms(output.logits[real], unpatched.logits[real]) <= limit
    assert worst_gradient(grads, unpatched_grads) <= GRADIENT_TOL + rounded


@pytest.mark.compat
@pytest.mark.parametrize(("family", "side", "labels"), pairwise(FAMILIES, list(ROWS), list(LABELS)))
def test_loss_logits_and_gradients_are_upstreams(family, side, labels):
    model, batch = tiny(family), padded_batch(side)
    batch["labels"] = LABELS[labels](batch["labels"])
    # transformers up to 5.14 misread the padding of a single row: it serves as the control later
    if side == "one row":
        batch = {name: value.repeat(2, 1) for name, value in batch.items()}
    wanted = step(model, batch)
    rounded = rounding(model, batch, wanted[1])
    assert rounded <= ONE_PARAMETER, "too blunt to see anything beside it"
    seen = Seen(apply_patches(model))
    assert_same(step(model, batch), wanted, batch, rounded=rounded)
    kept = int((batch["labels"][:, 1:][~batch["attention_mask"][:, :-1].bool()] != IGNORED).sum())
    assert seen.layer == seen.head == (1, real_tokens(batch) + kept)
    if kept == 0 or labels == "all":
        other = padded_batch(side)["labels"].roll(1, 1)
        rolled = step(model, {**padded_batch(side), "labels": other})[0]
        assert abs(rolled.loss.item() / wanted[0].loss.item() - 1) > 100 * LOSS_TOL


@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_num_items_in_batch(side, items):
    model, batch = tiny(), padded_batch(side)
    wanted = step(model, batch, num_items_in_batch=ITEMS[items])
    assert_same(step(apply_patches(model), batch, num_items_in_batch=ITEMS[items]), wanted, batch)


@settings(max_examples=15)
# where weights moved by their last bits move gradients by 4e-6 to 3e-5
@example(spans=[(10, 4, 0)], seed=3)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 9),
)
def test_any_padding(spans, seed):
    """Rows of any padding before and after, any labels of real tokens, in batches of two rows
    and more.
    """
    width = max(map(sum, spans)) or 1
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(spans) + 1, width, dtype=torch.long)
    for row, (before, tokens, _after) in enumerate([*spans, (0, width, 0)]):
        mask[row, before : before + tokens] = 1
    ids = torch.randint(2, 128, mask.shape, generator=generator)
    labels = ids.masked_fill(
        (mask == 0) | (torch.rand(mask.shape, generator=generator) < 0.2), IGNORED
    )
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    wanted = step(UNPATCHED, batch, num_items_in_batch=13)
    found = step(OURS, batch, num_items_in_batch=13)
    assert abs(found[0].loss.item() - wanted[0].loss.item()) <= LOSS_TOL * max(
        1.0, wanted[0].loss.item()
    )
    real = mask.bool()
    assert relative_rms(found[0].logits[real], wanted[0].logits[real]) <= LOGIT_TOL
    if wanted[0].loss.item():
        exact = step(EXACT, batch, num_items_in_batch=13)[1]
        for measure in (worst_gradient, all_gradients):
            error, own = measure(found[1], wanted[1]), 2 * measure(wanted[1], exact)
            # unpatched's rounding may have been lucky: five more draws of it
            if error > GRADIENT_TOL + own:
                draws = (
                    rounding(UNPATCHED, batch, wanted[1], measure, seed, num_items_in_batch=13)
                    for seed in range(5)
                )
                assert error <= GRADIENT_TOL + max(draws), "more than rounding moves"


UNPATCHED, OURS, EXACT = tiny(), apply_patches(tiny()), tiny().double()


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_shift_labels_and_weights_follow(family):
    model, batch = tiny(family), padded_batch("left")
    mask, labels = batch["attention_mask"], batch["labels"]
    batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    shifted = thinned(torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:])
    shifted = shifted.masked_fill(mask == 0, IGNORED)
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(5))

    def weighted(logits, labels, vocab_size, shift_labels=None, token_weights=None, **kwargs):
        each = torch.nn.functional.cross_entropy(
            logits.view(-1, vocab_size), shift_labels.view(-1), reduction="none"
        )
        return (each * token_weights.view(-1)).sum() / 50

    more = {"shift_labels": shifted, "num_items_in_batch": 50}
    wanted = step(model, batch, **more)
    model.loss_function = weighted
    wanted_weighted = step(model, batch, token_weights=weights, **more)
    apply_patches(model)
    assert_same(step(model, batch, token_weights=weights, **more), wanted_weighted, batch)
    del model._loss_function
    assert_same(step(model, batch, **more), wanted, batch)
    assert abs(wanted[0].loss.item() / wanted_weighted[0].loss.item() - 1) > 0.1


@pytest.mark.parametrize("side", ROWS)
def test_embeddings_instead_of_ids(side):
    model, batch = tiny(), padded_batch(side)
    batch = {name: torch.cat((value, value)) for name, value in batch.items()}
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    wanted = step(model, batch)
    assert_same(step(apply_patches(model), batch), wanted, batch)


def test_the_option_chooses_when_logits_are_padded():
    batch = padded_batch("right")
    outputs = {}
    for padded in ("lazy", "upstream"):
        model = apply_patches(tiny(), padded=padded)
        seen = Seen(model)
        outputs[padded] = model(**batch, use_cache=False)
        rows = (3, WIDTH) if padded == "upstream" else (1, real_tokens(batch))
        assert seen.layer == seen.head == rows
    logits = {name: output.logits for name, output in outputs.items()}
    assert [isinstance(logits[name], LazyTensor) for name in ("lazy", "upstream")] == [True, False]
    assert (
        logits["lazy"].source.values is None
        and outputs["lazy"]["logits"].detach().float().source.values is None
    )
    real = batch["attention_mask"].bool()
    assert relative_rms(logits["lazy"][real], logits["upstream"][real]) <= 1e-5
    assert logits["lazy"].source.values is not None and (logits["lazy"][~real] == 0).all()


def test_a_training_step_holds_no_padded_logits():
    """Nothing of B*S rows of logits is allocated, and everything is without the patches: the
    control.
    """
    batch, sizes = padded_batch("right"), {}
    for padded in ("lazy", "upstream"):
        model = apply_patches(tiny(), padded=padded)
        with _Sizes() as seen:
            model(**batch, use_cache=False).loss.backward()
        sizes[padded] = seen.largest_with(model.config.vocab_size)
    all_tokens, real = 3 * WIDTH, real_tokens(batch)
    assert sizes == {"lazy": real, "upstream": all_tokens}


class _Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, LazyTensor):
                self.shapes.add(tuple(tensor.shape))
        return found

    def largest_with(self, width):
        """Rows of the largest activation that is `width` wide; the head's own weight is 64 wide
        in its other axis.
        """
        return max(
            shape[:-1].numel()
            for shape in map(torch.Size, self.shapes)
            if len(shape) > 1 and shape[-1] == width
        )


def test_requested_outputs_have_the_callers_shape():
    model, batch = tiny("qwen3_5_moe"), padded_batch("left")
    requested = {"output_hidden_states": True, "output_router_logits": True, "use_cache": False}
    unpatched = model(**batch, **requested)
    ours = apply_patches(model)(**batch, **requested)
    real = batch["attention_mask"].bool()
    assert ours.logits.shape == unpatched.logits.shape
    assert len(ours.hidden_states) == len(unpatched.hidden_states) == 5
    for mine, theirs in zip(ours.hidden_states, unpatched.hidden_states):
        assert mine.shape == theirs.shape and relative_rms(mine[real], theirs[real]) <= LOGIT_TOL
    for mine, theirs in zip(ours.router_logits, unpatched.router_logits):
        assert (
            mine.shape == theirs.shape
            and relative_rms(mine[real.flatten()], theirs[real.flatten()]) <= LOGIT_TOL
        )
    trunk = model.model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    )
    assert (
        relative_rms(trunk.last_hidden_state[real], unpatched.hidden_states[-1][real]) <= LOGIT_TOL
    )
    assert trunk.last_hidden_state.shape == unpatched.hidden_states[-1].shape
    as_tuple = model(**batch, **requested, return_dict=False)
    assert (
        isinstance(as_tuple, tuple)
        and as_tuple[0].item() == ours.loss.item()
        and torch.equal(as_tuple[2], ours.logits)
    )


def test_reading_the_logits_of_a_training_step_has_gradients():
    """A second loss on top of the model's, as distillation or a label smoother outside would
    add.
    """
    model, batch = tiny(), padded_batch("right")

    def sharper(output):
        found = output.logits[:, :-1]
        found /= 0.7
        real = batch["attention_mask"][:, :-1, None]
        return output.loss + (found.log_softmax(-1) * real).mean()

    def outcome():
        model.zero_grad(set_to_none=True)
        loss = sharper(model(**batch, use_cache=False))
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}

    wanted, found = outcome(), (apply_patches(model), outcome())[1]
    assert (
        abs(found[0] / wanted[0] - 1) <= LOSS_TOL
        and worst_gradient(found[1], wanted[1]) <= GRADIENT_TOL
    )


EMPTY = {
    "input_ids": torch.zeros(2, 6, dtype=torch.long),
    "attention_mask": torch.zeros(2, 6, dtype=torch.long),
}


@pytest.mark.compat
@pytest.mark.parametrize("items", [None, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_padding_adds_nothing(family, items):
    """A rank with nothing: zero loss, zero gradients for exactly the parameters that a full
    batch gives one.
    """
    model = apply_patches(tiny(family))
    labels = torch.full((2, 6), IGNORED)
    # transformers 5.2 has no coefficient of Qwen3-VL-MoE's routers' loss
    more = (
        {"output_router_logits": True}
        if hasattr(model.config.get_text_config(), "router_aux_loss_coef")
        else {}
    )
    full = step(model, padded_batch("right"))[1]
    output, grads = step(model, {**EMPTY, "labels": labels}, num_items_in_batch=items, **more)
    assert output.loss.item() == 0 and output.logits.shape == (2, 6, 128)
    assert grads.keys() == full.keys() and all((grad == 0).all() for grad in grads.values())


def test_rows_with_nothing_to_learn_have_zero_loss():
    model, batch = tiny(), padded_batch("right")
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    assert step(model, batch)[0].loss.isnan(), "the control: transformers takes a mean over nothing"
    output, grads = step(apply_patches(model), batch)
    assert output.loss.item() == 0 and all((grad == 0).all() for grad in grads.values())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation(family, side):
    model, batch = tiny(family).eval(), padded_batch(side)
    with torch.no_grad():
        wanted, found = model(**batch), apply_patches(model)(**batch)
    real = batch["attention_mask"].bool()
    assert abs(found.loss.item() / wanted.loss.item() - 1) <= LOSS_TOL
    assert found.logits.source.values is None, "logits were made"
    assert relative_rms(found.logits[real], wanted.logits[real]) <= LOGIT_TOL


@pytest.mark.parametrize(
    "requested",
    [
        {"use_cache": True},
        {"use_cache": False, "output_attentions": True},
        {"use_cache": False, "logits_to_keep": 4},
    ],
)
def test_what_only_upstream_gives_is_upstreams(requested):
    model, batch = tiny(attention="eager").eval(), padded_batch("left")
    del batch["labels"]
    wanted, found = model(**batch, **requested), apply_patches(model)(**batch, **requested)
    assert torch.equal(found.logits, wanted.logits)
    assert (found.get(CACHE) is None) == (wanted.get(CACHE) is None)


def test_logits_to_keep_in_training():
    """The layers skip padding, the head runs on the tokens requested, which end rows of
    left-padded prompts.
    """
    model, batch = tiny(), padded_batch("left")
    del batch["labels"]
    wanted = model(**batch, use_cache=False, logits_to_keep=4).logits
    seen = Seen(apply_patches(model))
    found = model(**batch, use_cache=False, logits_to_keep=4).logits
    assert found.shape == (3, 4, 128) and relative_rms(found, wanted) <= LOGIT_TOL
    assert seen.layer == (1, real_tokens(batch)) and seen.head == (3, 4)


@pytest.mark.parametrize(("attention", "side"), [("eager", "left"), ("sdpa", "right")])
def test_labels_that_padding_predicts_are_upstreams(attention, side, caplog):
    """Where padding looks at tokens and has a label, upstream's answer depends on all of it: the
    batch stays padded.
    """
    model, batch = tiny(attention=attention), padded_batch(side)
    if side == "right":
        batch["labels"] = batch["input_ids"]
    wanted = step(model, batch)
    found = step(apply_patches(model), batch)
    assert torch.equal(found[0].loss, wanted[0].loss) and torch.equal(
        found[0].logits, wanted[0].logits
    )
    assert "padding would have to predict" in caplog.text
    caplog.clear()
    step(model, batch)
    assert "padding would have to predict" not in caplog.text, "said again in every step"
    batch["labels"] = (
        padded_batch("right")["labels"]
        if side == "right"
        else batch["labels"].masked_fill(batch["attention_mask"].cumsum(1) <= 1, IGNORED)
    )
    seen = Seen(model)
    step(model, batch)
    assert seen.layer == (1, real_tokens(batch)) and not caplog.text


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("span", [(0, 25), (11, 9), (3, 30)])
def test_a_batch_of_one_row_is_the_document_alone(family, span):
    """Against the document without padding: transformers up to 5.14 misreads the padding of a
    single row.
    """
    model, (first, tokens) = tiny(family), span
    ids = torch.zeros(1, WIDTH, dtype=torch.long)
    ids[0, first : first + tokens] = torch.randint(
        2, 128, (tokens,), generator=torch.Generator().manual_seed(4)
    )
    mask = (ids > 0).long()
    document = ids[:, first : first + tokens]
    output, grads = step(model, {"input_ids": document, "labels": document})
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask.cumsum(1) * mask <= 1, IGNORED),
    }
    found, found_grads = step(apply_patches(model), batch)
    assert abs(found.loss.item() / output.loss.item() - 1) <= LOSS_TOL
    assert (
        all_gradients(found_grads, grads) <= GRADIENT_TOL
        and worst_gradient(found_grads, grads) <= ONE_PARAMETER
    )
    assert relative_rms(found.logits[:, first : first + tokens], output.logits) <= LOGIT_TOL


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model, batch = tiny(), padded_batch("left")
    wanted = step(model, batch)
    apply_patches(model).gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    assert_same(step(model, batch), wanted, batch)
    assert len(calls) == 2, "nothing was recomputed"


def test_loaded_through_the_other_door():
    from hf_packfree import register_patches

    unpatched, batch = tiny(), padded_batch("both")
    with register_patches(padded="lazy"):
        model = transformers.AutoModelForCausalLM.from_config(unpatched.config).train()
    model.load_state_dict(unpatched.state_dict())
    assert type(model) is not type(unpatched)
    seen = Seen(model)
    assert_same(step(model, batch), step(unpatched, batch), batch)
    assert seen.layer == seen.head == (1, real_tokens(batch) + 2), "two rows begin with padding"


# torch.compile says where it breaks the graph
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_compiled():
    model, batch = tiny(), padded_batch("both")
    wanted = step(model, batch)
    found, grads = step(torch.compile(apply_patches(model), backend="eager"), batch)
    assert_same(
        (found, {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}),
        wanted,
        batch,
    )


def test_lazy_logits_in_shared_memory():
    """As a loader's worker would send them: the whole padded tensor, which a shell without
    memory of its own has not.
    """
    output, _ = step(apply_patches(tiny()), padded_batch("right"))
    assert isinstance(output.logits, LazyTensor)
    shared = output.logits.detach().share_memory_()
    assert shared.is_shared() and torch.equal(shared, output.logits.detach() + 0)
