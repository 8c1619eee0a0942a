"""The supported families as a practitioner asks for them; nothing is imported, so that the answer
is there at once.

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
        checkpoints: released ones that it serves.
        auto_class: of transformers, which loads such a checkpoint whole.
        media: what packed rows may hold: "text", "images", "videos", "audio".
    """

    name: str
    checkpoints: str
    auto_class: str
    media: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)


_TEXT, _SEEN = "AutoModelForCausalLM", "AutoModelForImageTextToText"
_MEDIA = ("text", "images", "videos")

SERVED = (
    Served("qwen3_5", "Qwen/Qwen3.5-0.8B, -2B, -4B, -9B, -27B; Qwen3.6-27B", _SEEN, _MEDIA),
    Served(
        "qwen3_5_moe",
        "Qwen/Qwen3.5-35B-A3B, -122B-A10B, -397B-A17B; Qwen3.6-35B-A3B",
        _SEEN,
        _MEDIA,
    ),
    Served("qwen3_next", "Qwen/Qwen3-Next-80B-A3B, Qwen3-Coder-Next", _TEXT, ("text",)),
    Served("qwen3_vl", "Qwen/Qwen3-VL-2B, -4B, -8B, -32B", _SEEN, _MEDIA),
    Served("qwen3_vl_moe", "Qwen/Qwen3-VL-30B-A3B, -235B-A22B", _SEEN, _MEDIA),
    Served("qwen2_5_vl", "Qwen/Qwen2.5-VL-3B, -7B, -32B, -72B", _SEEN, _MEDIA),
    Served(
        "qwen3_omni_moe",
        "the thinker of Qwen/Qwen3-Omni-30B-A3B",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        (*_MEDIA, "audio"),
    ),
    Served("llama", "meta-llama/Llama-2 to -3.3, and models of its classes", _TEXT, ("text",)),
    Served("qwen3", "Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -14B, -32B", _TEXT, ("text",)),
    Served("qwen2", "Qwen/Qwen2.5-0.5B to -72B, QwQ-32B", _TEXT, ("text",)),
    Served("mistral", "mistralai/Mistral-7B, Mistral-Nemo", _TEXT, ("text",)),
    Served("gemma2", "google/gemma-2-2b, -9b, -27b", _TEXT, ("text",)),
    Served("gemma3_text", "google/gemma-3-270m, -1b; texts of larger ones", _TEXT, ("text",)),
    Served("gpt_oss", "openai/gpt-oss-20b, -120b", _TEXT, ("text",)),
)
"""To list one more family, add a row; its parts are a row of `patching/registry.py`."""
