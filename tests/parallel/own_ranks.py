"""What two ranks measure of a family and an operation that no table of the package has, in fp64
against one process.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist

from hf_packfree import apply_patches
from hf_packfree.ops.table import OPS
from hf_packfree.parallel import ContextParallel
from hf_packfree.patching import registry
from tests.models import brook, brook_leaky_sum
from tests.parallel.ranks import ROWS, batch_of, of_all_ranks, step, widen_islands, worst
from tests.support import relative_rms, tiny

MODELS = {
    "conv, delta rule by heads, attention": (brook.ROW, {"gdn": "heads"}),
    "conv, delta rule by states, attention": (brook.ROW, {"gdn": "state"}),
    "leaky sum": (brook_leaky_sum.ROW, {}),
}


def measured(rank: int) -> dict[str, float]:
    """Return {model and row: the worst error of loss, logits and gradients}."""
    widen_islands()
    found = {}
    for name, (family, ways) in MODELS.items():
        with (
            patch.dict(OPS, {"leaky_sum": brook_leaky_sum.OP}),
            patch.object(registry, "FAMILIES", (*registry.FAMILIES, family)),
        ):
            found |= {f"{name}: {row}": error(family, ways, ROWS[row]) for row in ROWS}
    return found


def error(family, ways, lengths) -> float:
    """The worst error of one row."""
    one, many = (tiny(family).double() for _ in range(2))
    apply_patches(one, unpacked="native")
    apply_patches(many, context_parallel=ContextParallel(dist.group.WORLD, **ways))
    batch = batch_of(lengths, 1)
    wanted, wanted_gradients = step(one, batch)
    loss, gradients = of_all_ranks(many, batch, dist.get_world_size())
    with torch.no_grad():
        logits = relative_rms(many(**batch).logits, one(**batch).logits)
    return max(relative_rms(loss, wanted.loss), logits, worst(gradients, wanted_gradients))
