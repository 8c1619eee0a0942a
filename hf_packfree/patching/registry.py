"""The table of what is supported and what each family is. To add one: a row here, a file in
models/ with its tiny config.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_packfree.errors import UnsupportedModel
from hf_packfree.models import compat
from hf_packfree.models.base import replacements
from hf_packfree.ops.table import OPS


@dataclass(frozen=True)
class Mixer:
    """A kind of token mixer that a family has: what lets documents influence each other unless it
    is patched.

    Attributes:
        kind: the value in `config.layer_types` of the layers that have it.
        path: the attribute of the decoder layer that holds it.
        cls: upstream's class, by its exact name; ours, in the family's file, has the same.
        ops: what its packed branch calls, by the names that `backend` takes.
    """

    kind: str
    path: str
    cls: str
    ops: tuple[str, ...]

    def why(self) -> str:
        """Return why it has to be patched."""
        return "; ".join(leaks for op in self.ops if (leaks := OPS[op].leaks) is not None)


@dataclass(frozen=True)
class Tower:
    """What turns images, videos or audio into features, before the text model.

    Attributes:
        cls: upstream's class, by its exact name; ours, in the family's file, has the same.
        attention: the class of its attention.
        why: why they are swapped.
        parts: its classes that are swapped for speed.
        optional: whether upstream's own is exact for each image or audio, and only slower, so that
            one that something wraps is left alone.
    """

    cls: str
    attention: str
    why: str
    parts: tuple[str, ...] = ()
    optional: bool = True

    @property
    def swaps(self) -> dict[str, str]:
        """{name of a class that is swapped: why}."""
        return {self.cls: self.why, self.attention: self.why, **dict.fromkeys(self.parts, _PARTS)}


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: how people call it, and the argument of `packfree verify`.
        upstream: transformers' modeling module.
        replacement: our module; it holds a subclass of the same name for each class in `swaps`, and
            `tiny_config`; `HEADS`, if it is there, the classes around the text model that are
            swapped with it.
        causal_lm: upstream's class for verification and the demo, of which `tiny_config` is the
            configuration: the language model, or the class around its vision tower where the family
            has none without it.
        trunk: the text model: the class that takes the record, or reads it from the batch.
        layers: the decoder layers' classes.
        mixers: the token mixers of these layers; a kind of layer may have several.
        without_mixer: the values in `config.layer_types` of layers that mix no tokens ("mlp").
        fused_layer: whether the decoder layers are patched too, as `FusedDecoderLayer`. Others hand
            the record on.
        vision_language: the class around the text model that images go through, if there is one.
        towers: beside the text model, in models that have them.
        predicts_ahead: whether checkpoints carry a multi-token prediction head, see
            `hf_packfree.mtp`.
        masks_read_positions: whether upstream gives `position_ids` to what builds its masks.
    """

    name: str
    upstream: str
    replacement: str
    causal_lm: str
    trunk: str
    layers: tuple[str, ...]
    mixers: tuple[Mixer, ...]
    without_mixer: tuple[str, ...] = ()
    fused_layer: bool = False
    vision_language: str | None = None
    towers: tuple[Tower, ...] = ()
    predicts_ahead: bool = False
    masks_read_positions: bool = True

    @property
    def swaps(self) -> dict[str, str]:
        """{name of a class that is swapped: why}."""
        layers = dict.fromkeys(self.layers, _LAYER) if self.fused_layer else {}
        around = {} if self.vision_language is None else {self.vision_language: _VISION}
        towers = {cls: why for tower in self.towers for cls, why in tower.swaps.items()}
        return {
            self.trunk: _TRUNK,
            **layers,
            **{mixer.cls: mixer.why() for mixer in self.mixers},
            **around,
            **towers,
        }

    @property
    def mixers_by_kind(self) -> dict[str, tuple[str, ...]]:
        """{kind of decoder layer: the attributes that hold its mixers}."""
        kinds = dict.fromkeys((*(mixer.kind for mixer in self.mixers), *self.without_mixer))
        return {
            kind: tuple(mixer.path for mixer in self.mixers if mixer.kind == kind) for kind in kinds
        }

    @property
    def made_from_upstream(self) -> bool:
        """Whether no file holds our classes: see `hf_packfree.models.attention_interface`."""
        return ":" in self.replacement

    @property
    def attends_only(self) -> bool:
        """Whether all mixers are full attention, for which upstream reads boundaries in some
        positions itself.
        """
        attention = ("full_attention", "sliding_attention")
        return self.masks_read_positions and all(mixer.kind in attention for mixer in self.mixers)

    @property
    def ops(self) -> tuple[str, ...]:
        """What the family's packed branches and heads call, by the names that `backend` takes."""
        around = ("head", "towers") if self.towers else ("head",)
        return (*self.mixer_ops, *(op.name for op in OPS.values() if op.where in around))

    @property
    def mixer_ops(self) -> tuple[str, ...]:
        """What those of the mixers call."""
        return tuple(dict.fromkeys(op for mixer in self.mixers for op in mixer.ops))

    def pairs(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours}; imports both modules.

        Upstream's class is read from ours: the name in upstream's module may stand for another
        class for a while.
        """
        ours = replacements(self.replacement)
        return {self._upstream_of(ours[name]): ours[name] for name in self.swaps}

    def head_pairs(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours} of the heads, which are swapped where no other forward
        runs; see `head_swap`.
        """
        heads = replacements(self.replacement).get("HEADS", {})
        return {self._upstream_of(ours): ours for ours in heads.values()}

    def optional_swaps(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours} of what is left alone where something wraps it: packed
        rows are exact all the same.

        Those are towers that are exact as they are, and decoder layers in releases whose own layers
        hand the record on.
        """
        layers = {
            before: ours for before, ours in self.pairs().items() if before.__name__ in self.layers
        }
        towers = self.tower_pairs([tower for tower in self.towers if tower.optional])
        return towers | ({} if compat.LAYERS_DROP_KEYWORDS else layers)

    def tower_pairs(self, towers: Sequence[Tower]) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours} of these towers and their parts."""
        names = {name for tower in towers for name in tower.swaps}
        return {before: ours for before, ours in self.pairs().items() if before.__name__ in names}

    def trunk_class(self) -> type[nn.Module]:
        """Return upstream's class of the text model."""
        return next(before for before in self.pairs() if before.__name__ == self.trunk)

    def _upstream_of(self, ours: type[nn.Module]) -> type[nn.Module]:
        return next(base for base in ours.__mro__[1:] if base.__module__ == self.upstream)

    def tiny_config(self) -> Any:
        """Return the configuration of the family's tiny model."""
        build: Callable[[], Any] = replacements(self.replacement)["tiny_config"]
        return build()


