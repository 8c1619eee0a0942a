"""Trees of shared prefixes on each backend of the delta rule: every sample in the tree against the
same samples packed without sharing, beside what is left when branches are read as one document; and
in CUDA graphs, beside the same layers without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_packfree import patch_report
from hf_packfree.graphs.bucket import in_bucket, lengthened
from hf_packfree.models.state import state_of
from hf_packfree.packing import PackedSequence
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.gpu.small import NARROW, WIDE, hidden, packed_row, small
from tests.support import difference, gradients, relative_rms, runner_of
from tests.trees import TURNS, Forest, forest

pytestmark = gpu
GROUP = TURNS if TRIAL else forest((700, 130, 64, 1, 900), (None, 0, 0, 0, 0))
FELT = 5
"""Times an error, at least, that reading the row as one document makes."""
_GROUP, _TURNS = (None, 0, 0, 0, 0), (None, 0, 1, 1, 0, 4, 4)
BUCKETS = {
    "groups": (
        forest((1000, 300, 200, 1, 450), _GROUP),
        forest((960, 500, 13, 64, 433), _GROUP),
        forest((940, 230, 240, 260, 250), _GROUP),
        forest((1040, 20, 30, 40, 800), _GROUP),
    ),
    "turns": (
        forest((500, 100, 200, 90, 64, 1, 300), _TURNS),
        forest((510, 110, 180, 95, 60, 3, 280), _TURNS),
    ),
}
"""Trees of one bucket each."""
in_graphs = pytest.mark.skipif(TRIAL, reason="CUDA graphs need a GPU")


@pytest.mark.parametrize("tree", [GROUP, TURNS], ids=["group", "turns"])
@pytest.mark.parametrize("backend", ["flash_qla", "fla", "torch"])
def test_samples_in_a_tree_are_those_packed(backend, tree, record):
    if backend != "torch" and not TRIAL:
        pytest.importorskip(backend, reason=f"{backend} is not installed")
    torch.manual_seed(0)
    model = small(WIDE, backend="auto" if TRIAL else {"delta_rule": backend})
    compare(model, tree, record, backend)


def compare(model: Any, tree: Forest, record: Any, name: str, graphs: str = "never") -> None:
    """Compare samples in a tree with the same ones packed, and with one document, which run
    without a graph.
    """
    tokens, documents = packed_row(model, [sum(tree.lengths)])
    samples = torch.cat(tree.samples).to(DEVICE)
    lengths = [len(sample) for sample in tree.samples]
    weight = torch.randn(1, len(samples), model.config.hidden_size, device=DEVICE)
    rows = {
        "packed": (tokens[:, samples], PackedSequence.from_lengths(lengths, device=DEVICE)),
        "tree": (tokens, tree.record.to(DEVICE)),
        "one document": (tokens, documents),
    }
    values, grads = {}, {}
    for way, (ids, packed) in rows.items():
        model.zero_grad(set_to_none=True)
        switch(model, graphs if way == "tree" else "never")
        output = hidden(model, ids, packed)
        values[way] = output if way == "packed" else output[:, samples]
        (values[way].float() * weight).sum().backward()
        # a decay's may nearly cancel
        grads[way] = {key: one for key, one in gradients(model).items() if one.ndim > 1}
    error, felt = (relative_rms(values[way], values["packed"]) for way in list(rows)[1:])
    record(f"tree, {name}: values, against packed", error, felt / FELT)
    error, felt = (
        max(relative_rms(grads[way][key], one) for key, one in grads["packed"].items())
        for way in list(rows)[1:]
    )
    record(f"tree, {name}: matrices' gradients, against packed", error, felt / FELT)


def switch(model: Any, graphs: str) -> None:
    """Set what `apply_patches(cuda_graphs=)` did."""
    state_of(model.base_model).__dict__["cuda_graphs"] = graphs


def captured(shape: Any, trees: tuple[Forest, ...], backend: str = "flash_qla") -> Any:
    """Return a model that has a graph for the bucket of these trees."""
    torch.manual_seed(0)
    chosen = {"delta_rule": backend}
    model = small(shape, backend=chosen, cuda_graphs="auto", unpacked="native")
    for tree in (*trees, *trees):
        tokens, _ = packed_row(model, [sum(tree.lengths)])
        hidden(model, tokens, tree.record.to(DEVICE)).float().pow(2).sum().backward()
    assert len(runner_of(model).captures.graphs) == 1, patch_report(model).cuda_graphs
    return model


@in_graphs
@pytest.mark.parametrize("kind", BUCKETS)
def test_samples_in_a_graph_are_those_packed(kind, record):
    model = captured(WIDE, BUCKETS[kind])
    replayed = runner_of(model).replayed
    for number, tree in enumerate(BUCKETS[kind]):
        compare(model, tree, record, f"{kind} {number}, in a graph", "auto")
    assert runner_of(model).replayed == replayed + len(BUCKETS[kind])


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Gradients of branches are added up in one order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def step(model: Any, tokens: Tensor, packed: PackedSequence, count: int, seed: int) -> Any:
    """Return hidden states of `count` tokens, and every gradient."""
    model.zero_grad(set_to_none=True)
    bucket = next(iter(runner_of(model).captures.graphs))[0]
    embeddings = model.get_input_embeddings()(tokens)
    embeddings = lengthened(embeddings, bucket, 1) if packed.bounded else embeddings
    output = model.base_model(inputs_embeds=embeddings, packed_sequence=packed, use_cache=False)
    states = output.last_hidden_state[:, :count]
    weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed)).to(states)
    (states.float() * weight.float()).sum().backward()
    return states.detach(), gradients(model)


@in_graphs
@pytest.mark.parametrize("backend", ["flash_qla", "fla"])
@pytest.mark.parametrize("kind", BUCKETS)
def test_trees_in_turns(kind, backend, record, deterministic):
    """Other segments, and other tokens: each tree has the bits of its bucket without a graph."""
    model = captured(NARROW, BUCKETS[kind], backend)
    replayed = runner_of(model).replayed
    for turn in range(2):
        for number, tree in enumerate(BUCKETS[kind]):
            count = sum(tree.lengths)
            tokens, _ = packed_row(model, [count])
            packed = tree.record.to(DEVICE)
            found, grads = step(model, tokens, packed, count, number)
            row = in_bucket(packed, next(iter(runner_of(model).captures.graphs))[0])
            switch(model, "never")
            wanted, others = step(model, tokens, row, count, number)
            switch(model, "auto")
            what = f"{kind} {number}, turn {turn}"
            record(f"{what}, values", difference(found, wanted), 0.0)
            worst = max(difference(grads[key], one) for key, one in others.items())
            record(f"{what}, gradients", worst, 0.0)
    assert runner_of(model).replayed == replayed + 2 * len(BUCKETS[kind])


@in_graphs
@pytest.mark.parametrize("kind", BUCKETS)
def test_influence_in_a_graph_is_zero(kind, record):
    """Of other branches, whatever tree was before; the control: a path's tokens are felt."""
    model = captured(NARROW, BUCKETS[kind])
    for before, tree in zip(BUCKETS[kind], BUCKETS[kind][1:], strict=False):
        tokens, _ = packed_row(model, [sum(tree.lengths)])
        seen, of_token = tree.record.tree.sees(), tree.record.seq_idx[0].long()
        for segment in range(len(tree.lengths)):
            others, _ = packed_row(model, [sum(before.lengths)])
            hidden(model, others, before.record.to(DEVICE)).float().sum().backward()
            embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()
            output = model.base_model(
                inputs_embeds=embeddings, packed_sequence=tree.record.to(DEVICE), use_cache=False
            )[0]
            own = (of_token == segment).to(DEVICE)
            (gradient,) = torch.autograd.grad(output[:, own].float().pow(2).sum(), embeddings)
            felt = gradient[0].float().abs().sum(1).cpu()
            record(f"{kind}, segment {segment}", felt[~seen[segment][of_token]].sum().item(), 0.0)
            assert felt[seen[segment][of_token]].min() > 0
