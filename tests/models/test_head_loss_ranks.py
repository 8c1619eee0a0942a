"""Head and loss as one operation where two processes hold the model: gradients, and logits read
from sharded weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_packfree import apply_patches, patch_report
from hf_packfree.errors import UnsupportedInput
from hf_packfree.models import head_loss
from hf_packfree.packing.lazy import LazyTensor
from tests.integrations.marks import integration
from tests.models.padded import padded_batch
from tests.models.test_head_loss import GRADIENT_TOL, LOSS_TOL, packed_batch
from tests.ranks import two_ranks
from tests.support import tiny, worst_gradient

LENGTHS = ((5, 64, 1, 30), (40, 3, 57))
"""Of each rank's documents."""


def sharded(model: Any, last: Callable[[Any], None] = lambda model: None) -> Any:
    """Return a model sharded layer by layer, with the last layer wherever it is put."""
    for layer in model.model.layers:
        fully_shard(layer)
    last(model)
    return fully_shard(model, reshard_after_forward=True)


def with_norm(model: Any) -> None:
    """As accelerate 1.15 does for every model."""
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)


def with_wide_outputs(model: Any) -> None:
    """The logits that leave the layer are no longer what it made."""
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    fully_shard(model.lm_head, mp_policy=half)


WRAPPED = {
    "DDP": DistributedDataParallel,
    "DDP, unused": partial(DistributedDataParallel, find_unused_parameters=True),
    "with the rest": sharded,
    "alone": partial(sharded, last=lambda model: fully_shard(model.lm_head)),
    "with the norm": partial(sharded, last=with_norm),
    "wide outputs": partial(sharded, last=with_wide_outputs),
}
"""By where the last layer's weights are gathered."""


def step(rank: int, way: str, backend: str, read: bool) -> dict[str, object]:
    """One step of a wrapped model, whose logits are read after the forward pass, and have a loss
    of their own.
    """
    model = apply_patches(tiny(), backend={"loss": backend})
    wrapped = WRAPPED[way](model)
    output = wrapped(**packed_batch(LENGTHS[rank]))
    found: dict[str, object] = {
        "reported": patch_report(model).implementations["loss"],
        "lazy": isinstance(output.logits, LazyTensor),
        "loss": output.loss.item(),
    }
    loss = output.loss
    if read:
        with torch.no_grad():
            found["words"] = output.logits.argmax(-1)
        loss = loss + output.logits.float().square().mean()
    loss.backward()
    found["unread"] = found["lazy"] and output.logits.source.values is None
    if not read and backend == "torch" and not way.startswith("DDP"):
        try:
            output.logits.sum()
        except UnsupportedInput:
            found["refused"] = True
    model.lm_head.register_forward_hook(lambda *_: None)
    found["hooked"] = patch_report(model).implementations["loss"]
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return found | {
        "grads": {
            name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in named
        }
    }


CASES = [(way, False) for way in WRAPPED] + [(way, True) for way in list(WRAPPED)[2:5]]
"""What is around the model, and whether logits are read."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What two ranks found, {(way, backend of the loss, read): each rank's}."""
    cases = [(way, backend, read) for way, read in CASES for backend in ("torch", "upstream")]
    return dict(zip(cases, two_ranks(step, cases, tmp_path_factory.mktemp("ranks"))))


@integration(
    "torch",
    "loss without logits under DDP and FSDP2",
    "works as with upstream's loss; `output.logits` are made if read before the backward pass, "
    "after it FSDP2's are refused: `UnsupportedInput`",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "read"), CASES, ids=[f"{way}{', read' * read}" for way, read in CASES]
)
def test_wrapped_models_train_as_with_upstreams_loss(ran, way, read, record_property):
    for ours, theirs in zip(ran[way, "torch", read], ran[way, "upstream", read]):
        assert ours["lazy"] and not theirs["lazy"] and ours["unread"] != read
        assert ours["reported"] == "torch"
        assert ours["hooked"] == "upstream, because lm_head has hooks or a forward of its own"
        assert abs(ours["loss"] / theirs["loss"] - 1) <= LOSS_TOL
        record_property("error", error := worst_gradient(ours["grads"], theirs["grads"]))
        # which bf16 rounds
        assert error <= (1e-2 if way == "wide outputs" else GRADIENT_TOL)
        if read:
            assert torch.equal(ours["words"], theirs["words"])
        elif not way.startswith("DDP"):
            assert ours["refused"], "weights gathered later may be others"


def test_a_loss_that_raises_leaves_the_head_sharded(monkeypatch, one_rank):
    """Else it would take the memory of the whole vocabulary until the next step."""
    model = WRAPPED["alone"](apply_patches(tiny()))
    batch = packed_batch(LENGTHS[0])
    model(**batch).loss.backward()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(head_loss, "loss_of", lambda *_: 1 / 0)
        model(**batch)
    assert isinstance(model.lm_head.weight, DTensor)


UNEVEN = ((3,), (15, 64))
SHARDED = ["with the rest", "alone", "with the norm"]


def uneven(rank: int, way: str | None) -> dict[str, Any]:
    """Two steps where one rank's row is a document alone, which runs as upstream runs it."""
    model = apply_patches(tiny())
    wrapped = WRAPPED[way](model) if way else model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(2):
        with torch.no_grad():
            losses.append(wrapped(**packed_batch(UNEVEN[rank])).loss.item())
        loss = wrapped(**packed_batch(UNEVEN[rank])).loss
        loss.backward()
        losses.append(loss.item())
        for parameter in () if way else model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses}


@pytest.mark.slow
def test_ranks_with_other_kinds_of_rows_gather_alike(tmp_path):
    """Ranks that gather another number of times wait for each other for ever, or mix weights."""
    wanted, *every = two_ranks(uneven, [(None,), *((way,) for way in SHARDED)], tmp_path)
    for way, ranks in zip(SHARDED, every, strict=True):
        for found, alone in zip(ranks, wanted, strict=True):
            assert found["losses"] == pytest.approx(alone["losses"], rel=LOSS_TOL), way


ROWS = {
    "packed": partial(packed_batch, (15, 64)),
    "alone": partial(packed_batch, (15,)),
    "padded": partial(padded_batch, "left"),
}
UNLIKE = [
    (("padded", "packed"), False),
    (("padded", "packed"), True),
    (("padded", "alone"), False),
    (("packed", "alone"), False),
]
"""The rows of both ranks, and whether they have labels: with labels, reading lazy logits gathers
weights, and logits of a document alone are not lazy.
"""


def loss_of_ones_own(
    rank: int, way: str | None, kinds: tuple[str, str], labelled: bool
) -> dict[str, Any]:
    """The gradients of a loss of the logits alone, where ranks have other kinds of rows."""
    model = apply_patches(tiny())
    wrapped, batch = WRAPPED[way](model) if way else model, ROWS[kinds[rank]]()
    if not labelled:
        batch.pop("labels")
    wrapped(**batch).logits.square().mean().backward()
    grads: dict[str, Any] = {name: one.grad for name, one in model.named_parameters()}
    for name, grad in grads.items():
        if way is None:
            torch.distributed.all_reduce(grad)
            grad /= 2
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return grads


@pytest.mark.slow
def test_ranks_with_a_loss_of_their_own_gather_alike(tmp_path):
    cases = [(way, *case) for case in UNLIKE for way in (None, "alone")]
    ran = two_ranks(loss_of_ones_own, cases, tmp_path)
    for case, wanted, found in zip(UNLIKE, ran[::2], ran[1::2], strict=True):
        assert worst_gradient(found[0], wanted[0]) <= GRADIENT_TOL, case
