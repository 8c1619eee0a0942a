"""Log-probabilities of next tokens from hidden states, without logits, against all logits of
documents one by one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from hf_packfree import apply_patches, token_log_probs
from hf_packfree.errors import UnsupportedInput
from tests.models.padded import padded_batch
from tests.models.test_unlisted import built
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    by_family,
    documents,
    gradients,
    relative_rms,
    slow_decay,
    tiny,
)

LENGTHS = (5, 64, 1, 30)


def packed():
    parts = documents(LENGTHS, vocabulary=128)
    batch = {
        "input_ids": torch.cat(parts)[None],
        "position_ids": torch.cat([torch.arange(len(part)) for part in parts])[None],
    }
    ends = torch.tensor(LENGTHS).cumsum(0)
    where = [(0, slice(end - n, end)) for n, end in zip(LENGTHS, ends.tolist())]
    return batch, where


def padded(side):
    batch = padded_batch(side)
    del batch["labels"]
    firsts, counts = (
        batch["attention_mask"].argmax(1).tolist(),
        batch["attention_mask"].sum(1).tolist(),
    )
    return batch, [
        (row, slice(first, first + n)) for row, (first, n) in enumerate(zip(firsts, counts))
    ]


def targets(batch, where):
    """The next token of the document, -100 at its end and at padding."""
    found = torch.full_like(batch["input_ids"], -100)
    for row, part in where:
        found[row, part.start : part.stop - 1] = batch["input_ids"][row, part][1:]
    return found


def weights(shape):
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))


def one_by_one(model, batch, where, temperature):
    log_p, entropy = (torch.zeros(batch["input_ids"].shape) for _ in range(2))
    for row, part in where:
        logits = model(input_ids=batch["input_ids"][row, part][None], use_cache=False).logits[
            0, :-1
        ]
        divisor = temperature.expand(batch["input_ids"].shape)[row, part][:-1, None]
        scores = (logits.float() / divisor).log_softmax(-1)
        at = row, slice(part.start, part.stop - 1)
        log_p[at] = scores.gather(1, batch["input_ids"][row, part][1:, None])[:, 0]
        entropy[at] = -(scores.exp() * scores).sum(1)
    return log_p, entropy


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("name", ["packed", "left", "right"])
def test_equals_all_logits_one_by_one(name, family):
    batch, where = packed() if name == "packed" else padded(name)
    rows, tokens = batch["input_ids"].shape
    # by token, and by row
    size = (1, tokens) if name == "packed" else (rows, 1)
    temperature = torch.linspace(0.6, 1.5, size[0] * size[1]).view(size)
    model, stock, weight = (
        apply_patches(tiny(family)),
        tiny(family),
        weights(batch["input_ids"].shape),
    )
    hidden = model.base_model(**batch, use_cache=False)[0]
    found = token_log_probs(
        hidden, targets(batch, where), model, temperature=temperature, entropy=True, top1=True
    )
    wanted = one_by_one(stock, batch, where, temperature)
    for one, other in zip((found.log_probs, found.entropy), wanted):
        assert relative_rms(one, other) <= LOGIT_TOL
    assert found.top1.shape == found.is_top1.shape == hidden.shape[:2]
    (torch.stack([found.log_probs, found.entropy]) * weight).sum().backward()
    (torch.stack(wanted) * weight).sum().backward()
    got, want = gradients(model), gradients(stock)
    assert max(relative_rms(got[key], want[key]) for key in want) <= GRADIENT_TOL
    if name == "packed":
        leaks = one_by_one(tiny(family), batch, [(0, slice(0, sum(LENGTHS)))], temperature)[0]
        at = targets(batch, where) != -100
        assert relative_rms(leaks[at], wanted[0][at]) >= CONTROL * LOGIT_TOL


def test_entropy_for_the_log_has_no_gradient():
    hidden, model = torch.randn(1, 4, 64, requires_grad=True), tiny()
    wanted = torch.tensor([[3, 5, -100, 7]])
    logged = token_log_probs(hidden, wanted, model, entropy="detached")
    trained = token_log_probs(hidden, wanted, model.lm_head, entropy=True)
    assert torch.equal(logged.entropy, trained.entropy) and trained.entropy.requires_grad
    assert not logged.entropy.requires_grad and logged.log_probs.requires_grad
    assert logged.top1 is None is trained.is_top1


def test_under_autocast():
    hidden, model, wanted = torch.randn(2, 9, 64), tiny(), torch.randint(128, (2, 9))
    exact = token_log_probs(hidden, wanted, model).log_probs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_log_probs(hidden, wanted, model).log_probs
        full = model.lm_head(hidden).float().log_softmax(-1).gather(-1, wanted[..., None])[..., 0]
    assert found.dtype == torch.float32 and not torch.equal(found, exact)
    assert relative_rms(found, exact) <= 1.05 * relative_rms(full, exact)


def lazily(model, batch, where, *, labels=True, **options):
    """Return the model's lazy logits and what is asked of them."""
    if labels:
        padding = batch.get("attention_mask", torch.ones(())) == 0
        batch = batch | {"labels": batch["input_ids"].masked_fill(padding, -100)}
    logits = model(**batch, use_cache=False).logits
    assert logits.source.values is None
    return logits, logits.log_probs(targets(batch, where), **options)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", ["packed", "left", "right"])
