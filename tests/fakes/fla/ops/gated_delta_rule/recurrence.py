"""The gated delta rule as one triangular system per document, in fp64; its own arithmetic, not
hf_packfree's.

With G the running sum of the log decay and u_t what token t writes, the state after t is exp(G_t)
S_0 plus the sum over i <= t of exp(G_t - G_i) k_i u_i^T, and what is written follows from it (Yang
et al., arXiv:2412.06464, eq. 10):

    u_t = beta_t (v_t - exp(G_t) S_0^T k_t - sum over i < t of exp(G_t - G_i) (k_t . k_i) u_i)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

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
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g (log decay), beta: [B, T, HV].
    """
    groups = v.shape[2] // q.shape[2]
    wide = (
        q.repeat_interleave(groups, 2),
        k.repeat_interleave(groups, 2),
        v,
        g[..., None],
        beta[..., None],
    )
    query, key, value, decay, write = (side_by_side(x, spans) for x in wide)
    query = query * (k.shape[-1] ** -0.5 if scale is None else scale)
    state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    state = state if initial_state is None else initial_state.double()

    # G, [N, HV, L, 1]
    total = decay.cumsum(2)
    future = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=q.device).triu(1)
    between = (total - total.mT).masked_fill(future, -torch.inf).exp()
    system = (write * between * (key @ key.mT)).tril(-1)
    system = system + torch.eye(system.shape[-1], dtype=system.dtype, device=q.device)
    written = torch.linalg.solve_triangular(
        system, write * (value - total.exp() * (key @ state)), upper=False
    )
    outputs = total.exp() * (query @ state) + (between * (query @ key.mT)) @ written
    final = total[:, :, -1:].exp() * state + (key * (total[:, :, -1:] - total).exp()).mT @ written

    out = torch.full_like(v, float("nan"))
    for number, (row, start, stop) in enumerate(spans):
        out[row, start:stop] = outputs[number, :, : stop - start].transpose(0, 1).to(v.dtype)
    return out, final.float()


def unit(x: Tensor) -> Tensor:
    """Return x over its length along the last axis."""
    return x / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt().to(x.dtype)


def log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """Return the gate that the kernel computes from its raw input."""
    return -A_log.float().exp() * F.softplus(
        g.float() if dt_bias is None else g.float() + dt_bias.float()
    )


def side_by_side(x: Tensor, spans: Spans) -> Tensor:
    """[N, heads, longest, ...]: zeros after a document's end change no state, since they neither
    decay nor write.
    """
    return pad_sequence(
        [x[row, start:stop].double() for row, start, stop in spans], batch_first=True
    ).transpose(1, 2)
