"""The stock Trainer logs, evaluates and changes on ranks, two of which share each row, what it
does in one process.
"""

from __future__ import annotations

import pytest
import torch

from tests.integrations.marks import integration
from tests.parallel.trainers import SETTINGS, train
from tests.ranks import on_ranks
from tests.support import relative_rms

EXACT = 1e-10
SHARED = (
    "`cp_size=2`: two ranks share each row; accumulation, clipping, checkpointing, LoRA, "
    "evaluation, resuming"
)
CALLBACK = "works with `PackFreeCallback`"
SEQUENCE = (
    "`sp_size=2` of `parallelism_config`",
    "works as `cp_size` does, but the Trainer counts no tokens: micro-batches count equally; "
    "refused with a configuration of DeepSpeed: `PatchConflict`",
)
ROWS = {
    "sp_size": ("Trainer", *SEQUENCE),
    "own loop": (
        "accelerate",
        "own loop, `cp_size=2`",
        "works with `leave_rows_whole(model)` before `prepare`",
    ),
    "fully_shard": (
        "Trainer",
        "`dp_shard_size=2, cp_size=2` on four ranks: FSDP2, accumulation, resuming",
        CALLBACK,
    ),
}
"""Of the table of libraries, by what stands around the model; of all other ways there is one
row.
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By way: what one process found, and what the ranks did, two of them, or four where data
    parallelism is beside.
    """
    folder = tmp_path_factory.mktemp("trained")
    (folder / "ranks").mkdir()
    cases = [(str(folder), way) for way in SETTINGS]
    found = on_ranks(train, cases, folder / "ranks", worlds=(1, 2, 4))
    return {way: tuple(rank for rank in ranks if rank) for way, ranks in zip(SETTINGS, found)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=integration(*ROWS.get(way, ("Trainer", SHARED, CALLBACK))))
        for way in SETTINGS
        if way not in ("bf16", "offsets", "example")
    ],
)
def test_the_trainer_shares_rows(trained, way, record_property):
    wanted, *ranks = trained[way]
    assert len(ranks) == (4 if way == "fully_shard" else 2)
    errors = {
        name: relative_rms(ranks[0]["moved"][name], moved, floor=1e-8)
        for name, moved in wanted["moved"].items()
    }
    record_property("error", max(errors.values()))
    assert len(errors) == (98 if way == "LoRA" else 56) and max(errors.values()) <= EXACT, errors
    for rank in ranks:
        assert rank["shards"] == ({4} if way == "fully_shard" else set()), (
            "FSDP2 shards over data and context parallel ranks"
        )
        # which the Trainer adds up in fp32
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        assert rank.get("without logits", way == "own loop")
        assert rank["evaluated"] == pytest.approx(wanted["evaluated"], rel=EXACT)


@pytest.mark.slow
def test_steps_in_bf16_are_no_farther_from_fp64_than_one_processs(trained):
    def steps(found):
        return torch.cat([moved.flatten() for moved in found["moved"].values()])

    wanted, (alone, *ranks) = trained["sp_size"][0], trained["bf16"]
    off, *shared = (relative_rms(steps(found), steps(wanted)) for found in (alone, *ranks))
    assert off > 1e-4 and max(shared) <= 1.1 * off
    assert all(rank["without logits"] for rank in trained["bf16"])


@pytest.mark.slow
def test_offsets_without_positions_are_refused_where_the_trainer_adds_positions(trained):
    """It numbers the whole row, which says that there is one document."""
    for rank in trained["offsets"]:
        assert "cu_seq_lens_q" in rank["refused"] and "position_ids" in rank["refused"]


@pytest.mark.slow
def test_accelerate_is_as_it_was(trained):
    """At the end of training; of training that failed, when the patches are removed."""
    assert all(
        found["as it was"] for ranks in trained.values() for found in ranks if "moved" in found
    )


@pytest.mark.slow
def test_the_example_of_the_docs_trains_as_one_process_would(trained):
    alone, *ranks = (found["losses"] for found in trained["example"])
    assert len(alone) == 3 and alone[0] != alone[2]
    assert all(losses == pytest.approx(alone, rel=1e-5) for losses in ranks)