def test_lazy_logits_tell_what_fp64_logits_of_documents_tell(name, cast):
    batch, where = packed() if name == "packed" else padded(name)
    temperature = torch.linspace(0.6, 1.5, len(batch["input_ids"]))[:, None]
    model, stock = apply_patches(tiny()), tiny().double()
    asked = {"temperature": temperature, "entropy": True, "top1": True}
    logits, found = lazily(model, batch, where, **asked)
    if cast:
        # as accelerate casts outputs
        found = logits.float().log_probs(targets(batch, where), **asked)
        double = logits.double()
        assert torch.equal(double.log_probs(targets(batch, where), **asked).top1, found.top1)
    wanted = one_by_one(stock, batch, where, temperature)
    for one, other in zip((found.log_probs, found.entropy), wanted):
        assert one.dtype == torch.float32 and relative_rms(one, other) <= LOGIT_TOL
    weight = weights(batch["input_ids"].shape)
    (torch.stack([found.log_probs, found.entropy]) * weight).sum().backward()
    (torch.stack(wanted) * weight).sum().backward()
    got, want = gradients(model), gradients(stock)
    assert max(relative_rms(got[key], want[key]) for key in want) <= GRADIENT_TOL
    assert logits.source.values is None, "logits were made"
    has = targets(batch, where) != -100
    assert torch.equal(found.top1[has], logits.argmax(-1)[has])
    assert torch.equal(found.is_top1, (found.top1 == targets(batch, where)) & has)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["packed", "left"])
def test_without_labels_without_gradients_and_in_evaluation_too(name, training):
    (batch, where), model = packed() if name == "packed" else padded(name), apply_patches(tiny())
    options = {"temperature": 0.7, "entropy": True}
    model.train(training)
    wanted = one_by_one(tiny(), batch, where, torch.full((len(batch["input_ids"]), 1), 0.7))
    for labels in (True, False):
        logits, found = lazily(model, batch, where, labels=labels, **options)
        with torch.no_grad():
            _, alone = lazily(model, batch, where, labels=labels, **options)
        for one, same, other in zip(vars(found).values(), vars(alone).values(), wanted):
            assert relative_rms(one, other) <= LOGIT_TOL and torch.equal(one, same)
            assert one.requires_grad and not same.requires_grad
        assert logits.source.values is None, "logits were made"
    weight = weights(batch["input_ids"].shape)
    model.zero_grad()
    (torch.stack([found.log_probs, found.entropy]) * weight).sum().backward()
    got = gradients(model)
    stock = tiny()
    again = one_by_one(stock, batch, where, torch.full((len(batch["input_ids"]), 1), 0.7))
    (torch.stack(again) * weight).sum().backward()
    want = gradients(stock)
    assert max(relative_rms(got[key], want[key]) for key in want) <= GRADIENT_TOL


