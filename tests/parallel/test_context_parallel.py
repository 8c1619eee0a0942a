"""A row shared by the ranks of a group gives what one process gives; what a shard cannot give is
refused.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hf_packfree import apply_patches, remove_patches
from hf_packfree.errors import PatchConflict, UnsupportedInput
from hf_packfree.models.state import state_of
from hf_packfree.parallel import ContextParallel
from tests.parallel.ranks import (
    ROWS,
    batch_of,
    measured,
    names_of_models,
    names_of_ops,
    rows_of,
    step,
    worst,
)
from tests.parallel.traps import NAMES
from tests.support import relative_rms, tiny

EXACT, WRONG = 1e-10, 1e-2


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """What two processes measured, and of operations what three did, in fp64."""
    return measured((2, 3), tmp_path_factory.mktemp("ranks"))


TWO = [*names_of_ops(2), *names_of_models(), *NAMES]
TAKING_PART = ["cut, unequally", "cut", "whole, unequally", "whole"]
CUT = [row for row in ROWS if row not in ("edges at cuts", "one token before and behind the cuts")]
CONTROLS = [
    *(
        f"{kind}: {row}"
        for kind in ("means of means", "documents cut")
        for row in rows_of("qwen3_5")
    ),
    *(f"keys of this rank alone: {row}" for row in CUT),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_are_one_process(groups, name):
    assert groups[0][name] <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of_ops(3))
def test_operations_on_three_ranks_are_those_of_one_process(groups, name):
    """One document is on all three, and ends at, before and behind cuts."""
    assert groups[1][name] <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_wrong_is_found(groups, name):
    """Means of means, documents that a cut ends, and keys of one rank."""
    assert groups[0][f"control, {name}"] >= WRONG


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKING_PART)
def test_all_ranks_exchange_states_where_a_document_is_cut_and_none_elsewhere(groups, name):
    count = groups[0][f"taking part: {name}"]
    assert count > 0 if name == "cut" else count == 0


@pytest.mark.slow
def test_every_number_of_two_ranks_has_a_test(groups):
    named = {*TWO, *(f"control, {name}" for name in CONTROLS)}
    assert groups[0].keys() == named | {f"taking part: {name}" for name in TAKING_PART}


@pytest.mark.slow
def test_the_example_of_the_docs_trains_as_one_process_would():
    def losses(ranks):
        root = Path(__file__).parents[2]
        file, environment = (
            root / "docs" / "examples" / "context_parallel.py",
            {**os.environ, "PYTHONPATH": str(root)},
        )
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(file),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True, env=environment
        )
        return done.stdout.splitlines()

    shared = losses(2)
    assert len(shared) == 3 and shared == losses(1)


@pytest.fixture(scope="module")
def model(group):
    return apply_patches(tiny(), context_parallel=group)


BATCH = batch_of([5, 9, 3], 0)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"logits_to_keep": 1}, "logits_to_keep=1"),
        ({"output_hidden_states": True}, "output_hidden_states=True"),
        ({"output_attentions": True}, "output_attentions=True"),
    ],
)
def test_what_a_shard_cannot_give_is_refused(model, changed, found):
    with pytest.raises(UnsupportedInput, match=f"found {found} under context parallelism; wanted"):
        model(**BATCH | changed)


def test_what_a_configuration_wants_is_refused_too(model, monkeypatch):
    monkeypatch.setattr(model.config, "output_hidden_states", True)
    with pytest.raises(
        UnsupportedInput, match="found output_hidden_states=True under context parallelism"
    ):
        model(**BATCH)


def test_the_text_model_alone_is_refused(model):
    with pytest.raises(UnsupportedInput, match="without its head under context parallelism"):
        model.model(input_ids=BATCH["input_ids"], position_ids=BATCH["position_ids"])


def test_a_head_that_classifies_is_refused(group):
    model = tiny(head="Qwen3_5ForSequenceClassification")
    apply_patches(model, context_parallel=group)
    with pytest.raises(UnsupportedInput, match="without its head under context parallelism"):
        model(input_ids=BATCH["input_ids"], labels=torch.zeros(1, dtype=torch.long))


def test_generation_is_refused(model):
    with pytest.raises(
        UnsupportedInput,
        match="a cache, or what else upstream runs itself, under context parallelism",
    ):
        model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2)


def test_labels_on_padding_are_refused_by_name(model):
    """With which transformers would run the whole batch."""
    ids = torch.arange(5, 17).view(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    with pytest.raises(
        UnsupportedInput, match="found 1 labels that padding would have to predict under context"
    ):
        model(input_ids=ids, attention_mask=mask, labels=ids)


def test_a_loss_that_takes_no_count_is_refused(group):
    model = apply_patches(tiny(), context_parallel=group)
    model.loss_function = lambda logits, labels, vocab_size=None: logits.sum()
    with pytest.raises(
        UnsupportedInput, match="takes no num_items_in_batch under context parallelism"
    ):
        model(**BATCH)


def test_ranks_that_do_not_divide_the_heads_are_refused(group, monkeypatch):
    monkeypatch.setattr(ContextParallel, "world", 3)
    unpatched = tiny()
    for mixer, heads, instead in (
        ("attention", "4 query heads", "gather"),
        ("gdn", "2 key heads", "state"),
    ):
        wanted = f"found 3 ranks to share the {heads} of {mixer}; wanted .*{mixer}='{instead}'"
        with pytest.raises(PatchConflict, match=wanted):
            apply_patches(unpatched, context_parallel=ContextParallel(group, **{mixer: "heads"}))
    assert type(unpatched).__module__.startswith("transformers")
    patched = state_of(apply_patches(unpatched, context_parallel=group)).context_parallel
    assert (patched.attention, patched.gdn) == ("gather", "state")


def test_eager_attention_is_refused(group):
    with pytest.raises(
        PatchConflict, match="found attn_implementation='eager' under context parallelism"
    ):
        apply_patches(tiny(attention="eager"), context_parallel=group)


def test_a_mesh_a_copy_and_the_way_back(group):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match="found a mesh of 2 dimensions"):
        apply_patches(tiny(), context_parallel=mesh)
    unpatched = tiny()
    patched = copy.deepcopy(apply_patches(copy.deepcopy(unpatched), context_parallel=mesh["cp"]))
    wanted = apply_patches(copy.deepcopy(unpatched))(**BATCH)
    found = patched(**BATCH)
    assert relative_rms(found.loss, wanted.loss) == 0
    assert relative_rms(found.logits, wanted.logits) == 0
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 2, "do_sample": False}
    assert torch.equal(remove_patches(patched).generate(**prompt), unpatched.generate(**prompt))


# torch.compile says where it breaks the graph
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "llama"])
def test_a_compiled_model_is_shared_too(group, family):
    """Its graphs break where ranks exchange."""
    torch.compiler.reset()
    model = apply_patches(tiny(family), context_parallel=group).train()
    wanted, wanted_gradients = step(model, BATCH)
    found, gradients = step(torch.compile(model, backend="eager"), BATCH)
    assert relative_rms(found.loss, wanted.loss) <= 1e-6
    named = {name.removeprefix("_orig_mod."): one for name, one in gradients.items()}
    assert worst(named, wanted_gradients) <= 1e-4


def test_a_misspelt_way_is_refused(group):
    with pytest.raises(
        ValueError,
        match="found gdn='rows' for context parallelism; wanted 'auto', 'heads' or 'state'",
    ):
        ContextParallel(group, gdn="rows")


@pytest.mark.parametrize("options", [{"padded": "upstream"}, {"batch_invariant": True}])
def test_options_that_need_whole_rows_are_refused(group, options):
    with pytest.raises(ValueError, match="found context_parallel together with"):
        apply_patches(tiny(), context_parallel=group, **options)
