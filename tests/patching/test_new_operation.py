"""An operation is a file and a line of the table: it is chosen, reported, compiled ahead, forced
and refused like those of the package, and no shared code knows its name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hf_packfree
from hf_packfree import PackedSequence, apply_patches, patch_report, prewarm, verify_packing
from hf_packfree.errors import BackendUnavailable, PatchConflict, UnsupportedInput
from hf_packfree.ops.op import AcrossRanks, Way
from hf_packfree.ops.table import OPS
from hf_packfree.packing import shard_row
from hf_packfree.parallel import ContextParallel
from hf_packfree.patching import registry
from hf_packfree.patching.backends import choose_backends
from tests.input_formats import row_batch
from tests.models import brook_leaky_sum
from tests.parallel import own_ranks
from tests.parallel.ranks import ROWS
from tests.ranks import two_ranks
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    ROW,
    errors,
    random_weights,
    run,
    run_alone,
    tiny,
)

KNOWN = {
    # with dropout it runs in PyTorch
    ("patching/announce.py", "attention"),
    # of heads, there is one operation
    ("patching/prewarm.py", "loss"),
    ("mtp/depth_losses.py", "loss"),
    ("data/prefixes.py", "loss"),
    # the widths that were compared; what plain layers are checked with
    ("patching/invariance.py", "fused"),
    ("patching/selfcheck.py", "fused"),
}
"""Shared files that import an operation of the package: one more is to read the table instead."""


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(OPS, "leaky_sum", brook_leaky_sum.OP)
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, brook_leaky_sum.ROW))


def patched(**options):
    return apply_patches(tiny(brook_leaky_sum.ROW), **options)


def test_packed_is_per_document_and_unpatched_leaks():
    batch = row_batch("positions", ROW)
    model, weights = tiny(brook_leaky_sum.ROW), random_weights(batch, 128)
    alone = run_alone(model, batch, weights)
    logits, grads = errors(run(model, batch, weights), alone)
    assert logits >= CONTROL * LOGIT_TOL and grads >= CONTROL * GRADIENT_TOL
    logits, grads = errors(run(apply_patches(model), batch, weights), alone)
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)
    report = verify_packing(patched(), lengths=(5, 17, 1, 9))
    assert report.patched.influence == 0 and report.unpatched.influence > 1e-3


def test_it_is_chosen_and_forced(gpu):
    gpu()
    assert choose_backends("auto", {}, brook_leaky_sum.ROW.ops).cuda_half["leaky_sum"] == "scan"
    assert choose_backends("scan", {}, brook_leaky_sum.ROW.ops).cuda_half["leaky_sum"] == "scan"
    forced = choose_backends({"leaky_sum": "torch"}, {}, brook_leaky_sum.ROW.ops)
    assert forced.cuda_half["leaky_sum"] == "torch"
    assert "leaky_sum" not in choose_backends("auto", {}, ("conv",)).cuda_half


def test_it_is_refused():
    with pytest.raises(BackendUnavailable, match="leaky_sum backend 'scan' forced, but it runs on"):
        patched(backend={"leaky_sum": "scan"})
    with pytest.raises(BackendUnavailable, match="found leaky_sum=fla .*leaky_sum: scan, torch;"):
        patched(backend={"leaky_sum": "fla"})
    with pytest.raises(BackendUnavailable, match="found leaky sum backend 'fla'; wanted one of"):
        brook_leaky_sum.leaky_sum(None, None, None, backend="fla")


def test_it_is_reported(gpu, caplog):
    report = patch_report(patched())
    assert report.implementations["leaky_sum"] == "torch"
    assert "leaky_sum: torch 2" in str(report)
    mixer = next(one for one in brook_leaky_sum.ROW.mixers if one.cls == "BrookLeakySum")
    assert mixer.why() == "the running sum crosses document boundaries"
    gpu()
    caplog.clear()
    patched()
    assert any("leaky_sum: scan" in record.getMessage() for record in caplog.records)
    assert patch_report(patched(batch_invariant=True)).rounding is not None


def test_it_is_compiled_ahead(monkeypatch):
    called, by_tokens = [], OPS["leaky_sum"].backends["torch"].run
    watched = brook_leaky_sum.Backend(lambda *x: (called.append(x[0].shape), by_tokens(*x))[1])
    monkeypatch.setitem(brook_leaky_sum.OP.backends, "torch", watched)
    prewarm(patched())
    assert {shape[1] for shape in called} == {131, 67, 192, 141}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes measured, in fp64."""
    return two_ranks(own_ranks.measured, [()], tmp_path_factory.mktemp("ranks"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("model", own_ranks.MODELS)
def test_two_ranks_are_one_process_because_its_op_says_how(two, model, row):
    """And so is a family whose mixers know nothing of ranks, whatever operations they call."""
    assert max(rank[f"{model}: {row}"] for rank in two) <= 1e-10


def test_how_ranks_share_it_is_reported(one_rank):
    report = patch_report(patched(context_parallel=torch.distributed.group.WORLD))
    assert report.context_parallel.startswith("1 ranks share each row: attention exchanges heads")
    assert report.context_parallel.endswith("; leaky sum exchanges all tokens")


def test_ranks_cannot_share_it_unless_it_says_how(monkeypatch):
    monkeypatch.setattr(ContextParallel, "world", 2)
    alone = replace(brook_leaky_sum.OP, across_ranks=None)
    monkeypatch.setitem(OPS, "leaky_sum", alone)
    with pytest.raises(PatchConflict, match="found leaky_sum under context parallelism"):
        patched(context_parallel=ContextParallel(None))
    with pytest.raises(UnsupportedInput, match="rank's part of a row given to leaky_sum, which"):
        alone.running("torch", shard_row(PackedSequence.from_lengths([3]), 0, 1))


def test_ranks_whose_number_its_sizes_are_no_multiple_of_are_refused(monkeypatch):
    monkeypatch.setattr(ContextParallel, "world", 3)
    ways = {"row": Way(brook_leaky_sum.by_row, "all tokens", "query_heads")}
    shared = replace(brook_leaky_sum.OP, across_ranks=AcrossRanks(ways))
    monkeypatch.setitem(OPS, "leaky_sum", shared)
    with pytest.raises(PatchConflict, match=r"leaky sum \(3 ranks do not divide 4 query heads\)"):
        patched(context_parallel=ContextParallel(None))


def test_a_mixer_that_exchanges_nothing_is_refused(one_rank, monkeypatch):
    """Whatever its operation promises: what a backend returned of a part would leak in silence."""
    op, model = brook_leaky_sum.OP, patched(context_parallel=torch.distributed.group.WORLD)

    def by_backend(x, decay, packed, *, backend):
        return op.backend(backend).running(packed)(x, decay, packed)

    monkeypatch.setattr(brook_leaky_sum, "leaky_sum", by_backend)
    with pytest.raises(UnsupportedInput, match="rank's part of a row given to by_tokens alone"):
        model(**row_batch("positions", ROW).inputs)


def test_no_shared_file_knows_operations_by_name():
    """Side tables come back as strings: names of operations stand where they are defined, where
    their mixers call them, and in the rows of families.
    """
    package = Path(hf_packfree.__file__).parent
    rows = {package / "patching" / f"{name}.py" for name in ("registry", "rows", "unlisted")}
    known = {
        (path.relative_to(package).parts[0], name)
        for path in set(package.rglob("*.py")) - rows
        for name in OPS
        if f'"{name}"' in path.read_text()
    }
    # the kind of a mask, an option, a layer, a layout of checkpoints, a field of an output
    words = {
        ("packing", "attention"),
        ("packing", "conv"),
        ("parallel", "attention"),
        ("bench", "conv"),
        ("mtp", "fused"),
        *((room, "loss") for room in ("mtp", "trainer", "demo")),
    }
    assert {room for room, _ in known - words} == {"models", "ops"}, known


def test_who_imports_an_operation_is_known():
    """The test above sees strings; a shared file that imports an operation knows it, too."""
    package = Path(hf_packfree.__file__).parent
    names = {file.parent.name for file in (package / "ops").glob("*/__init__.py")} - {"chunked"}
    found = {
        (file.relative_to(package).as_posix(), name)
        for file in package.rglob("*.py")
        for name in names
        if re.search(rf"^\s*from hf_packfree\.ops\.{name}\b", file.read_text(), re.MULTILINE)
    }
    assert {pair for pair in found if not pair[0].startswith(("ops/", "models/"))} == KNOWN
