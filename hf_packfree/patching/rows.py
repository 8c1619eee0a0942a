"""Helpers for rows of the table, which write the common prefix of a family's class names once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_packfree.models import compat
from hf_packfree.patching.family import Family, Mixer, Tower
from hf_packfree.patching.tiny_mamba2 import TINY

MAMBA = ("conv", "ssd")
"""The ops of Mamba-2."""
_TOWER = "one attention call a layer instead of one an image"


def from_upstream(
    name: str,
    classes: str,
    *mixers: Mixer,
    upstream: str | None = None,
    replacement: str | None = None,
    causal_lm: str = "ForCausalLM",
    text: str = "Model",
    layers: tuple[str, ...] = ("DecoderLayer",),
    mlp: str | None = None,
    vision_language: str | None = None,
    towers: tuple[Tower, ...] = (),
    **more: Any,
) -> Family:
    """Return a family whose class names share a prefix; all class names are given without it.

    Args:
        classes: the prefix, such as "Qwen3Next".
        mixers, towers: see `Family`; their class names without the prefix.
        upstream: transformers' name of the family, if it is not `name`.
        replacement: see `Family`; None: `hf_packfree.models.from_upstream` makes our classes.
        causal_lm, text, layers, mlp, vision_language: `Family.causal_lm`, `trunk`, `layers`, `mlp`
            and `vision_language`, without the prefix.
        more: see `Family`.
    """
    home = f"transformers.models.{upstream or name}.modeling_{upstream or name}"
    return Family(
        name=name,
        upstream=home,
        replacement=replacement or f"hf_packfree.models.from_upstream:{home}",
        causal_lm=classes + causal_lm,
        trunk=classes + text,
        layers=tuple(classes + layer for layer in layers),
        mixers=tuple(replace(mixer, cls=classes + mixer.cls) for mixer in mixers),
        mlp=None if mlp is None else classes + mlp,
        vision_language=None if vision_language is None else classes + vision_language,
        towers=tuple(
            replace(
                tower,
                cls=classes + tower.cls,
                attention=classes + tower.attention,
                parts=tuple(classes + part for part in tower.parts),
            )
            for tower in towers
        ),
        **more,
    )


def with_file(name: str, classes: str, *mixers: Mixer, **more: Any) -> Family:
    """Return a family whose classes are in a file of ours; arguments: see `from_upstream`."""
    return from_upstream(name, classes, *mixers, replacement=f"hf_packfree.models.{name}", **more)


def vision_tower(
    cls: str = "VisionModel",
    attention: str = "VisionAttention",
    parts: tuple[str, ...] = ("VisionPatchEmbed", "VisionBlock"),
) -> Tower:
    """Return a vision tower, given its class names without the prefix; the defaults fit most
    families.
    """
    return Tower(cls, attention, _TOWER, parts)


def attention_only(name: str, classes: str, *kinds: str, **more: Any) -> Family:
    """Return a family of plain attention; `kinds` are its kinds of layers, if not only
    "full_attention".
    """
    mixers = (attends(kind) for kind in kinds or ("full_attention",))
    return from_upstream(name, classes, *mixers, **more)


def attends(kind: str = "full_attention") -> Mixer:
    """Return the mixer of plain attention in layers of a kind."""
    return Mixer(kind, "self_attn", "Attention", ("attention",))


def kimi(name: str, classes: str, **more: Any) -> Family:
    """Return a family whose layers hold Kimi Delta Attention or latent attention in the same
    attribute.
    """
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
