"""Head and loss as one operation where two processes hold the model: gradients, and logits read
from sharded weights.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_packfree import apply_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.packing.lazy import LazyTensor
from tests.integrations.marks import integration
from tests.models.padded import worst_gradient
from tests.models.test_head_loss import GRADIENT_TOL, LOSS_TOL, packed_batch
from tests.ranks import two_ranks
from tests.support import tiny

LENGTHS = ((5, 64, 1, 30), (40, 3, 57))
"""Of each rank's documents."""


def step(rank: int, way: str, backend: str, read: bool) -> dict[str, object]:
    """One step of a wrapped model, whose logits are read after the forward pass, and have a loss
    of their own.
    """
    model = apply_patches(tiny(), backend={"loss": backend})
    if way == "DDP":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        wrapped = fully_shard(model, reshard_after_forward=True)
    output = wrapped(**packed_batch(LENGTHS[rank]))
    found: dict[str, object] = {
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
    if not read and backend == "torch" and way != "DDP":
        try:
            output.logits.sum()
        except UnsupportedInput:
            found["refused"] = True
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return found | {
        "grads": {
            name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in named
        }
    }


@integration(
    "torch",
    "loss without logits under DDP and FSDP2",
    "works as with upstream's loss; `output.logits` are made if read before the backward pass, "
    "after it FSDP2's are refused: `UnsupportedInput`",
)
def test_wrapped_models_train_as_with_upstreams_loss(tmp_path, record_property):
    ways = ("fully_shard", True), ("fully_shard", False), ("DDP", False)
    cases = [(way, backend, read) for way, read in ways for backend in ("torch", "upstream")]
    ran = dict(zip(cases, two_ranks(step, cases, tmp_path)))
    for way, _, read in cases[::2]:
        for ours, theirs in zip(ran[way, "torch", read], ran[way, "upstream", read]):
            assert ours["lazy"] and not theirs["lazy"] and ours["unread"] != read
            assert abs(ours["loss"] / theirs["loss"] - 1) <= LOSS_TOL
            record_property("error", error := worst_gradient(ours["grads"], theirs["grads"]))
            assert error <= GRADIENT_TOL
            if read:
                assert torch.equal(ours["words"], theirs["words"])
            elif way != "DDP":
                assert ours["refused"], "weights gathered later may be others"
