"""Log-probabilities of next tokens from hidden states, without logits, against all logits of
documents one by one.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree import apply_patches, token_log_probs
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
