"""The models that transformers' common tests run on: of every hybrid family the text models, and
those that read images.

Collected by the job alone, in a tree where `tests` is transformers' own package, see
`tests.upstream.sources`.
"""

from __future__ import annotations

import unittest
from importlib import import_module
from typing import Any

import torch

# transformers' own, where the job runs
from tests.generation.test_utils import GenerationTesterMixin  # type: ignore[import-not-found]
from tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor  # type: ignore[import-not-found]
from transformers import PreTrainedModel

from hf_packfree.patching.family import Family
from hf_packfree.patching.registry import FAMILIES

IMAGE, VIDEO, START, END = 3, 4, 5, 6
SMALL = {
    "vocab_size": 99,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "hidden_size": 32,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 8,
    "spatial_merge_size": 1,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "in_channels": 3,
}


class Text:
    """What the common tests want of a text model: sizes, a small config, inputs with a mask."""

    is_training = True
    batch_size, seq_length = 5, 7

    def __init__(self, family: Family) -> None:
        self.family = family
        for name in ("hidden_size", "num_hidden_layers", "vocab_size", "head_dim"):
            setattr(self, name, SMALL[name])
        self.num_attention_heads = family.tiny_config().num_attention_heads

    def text(self) -> dict[str, Any]:
        """Return the text model's settings."""
        given: dict[str, Any] = self.family.tiny_config().to_dict()
        return {**given, **SMALL}

    def get_config(self) -> Any:
        """Return a new configuration."""
        return type(self.family.tiny_config())(**self.text())

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return a configuration and forward arguments, with a mask whose rows get longer, on
        the right.
        """
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)  # type: ignore[attr-defined]
        return self.get_config(), {
            "input_ids": ids,
            "attention_mask": torch.tril(torch.ones_like(ids)),
        }


class VisionLanguage(Text):
    """The same of a vision-language model: one image of four patches in every row."""

    batch_size, seq_length = 3, 16

    def __init__(self, family: Family) -> None:
        super().__init__(family)
        self.text_config, self.vision_config = self.text(), VISION

    def text(self) -> dict[str, Any]:
        """Return the text model's settings, with positions of three numbers."""
        rope = SMALL["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}  # type: ignore[operator]
        return {**super().text(), "rope_parameters": rope}

    def get_config(self) -> Any:
        """Return a new configuration."""
        module = import_module(self.family.upstream.replace("modeling_", "configuration_"))
        name = self.family.trunk.replace("TextModel", "Config")
        return getattr(module, name)(
            text_config=self.text(),
            vision_config=VISION,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return a configuration and forward arguments."""
        # no media by chance
        ids = ids_tensor([self.batch_size, self.seq_length], SMALL["vocab_size"] - 7) + 7
        ids[:, 2], ids[:, 3:7], ids[:, 7] = START, IMAGE, END
        return self.get_config(), {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == IMAGE).long(),
            "pixel_values": floats_tensor([4 * self.batch_size, 3 * 2 * 8 * 8]),
            "image_grid_thw": torch.tensor([[1, 2, 2]] * self.batch_size),
        }


class _Common(ModelTesterMixin, GenerationTesterMixin):  # type: ignore[misc]
    all_model_classes: tuple[type[PreTrainedModel], ...]
    kind: type[Text]
    family: Family

    def setUp(self) -> None:
        self.model_tester = self.kind(self.family)


def _classes(family: Family, media: bool) -> tuple[type[PreTrainedModel], ...]:
    """Return the family's models that this release has: those that read images, or the others."""
    upstream: Any = import_module(family.upstream)
    models = [
        getattr(upstream, name) for name in upstream.__all__ if not name.endswith("PreTrainedModel")
    ]
    return tuple(
        model
        for model in models
        if _reads_images(model, family) is media and "VisionModel" not in model.__name__
    )


def _reads_images(model: Any, family: Family) -> bool:
    """Whether its configuration holds one of a tower and one of a text model; transformers 5.2
    says so of the trunk too.
    """
    return bool(getattr(model.config_class, "sub_configs", None)) and model.__name__ != family.trunk


_hybrids = [
    family
    for family in FAMILIES
    if "delta_rule" in family.mixer_ops and not family.made_from_upstream
]
for _family in _hybrids:
    for _kind in (Text, VisionLanguage):
        _models = _classes(_family, media=_kind is VisionLanguage)
        if _models:
            _name = f"{_family.name}_{_kind.__name__}"
            _members = {"all_model_classes": _models, "kind": _kind, "family": _family}
            globals()[_name] = type(_name, (_Common, unittest.TestCase), _members)
