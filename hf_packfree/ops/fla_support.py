"""Shared by the backends that call flash-linear-attention or FlashQLA: when these can run, and the
plan of chunks that they read.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from hf_packfree.ops.backend import Fault, Target, broken, installed, needs_triton, too_old
from hf_packfree.ops.toolkit import has_nvcc, tilelang_off
from hf_packfree.packing import PackedSequence, chunk_plan
from hf_packfree.versions import FLA_BACKWARD_WRONG_ON_HOPPER, HOPPER_ADVICE, VERSIONS

CHUNK = 64
"""Tokens of a chunk, in flash-linear-attention and in FlashQLA on Hopper."""


def needs_fla(target: Target) -> str | None:
    """Return why flash-linear-attention's kernels cannot run at `target`, or None."""
    if (reason := needs_triton(target)) is not None:
        return reason
    found = installed("fla-core") or installed("flash-linear-attention")
    if found is None or find_spec("fla") is None:
        return f"fla-core is not installed; {VERSIONS['fla-core'].install}"
    return too_old("fla-core", found, "for packed rows")


def wide_keys(target: Target) -> str | None:
    """Return that flash-linear-attention's delta rules take no keys as wide as the model's, or
    None.
    """
    size = target.sizes.get("key_size", 0)
    if size <= 256:
        return None
    return f"it takes keys of 256 channels at most, the model has {size}"


def broken_fla(module: str) -> str | None:
    """Return why importing that module of flash-linear-attention fails, or None; call this last,
    since the import takes seconds.
    """
    return broken("fla-core" if installed("fla-core") else "flash-linear-attention", module)


def wrong_on_hopper(target: Target) -> str | None:
    """Return why the backward pass of FLA's gated delta rule would refuse to run at `target` (FLA's
    issue 640), or None: with tilelang and nvcc, FLA calls TileLang's kernels instead.
    """
    if (refuses := refuses_on_hopper(target)) is None:
        return None
    without = f"{refuses} without tilelang and nvcc"
    if find_spec("tilelang") is None or not has_nvcc():
        return f"{without}; {HOPPER_ADVICE}"
    if (setting := tilelang_off()) is not None:
        return Fault(f"{without}, and {setting} in the environment leaves tilelang out; unset it")
    reason = broken("tilelang", "tilelang")
    return reason and Fault(f"{without}, and {reason}")


def refuses_on_hopper(target: Target) -> str | None:
    """Return that FLA's own kernels refuse a gated backward at `target`, or None."""
    triton = Version(installed("triton") or "0")
    since, until = map(Version, FLA_BACKWARD_WRONG_ON_HOPPER)
    if target.capability != (9, 0) or not since <= triton < until:
        return None
    wrong = f"triton {triton} ({since} and later, before {until})"
    return f"its backward refuses to run on Hopper with {wrong}"


def chunk_indices(packed: PackedSequence) -> dict[str, Any]:
    """Return `chunk_indices`, with which flash-linear-attention does not plan chunks itself."""
    return {"chunk_indices": packed.cached(plan_chunks, CHUNK)[1]}


def offsets(packed: PackedSequence) -> Tensor:
    """Return the record's `cu_seqlens` for flash-linear-attention, int32 [N+1].

    Flash-linear-attention keeps what it computes of offsets for as long as it is called with the
    same tensor. In a CUDA graph that would be computed before the capture, and never again; so
    there each call gets a tensor of its own, on the same memory.
    """
    return packed.cu_seqlens.view(-1) if packed.bounded else packed.cu_seqlens


def plan_chunks(packed: PackedSequence, size: int) -> tuple[Tensor, Tensor]:
    """Return, on the row's device, the plan of chunks of `size` tokens: each document's first
    chunk, and each chunk's document.

    Returns:
        int32 [N+1], the number of each document's first chunk, and NC, the number of all chunks.
        int32 [NC, 2], each chunk's document, and its number within the document.
    """
    firsts, document, number = chunk_plan(packed, size)
    device, chunks = packed.cu_seqlens.device, torch.stack((document, number), 1)
    return firsts.to(device, non_blocking=True), chunks.to(device, non_blocking=True)