def test_kept_logits_of_a_step_tell_it_too():
    """As TRL asks for those of the answers."""
    (batch, where), model = padded("left"), apply_patches(tiny())
    wanted = targets(batch, where)[:, -9:]
    logits = model(**batch, logits_to_keep=9).logits
    found = logits.log_probs(wanted).log_probs
    assert logits.source.values is None and found.shape == (3, 9)
    full = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    assert relative_rms(found, full * (wanted >= 0)) <= LOGIT_TOL


def test_the_evaluation_loss_needs_no_logits():
    (batch, _), model = packed(), apply_patches(tiny()).eval()
    with torch.no_grad():
        found = model(**batch, labels=batch["input_ids"])
        assert found.logits.source.values is None
        stock = apply_patches(tiny(), backend={"loss": "upstream"}).eval()
        wanted = stock(**batch, labels=batch["input_ids"])
    assert abs(found.loss - wanted.loss) <= 1e-6 * wanted.loss
    assert torch.equal(found.logits, wanted.logits)


ORDINARY = {
    "a row of one document": lambda model, row: model(input_ids=row["input_ids"][:, :5]).logits,
    "logits read by a head that is hooked": lambda model, row: hooked(model)(**row).logits,
    "the last logits, as generation asks": lambda model, row: model(**row, logits_to_keep=1).logits,
    "inference mode": torch.inference_mode()(lambda model, row: model(**row).logits),
}


@pytest.mark.parametrize("case", ORDINARY)
def test_where_logits_are_ordinary_hidden_states_tell(case):
    """Documented in docs/rl.md."""
    batch, _ = packed()
    assert type(ORDINARY[case](apply_patches(tiny()).eval(), batch)) is torch.Tensor


def hooked(model):
    model.lm_head.register_forward_hook(lambda *call: None)
    return model


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_a_tied_head_and_the_gradient_of_the_weight_it_shares(dtype, limit):
    config = by_family["qwen3_5"].tiny_config()
    config.tie_word_embeddings, (batch, where) = True, packed()
    torch.manual_seed(0)
    model = apply_patches(slow_decay(Qwen3_5ForCausalLM(config)).to(dtype))
    # the layers' rounding grows with it: fp32 logits of all tokens are 1.1e-06 from fp64 ones
    model.model.embed_tokens.weight.data.mul_(0.2)
    shared, asked = model.model.embed_tokens.weight, targets(batch, where)
    assert model.lm_head.weight is shared
    options = {"temperature": 0.7, "entropy": True}
    hidden = model.base_model(**batch)[0]
    scores = (hidden.double() @ shared.double().t() / 0.7).log_softmax(-1)
    full = [
        scores.gather(-1, asked.clamp(min=0)[..., None])[..., 0] * (asked >= 0),
        -(scores.exp() * scores).sum(-1) * (asked >= 0),
    ]
    ways = {
        "hidden states": token_log_probs(hidden, asked, model, **options),
        "lazy logits": lazily(model, batch, where, labels=False, **options)[1],
    }
    weight = weights(asked.shape).to(dtype)
    (wanted,) = torch.autograd.grad((torch.stack(full) * weight).sum(), shared, retain_graph=True)
    for found in ways.values():
        mine = torch.stack([found.log_probs, found.entropy])
        assert relative_rms(mine, torch.stack(full)) <= limit
        (got,) = torch.autograd.grad((mine * weight).sum(), shared, retain_graph=True)
        assert relative_rms(got, wanted) <= limit


def test_lazy_logits_and_hidden_states_give_the_same():
    (batch, where), model = packed(), apply_patches(tiny())
    _, found = lazily(model, batch, where, temperature=0.7, entropy="detached")
    hidden = model.base_model(**batch, use_cache=False)[0]
    wanted = token_log_probs(
        hidden, targets(batch, where), model, temperature=0.7, entropy="detached"
    )
    assert torch.equal(found.log_probs, wanted.log_probs) and found.log_probs.requires_grad
    assert torch.equal(found.entropy, wanted.entropy) and not found.entropy.requires_grad


