"""An operation that is not in the table, and all that is written to add it: its function and its
`Op`, and the mixer and the row of a family that calls it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_packfree.models.base import Replacement, size_of, stands_for
from hf_packfree.models.state import receive, state_of
from hf_packfree.ops.backend import Backend, needs_cuda
from hf_packfree.ops.op import AcrossRanks, Op, Way
from hf_packfree.packing import shard_of, uncompiled
from hf_packfree.parallel.collectives import gather_row
from hf_packfree.patching.family import Mixer
from tests.models import brook
from tests.models import brook_upstream as upstream
from tests.models.brook import HEADS, BrookAttention, BrookDelta, BrookModel, BrookShortConv


def by_tokens(x, decay, packed):
    """Run h <- decay h + x token by token; x: [1, T, D]; decay: [D]."""
    sums = []
    for document in x.split(packed.lengths, 1):
        h = torch.zeros_like(x[:, 0])
        for t in range(document.shape[1]):
            h = decay * h + document[:, t]
            sums.append(h)
    return torch.stack(sums, 1)


@uncompiled
def by_row(backend, x, decay, packed):
    """Run it on the whole row, of which every rank needs its own tokens [1, t, D] alone."""
    row = shard_of(packed).row
    whole = gather_row(x[0], packed)[None]
    return packed.cut(backend.running(row)(whole, decay, row))


OP = Op(
    name="leaky_sum",
    leaks="the running sum crosses document boundaries",
    backends={
        # made for a GPU that only tests pretend
        "scan": Backend(by_tokens, needs_cuda, "triton", compiles="minutes"),
        "torch": Backend(by_tokens),
    },
    across_ranks=AcrossRanks({"row": Way(by_row, "all tokens")}),
)


def leaky_sum(x, decay, packed, *, backend="torch"):
    """Run h <- decay h + x on each document of a packed row; x: [1, T, D]; decay: [D]."""
    return OP.running(backend, packed)(x, decay, packed)


@stands_for(upstream)
class BrookLeakySum(Replacement, upstream.BrookLeakySum):
    """Upstream's mixer, plus the packed branch."""

    def forward(self, x, **kwargs):
        packed = receive(self, kwargs)
        if packed is None:
            return super().forward(x, **kwargs)
        backend = state_of(self).kernels_for(x.device, x.dtype)["leaky_sum"]
        out = leaky_sum(x, self.decay_logit.sigmoid(), packed, backend=backend)
        return packed.zero_left_pad(self.out(out))

    @staticmethod
    def op_sizes(layer):
        return {}

    @staticmethod
    def checkpoint_sizes(layer):
        return {"decay_logit": (size_of(layer.decay_logit), (layer.out.in_features,))}


def tiny_config():
    return upstream.BrookConfig(("hybrid", "full_attention", "hybrid"))


ROW = replace(
    brook.ROW,
    replacement=__name__,
    mixers=(*brook.ROW.mixers, Mixer("hybrid", "token_mix", "BrookLeakySum", ("leaky_sum",))),
)

__all__ = [
    "HEADS",
    "OP",
    "ROW",
    "BrookAttention",
    "BrookDelta",
    "BrookLeakySum",
    "BrookModel",
    "BrookShortConv",
    "leaky_sum",
    "tiny_config",
]
