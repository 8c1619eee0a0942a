"""What stands around a model in training stands around one whose rows are shared: on four ranks
as in one process.
"""

from __future__ import annotations

import pytest

from tests.integrations.marks import integration
from tests.parallel.training import step
from tests.ranks import on_ranks
from tests.support import relative_rms

EXACT, WRONG = 1e-10, 1e-2
CASES = [
    # first: the others let everything compute in fp64
    ("autocast", "state", "all"),
    ("alone", "state", "all"),
    ("DDP", "heads", "none"),
    ("fully_shard", "state", "all"),
    ("fully_shard", "heads", "none"),
    ("fully_shard", "state", "own"),
    ("non-reentrant", "state", "all"),
    ("reentrant", "heads", "all"),
    ("LoRA", "state", "all"),
]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """By case: what one process found, and what four ranks did, two of which share each row."""
    return dict(zip(CASES, on_ranks(step, CASES, tmp_path_factory.mktemp("steps"), worlds=(1, 4))))


def off(found, wanted) -> float:
    assert found["gradients"].keys() == wanted["gradients"].keys()
    pairs = [(found["gradients"][name], grad) for name, grad in wanted["gradients"].items()]
    return max(
        relative_rms(*pair, floor=1e-8) for pair in (*pairs, (found["loss"], wanted["loss"]))
    )


@integration(
    "torch", "context parallelism beside DDP and FSDP2, two by two ranks; checkpointing, LoRA"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if case[0] != "autocast" and case[2] != "own"], ids="-".join
)
def test_data_parallel_beside_context_parallel_is_one_process(steps, case, record_property):
    alone, *ranks = steps[case]
    assert len(alone["gradients"]) == (42 if case[0] == "LoRA" else 56)
    errors = [off(rank, alone) for rank in ranks]
    record_property("error", max(errors))
    assert errors == pytest.approx([0] * 4, abs=EXACT)


@pytest.mark.slow
def test_a_mean_over_each_ranks_own_targets_is_wrong(steps):
    alone, *ranks = steps["fully_shard", "state", "own"]
    wanted, *_ = steps["fully_shard", "heads", "none"]
    assert off(alone, wanted) <= EXACT, "a process alone has all targets"
    assert min(off(rank, alone) for rank in ranks) >= WRONG


@pytest.mark.slow
def test_all_ranks_exchange_equally_often_and_again_where_layers_are_computed_again(steps):
    def exchanges(*case):
        alone, *ranks = (one["exchanges"] for one in steps[case])
        assert alone == 0 and len(set(ranks)) == 1
        return ranks[0]

    once = exchanges("alone", "state", "all")
    assert 0 < once < exchanges("non-reentrant", "state", "all")
    assert exchanges("DDP", "heads", "none") < exchanges("reentrant", "heads", "all")


@pytest.mark.slow
def test_autocast_rounds_no_more_than_in_one_process(steps):
    wanted, *_ = steps["alone", "state", "all"]
    alone, *ranks = steps["autocast", "state", "all"]
    assert off(alone, wanted) > 1e-4, "autocast computes in bf16"
    assert max(off(rank, wanted) for rank in ranks) <= 1.1 * off(alone, wanted)