@pytest.mark.parametrize("name", ["packed", "left"])
def test_an_output_stands_for_its_logits(name):
    (batch, where), model = packed() if name == "packed" else padded(name), apply_patches(tiny())
    asked, output = targets(batch, where), model(**batch, use_cache=False)
    options = {"temperature": 0.7, "entropy": True, "top1": True}
    wanted = output.logits.log_probs(asked, **options)
    ones, others = (
        vars(token_log_probs(output, asked, *head, **options)) for head in ([], [model])
    )
    for key, one in vars(wanted).items():
        assert one is ones[key] is others[key] or torch.equal(one, ones[key])
    assert ones["entropy"].requires_grad and output.logits.source.values is None


def test_without_lazy_logits_hidden_states_and_the_model_are_wanted():
    stock, ids = tiny(), torch.arange(3, 15)[None]
    output = stock(input_ids=ids, use_cache=False)
    for one in (output, output.to_tuple(), stock.model(input_ids=ids)):
        with pytest.raises(UnsupportedInput, match="found a .* without lazy logits; wanted"):
            token_log_probs(one, ids, stock)
    with pytest.raises(UnsupportedInput, match="found hidden states without their head"):
        token_log_probs(stock.model(input_ids=ids)[0], ids)


def test_detached_lazy_logits_have_no_gradient():
    batch, where = padded("left")
    logits, found = lazily(apply_patches(tiny()), batch, where)
    detached = logits.detach().log_probs(targets(batch, where))
    assert torch.equal(detached.log_probs, found.log_probs)
    assert found.log_probs.requires_grad and not detached.log_probs.requires_grad


