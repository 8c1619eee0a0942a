"""Choice of backends, once, when a model is patched, for every device and precision that the model
may run in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from hf_packfree.errors import BackendUnavailable
from hf_packfree.models.state import Kernels, PatchState
from hf_packfree.ops.backend import Backend, Fault, Target
from hf_packfree.ops.table import OPS

Choice = str | Mapping[str, str]


def choose_backends(
    backend: Choice,
    sizes: Mapping[str, int] | None = None,
    ops: Sequence[str] | None = None,
    *,
    batch_invariant: bool = False,
) -> PatchState:
    """Return the backends for every device and precision, in the state that patched modules carry.

    Args:
        backend: "auto" (for every op its first backend that can run), the name of a backend (for
            every op that has it), or {op: name}.
        sizes: of the model, see `Target.sizes`; missing sizes are not checked.
        ops: the ops that the model calls, all if not given; forced names of other ops are checked,
            but not used.
        batch_invariant: whether to run the backends such that a document gets the same bits in
            every row.

    A backend is chosen for CUDA only if it runs on every visible GPU, since the model may be moved
    to any.

    Raises:
        BackendUnavailable: no operation has a backend of that name, or a forced backend cannot run
            here.
    """
    ops = tuple(OPS) if ops is None else ops
    forced = {op: name for op, name in forced_backends(backend).items() if op in ops}
    gpu = torch.cuda.is_available()
    choose = partial(_choose, ops=ops, forced=forced, batch_invariant=batch_invariant)
    elsewhere, _ = choose([Target("cpu", None, torch.float32, dict(sizes or {}))], in_doubt=gpu)
    if not gpu:
        return PatchState(elsewhere=elsewhere)
    half, why = choose(_gpus(torch.bfloat16, sizes or {}))
    single, why_single = choose(_gpus(torch.float32, sizes or {}), in_doubt=True)
    why |= {
        f"{op} in float32": reason for op, reason in why_single.items() if reason != why.get(op)
    }
    return PatchState(cuda_half=half, cuda_single=single, elsewhere=elsewhere, why=why)


def _gpus(dtype: torch.dtype, sizes: Mapping[str, int]) -> list[Target]:
    """Return a target for every kind of visible GPU."""
    kinds = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return [Target("cuda", capability, dtype, dict(sizes)) for capability in sorted(kinds)]


def forced_backends(backend: Choice) -> dict[str, str]:
    """Return {op: name} of the forced backends; raises `BackendUnavailable` for unknown names."""
    if isinstance(backend, str):
        known = {name: backend for name, op in OPS.items() if backend in op.backends}
        if backend != "auto" and not known:
            raise BackendUnavailable(
                f"found backend={backend!r}; wanted 'auto' or {_all_names()}; pass one of them"
            )
        return known
    if not isinstance(backend, Mapping):
        raise BackendUnavailable(
            f"found backend={backend!r}; wanted 'auto', a name or {{op: name}}: {_all_names()}; "
            "pass one of them"
        )
    for op, name in backend.items():
        if op not in OPS or not isinstance(name, str) or name not in {"auto", *OPS[op].backends}:
            raise BackendUnavailable(
                f"found {op}={name} in backend={backend!r}; wanted {_all_names()}; pass one of them"
            )
    return {op: name for op, name in backend.items() if name != "auto"}


def _all_names() -> str:
    return "; ".join(f"{name}: {', '.join(op.backends)}" for name, op in OPS.items())


def _choose(
    targets: Sequence[Target],
    *,
    ops: Sequence[str],
    forced: Mapping[str, str],
    batch_invariant: bool,
    in_doubt: bool = False,
) -> tuple[Kernels, dict[str, str]]:
    """Return for each op the forced backend, or the first one that can run at all `targets`; and
    why the backends before it cannot.

    A forced backend that cannot run is refused; with `in_doubt`, for targets where the model may
    never run, it is replaced.
    """
    names, why = {}, {}
    for op in ops:
        backends: Mapping[str, Backend] = OPS[op].backends
        refused: dict[str, str] = {}
        wanted = forced.get(op)
        if wanted is not None:
            reason = _unusable(backends[wanted], targets)
            if reason is None:
                names[op] = wanted
                continue
            if not in_doubt:
                raise _refusal(op, wanted, reason, targets)
            refused[wanted] = reason
        names[op], before = _first_usable(backends, targets)
        refused |= before
        if refused:
            kind = Fault if any(isinstance(reason, Fault) for reason in refused.values()) else str
            why[op] = kind("; ".join(f"not {name}: {because}" for name, because in refused.items()))
    if batch_invariant:
        names = {op: OPS[op].for_every_row(name) for op, name in names.items()}
    return Kernels(names), why


def _refusal(op: str, wanted: str, reason: str, targets: Sequence[Target]) -> BackendUnavailable:
    backends: Mapping[str, Backend] = OPS[op].backends
    usable = [name for name, backend in backends.items() if _unusable(backend, targets) is None]
    return BackendUnavailable(
        f"found {op} backend {wanted!r} forced, but {reason}; wanted one that runs here: "
        f"{', '.join(usable)}; pass one of them or 'auto' as backend"
    )


def _unusable(backend: Backend, targets: Sequence[Target]) -> str | None:
    """Return why a backend cannot run at one of `targets`, or None."""
    return next(
        (reason for target in targets if (reason := backend.unusable(target)) is not None), None
    )


def _first_usable(
    backends: Mapping[str, Backend], targets: Sequence[Target]
) -> tuple[str, dict[str, str]]:
    """Return the first backend that can run, and why those before it cannot; packages of later ones
    are not imported.
    """
    refused: dict[str, str] = {}
    for name, backend in backends.items():
        reason = _unusable(backend, targets)
        if reason is None:
            return name, refused
        refused[name] = reason
    raise AssertionError("the last backend of an op runs everywhere")
