"""A family that is not in the table, and all that is written to add it: this file, and the row
at its end.
"""

from __future__ import annotations

from hf_packfree.models.attention import PackedAttention
from hf_packfree.models.base import Replacement, size_of, size_of_linear, stands_for
from hf_packfree.models.heads import heads_of
from hf_packfree.models.state import receive, state_of
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.ops.delta_rule import gated_delta_rule
from hf_packfree.patching.family import Family, Mixer
from tests.models import brook_upstream as upstream


@stands_for(upstream)
class BrookShortConv(Replacement, upstream.BrookShortConv):
    """Upstream's mixer, plus the packed branch."""

    def forward(self, x, **kwargs):
        packed = receive(self, kwargs)
        if packed is None:
            return super().forward(x, **kwargs)
        before, after, x = self.gates_in(x).chunk(3, -1)
        backend = state_of(self).kernels_for(x.device, x.dtype)["conv"]
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        x = causal_conv1d(before * x, weight, packed, bias=bias, activation=None, backend=backend)
        return packed.zero_left_pad(self.out(after * x))

    @staticmethod
    def op_sizes(layer):
        return {"taps": layer.conv.kernel_size[0]}

    @staticmethod
    def checkpoint_sizes(layer):
        size = layer.out.in_features
        return {
            "conv": (size_of(layer.conv.weight)[:2], (size, 1)),
            "gates_in": (size_of_linear(layer.gates_in), (3 * size, size)),
        }


@stands_for(upstream)
class BrookDelta(Replacement, upstream.BrookDelta):
    """Upstream's mixer, plus the packed branch."""

    def forward(self, x, **kwargs):
        packed = receive(self, kwargs)
        if packed is None:
            return super().forward(x, **kwargs)
        backend = state_of(self).kernels_for(x.device, x.dtype)["delta_rule"]
        out = gated_delta_rule(*self.project(x), packed, backend=backend)
        return packed.zero_left_pad(self.out(out.flatten(2)))

    @staticmethod
    def op_sizes(layer):
        return {
            "key_heads": layer.num_heads,
            "value_heads": layer.num_heads,
            "key_size": layer.size,
            "value_size": layer.size,
        }

    @staticmethod
    def checkpoint_sizes(layer):
        return {"A_log": (size_of(layer.A_log), (layer.num_heads,))}


@stands_for(upstream)
class BrookAttention(PackedAttention, upstream.BrookAttention):
    """Upstream's mixer, plus the packed branch."""

    def _rotate(self, q, k, cos, sin):
        return upstream.rotate(q, k, cos, sin)


@stands_for(upstream)
class BrookModel(PackedTrunk, upstream.BrookModel):
    """Upstream's trunk, plus the record."""


HEADS = heads_of(upstream, __name__)
tiny_config = upstream.BrookConfig

ROW = Family(
    name="brook",
    upstream=upstream.__name__,
    replacement=__name__,
    causal_lm="BrookForCausalLM",
    trunk="BrookModel",
    layers=("BrookStreamLayer", "BrookPoolLayer"),
    mixers=(
        Mixer("conv", "token_mix", "BrookShortConv", ("conv",)),
        Mixer("linear_attention", "token_mix", "BrookDelta", ("delta_rule",)),
        Mixer("full_attention", "attend", "BrookAttention", ("attention", "fused")),
    ),
)
