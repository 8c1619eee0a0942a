"""A multi-token prediction head beside graphs of the text model, with the stand-in of `on_cpu`."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.models.state import state_of
from tests.graphs import on_cpu
from tests.mtp import heads
from tests.support import (
    GRADIENT_TOL,
    checkpoint_layers,
    gradients,
    runner_of,
    trunk_of,
    worst_gradient,
)

pytestmark = pytest.mark.slow
ORDERS = heads.LENGTHS, heads.LENGTHS[::-1], (64, 1, 37, 5, 3, 23, 2)


@pytest.mark.parametrize("recomputed", [False, True])
def test_losses_and_gradients_are_those_without_graphs(monkeypatch, recomputed):
    on_cpu.let_capture_whole_documents(monkeypatch)
    model = heads.build(depth=2)
    trunk = trunk_of(model)
    if recomputed:
        checkpoint_layers(model)

    def step(lengths, graphs):
        state_of(trunk).__dict__["cuda_graphs"] = graphs
        model.zero_grad(set_to_none=True)
        loss = model(**heads.packed(heads.labelled(lengths))).loss
        loss.backward()
        return loss.detach(), gradients(model)

    for lengths in ORDERS * 2:
        wanted, found = step(lengths, "never"), step(lengths, "auto")
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)
        assert worst_gradient(found[1], wanted[1]) <= GRADIENT_TOL
    runner = runner_of(model)
    assert runner.replayed == 2 * len(ORDERS) - 1, runner.reasons
