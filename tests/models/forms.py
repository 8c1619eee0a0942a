"""What tests of every kind of family ask alike of a tiny model: one function each."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_packfree import apply_patches
from tests.support import (
    checkpoint_layers,
    errors,
    random_weights,
    relative_rms,
    run,
    run_alone,
    tiny,
)


def logits_alone(model, batch):
    """Each document's logits in a forward of its own."""
    return [
        model(input_ids=document[None], use_cache=False).logits[0] for document in batch.documents
    ]


class Largest(TorchDispatchMode):
    """Notes in `bytes` how large the largest tensor is that any operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = (part for part in tree_leaves(out) if isinstance(part, torch.Tensor))
        sizes = (part.untyped_storage().nbytes() for part in found)
        self.bytes = max(self.bytes, *sizes, 0)
        return out


def assert_exact_in_fp64(family, batch):
    """Values and gradients, where what transformers computes in fp32 always is in fp64, too: see
    the fixture `widened`.
    """
    model = tiny(family).double()
    # the product of all experts takes no float64
    model.set_experts_implementation("eager")
    weights = [weight.double() for weight in random_weights(batch, 128)]
    wanted = run_alone(model, batch, weights)
    found = errors(run(apply_patches(model), batch, weights), wanted, floor=1e-6)
    # measured: at most 2e-15, and 6e-14 of gradients
    assert max(found) <= 1e-12, found


def assert_no_influence(family, batch, number):
    """Other tokens in document `number` change its logits, and no others."""
    model = apply_patches(tiny(family)).eval()
    wanted = batch.cut(model(**batch.inputs).logits)
    ids = batch.inputs["input_ids"].clone()
    changed = batch.places[number][1]
    ids[0, changed] = ids[0, changed].roll(1)
    found = batch.cut(model(**{**batch.inputs, "input_ids": ids}).logits)
    # experts multiply the tokens of a row together, and round accordingly
    same = [relative_rms(one, other) <= 1e-6 for one, other in zip(found, wanted)]
    assert same == [one != number for one in range(len(batch.documents))]


def assert_checkpointing_changes_nothing(family, batch, reentrant):
    """Logits bit for bit, gradients up to rounding."""
    model, weights = apply_patches(tiny(family)), random_weights(batch, 128)
    wanted = run(model, batch, weights)
    checkpoint_layers(model, reentrant)
    model.enable_input_require_grads()
    found = run(model, batch, weights)
    assert all(torch.equal(one, other) for one, other in zip(found[0], wanted[0]))
    assert errors(found, wanted)[1] <= 1e-6


def half_precision(exact, rounded, model, batches, autocast):
    """Return the errors of a patched model and of upstream's, both rounded, summed over batches: a
    token that rounding sends to another expert weighs more than the rest.

    Args:
        exact, rounded: upstream's in fp32, and in bfloat16 unless under autocast.
        model: the patched one, as `rounded`.
    """
    ours = upstreams = 0.0
    for batch in batches:
        with torch.no_grad():
            wanted = torch.cat(logits_alone(exact, batch))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                theirs = torch.cat(logits_alone(rounded, batch))
                found = torch.cat(batch.cut(model(**batch.inputs).logits))
        assert found.dtype == theirs.dtype
        ours += relative_rms(found, wanted)
        upstreams += relative_rms(theirs, wanted)
    return ours, upstreams
