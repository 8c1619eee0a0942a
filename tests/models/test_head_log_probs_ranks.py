"""Log-probabilities and entropies where two processes hold the head's weights, or each row: as on
one process, values and gradients.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from hf_packfree import apply_patches, token_log_probs
from hf_packfree.models import head_log_probs
from tests.models.test_head_loss import GRADIENT_TOL, packed_batch
from tests.models.test_head_loss_ranks import LENGTHS, WRAPPED
from tests.ranks import two_ranks
from tests.support import LOGIT_TOL, relative_rms, tiny, worst_gradient

WAYS = ["with the rest", "alone", "with the norm"]
"""Where FSDP2 keeps the head; accelerate keeps it with the norm."""
ASKED = ["hidden states", "lazy logits"]
ASKED += ["TRL", "TRL in fp32"] if find_spec("trl") else []
CASES = [(what, way) for what in ASKED for way in WAYS]
# a layer that is called gathers its weights by itself, or not at all
CALLED = ["softcap", *(["adapters on the head"] if find_spec("peft") else [])]
CASES += [(what, way) for what in CALLED for way in WAYS[1:]]


def ask(model: Any, batch: dict[str, Any], what: str) -> Any:
    """Return the log-probabilities and entropies of a batch's next tokens."""
    if what.startswith("TRL"):
        return model(**batch, fused_lm_head=True)
    targets = pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    output = model(**batch, output_hidden_states=what != "lazy logits")
    if what == "lazy logits":
        return output.logits.log_probs(targets, temperature=0.7, entropy=True)
    hidden = output.hidden_states[-1]
    return token_log_probs(hidden, targets, model, temperature=0.7, entropy=True)


def backward(found: Any) -> dict[str, torch.Tensor]:
    """Every token gets a gradient of its own; return what was asked."""
    (found.log_probs.square() - 0.1 * found.entropy.square()).sum().backward()
    return {"log_probs": found.log_probs.detach(), "entropy": found.entropy.detach()}


def sharded(rank: int, what: str, way: str | None) -> dict[str, Any]:
    """A rank's documents in a model whose weights FSDP2 shards, or in one of its own."""
    # ranks have another number of chunks each
    head_log_probs.rows_of_a_chunk = lambda *_: 7
    model = apply_patches(tiny())
    if what.startswith("TRL"):
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(
            model,
            outputs=("log_probs", "entropy"),
            temperature=0.7,
            cast_lm_head_to_fp32=what == "TRL in fp32",
        )
    if what == "softcap":
        model.config.final_logit_softcapping = 3.0
    if what == "adapters on the head":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    wrapped = WRAPPED[way](model) if way else model
    values = backward(ask(wrapped, packed_batch(LENGTHS[rank]), what))
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None:
            continue
        if not isinstance(grad, DTensor):
            torch.distributed.all_reduce(grad)
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad / 2
    return values | {"grads": grads}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What two ranks found, {(what was asked, where FSDP2 keeps the head): each rank's}; None:
    without FSDP2.
    """
    alone = [(what, None) for what in dict.fromkeys(what for what, _ in CASES)]
    cases = [*alone, *CASES]
    return dict(zip(cases, two_ranks(sharded, cases, tmp_path_factory.mktemp("ranks"))))


@pytest.mark.slow
@pytest.mark.parametrize(("what", "way"), CASES)
def test_fsdp2(ran, what, way):
    for found, wanted in zip(ran[what, way], ran[what, None]):
        for name in ("log_probs", "entropy"):
            assert relative_rms(found[name], wanted[name]) <= LOGIT_TOL
        assert worst_gradient(found["grads"], wanted["grads"]) <= GRADIENT_TOL


@pytest.mark.slow
def test_lazy_logits_have_what_hidden_states_have(ran):
    for found, other in zip(ran["lazy logits", None], ran["hidden states", None]):
        assert relative_rms(found["log_probs"], other["log_probs"]) <= LOGIT_TOL


def shared(rank: int, ranks: int) -> dict[str, Any]:
    """A row of which each rank has its part; of an odd number of tokens."""
    batch = packed_batch((5, 64, 1, 31))
    targets = pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    group = torch.distributed.group.WORLD if ranks > 1 else None
    model = apply_patches(tiny(), context_parallel=group)
    logits = model(**batch).logits
    mine = targets.shape[1] + targets.shape[1] % ranks
    mine = pad(targets, (0, mine - targets.shape[1]), value=-100).chunk(ranks, 1)[rank % ranks]
    values = backward(logits.log_probs(mine, temperature=0.7, entropy=True))
    assert logits.source.values is None
    grads = {name: one.grad for name, one in model.named_parameters()}
    if ranks > 1:
        for grad in grads.values():
            torch.distributed.all_reduce(grad)
    return values | {"grads": grads}


@pytest.mark.slow
def test_context_parallelism(tmp_path):
    """Each rank asks about its own tokens, and the gradients add up."""
    alone, both = two_ranks(shared, [(1,), (2,)], tmp_path)
    for name in ("log_probs", "entropy"):
        found = torch.cat([one[name] for one in both], 1)[:, : alone[0][name].shape[1]]
        assert relative_rms(found, alone[0][name]) <= LOGIT_TOL
    assert worst_gradient(both[0]["grads"], alone[0]["grads"]) <= GRADIENT_TOL
