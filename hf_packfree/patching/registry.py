"""The table of supported families; `docs/adding_a_family.md` says how to add one."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from torch import nn

from hf_packfree.errors import UnsupportedModel
from hf_packfree.models import compat
from hf_packfree.patching.family import Family, Mixer, Tower
from hf_packfree.patching.rows import (
    MAMBA,
    attends,
    attention_only,
    from_upstream,
    kimi,
    mamba_or_attention,
    vision_tower,
    with_file,
)
from hf_packfree.patching.tiny_mamba2 import TINY
from hf_packfree.patching.unlisted import family_of_patched

_AUDIO = "a short audio depends on the others of the call, before transformers 5.9 on all they hold"
_WINDOWS = ("full_attention", "sliding_attention")
_LATENT: dict[str, Any] = {"num_key_value_heads": 4}
"""Config fields of tiny models with multi-head latent attention."""
_HYBRID = _LATENT | {"layer_types": ["linear_attention", "full_attention"] * 2}
_GATED_DELTA_NET = Mixer(
    "linear_attention", "linear_attn", "GatedDeltaNet", ("conv", "delta_rule", "fused")
)
_ATTENTION = Mixer("full_attention", "self_attn", "Attention", ("attention", "fused"))
_SHORT_CONV = Mixer("conv", "conv", "ShortConv", ("conv",))

ROWS: tuple[Family, ...] = (
    *(
        with_file(
            name,
            classes,
            _GATED_DELTA_NET,
            _ATTENTION,
            text="TextModel",
            fused_layer=True,
            vision_language="Model",
            towers=(vision_tower(),),
            predicts_ahead=True,
        )
        for name, classes in (("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"))
    ),
    with_file(
        "qwen3_next",
        "Qwen3Next",
        _GATED_DELTA_NET,
        _ATTENTION,
        fused_layer=True,
        predicts_ahead=True,
    ),
    *(
        with_file(
            name,
            classes,
            replace(_ATTENTION, cls="TextAttention"),
            causal_lm="ForConditionalGeneration",
            text="TextModel",
            layers=("TextDecoderLayer",),
            fused_layer=True,
            vision_language="Model",
            towers=(vision_tower(),),
        )
        for name, classes in (("qwen3_vl", "Qwen3VL"), ("qwen3_vl_moe", "Qwen3VLMoe"))
    ),
    with_file(
        "qwen2_5_vl",
        "Qwen2_5_",
        replace(_ATTENTION, cls="VLAttention"),
        causal_lm="VLForConditionalGeneration",
        text="VLTextModel",
        layers=("VLDecoderLayer",),
        vision_language="VLModel",
        towers=(
            vision_tower(
                "VisionTransformerPretrainedModel", "VLVisionAttention", ("VisionPatchEmbed",)
            ),
        ),
    ),
    with_file(
        "qwen3_omni_moe",
        "Qwen3OmniMoe",
        replace(_ATTENTION, cls="ThinkerTextAttention"),
        causal_lm="ThinkerForConditionalGeneration",
        text="ThinkerTextModel",
        layers=("ThinkerTextDecoderLayer",),
        fused_layer=True,
        vision_language=None if compat.THINKER_HOLDS_TOWERS else "ThinkerModel",
        towers=(
            vision_tower("VisionEncoder"),
            Tower("AudioEncoder", "AudioAttention", _AUDIO, optional=False),
        ),
    ),
    attention_only("llama", "Llama", mlp="MLP", fused_layer=True),
    attention_only("qwen3", "Qwen3", *_WINDOWS, mlp="MLP", fused_layer=True),
    attention_only("qwen2", "Qwen2", *_WINDOWS, mlp="MLP", fused_layer=True),
    attention_only("mistral", "Mistral", mlp="MLP", fused_layer=True),
    # with 50, as in its checkpoints, the cap would not change the small scores of a tiny model
    attention_only("gemma2", "Gemma2", *_WINDOWS, tiny={"attn_logit_softcapping": 2.0}),
    attention_only("gemma3_text", "Gemma3", *_WINDOWS, upstream="gemma3", text="TextModel"),
    attention_only("gpt_oss", "GptOss", *_WINDOWS, fused_layer=True, masks_read_positions=False),
    attention_only("qwen3_moe", "Qwen3Moe", fused_layer=True),
    attention_only("mixtral", "Mixtral", fused_layer=True),
    attention_only("gemma", "Gemma"),
    attention_only("phi3", "Phi3"),
    attention_only("olmo2", "Olmo2", mlp="MLP"),
    attention_only("olmo3", "Olmo3", *_WINDOWS, mlp="MLP"),
    attention_only("granite", "Granite", mlp="MLP"),
    attention_only("cohere2", "Cohere2", *_WINDOWS, mlp="MLP"),
    attention_only("smollm3", "SmolLM3", *_WINDOWS, mlp="MLP", fused_layer=True),
    attention_only("glm4", "Glm4"),
    attention_only("glm4_moe", "Glm4Moe", mlp="MLP"),
    attention_only("starcoder2", "Starcoder2"),
    attention_only("afmoe", "Afmoe", *_WINDOWS, mlp="MLP", masks_read_positions=False),
    from_upstream(
        "gemma4_text",
        "Gemma4",
        *(Mixer(kind, "self_attn", "TextAttention", ("attention",)) for kind in _WINDOWS),
        upstream="gemma4",
        text="TextModel",
        layers=("TextDecoderLayer",),
        floor="5.5.0",
        tiny={
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 2,
        },
    ),
    attention_only(
        "deepseek_v3",
        "DeepseekV3",
        mlp="MLP",
        tiny=_LATENT | {"q_lora_rank": 24, "first_k_dense_replace": 1},
    ),
    attention_only("glm4_moe_lite", "Glm4MoeLite", mlp="MLP", tiny=_LATENT | {"q_lora_rank": 24}),
    attention_only("granitemoe_swa", "GraniteMoeSWA", *_WINDOWS, floor="5.15.0"),
    kimi(
        "kimi_linear",
        "KimiLinear",
        mlp="MLP",
        floor="5.17.0",
        tiny=_HYBRID | {"linear_head_dim": 16, "linear_num_heads": 4},
    ),
    kimi(
        "bailing_hybrid",
        "BailingHybrid",
        mlp="MLP",
        floor="5.20.0",
        tiny=_HYBRID | {"first_k_dense_replace": 1, "num_mtp_layers": 0},
    ),
    # short convolutions
    from_upstream(
        "lfm2",
        "Lfm2",
        _SHORT_CONV,
        attends(),
        floor="5.22.0",
        tiny={"layer_types": ["conv", "full_attention", "conv", "conv"]},
    ),
    from_upstream(
        "lfm2_moe",
        "Lfm2Moe",
        _SHORT_CONV,
        attends(),
        floor="5.22.0",
        tiny={"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1},
    ),
    from_upstream(
        "lfm3",
        "Lfm3",
        _SHORT_CONV,
        *map(attends, _WINDOWS),
        floor="5.23.0",
        tiny={"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    ),
    # the gated delta rule in other layouts
    from_upstream(
        "olmo_hybrid",
        "OlmoHybrid",
        _GATED_DELTA_NET,
        attends(),
        layers=("LinearAttentionDecoderLayer", "AttentionDecoderLayer"),
        mlp="MLP",
        floor="5.15.0",
        tiny={
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "linear_value_head_dim": 24,
        },
    ),
    from_upstream(
        "lara_mini",
        "LaraMini",
        _GATED_DELTA_NET,
        *map(attends, _WINDOWS),
        mlp="MLP",
        floor="5.24.0",
        tiny={"layer_types": [*["linear_attention"] * 2, *_WINDOWS]},
    ),
    # Mamba-2
    mamba_or_attention(
        "granitemoehybrid", "GraniteMoeHybrid", "MambaLayer", masks_read_positions=False
    ),
    mamba_or_attention("bamba", "Bamba", "Mixer", mlp="MLP"),
    mamba_or_attention(
        "nemotron_h",
        "NemotronH",
        "Mamba2Mixer",
        paths=("mixer", "mixer"),
        layers=("Block",),
        without_mixer=("moe", "mlp"),
        floor="5.17.0",
    ),
    from_upstream(
        "falcon_h1",
        "FalconH1",
        Mixer("hybrid", "mamba", "Mixer", MAMBA),
        attends("hybrid"),
        floor="5.17.0",
        tiny=TINY["falcon_h1"],
    ),
    from_upstream(
        "zamba2",
        "Zamba2",
        Mixer(compat.LINEAR, "mamba", "MambaMixer", MAMBA),
        Mixer("hybrid", "mamba_decoder.mamba", "MambaMixer", MAMBA),
        Mixer("hybrid", "shared_transformer.self_attn", "Attention", ("attention",)),
        layers=("MambaDecoderLayer", "HybridLayer"),
        # up to 5.14 upstream's scan is wrong for rows longer than a chunk, by .1 to .7
        floor="5.15.0",
        tiny=TINY["zamba2"],
    ),
    from_upstream(
        "mamba2",
        "Mamba2",
        Mixer(compat.LINEAR, "mixer", "Mixer", MAMBA),
        layers=("Block",),
        floor="5.17.0",
        tiny=TINY["mamba2"],
    ),
)
"""The families of every release of transformers."""

FAMILIES = tuple(row for row in ROWS if row.served)
"""The families of the installed transformers."""


def family_of(model: nn.Module) -> Family | None:
    """Return the family whose text model (upstream's or ours) is in `model`, or None; a family that
    is not listed only if the model is patched.

    Only families whose modeling module defines a class of the model are imported.

    Raises:
        UnsupportedModel: `model` is no module, or the installed transformers is older than its
            family's `floor`.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(
            f"found a {type(model).__name__}; wanted a torch.nn.Module; load the model first, by "
            "from_pretrained of the Auto class that packfree models names, and pass that"
        )
    classes = {base for kind in set(map(type, model.modules())) for base in kind.__mro__}
    homes = {cls.__module__ for cls in classes}
    found: Family | None = None
    for family in FAMILIES:
        if family.upstream in homes and (trunk := family.trunk_class()) in classes:
            # a text model may derive from another family's
            if found is None or issubclass(trunk, found.trunk_class()):
                found = family
    if found is not None:
        return found
    _refuse_before_the_floor(homes)
    return family_of_patched(model)


def _refuse_before_the_floor(homes: Container[str]) -> None:
    """Refuse a model with classes from a modeling module of which this release is too old."""
    for row in ROWS:
        if not row.served and row.upstream in homes:
            raise UnsupportedModel(
                f"found {row.name} on transformers {compat.RELEASE}, whose layers lose the "
                "boundaries on their way to a mixer, or are wrong by themselves; wanted "
                f"transformers {row.floor} or later; pip install -U 'transformers>={row.floor}'"
            )
