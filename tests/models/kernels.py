"""A patched model whose layers ask for kernels by name, which torch twins answer: what a GPU chooses, seen on a CPU."""

from __future__ import annotations

from dataclasses import replace

from hf_packfree import apply_patches
from hf_packfree.models import fused_layer
from hf_packfree.models.state import Kernels
from tests.support import GRADIENT_TOL, LOGIT_TOL, errors, random_weights, run, run_alone


def on_kernels(model, **kernels: str):
    """Patch, with these kernels' names chosen for this device."""
    for module in apply_patches(model).modules():
        if "packfree" in vars(module):
            vars(module)["packfree"] = replace(vars(module)["packfree"], elsewhere=Kernels(**kernels))
    return model


def watched(monkeypatch, name: str, twin, place: int) -> list:
    """Put `twin` in the decoder layer's place for the op `name` on Triton; return where its arguments at `place` gather."""
    seen = []

    def call(*arguments, backend):
        assert backend == "triton"
        seen.append(arguments[place])
        return twin(*arguments)

    monkeypatch.setattr(fused_layer, name, call)
    return seen


def assert_exact(model, batch):
    weights = random_weights(batch, 128)
    logits, grads = errors(run(model, batch, weights), run_alone(model, batch, weights))
    assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (logits, grads)
