"""Rows of families whose classes `hf_packfree.models.from_upstream` makes from transformers'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_packfree.models import compat
from hf_packfree.patching.family import Family, Mixer
from hf_packfree.patching.tiny_mamba2 import TINY

MAMBA = ("conv", "ssd")
"""What Mamba-2 calls."""


def from_upstream(
    name: str,
    classes: str,
    *mixers: Mixer,
    upstream: str | None = None,
    text: str = "Model",
    layers: tuple[str, ...] = ("DecoderLayer",),
    **more: Any,
) -> Family:
    """Return a family whose classes `hf_packfree.models.from_upstream` makes, where their names
    begin alike.

    Args:
        mixers: their `cls` without what it begins with.
        upstream: transformers' name of it, where it is another.
        text, layers: how the names of the text model and of the decoder layers end.
        more: see `Family`.
    """
    home = f"transformers.models.{upstream or name}.modeling_{upstream or name}"
    return Family(
        name=name,
        upstream=home,
        replacement=f"hf_packfree.models.from_upstream:{home}",
        causal_lm=f"{classes}ForCausalLM",
        trunk=f"{classes}{text}",
        layers=tuple(f"{classes}{layer}" for layer in layers),
        mixers=tuple(replace(mixer, cls=f"{classes}{mixer.cls}") for mixer in mixers),
        **more,
    )


def attention_only(name: str, classes: str, *kinds: str, **more: Any) -> Family:
    """Return a family of plain attention; `kinds` of its layers, where they differ."""
    mixers = (attends(kind) for kind in kinds or ("full_attention",))
    return from_upstream(name, classes, *mixers, **more)


def attends(kind: str = "full_attention") -> Mixer:
    """Return plain attention, in layers of a kind."""
    return Mixer(kind, "self_attn", "Attention", ("attention",))


def kimi(name: str, classes: str, **more: Any) -> Family:
    """Return a family whose layers hold Kimi Delta Attention or latent attention at one place."""
    delta = Mixer("linear_attention", "self_attn", "DeltaAttention", ("conv", "kda"))
    return from_upstream(name, classes, delta, attends(), **more)


def mamba_or_attention(
    name: str,
    classes: str,
    mamba: str,
    *,
    paths: tuple[str, str] = ("mamba", "self_attn"),
    **more: Any,
) -> Family:
    """Return a family whose layers hold Mamba-2, of a class `mamba`, or attention."""
    mixers = (
        Mixer(compat.LINEAR, paths[0], mamba, MAMBA),
        Mixer(compat.FULL, paths[1], "Attention", ("attention",)),
    )
    return from_upstream(name, classes, *mixers, tiny=TINY[name], **more)
