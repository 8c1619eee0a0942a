"""Log-probabilities of next tokens from hidden states, without logits, against all logits of
documents one by one.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree import apply_patches, token_log_probs
from hf_packfree.errors import UnsupportedInput
from tests.models.padded import padded_batch
from tests.support import CONTROL, GRADIENT_TOL, LOGIT_TOL, documents, gradients, relative_rms, tiny

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
        scores = (logits.float() / temperature[row]).log_softmax(-1)
        at = row, slice(part.start, part.stop - 1)
        log_p[at] = scores.gather(1, batch["input_ids"][row, part][1:, None])[:, 0]
        entropy[at] = -(scores.exp() * scores).sum(1)
    return log_p, entropy


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("name", ["packed", "left", "right"])
def test_equals_all_logits_one_by_one(name, family):
    batch, where = packed() if name == "packed" else padded(name)
    temperature = torch.linspace(0.6, 1.5, len(batch["input_ids"]))[:, None]
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


def lazily(model, batch, where, **options):
    """Return the model's lazy logits, of a step with labels, and what is asked of them."""
    labels = batch["input_ids"].masked_fill(batch.get("attention_mask", torch.ones(())) == 0, -100)
    logits = model.train()(**batch, labels=labels, use_cache=False).logits
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


def test_lazy_logits_and_hidden_states_give_the_same():
    (batch, where), model = packed(), apply_patches(tiny())
    _, found = lazily(model, batch, where, temperature=0.7, entropy="detached")
    hidden = model.base_model(**batch, use_cache=False)[0]
    wanted = token_log_probs(
        hidden, targets(batch, where), model, temperature=0.7, entropy="detached"
    )
    assert torch.equal(found.log_probs, wanted.log_probs) and found.log_probs.requires_grad
    assert torch.equal(found.entropy, wanted.entropy) and not found.entropy.requires_grad


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


def test_targets_of_another_shape_are_refused():
    batch, where = padded("right")
    logits, _ = lazily(apply_patches(tiny()), batch, where)
    with pytest.raises(UnsupportedInput, match="one target for every token"):
        logits.log_probs(targets(batch, where)[:, 1:])


@pytest.mark.parametrize("cap", [30.0, None])
def test_a_model_that_caps_its_logits_is_refused(cap):
    model, (batch, where) = tiny("gemma2"), packed()
    model.config.final_logit_softcapping = cap
    hidden, wanted = model.base_model(**batch)[0], targets(batch, where)
    if cap is not None:
        with pytest.raises(UnsupportedInput, match="found final_logit_softcapping=30.0 in the con"):
            token_log_probs(hidden, wanted, model)
        return
    scores = model.lm_head(hidden).log_softmax(-1)
    made = scores.gather(2, wanted.clamp(min=0)[..., None])[..., 0] * (wanted >= 0)
    assert relative_rms(token_log_probs(hidden, wanted, model).log_probs, made) <= LOGIT_TOL
