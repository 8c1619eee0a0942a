"""Where accelerate cuts rows: left to models that do it themselves, refused by name where a
release does it otherwise.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.big_modeling import _attach_context_parallel_hooks

from hf_packfree import PackFreeCallback, apply_patches, remove_patches
from hf_packfree.errors import PatchConflict
from hf_packfree.parallel import ContextParallel
from hf_packfree.parallel import accelerate as seam
from hf_packfree.parallel.accelerate import (
    as_context_parallel,
    cut_rows_again,
    leave_rows_whole,
    trainers_group,
)
from tests.integrations.marks import integration
from tests.parallel.ranks import batch_of
from tests.parallel.test_trainer import SEQUENCE
from tests.support import tiny


def accelerator(sizes=ParallelismConfig(cp_size=2), cuts=Accelerator.maybe_context_parallel):
    """What stands for one that shares rows: it is not shown to prepare anything else."""
    stand_in = SimpleNamespace(parallelism_config=sizes)
    stand_in.maybe_context_parallel = partial(cuts, stand_in)
    return stand_in


@pytest.fixture
def model(group):
    """One that is to be trained, until it is not."""
    model = apply_patches(tiny(), context_parallel=group)
    leave_rows_whole(model)
    yield model
    remove_patches(model)


def test_accelerate_leaves_alone_only_what_cuts_its_own_rows(group):
    before, model, sharing = (
        Accelerator._prepare_cp,
        apply_patches(tiny(), context_parallel=group),
        accelerator(),
    )
    leave_rows_whole(model)
    leave_rows_whole(other := apply_patches(tiny(), context_parallel=group))
    assert Accelerator._prepare_cp(sharing, model) == (model,)
    with sharing.maybe_context_parallel(buffers=[1], buffer_seq_dims=[1], no_restore_buffers=set()):
        pass
    # accelerate's own
    with pytest.raises(AttributeError, match="parallelism_config"):
        Accelerator._prepare_cp(SimpleNamespace(), tiny())
    cut_rows_again(torch.nn.ModuleList([model]))
    assert Accelerator._prepare_cp is not before, "the other one is to be trained"
    remove_patches(other)
    assert Accelerator._prepare_cp is before
    whole = sharing._cp_context
    assert sharing._prepare_cp("batches to evaluate") == ("batches to evaluate",)
    assert sharing._cp_context is whole


@pytest.mark.parametrize("version", ["1.9.0", "1.16.0"])
def test_a_release_that_prepares_models_elsewhere_is_refused(group, version, monkeypatch):
    monkeypatch.setattr("accelerate.__version__", version)
    monkeypatch.delattr(Accelerator, "_prepare_cp")
    with pytest.raises(
        PatchConflict,
        match=f"found accelerate {version}, whose Accelerator has no _prepare_cp; .*pip install",
    ):
        leave_rows_whole(apply_patches(tiny(), context_parallel=group))


def test_a_release_that_cuts_rows_otherwise_is_refused(model):
    """Where the method is there, but what it sets is not read."""
    sharing = accelerator(cuts=lambda self, **buffers: nullcontext())
    with pytest.raises(
        PatchConflict,
        match=r"found accelerate 1\.\d+\.\d+.*, whose Accelerator does not enter _cp_context",
    ):
        Accelerator._prepare_cp(sharing, model)


def test_training_on_rows_that_were_not_left_whole_is_refused(model, monkeypatch):
    """As a release would have it that has the method and does not call it, or a callback added
    late.
    """
    monkeypatch.setattr(seam, "parallelism_in_force", lambda: ParallelismConfig(cp_size=2))
    with pytest.raises(
        PatchConflict, match="prepared a model for context parallelism without _prepare_cp"
    ):
        seam.refuse_rows_cut_twice(model)
    Accelerator._prepare_cp(accelerator(), model)
    seam.refuse_rows_cut_twice(torch.nn.ModuleList([model]))


@pytest.mark.parametrize("shared", [True, False])
def test_a_model_that_accelerate_made_ready_to_be_cut_is_refused(group, shared):
    """By the hooks of every release from 1.10 on, which it adds where nothing of ours stands in
    front.
    """
    model = apply_patches(tiny(), context_parallel=group if shared else None)
    # 1.15 refuses the whole model, 1.12 to 1.14 train it
    for layer in model.model.layers:
        _attach_context_parallel_hooks(layer)
    with pytest.raises(
        PatchConflict, match="found a model that accelerate prepared with cp_size.*PackFreeCallback"
    ):
        model(**batch_of([5, 9, 3], 0))


def test_a_configuration_that_no_trainer_can_read_is_refused(monkeypatch):
    """`accelerate launch` gives it without the Trainer's arguments; in 1.10 and 1.11 it knows no
    sequence parallelism.
    """
    PackFreeCallback()
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    PackFreeCallback()
    monkeypatch.setattr("accelerate.__version__", "1.11.0")
    monkeypatch.delattr(ParallelismConfig, "sp_enabled")
    with pytest.raises(
        PatchConflict, match="found accelerate 1.11.0, .* wanted one from 1.12 to 1.15"
    ):
        PackFreeCallback()


@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
def test_rows_shared_against_the_callbacks_will_are_refused(size):
    assert trainers_group(None, None) is None and trainers_group(ParallelismConfig(), None) is None
    with pytest.raises(PatchConflict, match=f"found context_parallel=None with {size}=2"):
        trainers_group(ParallelismConfig(**{size: 2}), None)


def test_a_group_of_one_is_refused_where_two_share_rows(group, monkeypatch):
    assert trainers_group(None, given := ContextParallel(group)) is given
    monkeypatch.setattr(seam, "_of_mesh", lambda parallelism: SimpleNamespace(group="of two"))
    ranks = seam.dist.get_process_group_ranks
    monkeypatch.setattr(
        seam.dist, "get_process_group_ranks", lambda one: [0, 1] if one == "of two" else ranks(one)
    )
    with pytest.raises(
        PatchConflict, match=r"found context_parallel with ranks \[0\], and .* to ranks \[0, 1\]"
    ):
        trainers_group(ParallelismConfig(cp_size=2), given)


def test_a_group_whose_ranks_get_other_batches_is_refused(group, monkeypatch):
    monkeypatch.setattr(ContextParallel, "world", 2)
    with pytest.raises(
        PatchConflict, match=r"found context_parallel with ranks \[0\], .* to no two ranks"
    ):
        trainers_group(None, ContextParallel(group))


@integration("Trainer", *SEQUENCE)
def test_sequence_parallelism_that_cannot_be_served_is_refused():
    wanted = ParallelismConfig(sp_size=2)
    with pytest.raises(PatchConflict, match="found sp_size=2 for 3 processes"):
        as_context_parallel(wanted, SimpleNamespace(num_processes=3, distributed_type="MULTI_GPU"))
    with pytest.raises(PatchConflict, match="found sp_size=2 with a DeepSpeed configuration"):
        as_context_parallel(wanted, SimpleNamespace(num_processes=2, distributed_type="DEEPSPEED"))
