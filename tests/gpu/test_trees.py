"""Trees of shared prefixes on each backend of the delta rule: every sample in the tree against the
same samples packed without sharing, beside what is left when branches are read as one document.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.packing import PackedSequence
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.gpu.small import WIDE, hidden, packed_row, small
from tests.support import gradients, relative_rms
from tests.trees import TURNS, forest

pytestmark = gpu
GROUP = TURNS if TRIAL else forest((700, 130, 64, 1, 900), (None, 0, 0, 0, 0))
FELT = 5
"""Times an error, at least, that reading the row as one document makes."""


@pytest.mark.parametrize("tree", [GROUP, TURNS], ids=["group", "turns"])
@pytest.mark.parametrize("backend", ["flash_qla", "fla", "torch"])
def test_samples_in_a_tree_are_those_packed(backend, tree, record):
    if backend != "torch" and not TRIAL:
        pytest.importorskip(backend, reason=f"{backend} is not installed")
    torch.manual_seed(0)
    model = small(WIDE, backend="auto" if TRIAL else {"delta_rule": backend})
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
    for name, (ids, packed) in rows.items():
        model.zero_grad(set_to_none=True)
        output = hidden(model, ids, packed)
        values[name] = output if name == "packed" else output[:, samples]
        (values[name].float() * weight).sum().backward()
        # a decay's may nearly cancel
        grads[name] = {key: one for key, one in gradients(model).items() if one.ndim > 1}
    error, felt = (relative_rms(values[name], values["packed"]) for name in list(rows)[1:])
    record(f"tree, {backend}: values, against packed", error, felt / FELT)
    error, felt = (
        max(relative_rms(grads[name][key], one) for key, one in grads["packed"].items())
        for name in list(rows)[1:]
    )
    record(f"tree, {backend}: matrices' gradients, against packed", error, felt / FELT)
