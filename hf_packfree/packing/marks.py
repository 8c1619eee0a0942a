"""Every attribute that this package leaves on an object of torch or transformers.

Everything else is passed as arguments, keywords and fields. Each mark below says why its value
cannot be.
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
        name: the attribute's name.
    """

    name: str

    def put(self, on: Any, value: T) -> None:
        """Set the attribute."""
        setattr(on, self.name, value)

    def on_view(self, x: Tensor, value: T) -> Tensor:
        """Return a view of x that has the attribute; x itself does not get it."""
        marked = x.view_as(x)
        self.put(marked, value)
        return marked

    def of(self, on: Any) -> T | None:
        """Return the value, or None where there is none."""
        found: T | None = getattr(on, self.name, None)
        return found

    def take(self, on: Any) -> T | None:
        """Return the value, or None, and remove the attribute."""
        # torch.compile cannot trace vars() of a tensor
        if self.of(on) is None:
            return None
        found: T | None = vars(on).pop(self.name, None)
        return found


@dataclass(frozen=True, eq=False)
class CountedMedia:
    """Facts about a packed row that are computed before its towers run, so that nothing after them
    makes the host wait for the GPU.

    Attributes:
        features: {argument of `get_placeholder_mask`: number of features}, each equal to the number
            of placeholders.
        positions: returns the mRoPE positions [3 or 4, 1, T], on the row's device.
    """

    features: dict[str, int]
    positions: Callable[[], Tensor]


PACKED: Mark[bool] = Mark("packfree_packed")
"""On image grids and patches: the batch is packed. No keyword reaches a vision tower before
transformers 5.9, nor its patch embedding.
"""

SEGMENTS: Mark[PackedSequence] = Mark("packfree_segments")
"""On a tower's `cu_seqlens`: the record of the segments, built on the host once for all layers. No
keyword reaches an audio tower's layers, nor those of vision towers before 5.9.
"""

ON_HOST: Mark[Tensor] = Mark("packfree_on_host")
"""On a tower's `cu_seqlens`: the same offsets on the host, from which the record is built.
Upstream's towers pass on one tensor only.
"""

COUNTED: Mark[CountedMedia] = Mark("packfree_counted")
"""On a row's ids: `get_placeholder_mask` and `compute_3d_position_ids`, which upstream's forward
calls with the ids, get no keywords.
"""

KEPT: Mark[slice] = Mark("packfree_kept")
"""On pixels or waveforms of a shard: which of their features the rank keeps. Upstream's forward
calls the methods that compute features with the pixels alone.
"""

PLACES: Mark[Tensor] = Mark("packfree_places")
"""On masks of placeholders: the flat indices of the placeholders, int64. Upstream slices the mask
between the code that computes them and the code that reads them.
"""

NORM: Mark[tuple[tuple[int, int, int], Any]] = Mark("packfree_norm")
"""On a norm's output: its version and its inputs', and these inputs, so that projections recompute
the norm instead of keeping it. Norm and projections are called by upstream's forward.
"""

SPARE_COLUMNS: Mark[int] = Mark("packfree_spare_columns")
"""On a layer's output: how many columns its backward pass appends to the output's gradient, which
the next norm allocates.
"""

PADDED: Mark[Tensor] = Mark("packfree_padded")
"""On a gradient with spare columns: the tensor [..., D + columns] whose first columns it is.
Autograd passes on one tensor only.
"""

FORWARD_BEFORE: Mark[Callable[..., Any]] = Mark("packfree_forward_before")
"""On a patched module: the forward that was on the instance before, to be put back. The instance is
upstream's; only its class is ours, which adds no fields.
"""

FUSED_HEAD: Mark[Any] = Mark("packfree_fused_head")
"""On a patched head: the facts read once from TRL's fused forward. The state of a patched model is
shared by all its modules, and frozen.
"""

VERL_EXPECTED: Mark[Any] = Mark("packfree_verl_expected")
"""On a patched head: the gradients that reached verl's fused forward, which the next step is
expected to get too. verl calls that forward anew in each step, and passes on nothing between steps.
"""

ADDED: Mark[dict[str, nn.Module]] = Mark("packfree_added")
"""On the parent of modules that patching added: the added modules by name, so that only they are
removed.
"""

FLASH_QLA_PLAN: Mark[tuple[int, Tensor, int, Tensor]] = Mark("_flash_qla_prepared_varlen")
"""On offsets for FlashQLA: its plan of a row's chunks, for which its functions have no argument and
look here.
"""

SAVE_PRETRAINED: Mark[Callable[..., Any]] = Mark("save_pretrained")
"""On a model with a multi-token prediction head whose checkpoint has tensors per expert: a
`save_pretrained` that writes them so again. Upstream's has no hook for the layout of a child's
tensors.
"""

MTP_LAYERS: Mark[int] = Mark("mtp_num_hidden_layers")
"""On the configuration of a model with a multi-token prediction head, if it lacks the field: the
number of the head's layers, under the name that upstream and inference engines use, so that it is
saved.
"""
