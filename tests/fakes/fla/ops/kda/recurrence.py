"""Kimi Delta Attention as one triangular system per document, in fp64; its own arithmetic, not
hf_packfree's: as that of the gated delta rule beside it, with every decay between two tokens a
vector of channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops.gated_delta_rule.recurrence import side_by_side
from fla.ops.utils.index import Spans


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    spans: Spans,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, HV, V] and final states [N, HV, K, V], of what the spans cover.

    Tokens outside every span come out as NaN: the kernels never write them.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g (log decay): [B, T, HV, K]; beta: [B, T, HV].
    """
    groups = v.shape[2] // q.shape[2]
    wide = (q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2), v, g, beta[..., None])
    query, key, value, decay, write = (side_by_side(x, spans) for x in wide)
    query = query * (k.shape[-1] ** -0.5 if scale is None else scale)
    state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    state = state if initial_state is None else initial_state.double()

    # G, [N, HV, L, K], and what decays from one token to another, [N, HV, L, L, K]
    total = decay.cumsum(2)
    future = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=q.device).triu(1)
    between = (total[:, :, :, None] - total[:, :, None]).masked_fill(future[..., None], -torch.inf)
    products = [torch.einsum("nhik,nhjk,nhijk->nhij", x, key, between.exp()) for x in (key, query)]
    system = (write * products[0]).tril(-1)
    system = system + torch.eye(system.shape[-1], dtype=system.dtype, device=q.device)
    written = torch.linalg.solve_triangular(
        system, write * (value - (total.exp() * key) @ state), upper=False
    )
    outputs = (total.exp() * query) @ state + products[1] @ written
    last = total[:, :, -1:]
    final = last.exp().mT * state + (key * (last - total).exp()).mT @ written

    out = torch.full_like(v, float("nan"))
    for number, (row, start, stop) in enumerate(spans):
        out[row, start:stop] = outputs[number, :, : stop - start].transpose(0, 1).to(v.dtype)
    return out, final.float()
