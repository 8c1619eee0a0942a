"""The Triton kernels of mamba-ssm, with seq_idx; they do not need the package's CUDA extensions."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BackendUnavailable, in_short
from hf_packfree.ops.backend import Fault, Target, dtype_name, installed, needs_triton, too_old
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.versions import VERSIONS

_CHUNK = 256
"""Tokens of a chunk, counted from the row's start; mamba-ssm's authors tuned the kernels for this
size.
"""
_OFFSETS = 2**31
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COMPILED = "selective_scan_cuda"
"""The CUDA extension of Mamba-1's scan: the package imports it, its Triton kernels do not need
it.
"""


def unusable(target: Target) -> str | None:
    """Return why mamba-ssm's kernels cannot run at `target`, or None."""
    if (reason := needs_triton(target)) is not None:
        return reason
    if target.dtype not in _DTYPES:
        return f"it runs in bfloat16, float16 and float32, this is {dtype_name(target.dtype)}"
    row = VERSIONS["mamba-ssm"]
    if find_spec("mamba_ssm") is None:
        return f"mamba-ssm is not installed; {row.install}, which compiles it"
    return too_old(row.name, installed(row.name), "for packed rows") or _broken()


@cache
def _broken() -> str | None:
    """Return why importing mamba-ssm's kernel raises, or None; see
    `hf_packfree.ops.backend.broken`.
    """
    try:
        _kernel()
    except Exception as error:
        # a mismatched binary may raise anything
        found = installed("mamba-ssm") or ""
        return Fault(f"mamba-ssm {found} is broken ({in_short(error)}); reinstall it")
    return None


@uncompiled
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, packed: PackedSequence
) -> Tensor:
    """See `hf_packfree.ops.ssd.ssd`.

    Raises:
        BackendUnavailable: the row is so long that an offset overflows int32, which the kernels
            count in.
    """
    _check_offsets(x, B, C)
    out: Tensor = _kernel()(x, dt, A, B, C, _CHUNK, D=D, seq_idx=packed.seq_idx)
    return out


def _check_offsets(x: Tensor, B: Tensor, C: Tensor) -> None:
    tokens, (heads, size), state = x.shape[1], x.shape[2:], B.shape[3]
    rows = tokens * max(heads * size, *(part.stride(1) for part in (x, B, C)))
    # the largest tensors: a state for each chunk and head, and the products within chunks
    chunks = -(-tokens // _CHUNK) * max(heads * size * state, B.shape[2] * _CHUNK**2)
    if max(rows, chunks) >= _OFFSETS:
        raise BackendUnavailable(
            f"found a row of {tokens} tokens, {heads} heads of {size} and states of {state}, whose "
            f"offsets reach {max(rows, chunks)}; wanted less than 2**31 for mamba-ssm's kernels; "
            "cut the row, or call apply_patches(model, backend={'ssd': 'torch'})"
        )


@cache
def _kernel() -> Any:
    """Import mamba-ssm's function; where the package was built without its CUDA extension, an empty
    module stands in for that during the import.
    """
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ModuleNotFoundError as error:
        if error.name != _COMPILED:
            raise
        sys.modules[_COMPILED] = ModuleType(_COMPILED)
        try:
            from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
        finally:
            del sys.modules[_COMPILED]
    return torch.compiler.disable(mamba_chunk_scan_combined)
