"""Which implementation runs: chosen once, when a model is patched."""

from __future__ import annotations

from hf_packfree.errors import BackendUnavailable
from hf_packfree.models.state import PatchState
from hf_packfree.ops import attention, conv, delta_rule


def choose_backends(backend: str, unpacked: str) -> PatchState:
    """Return the state that patched modules carry.

    Args:
        backend: "auto" (the fastest that is exact here), or a name that every operation must have.
        unpacked: "upstream" or "native".

    Raises:
        BackendUnavailable: an operation has no such backend.
        ValueError: `unpacked` is neither.
    """
    if unpacked not in ("upstream", "native"):
        raise ValueError(f"found unpacked={unpacked!r}; wanted 'upstream' or 'native'")
    name = "torch" if backend == "auto" else backend
    for op in (conv, delta_rule, attention):
        if name not in op.BACKENDS:
            operation = op.__name__.rpartition(".")[2]
            raise BackendUnavailable(
                f"found backend={backend!r}; wanted 'auto' or, for {operation}, one of {sorted(op.BACKENDS)}"
            )
    return PatchState(conv=name, delta_rule=name, attention=name, unpacked=unpacked)
