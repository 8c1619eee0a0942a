"""A patched model whose decoder layers choose Triton's ops, which references answer: what a GPU
chooses, seen on a CPU.
"""

from __future__ import annotations

from dataclasses import replace

from hf_packfree import apply_patches
from hf_packfree.models import fused_layer
from hf_packfree.models.state import Kernels


def on_kernels(model, part=fused_layer.FusedDecoderLayer):
    """Patch, with Triton's small ops chosen for this device in the parts of a class, which a test's
    references answer, as `watched`.
    """
    for module in apply_patches(model).modules():
        if isinstance(module, part):
            state = vars(module)["packfree"]
            vars(module)["packfree"] = replace(state, elsewhere=Kernels(fused="triton"))
    return model


def watched(monkeypatch, name: str, place: int) -> list:
    """Let the references run where decoder layers call Triton's ops; return where `name`'s
    arguments at `place` gather.
    """
    seen = []

    def stand_in(op):
        reference = getattr(fused_layer, op)

        def call(*arguments, backend, **options):
            assert backend == "triton"
            if op == name:
                seen.append(arguments[place])
            return reference(*arguments, **options)

        monkeypatch.setattr(fused_layer, op, call)

    for op in ("add_norm", "swiglu_mlp"):
        stand_in(op)
    return seen
