"""The wrappings that are timed under FSDP2: what they gather, and that they train alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.benchmarks.batches import Load
from tests.benchmarks.fsdp2 import SHARDINGS, Sharding, rows_of, shard
from tests.benchmarks.models import Variant, variant_of
from tests.benchmarks.shapes import SHAPES
from tests.integrations.marks import needs
from tests.support import gradients, worst_gradient

# what is deprecated is PEFT's to change
pytestmark = [needs("peft"), pytest.mark.filterwarnings("default")]
GATHERED = {
    "weights kept": (1, 4),
    "groups of 4 layers": (4, 0),
    "groups of 4 layers, weights kept": (4, 4),
    "groups of 2, 11 and 11 layers, weights kept": (2, 4),
    "frozen weights whole": (4, 4),
}
"""Of the tiny model's four layers: whole in the first one's forward, and after that of the model."""


def whole(layers: Any) -> int:
    """Return how many layers have no parameter that is sharded."""
    return sum(not any(isinstance(one, DTensor) for one in layer.parameters()) for layer in layers)


def step(sharding: Sharding) -> tuple[float, dict[str, torch.Tensor], tuple[int, int]]:
    """Return loss and gradients of a step with LoRA, and what `GATHERED` says of it."""
    counted = []
    variant = Variant(fp32=True, lora="fp32")
    with variant_of(SHAPES["tiny"], variant, "cpu", torch.float32) as model:
        frozen = [one for one in model.parameters() if not one.requires_grad]
        for parameter in frozen if sharding.whole_base else ():
            parameter.data = parameter.data.bfloat16()
        shard(model, "cpu", sharding)
        layers = model.model.layers
        layers[0].mlp.register_forward_pre_hook(lambda *_: counted.append(whole(layers)))
        inputs = Load((40, 30, 58)).inputs(model.config.vocab_size, "cpu")
        loss = model(labels=inputs["input_ids"], use_cache=False, **inputs).loss
        counted.append(whole(layers))
        loss.backward()
        found = gradients(model)
    grads = {name: one.full_tensor() for name, one in found.items() if isinstance(one, DTensor)}
    assert grads.keys() == found.keys()
    return loss.item(), grads, tuple(counted)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDINGS)
def test_a_wrapping_gathers_what_it_says_and_trains_as_by_layer(name, one_rank):
    wanted_loss, wanted, by_layer = step(Sharding())
    loss, grads, gathered = step(SHARDINGS[name])
    assert by_layer == (1, 0) and gathered == GATHERED[name]
    assert loss == wanted_loss and worst_gradient(grads, wanted) == 0


def test_every_row_has_a_name_of_its_own():
    names = [(row.workload, row.name) for row in rows_of()]
    assert len(set(names)) == len(names)
    assert ("2b-8k-lora-fsdp2", "packfree, wrapped: frozen weights whole") in names
    assert ("2b-8k-fsdp2", "packfree, wrapped: frozen weights whole") not in names
