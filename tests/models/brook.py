"""A family that is not in the table, and all that somebody writes to add it: one row, this file, one tiny config.

Upstream's side is made up at run time: Qwen3.5's modeling module under other class names, as a new release would be.
"""

from __future__ import annotations

import inspect
import re
import sys
from types import ModuleType

from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_packfree.models import qwen3_5
from hf_packfree.models.attention import PackedAttention
from hf_packfree.models.base import stands_for
from hf_packfree.models.decoder_layer import PackedDecoderLayer
from hf_packfree.models.qwen3_5 import SplitProjections
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.patching.registry import Family


def _made_up_release() -> ModuleType:
    module = ModuleType("transformers.models.brook.modeling_brook")
    module.__package__, module.__file__ = modeling_qwen3_5.__package__, modeling_qwen3_5.__file__
    sys.modules[module.__name__] = module
    source = re.sub(r"Qwen3_5(?!\w*Config)", "Brook", inspect.getsource(modeling_qwen3_5))
    exec(compile(source, "modeling_brook.py", "exec"), vars(module))
    return module


upstream = _made_up_release()


@stands_for(upstream)
class BrookGatedDeltaNet(SplitProjections, upstream.BrookGatedDeltaNet):
    """Upstream's layer, plus the packed branch."""


@stands_for(upstream)
class BrookAttention(PackedAttention, upstream.BrookAttention):
    """Upstream's layer, plus the packed branch."""

    def _rotate(self, q, k, cos, sin):
        return upstream.apply_rotary_pos_emb(q, k, cos, sin)


@stands_for(upstream)
class BrookDecoderLayer(PackedDecoderLayer, upstream.BrookDecoderLayer):
    """Upstream's layer, plus the packed branch."""


@stands_for(upstream)
class BrookTextModel(PackedTrunk, upstream.BrookTextModel):
    """Upstream's trunk, plus the record."""


tiny_config = qwen3_5.tiny_config

ROW = Family(
    name="brook",
    upstream=upstream.__name__,
    replacement=__name__,
    trunk="BrookTextModel",
    layer="BrookDecoderLayer",
    swaps=dict.fromkeys(("BrookTextModel", "BrookDecoderLayer", "BrookGatedDeltaNet", "BrookAttention"), "as every family"),
    causal_lm="BrookForCausalLM",
)
