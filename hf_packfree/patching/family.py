"""What a family is: the classes of a transformers model, its mixers and what they call."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version
from torch import nn

from hf_packfree.models import compat
from hf_packfree.models.base import replacements
from hf_packfree.ops.table import OPS

_TRUNK = "the batch is read here, if nothing around it did, and the record handed to every layer"
_LAYER = "residual sums and norms, and the MLP, run as one kernel each"
_MLP = "on a CPU, half of what it would keep for the backward pass is computed again"
_VISION = (
    "the row would be numbered as one document, and nothing would check which images belong to "
    "which document"
)
_PARTS = "patches are embedded by one matrix product, residual sums and norms are one kernel each"


@dataclass(frozen=True)
class Mixer:
    """A kind of token mixer that a family has: what lets documents influence each other unless it
    is patched.

    Attributes:
        kind: the value in `config.layer_types` of the layers that have it.
        path: the attribute of the decoder layer that holds it, dotted where that is deeper.
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
        mlp: the class of its MLPs, patched too, as `GatedMLP`; None: they compute something else,
            or the fused layer does it.
        vision_language: the class around the text model that images go through, if there is one.
        towers: the encoders of images, videos and audio, in models that have them.
        predicts_ahead: whether checkpoints carry a multi-token prediction head, see
            `hf_packfree.mtp`.
        masks_read_positions: whether upstream gives `position_ids` to what builds its masks.
        floor: the first release of transformers that has the family and whose layers hand their
            keywords on to every mixer; before it the record would be dropped, and the row leak. A
            later one, where its mixers were wrong by themselves until then.
        tiny: fields of the tiny model's config, in addition to those that most families share; of
            families that are made from upstream's classes.
        config: of a family that is in no table, whose row was made for one model: the class of
            that model's configuration, of which `tiny` are all fields; see
            `hf_packfree.patching.unlisted`.
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
    mlp: str | None = None
    vision_language: str | None = None
    towers: tuple[Tower, ...] = ()
    predicts_ahead: bool = False
    masks_read_positions: bool = True
    floor: str = "5.2.0"
    tiny: Mapping[str, Any] = field(default_factory=dict)
    config: Any = None

    @property
    def swaps(self) -> dict[str, str]:
        """{name of a class that is swapped: why}."""
        layers = dict.fromkeys(self.layers, _LAYER) if self.fused_layer else {}
        mlps = {} if self.mlp is None else {self.mlp: _MLP}
        around = {} if self.vision_language is None else {self.vision_language: _VISION}
        towers = {cls: why for tower in self.towers for cls, why in tower.swaps.items()}
        return {
            self.trunk: _TRUNK,
            **layers,
            **mlps,
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
    def served(self) -> bool:
        """Whether the installed transformers has what the family needs of it."""
        return compat.RELEASE >= Version(self.floor)

    @property
    def listed(self) -> bool:
        """Whether it is a row of the table."""
        return self.config is None

    @property
    def made_from_upstream(self) -> bool:
        """Whether no file holds our classes: see `hf_packfree.models.from_upstream`."""
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

        Those are MLPs, towers that are exact as they are, and decoder layers in releases whose own
        layers hand the record on.
        """
        layers = () if compat.LAYERS_DROP_KEYWORDS else self.layers
        towers = (tower.swaps for tower in self.towers if tower.optional)
        return self._pairs_of({self.mlp, *layers}.union(*towers))

    def tower_pairs(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours} of the towers and their parts."""
        return self._pairs_of({name for tower in self.towers for name in tower.swaps})

    def _pairs_of(self, names: Container[str | None]) -> dict[type[nn.Module], type[nn.Module]]:
        return {before: ours for before, ours in self.pairs().items() if before.__name__ in names}

    def trunk_class(self) -> type[nn.Module]:
        """Return upstream's class of the text model."""
        return next(before for before in self.pairs() if before.__name__ == self.trunk)

    def _upstream_of(self, ours: type[nn.Module]) -> type[nn.Module]:
        return next(base for base in ours.__mro__[1:] if base.__module__ == self.upstream)

    def tiny_config(self) -> Any:
        """Return the configuration of the family's tiny model."""
        if self.config is not None:
            return self.config(**self.tiny)
        build: Callable[..., Any] = replacements(self.replacement)["tiny_config"]
        return build(**self.tiny)
