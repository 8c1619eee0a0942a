"""Which implementation runs: chosen once, when a model is patched, for every kind of tensor it may meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from hf_packfree.errors import BackendUnavailable
from hf_packfree.models.state import Kernels, PatchState
from hf_packfree.ops import add_norm, attention, conv, delta_rule, gated_norm, gates, norm_rope, output_gate, swiglu
from hf_packfree.ops.backend import Backend, Site

VARIABLE = "PACKFREE_BACKEND"
"""Environment variable read where `backend` is "auto": a name, or "conv=fla,delta_rule=torch"."""

OPS: dict[str, ModuleType] = {
    "conv": conv,
    "delta_rule": delta_rule,
    "attention": attention,
    "gated_norm": gated_norm,
    "norm_rope": norm_rope,
    "output_gate": output_gate,
    "gates": gates,
    "add_norm": add_norm,
    "swiglu": swiglu,
}

Choice = str | Mapping[str, str]


def choose_backends(backend: Choice, unpacked: str, config: Any = None) -> PatchState:
    """Return the state that patched modules carry.

    Args:
        backend: "auto" (of every op, the first in its `BACKENDS` that can run), a name (of every op that has it), or
            {op: name}.
        unpacked: "upstream" or "native".
        config: of the text model; None: its sizes are not checked.

    Raises:
        BackendUnavailable: no operation has such a backend, or it cannot run here.
        ValueError: `unpacked` is neither.
    """
    if unpacked not in ("upstream", "native"):
        raise ValueError(f"found unpacked={unpacked!r}; wanted 'upstream' or 'native'")
    forced = _forced(os.environ.get(VARIABLE, "auto") if backend == "auto" else backend)
    sizes = {} if config is None else model_sizes(config)
    gpu = torch.cuda.is_available()
    elsewhere, _ = _choose(Site("cpu", None, torch.float32, sizes), forced, in_doubt=gpu)
    if not gpu:
        return PatchState(elsewhere=elsewhere, unpacked=unpacked)
    capability = min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    half, why = _choose(Site("cuda", capability, torch.bfloat16, sizes), forced)
    single, why_single = _choose(Site("cuda", capability, torch.float32, sizes), forced, in_doubt=True)
    why |= {f"{op} in float32": reason for op, reason in why_single.items() if reason != why.get(op)}
    return PatchState(cuda_half=half, cuda_single=single, elsewhere=elsewhere, unpacked=unpacked, why=why)


def model_sizes(config: Any) -> dict[str, int]:
    """Return what backends ask about, from a text model's config."""
    names = {
        "key_heads": "linear_num_key_heads",
        "value_heads": "linear_num_value_heads",
        "key_size": "linear_key_head_dim",
        "value_size": "linear_value_head_dim",
        "taps": "linear_conv_kernel_dim",
        "head_size": "head_dim",
    }
    return {size: value for size, name in names.items() if isinstance(value := getattr(config, name, None), int)}


def _forced(backend: Choice) -> dict[str, str]:
    """Return {op: name} of what is not left to us."""
    if isinstance(backend, str) and "=" in backend:
        pairs = [part.strip().split("=", 1) for part in backend.split(",")]
        backend = {pair[0]: pair[-1] if len(pair) == 2 else "" for pair in pairs}
    if isinstance(backend, str):
        known = {op: backend for op, module in OPS.items() if backend in module.BACKENDS}
        if backend != "auto" and not known:
            raise BackendUnavailable(f"found backend={backend!r}; wanted 'auto' or {_all_names()}; pass one of them")
        return known
    for op, name in backend.items():
        if op not in OPS or name not in {"auto", *OPS[op].BACKENDS}:
            raise BackendUnavailable(f"found backend {op}={name}; wanted {_all_names()}; pass one of them")
    return {op: name for op, name in backend.items() if name != "auto"}


def _all_names() -> str:
    return "; ".join(f"{op}: {', '.join(module.BACKENDS)}" for op, module in OPS.items())


def _choose(site: Site, forced: Mapping[str, str], in_doubt: bool = False) -> tuple[Kernels, dict[str, str]]:
    """Return the first backend of every op that can run at `site`, and why those before it, or the forced one, cannot.

    A forced one that cannot is refused, or, `in_doubt` whether the model ever comes there, replaced.
    """
    names, why = {}, {}
    for op, module in OPS.items():
        backends: dict[str, Backend] = module.BACKENDS
        asked = forced.get(op)
        if asked is not None:
            reason = backends[asked].unusable(site)
            if reason is None:
                names[op] = asked
                continue
            if not in_doubt:
                usable = [name for name in backends if backends[name].exact and backends[name].unusable(site) is None]
                raise BackendUnavailable(
                    f"found {op} backend {asked!r} asked for, but {reason}; wanted one that runs here: "
                    f"{', '.join(usable)}; pass one of them or 'auto' as backend, or in {VARIABLE}"
                )
        names[op], refused = _first_usable(backends, site)
        refused = refused if asked is None else {asked: str(reason)}
        if refused:
            why[op] = "; ".join(f"not {name}: {because}" for name, because in refused.items())
    return Kernels(**names), why


def _first_usable(backends: Mapping[str, Backend], site: Site) -> tuple[str, dict[str, str]]:
    """Return the first exact backend that can run, and why those before it cannot; later ones are not even imported."""
    refused: dict[str, str] = {}
    for name, backend in backends.items():
        if backend.exact:
            reason = backend.unusable(site)
            if reason is None:
                return name, refused
            refused[name] = reason
    raise AssertionError("torch runs everywhere")
