"""Seeds of dropout masks: each row's own, and a layer's second run has those of the first."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_packfree.graphs import checkpointing
from hf_packfree.graphs.captured_sequence import NotCapturable
from hf_packfree.ops.fused import projections
from hf_packfree.ops.fused.lora import Adapter, LoraLinear
from hf_packfree.ops.seeds import Seeds, draw_seed

CPU = torch.device("cpu")


class Dropping(nn.Module):
    """Layers with an adapter that drops half of its input, each of which may be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.adapters = nn.ParameterList(torch.randn(2, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            run = partial(self.run, number)
            called = getattr(layer, checkpointing.FUNCTION, None)
            x = run(x) if called is None else called(run, x)
        return x

    def run(self, number: int, x: torch.Tensor) -> torch.Tensor:
        # as PEFT's own forward
        x = nn.functional.dropout(x, 0.25, self.training)
        A, B = self.adapters[2 * number], self.adapters[2 * number + 1].T
        weight = self.layers[number].weight.detach()
        layer = LoraLinear(weight, (Adapter(A, B, 1.0, dropout=0.5),))
        (out,) = projections(x, layer, backend="triton")
        return out.tanh()

    def gradients(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [*torch.autograd.grad(self(x).sum(), [*self.adapters])]

    def recompute(self, **settings: bool) -> None:
        for layer in self.layers:
            layer.gradient_checkpointing = True
            setattr(layer, checkpointing.FUNCTION, partial(checkpoint, **settings))


@pytest.mark.parametrize("chosen", [False, True], ids=["", "selective"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_second_run_drops_what_the_first_did(reentrant, chosen):
    model, seeds, x = Dropping(), Seeds(), torch.randn(1, 5, 8)
    with seeds.in_use(), checkpointing._Dropout(seeds):
        first = model.gradients(x)
    settings = {"use_reentrant": reentrant}
    entered = []
    if chosen:
        settings = {"use_reentrant": False, "context_fn": lambda: _noting(entered)}
    model.recompute(**settings)
    again = Seeds()
    with checkpointing.in_capture(model, True, again), again.in_use():
        found = model.gradients(x)
        assert all(map(torch.equal, found, first))
        assert not all(map(torch.equal, model.gradients(x), first)), "each run has its own"
    assert entered == (["forward"] * 3 + ["second"] * 3) * 2 if chosen else not entered


def _noting(entered):
    @contextmanager
    def noting(what):
        entered.append(what)
        yield

    return noting("forward"), noting("second")


def test_a_row_has_a_seed_of_its_own_and_a_generators_state_decides():
    seeds = Seeds()
    before = torch.get_rng_state()
    seeds.refresh()
    assert torch.equal(torch.get_rng_state(), before), "nothing drops out"
    with seeds.in_use():
        one, other = draw_seed(CPU), draw_seed(CPU)
    assert one.of_row is other.of_row and one.number != other.number
    assert all(seed.number % 16 and seed.number > 1 for seed in (one, other))
    drawn = []
    for state in (0, 0, 1):
        torch.manual_seed(state)
        for _ in range(2):
            seeds.refresh()
            drawn.append(int(one.of_row))
    assert drawn[:2] == drawn[2:4] and len(set(drawn)) == 4
    assert draw_seed(CPU).of_row is not one.of_row, "rows without a graph"


def test_other_random_numbers_are_not_captured():
    """Nobody tells apart which were drawn in a layer that is recomputed."""
    model, seeds = Dropping(), Seeds()
    model.recompute(use_reentrant=False)
    with (
        pytest.raises(NotCapturable, match="draw random numbers"),
        checkpointing.in_capture(model, True, seeds),
    ):
        torch.nn.functional.dropout(model(torch.randn(1, 5, 8)), 0.5)
