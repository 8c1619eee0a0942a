"""Every attribute that this package leaves on an object of torch or transformers.

Other data travels as arguments, keywords and fields. Each mark says why it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from hf_packfree.packing.record import PackedSequence

T = TypeVar("T")


@dataclass(frozen=True)
class Mark(Generic[T]):
    """An attribute of an object that is not ours.

    Attributes:
        name: of the attribute.
    """

    name: str

    def put(self, on: Any, value: T) -> None:
        """Set the attribute."""
        setattr(on, self.name, value)

    def on_view(self, x: Tensor, value: T) -> Tensor:
        """Return a view of x that has the attribute; nothing is copied, and x stays without."""
        marked = x.view_as(x)
        self.put(marked, value)
        return marked

    def of(self, on: Any) -> T | None:
        """Return the value, or None where there is none."""
        found: T | None = getattr(on, self.name, None)
        return found

    def take(self, on: Any) -> T | None:
        """Return the value, or None, and remove the attribute."""
        found: T | None = vars(on).pop(self.name, None)
        return found


@dataclass(frozen=True, eq=False)
class CountedMedia:
    """What is known of a packed row before its towers run, so that nothing after them makes the
    host wait for the GPU.

    Attributes:
        features: {argument of `get_placeholder_mask`: rows of features}, equal to the placeholders
            counted.
        positions: returns [3 or 4, 1, T] on the row's device.
    """

    features: dict[str, int]
    positions: Callable[[], Tensor]


PACKED: Mark[bool] = Mark("packfree_packed")
"""On grids, and on patches: their batch is packed. No keyword reaches a vision tower before
transformers 5.9, nor its patch embedding.
"""

SEGMENTS: Mark[PackedSequence] = Mark("packfree_segments")
"""On a tower's `cu_seqlens`: their record, read on the host once for all layers. No keyword reaches
an audio tower's layers, nor those of vision towers before 5.9.
"""

ON_HOST: Mark[Tensor] = Mark("packfree_on_host")
"""On a tower's `cu_seqlens`: the same on the host, for the record. Upstream's towers hand on one
tensor.
"""

COUNTED: Mark[CountedMedia] = Mark("packfree_counted")
"""On a row's ids: what upstream's forward calls with them, `get_placeholder_mask` and
`compute_3d_position_ids`, gets no keyword.
"""

KEPT: Mark[slice] = Mark("packfree_kept")
"""On pixels or waveforms of a shard: which of their features the rank keeps. Upstream's forward
calls the methods that make features with the pixels alone.
"""

PLACES: Mark[Tensor] = Mark("packfree_places")
"""On masks of placeholders: the flat places of what they mark, int64. Upstream slices the mask
between where they are computed and where they are read.
"""

NORM: Mark[tuple[int, Any]] = Mark("packfree_norm")
"""On a norm's output: its version, and what it was computed from, so that projections that read it
compute it again instead of keeping it. The layer's forward, which hands it on, is upstream's.
"""

SPARE_COLUMNS: Mark[int] = Mark("packfree_spare_columns")
"""On a layer's output: how many columns its backward pass appends to the output's gradient, which
the next norm allocates.
"""

PADDED: Mark[Tensor] = Mark("packfree_padded")
"""On a gradient that was allocated so: the tensor [..., D + columns] whose first columns it is,
since autograd hands on one tensor.
"""

FORWARD_BEFORE: Mark[Callable[..., Any]] = Mark("packfree_forward_before")
"""On a patched module: the forward that somebody had put on the instance, and gets back. Upstream
made the instance; ours is its class alone, which has no fields.
"""

FUSED_HEAD: Mark[Any] = Mark("packfree_fused_head")
"""On a patched head: what was read from TRL's fused forward, once. The state of a patched model is
shared by all its modules, and frozen.
"""

VERL_EXPECTED: Mark[Any] = Mark("packfree_verl_expected")
"""On a patched head: which gradients came where verl's fused forward was called, and are expected
in the next step. It is called anew in each, and hands nothing on.
"""

ADDED: Mark[dict[str, nn.Module]] = Mark("packfree_added")
"""On a parent of modules that patching added: these, by name, so that exactly they are removed."""

FLASH_QLA_PLAN: Mark[tuple[int, Tensor, int, Tensor]] = Mark("_flash_qla_prepared_varlen")
"""On offsets for FlashQLA: its plan of a row's chunks, which its functions look for there and take
in no argument.
"""

SAVE_PRETRAINED: Mark[Callable[..., Any]] = Mark("save_pretrained")
"""On a model with a multi-token prediction head whose experts were read one by one: writes them so
again. Upstream's method asks nobody how tensors of a child are laid out.
"""

MTP_LAYERS: Mark[int] = Mark("mtp_num_hidden_layers")
"""On the configuration of such a model, where it does not say so: upstream's and inference engines'
name for how many layers the head has, so that what is saved says it.
"""
