"""Log-probabilities and entropies where two processes hold the head's weights, or each row: as on
one process, values and gradients.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from hf_packfree import apply_patches, token_log_probs
from hf_packfree.errors import UnsupportedInput
from hf_packfree.models import head_log_probs
from tests.models.test_head_loss import GRADIENT_TOL, packed_batch
from tests.models.test_head_loss_ranks import LENGTHS, WRAPPED
from tests.models.test_head_loss_ranks import sharded as by_layer
from tests.ranks import two_ranks
from tests.support import LOGIT_TOL, relative_rms, tiny, worst_gradient


def tied(model: Any) -> None:
    """As accelerate 1.15 does for a model whose head is its embedding."""
    parts = [model.model.norm, model.model.embed_tokens, model.lm_head]
    fully_shard(parts, reshard_after_forward=False)


TIED, SHARDED = (
    "with the norm, tied",
    WRAPPED | {"with the norm, tied": partial(by_layer, last=tied)},
)
WAYS = ["with the rest", "alone", "with the norm", TIED]
"""Where FSDP2 keeps the head; accelerate keeps it with the norm."""
ASKED = ["hidden states", "lazy logits"]
ASKED += ["TRL", "TRL in fp32"] if find_spec("trl") else []
CASES = [(what, way) for what in ASKED for way in WAYS]
# a layer that is called gathers its weights by itself, or not at all
CALLED = ["softcap", *(["adapters on the head"] if find_spec("peft") else [])]
CASES += [(what, way) for what in CALLED for way in WAYS[1:3]]


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


def made(what: str, is_tied: bool) -> Any:
    """Return the patched model that is asked."""
    model = tiny()
    if is_tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    apply_patches(model)
    if what.startswith("TRL"):
        from trl.trainer.utils import add_fused_lm_head

        options = {"temperature": 0.7, "cast_lm_head_to_fp32": what == "TRL in fp32"}
        add_fused_lm_head(model, outputs=("log_probs", "entropy"), **options)
    if what == "softcap":
        model.config.final_logit_softcapping = 3.0
    if what == "adapters on the head":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        options = {"r": 4, "target_modules": ["lm_head"], "init_lora_weights": False}
        get_peft_model(model, LoraConfig(**options))
    return model


def sharded(rank: int, what: str, way: str | None, is_tied: bool) -> dict[str, Any]:
    """A rank's documents in a model whose weights FSDP2 shards, or in one of its own: forward
    passes before as many backward passes, and another of both after a step.
    """
    # ranks have another number of chunks each
    head_log_probs.rows_of_a_chunk = lambda *_: 7
    model, batch = made(what, is_tied), packed_batch(LENGTHS[rank])
    wrapped = SHARDED[way](model) if way else model
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.01)
    # what lazy logits read may be gone after the first
    asked = [ask(wrapped, batch, what) for _ in range(1 if what == "lazy logits" else 2)]
    values = [backward(each) for each in asked][0]
    grads = {}
    for name, parameter in trained.items():
        if not isinstance(parameter.grad, DTensor):
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= 2
        grad = parameter.grad
        grads[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
    optimizer.step()
    optimizer.zero_grad()
    later = backward(ask(wrapped, batch, what))
    return values | {f"{name}, later": one for name, one in later.items()} | {"grads": grads}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What two ranks found, {(what was asked, where FSDP2 keeps the head, whether that is the
    embedding): each rank's}; None: without FSDP2.
    """
    names = dict.fromkeys(what for what, _ in CASES)
    cases = [(what, way, way == TIED) for what, way in CASES]
    cases += [(what, None, is_tied) for what in names for is_tied in (False, True)]
    return dict(zip(cases, two_ranks(sharded, cases, tmp_path_factory.mktemp("ranks"))))


@pytest.mark.slow
@pytest.mark.parametrize(("what", "way"), CASES)
def test_fsdp2(ran, what, way):
    is_tied = way == TIED
    for found, wanted in zip(ran[what, way, is_tied], ran[what, None, is_tied]):
        for name in ("log_probs", "entropy", "log_probs, later", "entropy, later"):
            assert relative_rms(found[name], wanted[name]) <= LOGIT_TOL, name
        assert worst_gradient(found["grads"], wanted["grads"]) <= GRADIENT_TOL


@pytest.mark.slow
def test_lazy_logits_have_what_hidden_states_have(ran):
    for found, other in zip(ran["lazy logits", None, False], ran["hidden states", None, False]):
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


def uneven(rank: int, way: str | None) -> dict[str, Any]:
    """What TRL's head says of a document alone on one rank, which upstream would run, and of packed
    ones on the other.
    """
    head_log_probs.rows_of_a_chunk = lambda *_: 7
    model = made("TRL", is_tied=False)
    batch = packed_batch(((15,), (40, 3, 57))[rank])
    values = backward(ask(SHARDED[way](model) if way else model, batch, "TRL"))
    grad: Any = model.lm_head.weight.grad
    if way is None:
        torch.distributed.all_reduce(grad)
        grad /= 2
    return values | {"grad": grad.full_tensor() if isinstance(grad, DTensor) else grad}


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("trl"), reason="trl not installed")
def test_ranks_with_other_kinds_of_rows(tmp_path):
    ways = ["alone", "with the norm"]
    wanted, *every = two_ranks(uneven, [(None,), *((way,) for way in ways)], tmp_path)
    for way, ranks in zip(ways, every, strict=True):
        for found, alone in zip(ranks, wanted, strict=True):
            assert relative_rms(found["log_probs"], alone["log_probs"]) <= LOGIT_TOL, way
            assert relative_rms(found["grad"], alone["grad"]) <= GRADIENT_TOL, way


# FSDP2 warns of views that leave a model
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("others", [False, True])
def test_a_sharded_head_with_hooks_is_refused(one_rank, others):
    """It would be called on chunks, of which ranks may have another number."""
    model, batch = apply_patches(tiny()), packed_batch(LENGTHS[0])
    WRAPPED["alone"](model)
    if others:
        model.lm_head.register_forward_hook(lambda *_: None)
    refused = pytest.raises(UnsupportedInput, match="found hooks on a last layer that FSDP2")
    with refused if others else nullcontext():
        ask(model, batch, "hidden states")
    assert "forward" not in vars(model.lm_head)
