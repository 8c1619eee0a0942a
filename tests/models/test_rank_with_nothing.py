"""Two processes, one of which has nothing but padding: nobody waits, and the gradient is half of
the other's.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hf_packfree import apply_patches
from tests.models.padded import IGNORED, padded_batch
from tests.ranks import two_ranks
from tests.support import GRADIENT_TOL, step, tiny, worst_gradient


def gradients_of(rank: int, options: dict[str, bool]) -> dict[str, torch.Tensor]:
    """What a rank finds whose neighbour has padding alone, or who has that itself."""
    model = DistributedDataParallel(apply_patches(tiny("qwen3_5_moe")), **options)
    nothing = torch.zeros(2, 6, dtype=torch.long)
    batch = (
        {"input_ids": nothing, "attention_mask": nothing, "labels": nothing + IGNORED}
        if rank
        else padded_batch("right")
    )
    output, grads = step(model, batch)
    assert (output.loss.item() == 0) == (rank == 1)
    return {name.removeprefix("module."): grad for name, grad in grads.items()}


OPTIONS = {"as it is": {}, "with unused parameters": {"find_unused_parameters": True}}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The gradients that two ranks have, {DDP's options: each rank's}."""
    cases = [(each,) for each in OPTIONS.values()]
    return dict(zip(OPTIONS, two_ranks(gradients_of, cases, tmp_path_factory.mktemp("ranks"))))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_rank_with_nothing_stays_in_step(ran, options, rank):
    alone = step(apply_patches(tiny("qwen3_5_moe")), padded_batch("right"))[1]
    doubled = {name: 2 * grad for name, grad in ran[options][rank].items()}
    assert worst_gradient(doubled, alone) <= GRADIENT_TOL
