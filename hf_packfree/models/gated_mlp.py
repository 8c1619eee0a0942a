"""MLPs with a gate; on a CPU, only half of their activations are kept for the backward pass.

Shapes: D channels of the model, F of the MLP.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hf_packfree.models.base import Replacement, is_transformers_own, upstream_of
from hf_packfree.models.plain_layers import is_silu
from hf_packfree.models.recompute import recompute_saved
from hf_packfree.ops.fused import gated_product
from hf_packfree.packing.compiling import is_transformed


class GatedMLP(Replacement):
    """Put in front of an MLP that is down_proj(act_fn(gate_proj(x)) * up_proj(x)) and nothing else.

    The linear layers are called, so that adapters and hooks run. The product between them has
    upstream's bits, gradients included, so that it runs for packed rows and all others alike.
    """

    endings = ("MLP",)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output [..., D] for x [..., D]. For gradients on a CPU, only gate and up
        [..., F] are kept; silu(gate) and the product are recomputed.
        """
        if not self._computes_again(x):
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not type(gate) is type(up) is Tensor or gate.dtype != up.dtype:
            return self.down_proj(self.act_fn(gate) * up)
        product, again = gated_product(gate, up), partial(gated_product, gate.detach(), up.detach())
        # if the product needs no gradient, down_proj keeps the product itself: recomputing it would
        # not notice that gate or up was changed in place
        with recompute_saved(product, again, product.requires_grad):
            return self.down_proj(product)

    def _computes_again(self, x: Tensor) -> bool:
        """Whether gradients are wanted on a CPU, where recomputing the product costs nothing; on a
        GPU it would be one more pass over gate and up. Not where somebody put another forward into
        the MLP's class.
        """
        on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        wanted = torch.is_grad_enabled() and not is_transformed()
        if not (on_cpu and wanted and is_silu(self.act_fn)):
            return False
        return is_transformers_own(upstream_of(type(self)).forward)
