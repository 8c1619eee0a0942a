"""A family of the shapes of Falcon-H1 and Nemotron-H, and all that is written to add it."""

from __future__ import annotations

from hf_packfree.models.attention import PackedAttention
from hf_packfree.models.base import Replacement, size_of, stands_for
from hf_packfree.models.heads import heads_of
from hf_packfree.models.state import receive, state_of
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.patching.family import Family, Mixer
from tests.models import brook_upstream
from tests.models import marsh_upstream as upstream


@stands_for(upstream)
class MarshShortConv(Replacement, upstream.MarshShortConv):
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
        return {"conv": (size_of(layer.conv.weight)[:2], (layer.out.in_features, 1))}


@stands_for(upstream)
class MarshAttention(PackedAttention, upstream.MarshAttention):
    """Upstream's mixer, plus the packed branch."""

    def _rotate(self, q, k, cos, sin):
        return brook_upstream.rotate(q, k, cos, sin)


@stands_for(upstream)
class MarshModel(PackedTrunk, upstream.MarshModel):
    """Upstream's trunk, plus the record."""


HEADS = heads_of(upstream, __name__)
tiny_config = upstream.MarshConfig

_CONV, _ATTENTION = ("conv",), ("attention", "fused")
ROW = Family(
    name="marsh",
    upstream=upstream.__name__,
    replacement=__name__,
    causal_lm="MarshForCausalLM",
    trunk="MarshModel",
    layers=("MarshLayer",),
    mixers=(
        Mixer("hybrid", "mixer", "MarshShortConv", _CONV),
        Mixer("hybrid", "attend", "MarshAttention", _ATTENTION),
        Mixer("conv", "mixer", "MarshShortConv", _CONV),
        Mixer("full_attention", "mixer", "MarshAttention", _ATTENTION),
    ),
    without_mixer=("moe",),
)
