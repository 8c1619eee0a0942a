"""Ranks with different batches, packages, options or models say so on all of them, before they
exchange anything; one whose companion is gone fails within the group's timeout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_packfree import apply_patches
from hf_packfree.errors import RankLost, UnsupportedInput
from hf_packfree.parallel import agreement
from hf_packfree.parallel.agreement import checksum
from hf_packfree.parallel.collectives import Pending
from hf_packfree.parallel.roll_call import refuse_missing_ranks
from tests.parallel.disagreement import BATCHES, LOST, SETUPS, TIMEOUT, WAYS, said
from tests.parallel.ranks import batch_of
from tests.ranks import two_ranks
from tests.support import tiny


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """By what is other on the second of two ranks: what both say."""
    names = [*BATCHES, *SETUPS]
    found = two_ranks(said, [(name,) for name in names], tmp_path_factory.mktemp("ranks"))
    return dict(zip(names, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, other in BATCHES.items() if other])
def test_every_rank_refuses_different_batches_by_name(sentences, name):
    first, second = sentences[name]
    assert first == second and first.startswith("UnsupportedInput: found different batches")
    assert BATCHES[name] in first and "DistributedSampler(" in first


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_every_rank_refuses_what_is_not_set_up_alike_by_name(sentences, name):
    first, second = sentences[name]
    assert first == second and first.startswith("PatchConflict: found ranks")
    assert SETUPS[name] in first


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, other in BATCHES.items() if not other])
def test_ranks_with_the_same_batch_step(sentences, name):
    """Also where one of them was patched anew, as around what only the first one saves: the others
    would not answer it a second time.
    """
    assert sentences[name] == (None, None)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A folder of what the ranks say that are left, by way and rank."""
    folder = tmp_path_factory.mktemp("left")
    command = [sys.executable, "-m", "tests.parallel.disagreement", str(folder)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, timeout=120)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_gone_is_named_on_all_others_within_the_timeout(left, way):
    """Of gloo; the first exchange, which waits for all ranks of any backend, has the name under
    NCCL too.
    """
    for rank in {0, 1, 2} - {LOST[way]}:
        waited, _, sentence = (left / f"{way} {rank}").read_text().partition(" ")
        whom = "the process that keeps the group's store" if "store" in way else "rank 1"
        assert f"from {whom}" in sentence and sentence.startswith("RankLost: "), sentence
        assert float(waited) < (TIMEOUT if way.startswith("ends amid") else 2 * TIMEOUT), waited


def test_a_group_whose_ranks_all_answer_keeps_its_error(group):
    refuse_missing_ranks(group)
    work = SimpleNamespace(wait=lambda: torch.zeros(2).view(3))
    with pytest.raises(RuntimeError, match="shape") as raised:
        Pending(torch.zeros(1), torch.zeros(1), work, group).wait()
    assert not isinstance(raised.value, RankLost)


@pytest.mark.parametrize(
    ("changed", "what"),
    [(1, "rows 1, 2 by rank"), (6, "other input_ids on rank 1 than on rank 0")],
)
def test_every_forward_compares(group, monkeypatch, changed, what):
    model = apply_patches(tiny(), context_parallel=group)
    batch = batch_of([5, 9, 3], 0)
    model(**batch)

    def gathered(mine, group):
        other = mine.clone()
        other[changed] += 1
        return torch.stack([mine, other])

    monkeypatch.setattr(agreement, "gathered", gathered)
    streams = "stream wants accelerator_config={'dispatch_batches': False}"
    with pytest.raises(UnsupportedInput, match=f"{what}.*{streams}"):
        model(**batch)


def test_a_checksum_tells_values_and_their_order():
    ids = torch.randint(0, 250_000, (1, 4096), generator=torch.Generator().manual_seed(0))
    others = [ids.flip(1), ids.roll(1, 1), torch.nn.functional.pad(ids, (0, 1))]
    # which sums, weighted by places, would not see
    curved = ids.clone()
    curved[0, 10:13] += torch.tensor([1, -2, 1])
    found = [checksum(one).item() for one in (ids, *others, curved)]
    assert checksum(ids.clone()).item() == found[0] and len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_a_checksum_tells_pixels(dtype):
    pixels = torch.rand(16, 24, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    pixels = (pixels > 0.5).to(dtype) if dtype == torch.bool else pixels.to(dtype)
    other = pixels.clone()
    other[3, 4] = not pixels[3, 4]
    found = {checksum(one).item() for one in (pixels, other, pixels.flip(0))}
    assert len(found) == 3
