"""torch.compile around and inside a patched model: same gradients, known breaks, and no graph
per row.
"""

from __future__ import annotations

import logging
import re

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer

from hf_packfree import PackFreeCallback, apply_patches
from tests.integrations.compare import (
    KeepGradients,
    arguments,
    in_rows,
    in_steps,
    labelled,
    packed,
    per_document,
    rows,
)
from tests.integrations.marks import integration
from tests.support import tiny

SAYS = (
    "works; packed rows break the graph where boundaries are read, nowhere else, padded batches at "
    "more points"
)
READERS = {"read_call", "_loss_arguments"}

# torch.compile hides its own warnings, unless they are errors
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def nothing_compiled_before(tmp_path, monkeypatch):
    """Forget graphs, and compile into a folder of this test: a process that was stopped may
    leave half a library behind.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, example_inputs):
        self.count += 1
        return graph.forward


@integration("torch.compile", "whole model", SAYS)
def test_patched_before(same_gradients):
    model = apply_patches(tiny())
    compiled = torch.compile(model, backend="aot_eager")
    same_gradients(
        in_rows(model, compiled), per_document(tiny(), in_steps(labelled())), in_rows(tiny())
    )


@integration("torch.compile", "whole model", SAYS)
def test_patched_after_and_new_rows_need_no_new_graphs(same_gradients):
    """After the first row, and the first of another length and another number of documents, they
    may be any: nothing is compiled again.
    """
    model, graphs = tiny(), Graphs()
    compiled = apply_patches(torch.compile(model, backend=graphs))
    items, counts = labelled(), []
    for chosen in (
        items[:4],
        items[4:9],
        items[9:],
        items[2:9],
        items[:1] + items[5:],
        items[1:2] + items[3:4],
    ):
        compiled(**packed(chosen)).loss.backward()
        counts.append(graphs.count)
    assert counts[0] > 0 and counts[1:] == [counts[1]] * 5, counts
    same_gradients(
        in_rows(model, compiled), per_document(tiny(), in_steps(labelled())), in_rows(tiny())
    )


@integration("torch.compile", "whole model", SAYS)
def test_it_breaks_where_we_say(record_property):
    torch._dynamo.utils.counters.clear()
    found = torch._dynamo.explain(apply_patches(tiny()))(**packed(labelled()[:4]))
    # those that `explain` lists are of graphs with operations alone
    reasons = list(torch._dynamo.utils.counters["graph_break"])
    record_property("graphs", found.graph_count)
    assert all("torch.compiler.disable" in reason for reason in reasons)
    named = [re.search(r"<function ([\w.]+)", reason)[1] for reason in reasons]
    assert {name.rpartition(".")[2] for name in named} == READERS


@integration("torch.compile", "each decoder layer")
@pytest.mark.parametrize(("backend", "layers"), [("eager", slice(None)), ("inductor", slice(2, 3))])
def test_each_layer(backend, layers, same_gradients):
    model = apply_patches(tiny())
    for layer in model.model.layers[layers]:
        # which compiles once, not twice
        dynamic = True if backend == "inductor" else None
        layer.compile(backend=backend, dynamic=dynamic, fullgraph=True)
    same_gradients(in_rows(model), per_document(tiny(), in_steps(labelled())))


@integration("Trainer", "`torch_compile=True`", SAYS)
def test_through_the_trainer(same_gradients, tmp_path, caplog):
    keep = KeepGradients()
    caplog.set_level(logging.INFO, "hf_packfree")
    torch._dynamo.utils.counters.clear()
    Trainer(
        model=tiny(),
        args=arguments(tmp_path, torch_compile=True, torch_compile_backend="eager"),
        train_dataset=rows(labelled()),
        data_collator=DataCollatorWithFlattening(),
        callbacks=[keep, PackFreeCallback()],
    ).train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= len(tiny().model.layers), (
        "something was compiled"
    )
    assert "torch_compile=True: the Trainer compiles the model" in caplog.text
    same_gradients(keep.steps, per_document(tiny(), in_steps(labelled())))
