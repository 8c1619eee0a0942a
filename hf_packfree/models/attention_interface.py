"""Attention that calls transformers' AttentionInterface, of any family.

Upstream's forward of an attention layer looks up by name what attends. For a packed row the name is
that of an entry of ours, which runs `hf_packfree.ops.attention` with what the layer passes: its
scaling, dropout, sliding window, softcap and sinks. The model's config keeps the name that it has.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

from hf_packfree.errors import BackendUnavailable, UnsupportedModel
from hf_packfree.models.attention import additive_block_mask, check_attention, take_packed_call
from hf_packfree.models.base import Replacement, upstream_of
from hf_packfree.models.state import state_of
from hf_packfree.ops.attention import attention
from hf_packfree.packing import PackedSequence, to_hf_kwargs

NAME = "packfree"
"""Of our entry in transformers' AttentionInterface."""
_OPTIONS = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}
"""{what a layer says of its scores: the keyword of our operation}."""
_HEAD = "qk_head_dim", "head_dim", "head_size"
"""What layers call the size of a head."""


class InterfaceAttention(Replacement):
    """Put in front of attention that calls the AttentionInterface: upstream's forward runs on
    packed rows too, and our operation attends in it.

    A flash attention that the model was loaded with runs itself, on boundaries.
    """

    endings = ("Attention",)
    attends_for = "sdpa", "eager"
    follows_trees = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give transformers our entry, before a packed row asks for it."""
        AttentionInterface.register(NAME, _attend)
        super().__init_subclass__(**kwargs)

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within documents when a record comes down, as upstream otherwise.

        Args:
            hidden_states: [1, T, D_model] of a packed row.

        Raises:
            PatchConflict: accelerate prepared the model to cut its rows.
        """
        call = take_packed_call(self, (hidden_states, *args), kwargs)
        if call is None:
            return super().forward(hidden_states, *args, **kwargs)
        packed, arguments = call
        arguments["attention_mask"] = None
        if check_attention(self.config) == "flash":
            out, weights = super().forward(**arguments, **to_hf_kwargs(packed))
            out = packed.zero_left_pad(out)
        else:
            upstream: Any = upstream_of(type(self)).forward
            out, weights = upstream(AttentionOfCall(self), **arguments, packed_sequence=packed)
        return out, weights

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return the heads' size, how many queries have, and what their scores need besides a
        scale.
        """
        config = layer.config
        size = next(getattr(layer, name) for name in _HEAD if hasattr(layer, name))
        window = getattr(layer, "sliding_window", getattr(config, "sliding_window", None))
        values = getattr(layer, "v_head_dim", size)
        needs = {
            # EXAONE 4's other layers have one, too, and do not use it
            "window": (getattr(layer, "is_sliding", True) and window) or 0,
            "softcap": int(bool(getattr(layer, "attn_logit_softcapping", None))),
            "sinks": int(hasattr(layer, "sinks")),
            "other_value_size": values if values != size else 0,
        }
        sizes = {"head_size": size, "query_heads": config.num_attention_heads}
        return sizes | {name: size for name, size in needs.items() if size}


class AttentionOfCall:
    """An attention layer as upstream's forward sees it during one call: itself but for the name of
    what attends.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.config = ConfigOfCall(layer.config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class ConfigOfCall:
    """Its config."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _attend(
    module: AttentionOfCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    packed_sequence: PackedSequence,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend within documents, for upstream's forward.

    Args:
        query, key, value: [1, heads, T, D], of grouped heads or not.
        kwargs: what the layer says of its scores, see `_OPTIONS`; sinks are [heads]. And those of
            the model's forward.

    Returns:
        [1, T, heads, D], and attention weights where they are wanted and the model makes them.
    """
    layer = module.layer
    given = {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}
    _refuse_lost_cap(layer, given.get("softcap"))
    wants = kwargs.get("output_attentions", getattr(layer.config, "output_attentions", False))
    if wants and check_attention(layer.config) == "mask":
        window = given.get("sliding_window")
        mask = packed_sequence.cached(additive_block_mask, query.dtype, window)
        eager = sys.modules[type(layer).__module__].eager_attention_forward
        made: tuple[Tensor, Tensor] = eager(
            layer, query, key, value, mask, scaling=scaling, dropout=dropout, **given
        )
        return made
    dtype = value.dtype
    # under autocast a rotary embedding may be wider
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    out = attention(
        q,
        k,
        v,
        packed_sequence,
        scale=scaling,
        dropout=dropout,
        backend=state_of(layer).kernels_for(q.device, dtype)["attention"],
        **{_OPTIONS[name]: option for name, option in given.items()},
    )
    # nothing, before an output projection that may have a bias
    return packed_sequence.zero_left_pad(out.flatten(2)).view_as(out), None


def _refuse_lost_cap(layer: Any, softcap: float | None) -> None:
    """Refuse capped scores where upstream's own attention, for rows that are not packed, leaves
    them as they are: another model than in packed rows.

    transformers runs Gemma 2 so by default up to 5.19 at least; 5.23 does not.

    Raises:
        BackendUnavailable: it does.
    """
    if softcap is not None and check_attention(layer.config) == "varlen":
        raise BackendUnavailable(
            "found attn_implementation='sdpa', which drops the cap that a "
            f"{type(layer).__name__} has for its scores ({softcap}); wanted eager or a flash "
            "attention, which transformers caps; call model.set_attn_implementation('eager')"
        )


def refuse_what_it_cannot_serve(model: torch.nn.Module, trunk: Any) -> None:
    """Refuse a text model whose attention looks ahead, and a model around it that is more than
    text.

    Raises:
        UnsupportedModel: it is one.
    """
    if looks_ahead(trunk):
        raise UnsupportedModel(
            f"found use_bidirectional_attention in the config of a {type(trunk).__name__}; wanted "
            "causal attention, the only kind that packs exactly; pass documents in rows of their "
            "own"
        )
    for module in model.modules():
        if is_more_than_text(module) and any(part is trunk for part in module.modules()):
            raise UnsupportedModel(
                f"found a {type(module).__name__} around a {type(trunk).__name__}; wanted the "
                "language model alone, because images, audio or an encoder may say otherwise who "
                "sees whom; call apply_patches on the language model inside, for rows of text"
            )


def looks_ahead(trunk: Any) -> bool:
    """Whether a text model's configuration makes its attention one that sees later tokens."""
    return bool(getattr(trunk.config, "use_bidirectional_attention", False))


def is_more_than_text(module: Any) -> bool:
    """Whether a module's configuration holds one of a text model besides others."""
    config = getattr(module, "config", None)
    return isinstance(config, PreTrainedConfig) and config.get_text_config() is not config
