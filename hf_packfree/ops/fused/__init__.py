"""The small ops of a decoder layer: a file with a PyTorch reference for each, and one choice of
backend for all.

The Triton kernels are in `kernels/`: importing them needs triton, which machines without a GPU
lack.

Shapes: T tokens of the row, D channels, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_packfree.ops.backend import Backend, needs_triton
from hf_packfree.ops.fused.add_norm import add_layer_norm, add_norm
from hf_packfree.ops.fused.gated_norm import gated_rms_norm
from hf_packfree.ops.fused.gated_product import gated_product
from hf_packfree.ops.fused.gates import gates
from hf_packfree.ops.fused.norm_rope import norm_rope
from hf_packfree.ops.fused.output_gate import output_gate
from hf_packfree.ops.fused.projections import projections
from hf_packfree.ops.fused.rope import qkv_rope, rope
from hf_packfree.ops.fused.swiglu import swiglu_mlp
from hf_packfree.ops.op import Op


@dataclass(frozen=True)
class FusedBackend(Backend):
    """One implementation of all small ops.

    Attributes:
        recomputes: whether ops with a `projection` recompute the projection's input in the backward
            pass instead of keeping it.
        adapters: whether linear layers with adapters or quantised weights run in these ops, instead
            of their own forward.
    """

    recomputes: bool = False
    adapters: bool = False

    def for_every_row(self) -> FusedBackend:
        """Return the backend that lets layers with adapters run their own forward: our products
        with adapters are not batch-invariant.
        """
        return replace(self, adapters=False) if self.adapters else self


OP = Op(
    name="fused",
    backends={
        "triton": FusedBackend(
            None,
            needs_triton,
            "triton",
            batch_invariant=True,
            compiles="seconds",
            recomputes=True,
            adapters=True,
        ),
        "torch": FusedBackend(),
    },
    # torch.compile fuses elementwise operations itself
    compiled="torch",
    linear_layers=True,
)
"""In a model's layers "torch" means upstream's own modules, or what replaced them; in this folder
it is the reference. `gated_product` has only one implementation, in PyTorch.
"""

__all__ = [
    "OP",
    "FusedBackend",
    "add_layer_norm",
    "add_norm",
    "gated_product",
    "gated_rms_norm",
    "gates",
    "norm_rope",
    "output_gate",
    "projections",
    "qkv_rope",
    "rope",
    "swiglu_mlp",
]
