"""Rotary embeddings that turn all tokens of a call by its longest position, in rows that two ranks
share: each would turn its own tokens by the longest position that it holds.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hf_packfree import apply_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.rotary import BY_LONGEST
from tests.models.test_rotary import LIMIT, built
from tests.parallel.ranks import batch_of, of_all_ranks, step, widen_islands, worst
from tests.ranks import two_ranks
from tests.support import relative_rms

SHORT = {"documents": [30, 9, LIMIT - 2, 5], "one document": [LIMIT - 1]}
LONG = {"a document on both": [20, 2 * LIMIT], "one document": [150], "behind others": [9, 30, 50]}
"""By what is in the row: the lengths of its documents."""


def shared(rank: int, kind: str, lengths: list[int]) -> float | str:
    """Return how far loss and gradients of two ranks are from one process's, or the refusal."""
    widen_islands()
    one, many = (built("llama", kind).double().train() for _ in range(2))
    row = batch_of(lengths, 1)
    if len(lengths) == 1:
        del row["position_ids"]
    apply_patches(many, context_parallel=dist.group.WORLD)
    try:
        loss, gradients = of_all_ranks(many, row, dist.get_world_size())
        wanted, wanted_gradients = step(apply_patches(one, unpacked="native"), row)
    except UnsupportedInput as error:
        return str(error)
    return max(relative_rms(loss, wanted.loss), worst(gradients, wanted_gradients))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By type and documents: what both ranks return."""
    rows = [*SHORT.values(), *LONG.values()]
    cases = [(kind, lengths) for kind in sorted(BY_LONGEST) for lengths in rows]
    results = two_ranks(shared, cases, tmp_path_factory.mktemp("ranks"))
    return {str(case): both for case, both in zip(cases, results, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(BY_LONGEST))
@pytest.mark.parametrize("row", SHORT)
def test_documents_below_the_limit_are_those_of_one_process(found, kind, row):
    assert max(found[str((kind, SHORT[row]))]) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(BY_LONGEST))
@pytest.mark.parametrize("row", LONG)
def test_longer_ones_are_refused_on_every_rank(found, kind, row):
    ends = f"ends at position {max(LONG[row])} in a row that 2 ranks share, and rope_type='{kind}'"
    assert all(ends in sentence for sentence in found[str((kind, LONG[row]))])
