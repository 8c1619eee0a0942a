"""Mamba-2's SSD token by token: the definition that every backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence


def recurrent_ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, packed: PackedSequence
) -> Tensor:
    """Run each document of the row from a zero state; clear rather than fast, differentiable by
    autograd.

    With S [N, P] the state, and for every token in turn (Dao & Gu, arXiv:2405.21060, eq. 1 with
    Mamba-2's discretisation, S transposed):

        S <- exp(dt A) S;    S <- S + B (dt x)^T;    y = S^T C + D x

    Args and returns: as `hf_packfree.ops.ssd.ssd`, computed in x's dtype if fp64, else fp32.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    values, steps, write, read = (part[0].to(dtype) for part in (x, dt, B, C))
    share = values.shape[1] // write.shape[1]
    inputs = (
        (steps * A.to(dtype)).exp(),
        steps[..., None] * values,
        write.repeat_interleave(share, 1),
        read.repeat_interleave(share, 1),
    )
    documents = zip(*(part.split(packed.lengths) for part in inputs), strict=True)
    outputs = torch.cat([_run_document(*document) for document in documents])
    return (outputs + D.to(dtype)[:, None] * values)[None].to(x.dtype)


def _run_document(decay: Tensor, u: Tensor, B: Tensor, C: Tensor) -> Tensor:
    state, outputs = u.new_zeros(*B.shape[1:], u.shape[-1]), []
    for decay_t, u_t, B_t, C_t in zip(decay, u, B, C, strict=True):
        state = state * decay_t[:, None, None] + torch.einsum("hn,hp->hnp", B_t, u_t)
        outputs.append(torch.einsum("hn,hnp->hp", C_t, state))
    return torch.stack(outputs)