_TRUNK = "the batch is read here, if nothing around it did, and the record handed to every layer"
_LAYER = "residual sums and norms, and the MLP, run as one kernel each"
_VISION = (
    "the row would be numbered as one document, and nothing would check which images belong to "
    "which document"
)
_AUDIO = "a short audio depends on those beside it, before transformers 5.9 on all they hold"
_TOWER = "one attention call a layer instead of one an image"
_PARTS = "patches are embedded by one matrix product, residual sums and norms are one kernel each"
_DELTA_NET, _ATTENTION = ("conv", "delta_rule", "fused"), ("attention", "fused")


def _vision_tower(names: str, cls: str = "Model") -> Tower:
    """Return the tower whose classes' names begin alike, as those of most families do."""
    return Tower(
        f"{names}{cls}", f"{names}Attention", _TOWER, (f"{names}PatchEmbed", f"{names}Block")
    )


def _attention_only(
    name: str, classes: str, *kinds: str, text: str = "Model", masks_read_positions: bool = True
) -> Family:
    """Return the family of plain attention whose classes' names begin alike.

    Args:
        kinds: of its layers, where they differ.
        text: how the name of the text model ends.
        masks_read_positions: see `Family`.
    """
    upstream = "transformers.models.{0}.modeling_{0}".format(name.removesuffix("_text"))
    return Family(
        name=name,
        upstream=upstream,
        replacement=f"hf_packfree.models.attention_interface:{upstream}",
        causal_lm=f"{classes}ForCausalLM",
        trunk=f"{classes}{text}",
        layers=(f"{classes}DecoderLayer",),
        mixers=tuple(
            Mixer(kind, "self_attn", f"{classes}Attention", ("attention",))
            for kind in kinds or ("full_attention",)
        ),
        masks_read_positions=masks_read_positions,
    )


