"""verl's fused forward where two processes hold the model: ranks whose row is one document gather
weights as ranks with packed rows do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_packfree import apply_patches
from tests.models.test_head_log_probs_ranks import backward
from tests.models.test_head_loss import GRADIENT_TOL, packed_batch
from tests.models.test_head_loss_ranks import WRAPPED, sharded
from tests.models.test_rl_verl import TEMPERATURE, fused_text, named_as_verls
from tests.ranks import two_ranks
from tests.support import LOGIT_TOL, relative_rms, tiny, worst_gradient


def with_embedding(model: Any) -> None:
    """As verl's `apply_fsdp2` does where the head is not the embedding."""
    fully_shard(model.model.embed_tokens)


WAYS = {name: WRAPPED[name] for name in ("alone", "with the norm")}
WAYS["with the rest"] = partial(sharded, last=with_embedding)
"""Where FSDP2 keeps the head; verl keeps it with the rest."""


# FSDP2 warns of views that leave a model
@pytest.mark.filterwarnings("default")
def test_a_model_that_fsdp2_shards_keeps_the_forward(monkeypatch, one_rank):
    """verl assigns it before it shards the model, for which FSDP2 derives a class."""
    model = apply_patches(tiny())
    monkeypatch.setattr(type(model), "forward", named_as_verls(fused_text)[0])
    output = sharded(model)(**packed_batch(), return_dict=True)
    assert output.logits is None and output.log_probs is not None


def uneven(rank: int, way: str | None) -> dict[str, Any]:
    """What verl's forward says of a document alone on one rank, which upstream would run, and of
    packed ones on the other, twice.
    """
    model, batch = apply_patches(tiny()), packed_batch(((15,), (40, 3, 57))[rank])
    type(model).forward = named_as_verls(fused_text)[0]
    wrapped = WAYS[way](model) if way else model
    for _ in range(2):
        values = backward(wrapped(**batch, temperature=TEMPERATURE, return_dict=True))
    grads = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        if way is None:
            torch.distributed.all_reduce(grad)
            grad /= 2
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return values | {"grads": grads}


@pytest.mark.slow
def test_ranks_with_other_kinds_of_rows(tmp_path):
    wanted, *every = two_ranks(uneven, [(None,), *((way,) for way in WAYS)], tmp_path)
    for way, ranks in zip(WAYS, every, strict=True):
        for found, alone in zip(ranks, wanted, strict=True):
            for name in ("log_probs", "entropy"):
                assert relative_rms(found[name], alone[name]) <= LOGIT_TOL, (way, name)
            assert worst_gradient(found["grads"], alone["grads"]) <= GRADIENT_TOL, way
