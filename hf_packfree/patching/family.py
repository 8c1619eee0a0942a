"""The description of a family: the classes of a transformers model, its token mixers and the
operations that they call.
"""

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
_LAYER = "residual sums and norms, and an MLP without experts, run as one kernel each"
_MLP = "on a CPU, half of what it would keep for the backward pass is computed again"
_VISION = (
    "the row would be numbered as one document, and nothing would check which images belong to "
    "which document"
)
_PARTS = "patches are embedded by one matrix product, residual sums and norms are one kernel each"


@dataclass(frozen=True)
class Mixer:
    """A kind of token mixer of a family: the layers through which documents influence each other
    unless they are patched.

    Attributes:
        kind: the value in `config.layer_types` of the layers with this mixer.
        path: the attribute of the decoder layer that holds the mixer; dotted if it is deeper.
        cls: upstream's class, by its exact name; ours, in the family's file, has the same name.
        ops: the ops that its packed branch calls, by their names in `backend`.
    """

    kind: str
    path: str
    cls: str
    ops: tuple[str, ...]

    def why(self) -> str:
        """Return why the mixer has to be patched."""
        return "; ".join(leaks for op in self.ops if (leaks := OPS[op].leaks) is not None)


@dataclass(frozen=True)
class Tower:
    """An encoder of images, videos or audio, before the text model.

    Attributes:
        cls: upstream's class, by its exact name; ours, in the family's file, has the same name.
        attention: the class of the tower's attention.
        why: why the tower and its parts are swapped.
        parts: classes inside the tower that are swapped for speed.
        optional: whether upstream's tower is exact for each image or audio, and only slower, so
            that a tower that something wraps is left unpatched.
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
        name: the family's name, and the argument of `packfree verify`.
        upstream: transformers' modeling module.
        replacement: our module; it holds a subclass of the same name for each class in `swaps`, and
            `tiny_config`; and `HEADS`, if there are any, the classes around the text model that are
            swapped with it.
        causal_lm: upstream's class for verification and the demo, of which `tiny_config` is the
            configuration: the language model, or the class around its vision tower where the family
            has none without it.
        trunk: the text model: the class that takes the record, or reads it from the batch.
        layers: the decoder layers' classes.
        mixers: the token mixers of the decoder layers; a kind of layer may have several.
        without_mixer: the values in `config.layer_types` of layers that mix no tokens ("mlp").
        fused_layer: whether the decoder layers are patched too, as `FusedDecoderLayer`. Unpatched
            layers pass the record on.
        mlp: the class of the MLPs, patched as `GatedMLP`, for CPUs; None: they compute something
            else, or upstream's run there.
        vision_language: the class around the text model that takes images, if there is one.
        towers: the encoders of images, videos and audio, in models that have them.
        predicts_ahead: whether checkpoints carry a multi-token prediction head, see
            `hf_packfree.mtp`.
        masks_read_positions: whether upstream builds masks with `position_ids`.
        floor: the first supported release of transformers: it has the family, and its layers pass
            keywords on to every mixer. In earlier ones the record would be dropped, and the row
            leak. Or a later release, if upstream's mixers were wrong before it.
        tiny: fields of the tiny model's config, in addition to those that most families share; only
            for families with `made_from_upstream`.
        config: for a family that is not listed, whose row is made from one model: the class of the
            model's configuration, of which `tiny` has all fields; see
            `hf_packfree.patching.unlisted`. None for listed families.
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
        """Whether the installed transformers is new enough for the family."""
        return compat.RELEASE >= Version(self.floor)

    @property
    def listed(self) -> bool:
        """Whether the family is in the table."""
        return self.config is None

    @property
    def made_from_upstream(self) -> bool:
        """Whether our classes are made from upstream's, without a file: see
        `hf_packfree.models.from_upstream`.
        """
        return ":" in self.replacement

    @property
    def attends_only(self) -> bool:
        """Whether all mixers are attention and upstream builds masks with `position_ids`, so that
        it reads boundaries from some positions itself.
        """
        return self.masks_read_positions and self._has_attention_alone

    @property
    def _has_attention_alone(self) -> bool:
        attention = ("full_attention", "sliding_attention")
        return all(mixer.kind in attention for mixer in self.mixers)

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops of the family's mixers, decoder layers, heads and towers, by their names in
        `backend`.
        """
        around = ("head", "towers") if self.towers else ("head",)
        fused = [op.name for op in OPS.values() if op.linear_layers and self.fused_layer]
        here = (op.name for op in OPS.values() if op.where in around)
        return tuple(dict.fromkeys((*self.mixer_ops, *fused, *here)))

    @property
    def fused_parts(self) -> tuple[str, ...]:
        """The classes in the decoder layers whose linear layers run in fused kernels, by name."""
        fused = {op.name for op in OPS.values() if op.linear_layers}
        mixers = [mixer.cls for mixer in self.mixers if fused.intersection(mixer.ops)]
        return (*mixers, self.mlp) if self.fused_layer and self.mlp else tuple(mixers)

    def fuses_linear_layers(self, runs: Mapping[str, str]) -> bool:
        """Whether linear layers of the decoder layers run in fused kernels, given {op: backend}."""
        chosen = any(OPS[op].linear_layers and name != "torch" for op, name in runs.items())
        return chosen and bool(self.fused_parts)

    @property
    def fuses_all(self) -> bool:
        """Whether all linear layers of the decoder layers run in fused kernels."""
        mixers = {mixer.cls for mixer in self.mixers}
        return self.fused_layer and mixers <= {*self.fused_parts}

    @property
    def mixer_ops(self) -> tuple[str, ...]:
        """The ops that the mixers call."""
        return tuple(dict.fromkeys(op for mixer in self.mixers for op in mixer.ops))

    def pairs(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours}; imports both modules.

        Upstream's class is found among the bases of ours, because its name in upstream's module may
        temporarily be another class.
        """
        ours = replacements(self.replacement)
        return {self._upstream_of(ours[name]): ours[name] for name in self.swaps}

    @property
    def attends_for(self) -> frozenset[str]:
        """The attention implementations in whose place the family's layers run our operation."""
        classes: Any = self.pairs().values()
        return frozenset(name for ours in classes for name in ours.attends_for)

    def head_pairs(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours} for the heads, which are swapped if no other forward
        replaces theirs; see `head_swap`.
        """
        heads = replacements(self.replacement).get("HEADS", {})
        return {self._upstream_of(ours): ours for ours in heads.values()}

    def optional_swaps(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours} for modules that are left unpatched if something wraps
        them, since packed rows are exact without them.

        Those are MLPs, towers that are exact in upstream, and decoder layers in releases whose own
        layers pass the record on, as those of plain attention do in all.
        """
        drop = compat.LAYERS_DROP_KEYWORDS and not self._has_attention_alone
        layers = () if drop else self.layers
        towers = (tower.swaps for tower in self.towers if tower.optional)
        return self._pairs_of({self.mlp, *layers}.union(*towers))

    def tower_pairs(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours} for the towers and their parts."""
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