CHANGES = {
    "read": lambda model, logits: logits.sum(),
    "read as another dtype": lambda model, logits: logits.float().sum(),
    "changed": lambda model, logits: logits.detach().div_(2),
    "a step": lambda model, logits: torch.optim.SGD(model.parameters(), 0.1).step(),
    "weights written": lambda model, logits: model.lm_head.weight.data.mul_(2),
    "other weights": lambda model, logits: setattr(
        model.lm_head.weight, "data", model.lm_head.weight.data * 2
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["packed", "left"])
def test_logits_that_are_no_longer_untouched_are_refused(name, change):
    batch, where = packed() if name == "packed" else padded(name)
    model = apply_patches(tiny())
    logits, found = lazily(model, batch, where)
    found.log_probs.sum().backward()
    CHANGES[change](model, logits)
    with pytest.raises(UnsupportedInput, match="found logits (that were )?read"):
        logits.log_probs(targets(batch, where))


SQUARE = torch.zeros(3, 3, dtype=torch.int64)
MISREAD = {
    "other targets": (
        {"targets": torch.zeros(9, 1, dtype=torch.int64)},
        r"found targets of shape \[9, 1\] for tokens of shape \[3, 3\]; wanted one target for every",
    ),
    "rows' temperatures": (
        {"temperature": torch.tensor([0.5, 1.0, 2.0])},
        r"found a temperature of shape \[3\] for tokens of shape \[3, 3\]; wanted a number",
    ),
    "too many temperatures": (
        {"temperature": torch.ones(3, 2)},
        r"a temperature of shape \[3, 2\]",
    ),
    "cold": ({"temperature": 0.0}, "found a temperature of 0.0; wanted one above 0"),
    "a cold row": (
        {"temperature": torch.tensor([[1.0], [-0.5], [1.0]])},
        "found a temperature of -0.5; wanted one above 0",
    ),
    "a mask": ({"targets": SQUARE == 0}, "found targets of torch.bool; wanted ids"),
    "no word": (
        {"targets": SQUARE.index_fill(1, torch.tensor(1), 128)},
        "found targets from 0 to 128 for a vocabulary of 128; wanted ids of its tokens",
    ),
    "another ignore_index": ({"targets": SQUARE - 1}, "found targets from -1 to -1"),
    "misspelt": ({"entropy": "detach"}, "found entropy='detach'; wanted True, False or 'detached'"),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", MISREAD)
def test_what_would_be_read_as_something_else_is_refused(name, lazy):
    """A shape that broadcasts along the wrong axis, or is only as large as the right one."""
    more, said = MISREAD[name]
    asked, model = {"targets": SQUARE, **more}, apply_patches(tiny(), unpacked="native")
    output = model(input_ids=SQUARE)
    hidden = torch.randn(3, 3, model.config.hidden_size)
    ask = (
        output.logits.log_probs
        if lazy
        else lambda **given: token_log_probs(hidden, head=model, **given)
    )
    with pytest.raises(ValueError, match=said):
        ask(**asked)


@pytest.mark.parametrize(
    "temperature", [torch.tensor(0.5), torch.tensor([0.5]), torch.full((5,), 0.5)]
)
def test_temperatures_that_can_only_mean_one_thing(temperature):
    hidden, head = torch.randn(1, 5, 4), torch.nn.Linear(4, 8)
    found, wanted = (
        token_log_probs(hidden, SQUARE.view(-1)[None, :5], head, temperature=one).log_probs
        for one in (temperature, 0.5)
    )
    assert torch.equal(found, wanted)


CHANGED = {
    "gemma2": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 8.0},
    "cohere2": {"logit_scale": 0.25},
    "falcon_h1": {},
    "granitemoehybrid": {},
}


@pytest.mark.parametrize("family", [name for name in CHANGED if name in by_family])
@pytest.mark.parametrize(
    "temperature", [0.7, torch.linspace(0.5, 2, 12)[None]], ids=["one", "of tokens"]
)
def test_models_that_scale_or_cap_their_logits(family, temperature):
    row = by_family[family]
    model = tiny(replace(row, tiny={**row.tiny, **CHANGED[family]}))
    ids = torch.arange(3, 15)[None]
    logits = model(input_ids=ids, use_cache=False).logits
    scores = (logits / torch.as_tensor(temperature)[..., None]).log_softmax(-1)
    wanted = scores.gather(2, ids[..., None])[..., 0]
    hidden = model.base_model(input_ids=ids, use_cache=False)[0]
    found = token_log_probs(hidden, ids, model, temperature=temperature, entropy=True)
    assert relative_rms(found.log_probs, wanted) <= LOGIT_TOL
    assert relative_rms(found.entropy, -(scores.exp() * scores).sum(-1)) <= LOGIT_TOL
    weight = model.get_output_embeddings().weight
    ours, theirs = (
        torch.autograd.grad(one.square().sum(), weight)[0] for one in (found.log_probs, wanted)
    )
    assert relative_rms(ours, theirs) <= GRADIENT_TOL


def test_hyperclovax_multiplies_by_what_granite_divides_by():
    pytest.importorskip("transformers.models.hyperclovax")
    model, ids = built("hyperclovax", logits_scaling=0.125), torch.arange(3, 15)[None]
    wanted = model(input_ids=ids).logits.log_softmax(-1).gather(2, ids[..., None])[..., 0]
    found = token_log_probs(model.base_model(input_ids=ids)[0], ids, model).log_probs
    assert relative_rms(found, wanted) <= LOGIT_TOL


@pytest.mark.parametrize("scale", ["logit_scale", "output_multiplier"])
def test_logits_that_are_capped_and_scaled_are_refused(scale):
    model = tiny("gemma2")
    setattr(model.config, scale, 0.25)
    ids = torch.arange(3, 15)[None]
    with pytest.raises(UnsupportedInput, match="found a cap and a scale of logits in the config"):
        token_log_probs(torch.randn(1, 12, 64), ids, model)


@pytest.mark.slow
def test_every_head_of_transformers_is_computed_or_refused_by_name():
    """Of what can be built small: none gives other numbers in silence."""
    ids, computed, refused = torch.arange(3, 23)[None], [], []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            model = built(kind).eval()
            hidden = model.base_model(input_ids=ids, use_cache=False)[0].detach()
            logits = model(input_ids=ids, use_cache=False).logits.detach()
        except Exception:
            # neither here nor there: configs that want more than sizes, an encoder, a language
            continue
        if hidden.shape[-1] != model.get_output_embeddings().weight.shape[-1]:
            continue
        wanted = logits.float().log_softmax(-1).gather(2, ids[..., None])[..., 0]
        try:
            found = token_log_probs(hidden, ids, model).log_probs
        except UnsupportedInput as error:
            assert f"of a {type(model).__name__}" in str(error)
            refused.append(kind)
            continue
        assert relative_rms(found, wanted) <= LOGIT_TOL, kind
        computed.append(kind)
    assert len(computed) > 100 and {"bert", "modernbert-decoder"} <= {*refused}
