"""An MLP with a gate, of which a CPU keeps half for the backward pass.

Shapes: D channels of the model, F of the MLP.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hf_packfree.models.base import Replacement
from hf_packfree.models.plain_layers import is_silu
from hf_packfree.models.recompute import recompute_saved
from hf_packfree.ops.fused import gated_product
from hf_packfree.packing.compiling import is_transformed


class GatedMLP(Replacement):
    """Put in front of an MLP that is down_proj(act_fn(gate_proj(x)) * up_proj(x)) and nothing else.

    Its layers are called, with whatever adapters and hooks they have. What is in between has
    upstream's bits, those of gradients too, so that it need not know what a row holds.
    """

    endings = ("MLP",)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., D] of x [..., D]; for gradients on a CPU, keep gate and up [..., F] alone,
        not silu(gate) nor the product.
        """
        if not self._computes_again(x):
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not type(gate) is type(up) is Tensor or gate.dtype != up.dtype:
            return self.down_proj(self.act_fn(gate) * up)
        product, again = gated_product(gate, up), partial(gated_product, gate.detach(), up.detach())
        # otherwise the product alone is kept, and nothing would notice that gate or up was changed
        with recompute_saved(product, again, product.requires_grad):
            return self.down_proj(product)

    def _computes_again(self, x: Tensor) -> bool:
        """Whether gradients are wanted where this costs nothing: on a GPU it would be one more pass
        over gate and up.
        """
        on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        wanted = torch.is_grad_enabled() and not is_transformed()
        return on_cpu and wanted and is_silu(self.act_fn)
