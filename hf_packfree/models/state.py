"""The state that the patched modules of a model share: options, chosen backends and observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.errors import PatchConflict
from hf_packfree.graphs.of_model import Graphs
from hf_packfree.models.call import UNPACKED, Call
from hf_packfree.models.run_options import RunOptions
from hf_packfree.ops.backend import BATCH_INVARIANT, HALF
from hf_packfree.ops.table import OPS
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.tree import refuse_tree

Observer = Callable[[PackedSequence | None, tuple[int, int], Any], None]
"""Called by the text model before every training forward with the record (None if upstream runs the
batch), the caller's (B, S) and the mask.
"""
Follower = Callable[[Call, Tensor], None]
"""Called by the text model after every training forward with the call and the last hidden states of
upstream's forward. Both are of the row [1, T], with the record of the caller's batch, or of the
batch [B, S] without a record.
"""


class Kernels(dict[str, str]):
    """{operation: name of the backend that runs}, see `hf_packfree.ops.op.Op.backend`; "torch" for
    operations without an entry.
    """

    def __missing__(self, op: str) -> str:
        return "torch"

    def compiled(self) -> Kernels:
        """Return the backends that run under torch.compile."""
        return Kernels({**self, **_COMPILED})

    def bare(self) -> Kernels:
        """Return the names without the suffix `BATCH_INVARIANT`, as `apply_patches(model,
        backend=...)` takes them and reports print them.
        """
        return Kernels({op: name.removesuffix(BATCH_INVARIANT) for op, name in self.items()})


_COMPILED = {op.name: op.compiled for op in OPS.values() if op.compiled is not None}


@dataclass(frozen=True, kw_only=True)
class PatchState(RunOptions):
    """The options of a patched model, and the backends chosen when it was patched; shared by all
    its patched modules.

    Attributes:
        cuda_half, cuda_single: the backends for packed rows on CUDA, in bfloat16 or float16, and in
            float32.
        elsewhere: the backends on every other device, and in float64.
        mixers: {kind of decoder layer: the attributes that hold its token mixers}, see `Family`;
            they are checked before packed rows.
        attends_for: the attention implementations, as models are loaded with them, in whose place
            the layers run our operation.
        why: {operation, or "operation in float32": why a faster backend is not used on CUDA, as a
            sentence}.
        observers: called before every training forward of the text model.
        followers: called after every training forward of the text model.
        graphs: the CUDA graphs of the layers of the model's text models.
        said: what the model's forward has warned of, which it does once.
    """

    cuda_half: Kernels = field(default_factory=Kernels)
    cuda_single: Kernels = field(default_factory=Kernels)
    elsewhere: Kernels = field(default_factory=Kernels)
    mixers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # which follows from the family
    attends_for: frozenset[str] = field(default=frozenset({"sdpa"}), compare=False)
    why: dict[str, str] = field(default_factory=dict, compare=False)
    observers: list[Observer] = field(default_factory=list, compare=False, repr=False)
    followers: list[Follower] = field(default_factory=list, compare=False, repr=False)
    graphs: Graphs = field(default_factory=Graphs, compare=False, repr=False)
    said: set[str] = field(default_factory=set, compare=False, repr=False)

    def why_of(self, ops: Sequence[str]) -> dict[str, str]:
        """Return the entries of `why` for these operations."""
        return {op: reason for op, reason in self.why.items() if op.partition(" ")[0] in ops}

    def kernels_for(self, device: torch.device, dtype: torch.dtype) -> Kernels:
        """Return the backends for tensors of that device and dtype, which need not be those of the
        model when it was patched.
        """
        chosen = self.elsewhere
        if device.type == "cuda":
            chosen = (
                self.cuda_half
                if dtype in HALF
                else self.cuda_single
                if dtype == torch.float32
                else chosen
            )
        return chosen.compiled() if torch.compiler.is_compiling() else chosen


def find_state(model: nn.Module) -> PatchState | None:
    """Return the state that the patched modules inside a model share, or None if no module is
    patched.
    """
    states = (vars(module).get("packfree") for module in model.modules())
    return next((state for state in states if isinstance(state, PatchState)), None)


def state_of(module: nn.Module) -> PatchState:
    """Return the state of one patched module.

    Raises:
        PatchConflict: the module got its class, but no state, from something else than
            `apply_patches` or `register_patches`.
    """
    state = getattr(module, "packfree", None)
    if not isinstance(state, PatchState):
        raise PatchConflict(
            f"found a {type(module).__name__} of hf_packfree that was never patched; wanted "
            "upstream's class until then; build the model anew and call apply_patches(model)"
        )
    return state


def receive(layer: nn.Module, kwargs: dict[str, Any]) -> PackedSequence | None:
    """Remove the record from a layer's keywords and return it; None means that upstream's forward
    runs.

    Raises:
        PatchConflict: the layer has no state, see `state_of`: its text model is not patched, and
            never passes a record; or what a head hands on came past our text model.
        UnsupportedInput: the record has a tree, and the layer does not follow trees.
    """
    state_of(layer)
    found: Any = kwargs.pop("packed_sequence", None)
    if found is UNPACKED:
        raise PatchConflict(
            f"found a {type(layer).__name__} called by a text model whose forward is not ours, as "
            "where it was set on the instance after patching: it would read no boundaries; wanted "
            "ours; undo that, or let it call the forward that was there"
        )
    packed: PackedSequence | None = found
    if not getattr(layer, "follows_trees", False):
        refuse_tree(packed, f"with layers of {type(layer).__name__}")
    return packed
