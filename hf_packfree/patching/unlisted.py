"""Families that the table does not list: a row is made from a model's own classes, if they are
plain attention.

This module checks classes and config; `selfcheck_unlisted.check_unlisted` then measures a tiny
copy.
"""

from __future__ import annotations

import sys
from inspect import unwrap
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_packfree.errors import UnsupportedModel
from hf_packfree.models.base import kinds_of_layers
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.patching.family import Family, Mixer
from hf_packfree.patching.shrunk import shrunk
from hf_packfree.refused_families import REFUSED

_KINDS = "full_attention", "sliding_attention"
_MEDIA = "vision", "image", "video", "audio"
_STATES = nn.Conv1d, nn.RNNBase
_OF_THE_ROW = {
    "use_bidirectional_attention": "its attention looks ahead",
    "attn_temperature_tuning": "the temperature of its attention follows the row",
    "attention_chunk_size": "chunks of attention follow the row, not the document",
    "index_topk": "its attention selects tokens of the whole row",
}
"""{field of a config: why a model with this field set cannot be packed}."""


def text_model(model: nn.Module) -> Any:
    """Return the text model inside `model`, by transformers' own `get_decoder`; None if `model`
    contains no model of transformers, or none that reads tokens.
    """
    outer: Any = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if outer is None:
        return None
    return next((part for part in (outer.get_decoder(), outer.base_model) if _reads(part)), None)


def _reads(module: Any) -> bool:
    return isinstance(module, PreTrainedModel) and hasattr(module.config, "vocab_size")


def name_of(trunk: Any) -> str:
    """Return transformers' name of the family: the folder that defines the text model's class."""
    return (["", *type(trunk).__module__.split(".")])[-2]


def family_for(model: nn.Module) -> Family | None:
    """Return a row for a model whose family is not listed; None if it has no text model.

    Raises:
        UnsupportedModel: by its classes or config, documents would not be kept apart.
    """
    trunk = text_model(model)
    if trunk is None:
        return None
    reason = REFUSED.get(name_of(trunk)) or _encodes(model) or _why_not(trunk)
    if reason is not None:
        raise refusal(name_of(trunk), trunk, reason)
    return _row(trunk)


def why_not_patched(model: nn.Module) -> str | None:
    """Return why a model whose family is not listed would be refused before any measurement, or
    None.
    """
    try:
        family_for(model)
    except UnsupportedModel as error:
        return error.reason
    return None


def family_of_patched(model: nn.Module) -> Family | None:
    """Return the row of a patched text model in `model`, made anew from its classes, so that it
    also works for a model that was pickled in another process; None if there is none.
    """
    trunk = next((part for part in model.modules() if isinstance(part, PackedTrunk)), None)
    return None if trunk is None else _row(trunk)


def refusal(name: str, trunk: Any, reason: str) -> UnsupportedModel:
    """Return the error that refuses a family, with its name and the reason."""
    return UnsupportedModel(
        f"found a {type(trunk).__name__} of {name}, which is not patched: {reason}; wanted a "
        "family that `packfree models` lists, or plain attention by transformers' "
        "AttentionInterface; train it without this package, with documents in rows of their own, "
        "padded",
        reason,
    )


def _encodes(model: nn.Module) -> str | None:
    configs = (getattr(part, "config", None) for part in model.modules())
    found = any(getattr(config, "is_encoder_decoder", False) for config in configs)
    return "its encoder reads whole rows" if found else None


def _why_not(trunk: Any) -> str | None:
    """Return why, by its config or classes, the text model does not keep documents apart, or
    None.
    """
    for name, why in _OF_THE_ROW.items():
        if getattr(trunk.config, name, None):
            return why
    media = [name for name in trunk.config.sub_configs if name.startswith(_MEDIA)]
    if media:
        return f"its config has {media[0]}, for more than text"
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not type(trunk).__name__.endswith("Model"):
        return "its text model does not hold its decoder layers as `layers`"
    unknown = sorted({*kinds_of_layers(trunk.config)} - {*_KINDS})
    if unknown:
        return f"its layers of kind {', '.join(unknown)} are not known"
    home = type(trunk).__module__
    reasons = (_mixes_otherwise(layer) or _attends_otherwise(layer, home) for layer in layers)
    return next(filter(None, reasons), None)


def _mixes_otherwise(layer: nn.Module) -> str | None:
    for part in layer.modules():
        if isinstance(part, _STATES) or hasattr(part, "A_log"):
            return f"its {type(part).__name__} mixes tokens apart from its attention"
        if "Indexer" in type(part).__name__:
            return f"its {type(part).__name__} selects tokens of the whole row"
    return None


def _attends_otherwise(layer: nn.Module, home: str) -> str | None:
    attention = _attention_of(layer).values()
    if not attention:
        return (
            f"the attention of its {type(layer).__name__} does not go through transformers' "
            "AttentionInterface"
        )
    for part in (layer, *attention):
        if type(part).__module__ != home:
            return f"its {type(part).__name__} is not of {home}, where its text model is from"
        if not getattr(part, "is_causal", True):
            return "its attention looks ahead"
    return None


def _attention_of(layer: nn.Module) -> dict[str, nn.Module]:
    """Return {path: module} of a decoder layer's modules that call transformers'
    AttentionInterface.
    """
    return {path: part for path, part in layer.named_modules() if _looks_up(type(part))}


def _looks_up(cls: type) -> bool:
    """Whether the forward of an attention class, or of one of its bases, reads
    `ALL_ATTENTION_FUNCTIONS`.
    """
    forwards = (unwrap(vars(base)["forward"]) for base in cls.__mro__ if "forward" in vars(base))
    named = (getattr(forward, "__code__", None) for forward in forwards)
    return cls.__name__.endswith("Attention") and any(
        code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in named
    )


def _row(trunk: Any) -> Family:
    home, kinds = type(trunk).__module__, kinds_of_layers(trunk.config)
    mixers = {
        Mixer(kind, path, type(part).__name__, ("attention",)): None
        for kind, layer in zip(kinds, trunk.layers, strict=False)
        for path, part in _attention_of(layer).items()
    }
    return Family(
        name=name_of(trunk),
        upstream=home,
        replacement=f"hf_packfree.models.from_upstream:{home}",
        causal_lm=_causal_lm(trunk),
        trunk=type(trunk).__name__,
        layers=tuple(dict.fromkeys(type(layer).__name__ for layer in trunk.layers)),
        mixers=tuple(mixers),
        config=type(trunk.config),
        tiny=shrunk(trunk.config),
    )


def _causal_lm(trunk: Any) -> str:
    """Return the class name of the language model around a text model, or of the text model
    itself.
    """
    found = vars(sys.modules[type(trunk).__module__])
    heads = (name for name in found if name.endswith(("ForCausalLM", "LMHeadModel")))
    own = [
        name for name in heads if getattr(found[name], "config_class", None) is type(trunk.config)
    ]
    return own[0] if own else type(trunk).__name__
