"""The supported families, by the checkpoints and names that users know. Nothing is imported, so
that `packfree models` answers at once.

`tests/test_doctor.py` holds the table equal to the registry's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Served:
    """One supported family.

    Attributes:
        name: the built-in name of its tiny model, as in `packfree verify NAME`.
        checkpoints: released checkpoints of the family.
        auto_class: the class of transformers that loads such a checkpoint whole.
        media: what packed rows may hold: "text", "images", "videos", "audio".
        transformers: the releases that support the family.
    """

    name: str
    checkpoints: str
    auto_class: str = "AutoModelForCausalLM"
    media: tuple[str, ...] = ("text",)
    transformers: str = ">=5.2"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)


_MEDIA = ("text", "images", "videos")
_SEEN: dict[str, Any] = {"auto_class": "AutoModelForImageTextToText", "media": _MEDIA}

SERVED = (
    Served("qwen3_5", "Qwen/Qwen3.5-0.8B, -2B, -4B, -9B, -27B; Qwen3.6-27B", **_SEEN),
    Served("qwen3_5_moe", "Qwen/Qwen3.5-35B-A3B, -122B-A10B, -397B-A17B; Qwen3.6-35B-A3B", **_SEEN),
    Served("qwen3_next", "Qwen/Qwen3-Next-80B-A3B, Qwen3-Coder-Next"),
    Served("qwen3_vl", "Qwen/Qwen3-VL-2B, -4B, -8B, -32B", **_SEEN),
    Served("qwen3_vl_moe", "Qwen/Qwen3-VL-30B-A3B, -235B-A22B", **_SEEN),
    Served("qwen2_5_vl", "Qwen/Qwen2.5-VL-3B, -7B, -32B, -72B", **_SEEN),
    Served(
        "qwen3_omni_moe",
        "the thinker of Qwen/Qwen3-Omni-30B-A3B",
        auto_class="Qwen3OmniMoeThinkerForConditionalGeneration",
        media=(*_MEDIA, "audio"),
    ),
    Served("llama", "meta-llama/Llama-2 to -3.3, TinyLlama, SmolLM2"),
    Served("qwen3", "Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -14B, -32B"),
    Served("qwen2", "Qwen/Qwen2.5-0.5B to -72B, QwQ-32B"),
    Served("mistral", "mistralai/Mistral-7B, Mistral-Nemo"),
    Served("gemma2", "google/gemma-2-2b, -9b, -27b"),
    Served("gemma3_text", "google/gemma-3-270m, -1b"),
    Served("gpt_oss", "openai/gpt-oss-20b, -120b"),
    Served("qwen3_moe", "Qwen/Qwen3-30B-A3B, -235B-A22B, Qwen3-Coder-30B-A3B"),
    Served("mixtral", "mistralai/Mixtral-8x7B, -8x22B"),
    Served("gemma", "google/gemma-2b, -7b"),
    Served("phi3", "microsoft/Phi-3-mini, -medium, Phi-3.5-mini, Phi-4, Phi-4-mini"),
    Served("olmo2", "allenai/OLMo-2-0425-1B, -1124-7B, -1124-13B, -0325-32B"),
    Served("olmo3", "allenai/Olmo-3-1025-7B, -1125-32B"),
    Served("granite", "ibm-granite/granite-3.0 to -3.3, 2b and 8b"),
    Served("cohere2", "CohereLabs/c4ai-command-r7b-12-2024, command-a-03-2025"),
    Served("smollm3", "HuggingFaceTB/SmolLM3-3B"),
    Served("glm4", "zai-org/GLM-4-9B-0414, -32B-0414"),
    Served("glm4_moe", "zai-org/GLM-4.5, GLM-4.5-Air, GLM-4.6"),
    Served("starcoder2", "bigcode/starcoder2-3b, -7b, -15b"),
    Served("afmoe", "arcee-ai/Trinity-Nano, -Mini"),
    Served(
        "gemma4_text", "the text models of google/gemma-4-e2b-it and others", transformers=">=5.5.0"
    ),
    Served("deepseek_v3", "deepseek-ai/DeepSeek-V3, -V3.1, -R1"),
    Served("glm4_moe_lite", "zai-org/GLM-4.7-Flash"),
    Served("granitemoe_swa", "ibm-granite/granite-swash-3b-a600m", transformers=">=5.15.0"),
    Served("kimi_linear", "moonshotai/Kimi-Linear-48B-A3B", transformers=">=5.17.0"),
    Served("bailing_hybrid", "inclusionAI/Ling-3.0-Flash", transformers=">=5.20.0"),
    Served("lfm2", "LiquidAI/LFM2-350M, -700M, -1.2B, -2.6B", transformers=">=5.22.0"),
    Served("lfm2_moe", "LiquidAI/LFM2-8B-A1B", transformers=">=5.22.0"),
    Served("lfm3", "LiquidAI/LFM3-1.7B", transformers=">=5.23.0"),
    Served("olmo_hybrid", "allenai/Olmo-Hybrid-7B", transformers=">=5.15.0"),
    Served("lara_mini", "translated/Lara-4-Mini-Base", transformers=">=5.24.0"),
    Served(
        "granitemoehybrid", "ibm-granite/granite-4.0-h-350m, -h-1b, -h-micro, -h-tiny, -h-small"
    ),
    Served("bamba", "ibm-ai-platform/Bamba-9B-v1, -v2"),
    Served(
        "nemotron_h",
        "nvidia/Nemotron-H-8B, -47B, -56B, NVIDIA-Nemotron-Nano-9B-v2, Nemotron-3-Nano-30B-A3B",
        transformers=">=5.17.0",
    ),
    Served("falcon_h1", "tiiuae/Falcon-H1-0.5B, -1.5B, -3B, -7B, -34B", transformers=">=5.17.0"),
    Served("zamba2", "Zyphra/Zamba2-1.2B, -2.7B, -7B", transformers=">=5.15.0"),
    Served("mamba2", "mistralai/Mamba-Codestral-7B-v0.1", transformers=">=5.17.0"),
)
"""To list one more family, add a row here; its classes are in a row of `patching/registry.py`."""