_WINDOWS = ("full_attention", "sliding_attention")

FAMILIES: tuple[Family, ...] = (
    Family(
        name="qwen3_5",
        upstream="transformers.models.qwen3_5.modeling_qwen3_5",
        replacement="hf_packfree.models.qwen3_5",
        causal_lm="Qwen3_5ForCausalLM",
        trunk="Qwen3_5TextModel",
        layers=("Qwen3_5DecoderLayer",),
        mixers=(
            Mixer("linear_attention", "linear_attn", "Qwen3_5GatedDeltaNet", _DELTA_NET),
            Mixer("full_attention", "self_attn", "Qwen3_5Attention", _ATTENTION),
        ),
        fused_layer=True,
        vision_language="Qwen3_5Model",
        towers=(_vision_tower("Qwen3_5Vision"),),
        predicts_ahead=True,
    ),
    Family(
        name="qwen3_5_moe",
        upstream="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
        replacement="hf_packfree.models.qwen3_5_moe",
        causal_lm="Qwen3_5MoeForCausalLM",
        trunk="Qwen3_5MoeTextModel",
        layers=("Qwen3_5MoeDecoderLayer",),
        mixers=(
            Mixer("linear_attention", "linear_attn", "Qwen3_5MoeGatedDeltaNet", _DELTA_NET),
            Mixer("full_attention", "self_attn", "Qwen3_5MoeAttention", _ATTENTION),
        ),
        fused_layer=True,
        vision_language="Qwen3_5MoeModel",
        towers=(_vision_tower("Qwen3_5MoeVision"),),
        predicts_ahead=True,
    ),
    Family(
        name="qwen3_next",
        upstream="transformers.models.qwen3_next.modeling_qwen3_next",
        replacement="hf_packfree.models.qwen3_next",
        causal_lm="Qwen3NextForCausalLM",
        trunk="Qwen3NextModel",
        layers=("Qwen3NextDecoderLayer",),
        mixers=(
            Mixer("linear_attention", "linear_attn", "Qwen3NextGatedDeltaNet", _DELTA_NET),
            Mixer("full_attention", "self_attn", "Qwen3NextAttention", _ATTENTION),
        ),
        fused_layer=True,
        predicts_ahead=True,
    ),
    Family(
        name="qwen3_vl",
        upstream="transformers.models.qwen3_vl.modeling_qwen3_vl",
        replacement="hf_packfree.models.qwen3_vl",
        causal_lm="Qwen3VLForConditionalGeneration",
        trunk="Qwen3VLTextModel",
        layers=("Qwen3VLTextDecoderLayer",),
        mixers=(Mixer("full_attention", "self_attn", "Qwen3VLTextAttention", _ATTENTION),),
        vision_language="Qwen3VLModel",
        towers=(_vision_tower("Qwen3VLVision"),),
    ),
    Family(
        name="qwen3_vl_moe",
        upstream="transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
        replacement="hf_packfree.models.qwen3_vl_moe",
        causal_lm="Qwen3VLMoeForConditionalGeneration",
        trunk="Qwen3VLMoeTextModel",
        layers=("Qwen3VLMoeTextDecoderLayer",),
        mixers=(Mixer("full_attention", "self_attn", "Qwen3VLMoeTextAttention", _ATTENTION),),
        vision_language="Qwen3VLMoeModel",
        towers=(_vision_tower("Qwen3VLMoeVision"),),
    ),
    Family(
        name="qwen2_5_vl",
        upstream="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
        replacement="hf_packfree.models.qwen2_5_vl",
        causal_lm="Qwen2_5_VLForConditionalGeneration",
        trunk="Qwen2_5_VLTextModel",
        layers=("Qwen2_5_VLDecoderLayer",),
        mixers=(Mixer("full_attention", "self_attn", "Qwen2_5_VLAttention", _ATTENTION),),
        vision_language="Qwen2_5_VLModel",
        towers=(
            Tower(
                "Qwen2_5_VisionTransformerPretrainedModel",
                "Qwen2_5_VLVisionAttention",
                _TOWER,
                ("Qwen2_5_VisionPatchEmbed",),
            ),
        ),
    ),
    Family(
        name="qwen3_omni_moe",
        upstream="transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",
        replacement="hf_packfree.models.qwen3_omni_moe",
        causal_lm="Qwen3OmniMoeThinkerForConditionalGeneration",
        trunk="Qwen3OmniMoeThinkerTextModel",
        layers=("Qwen3OmniMoeThinkerTextDecoderLayer",),
        mixers=(
            Mixer("full_attention", "self_attn", "Qwen3OmniMoeThinkerTextAttention", _ATTENTION),
        ),
        vision_language=None if compat.THINKER_HOLDS_TOWERS else "Qwen3OmniMoeThinkerModel",
        towers=(
            _vision_tower("Qwen3OmniMoeVision", "Encoder"),
            Tower("Qwen3OmniMoeAudioEncoder", "Qwen3OmniMoeAudioAttention", _AUDIO, optional=False),
        ),
    ),
    _attention_only("llama", "Llama"),
    _attention_only("qwen3", "Qwen3", *_WINDOWS),
    _attention_only("qwen2", "Qwen2", *_WINDOWS),
    _attention_only("mistral", "Mistral"),
    _attention_only("gemma2", "Gemma2", *_WINDOWS),
    _attention_only("gemma3_text", "Gemma3", *_WINDOWS, text="TextModel"),
    _attention_only("gpt_oss", "GptOss", *_WINDOWS, masks_read_positions=False),
    _attention_only("qwen3_moe", "Qwen3Moe"),
    _attention_only("mixtral", "Mixtral"),
    _attention_only("gemma", "Gemma"),
    _attention_only("phi3", "Phi3"),
    _attention_only("olmo2", "Olmo2"),
    _attention_only("olmo3", "Olmo3", *_WINDOWS),
    _attention_only("granite", "Granite"),
    _attention_only("cohere2", "Cohere2", *_WINDOWS),
    _attention_only("smollm3", "SmolLM3", *_WINDOWS),
    _attention_only("glm4", "Glm4"),
    _attention_only("glm4_moe", "Glm4Moe"),
    _attention_only("starcoder2", "Starcoder2"),
    _attention_only("afmoe", "Afmoe", *_WINDOWS, masks_read_positions=False),
)


def family_of(model: nn.Module) -> Family | None:
    """Return the family whose text model (upstream's or ours) is in `model`, or None.

    Only families whose modeling module is loaded are looked at: no other can have models.

    Raises:
        UnsupportedModel: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(
            f"found a {type(model).__name__}; wanted a torch.nn.Module; load the model first, by "
            "from_pretrained of the Auto class that packfree models names, and pass that"
        )
    for family in FAMILIES:
        if family.upstream in sys.modules:
            trunk = family.trunk_class()
            if any(isinstance(module, trunk) for module in model.modules()):
                return family
    return None
