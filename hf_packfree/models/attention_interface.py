"""Attention layers of any family that call transformers' AttentionInterface.

Upstream's forward of an attention layer looks up the attention function by name. For a packed row
the layer finds the name of our entry, which runs `hf_packfree.ops.attention` with the scaling,
dropout, sliding window, softcap and sinks that the layer passes. The model's config keeps its own
name.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

from hf_packfree.errors import BackendUnavailable, UnsupportedModel
from hf_packfree.models.attention import (
    additive_block_mask,
    attention_route_of,
    check_attention,
    take_packed_call,
)
from hf_packfree.models.base import Replacement, kinds_of_layers, upstream_of
from hf_packfree.models.rotated import with_our_rotation
from hf_packfree.models.state import state_of
from hf_packfree.ops.attention import attention
from hf_packfree.packing import PackedSequence, to_hf_kwargs

NAME = "packfree"
"""The name of our entry in transformers' AttentionInterface."""
_OPTIONS = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}
"""{keyword that a layer passes to its attention function: the keyword of our operation}."""
_HEAD = "qk_head_dim", "head_dim", "head_size"
"""The attributes in which layers hold the size of a head."""


class InterfaceAttention(Replacement):
    """Put in front of attention that calls the AttentionInterface: upstream's forward runs on
    packed rows too, and calls our operation as its attention function.

    If the model was loaded with a flash attention, upstream's forward calls that one, with
    cu_seqlens, but for the rows of CUDA graphs.
    """

    endings = ("Attention",)
    inputs = "q_proj", "k_proj", "v_proj"
    joins_inputs = False
    attends_for = "sdpa", "eager"
    follows_trees = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register our entry with transformers."""
        AttentionInterface.register(NAME, _attend)
        super().__init_subclass__(**kwargs)

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within documents if the keywords hold a record; otherwise run upstream's forward.

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
        upstream: Any = self._upstream(hidden_states)
        if attention_route_of(self.config, packed) == "flash":
            out, weights = upstream(self, **arguments, **to_hf_kwargs(packed))
            out = packed.zero_left_pad(out)
        else:
            out, weights = upstream(AttentionOfCall(self), **arguments, packed_sequence=packed)
        return out, weights

    def _upstream(self, x: Tensor) -> Any:
        """Return upstream's forward, with our rotation where layers of this family run fused."""
        forward = upstream_of(type(self)).forward
        backend = state_of(self).kernels_for(x.device, x.dtype)["fused"]
        return forward if backend == "torch" else with_our_rotation(forward, backend)

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return the size of a head, the number of query heads, and what a backend has to support:
        a window, a softcap, sinks, another size of value heads.
        """
        config = layer.config
        size = next(getattr(layer, name) for name in _HEAD if hasattr(layer, name))
        window = getattr(layer, "sliding_window", getattr(config, "sliding_window", None))
        values = getattr(layer, "v_head_dim", size)
        needs = {
            # EXAONE 4's full-attention layers have a window, too, and do not use it
            "window": (getattr(layer, "is_sliding", True) and window) or 0,
            "softcap": int(bool(getattr(layer, "attn_logit_softcapping", None))),
            "sinks": int(hasattr(layer, "sinks")),
            "other_value_size": values if values != size else 0,
        }
        sizes = {"head_size": size, "query_heads": config.num_attention_heads}
        return sizes | {name: size for name, size in needs.items() if size}


class AttentionOfCall:
    """The `self` that upstream's forward of an attention layer gets during one call: the layer,
    with our name of the attention function in its config.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.config = ConfigOfCall(layer.config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class ConfigOfCall:
    """The config of an `AttentionOfCall`: the layer's, with our name of the attention function."""

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
    """Attend within documents: the attention function that upstream's forward calls.

    Args:
        query, key, value: [1, heads, T, D]; key and value may have fewer heads.
        kwargs: the layer's, see `_OPTIONS`; sinks are [heads]. The other keywords of the model's
            forward come along.

    Returns:
        The output [1, T, heads, D], and the attention weights if the caller wants them and the
        model runs eager attention, else None.
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
    # under autocast the rotary embedding may return a wider dtype
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
    # zeros enter the output projection, which may have a bias
    return packed_sequence.zero_left_pad(out.flatten(2)).view_as(out), None


def _refuse_lost_cap(layer: Any, softcap: float | None) -> None:
    """Refuse a softcap under sdpa: upstream drops the cap in rows that are not packed, so that
    these rows would run another model than packed rows.

    transformers loads Gemma 2 with sdpa by default up to 5.19 at least; 5.23 does not.

    Raises:
        BackendUnavailable: the layer has a softcap, and the model runs sdpa.
    """
    if softcap is not None and check_attention(layer.config) == "varlen":
        raise BackendUnavailable(
            "found attn_implementation='sdpa', which drops the cap that a "
            f"{type(layer).__name__} has for its scores ({softcap}); wanted eager or a flash "
            "attention, which transformers caps; call model.set_attn_implementation('eager')"
        )


def refuse_what_it_cannot_serve(model: torch.nn.Module, trunk: Any) -> None:
    """Refuse a text model with bidirectional attention or windows that only its masks have, and a
    text model inside a multimodal model.

    Raises:
        UnsupportedModel: `trunk` is such a text model.
    """
    if looks_ahead(trunk):
        raise UnsupportedModel(
            f"found use_bidirectional_attention in the config of a {type(trunk).__name__}; wanted "
            "causal attention, the only kind that packs exactly; pass documents in rows of their "
            "own"
        )
    _refuse_windows_of_masks(trunk)
    for module in model.modules():
        if is_more_than_text(module) and any(part is trunk for part in module.modules()):
            raise UnsupportedModel(
                f"found a {type(module).__name__} around a {type(trunk).__name__}; wanted the "
                "language model alone, because images, audio or an encoder may say otherwise who "
                "sees whom; call apply_patches on the language model inside, for rows of text"
            )


def _refuse_windows_of_masks(trunk: Any) -> None:
    """Refuse sliding layers whose attention is called without the window of their mask: SmolLM3's,
    if `use_sliding_window` is False.
    """
    for number, (kind, layer) in enumerate(zip(kinds_of_layers(trunk.config), trunk.layers)):
        for part in layer.modules():
            # layers that only read a window from the config are of one kind
            if kind == "sliding_attention" and getattr(part, "sliding_window", 0) is None:
                raise UnsupportedModel(
                    f"found layers.{number}, which the config says is {kind!r}, with a "
                    f"{type(part).__name__} that has no window: transformers' masks would have "
                    "one, and packed rows none; wanted one model for both; set "
                    "config.use_sliding_window=True, or 'full_attention' in config.layer_types, "
                    "and build it again"
                )


def looks_ahead(trunk: Any) -> bool:
    """Whether a text model's configuration asks for bidirectional attention."""
    return bool(getattr(trunk.config, "use_bidirectional_attention", False))


def is_more_than_text(module: Any) -> bool:
    """Whether a module's configuration is of a multimodal model: it holds the text model's
    configuration as a part.
    """
    config = getattr(module, "config", None)
    return isinstance(config, PreTrainedConfig) and config.get_text_config() is not config
