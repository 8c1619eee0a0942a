"""The formulas of the operations' README files, written out: equal to autograd and to the operation."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from hf_packfree import PackedSequence
from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.ops.delta_rule import gated_delta_rule_with_states
from hf_packfree.ops.fused import projections
from hf_packfree.ops.fused.computed_weights import scaled
from hf_packfree.ops.fused.lora import Adapter, LoraLinear
from hf_packfree.ops.kda import kda
from hf_packfree.ops.loss import Wanted, linear_cross_entropy, linear_log_probs
from hf_packfree.ops.ssd import ssd
from tests.support import loss_after

T, K, V = 13, 5, 4


def near(found, wanted, rtol=1e-10):
    return torch.allclose(found.double(), wanted, rtol=rtol, atol=rtol / 100)


@pytest.fixture
def rule():
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(T, K).double(), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(T, V).double(), -torch.rand(T).double(), torch.rand(T).double()
    return q, k, v, g, beta, torch.randn(K, V).double()


def by_tokens(q, k, v, g, beta, state):
    """Forward of the delta rule's README; the states before each write, the writes, the outputs."""
    decayed, writes, states, outs = [], [], [], []
    for t in range(len(q)):
        decayed.append(g[t].exp() * state)
        writes.append(beta[t] * (v[t] - decayed[t].mT @ k[t]))
        states.append(state := decayed[t] + k[t][:, None] * writes[t])
        outs.append(K**-0.5 * state.mT @ q[t])
    return decayed, writes, states, torch.stack(outs)


def test_delta_rule_forward_and_backward(rule):
    leaves = [x.clone().requires_grad_() for x in rule]
    heads = [x[None, :, None] for x in leaves[:5]]
    record = PackedSequence.from_lengths([T])
    out, final = gated_delta_rule_with_states(
        *heads, record, leaves[5][None, None], qk_l2norm=False
    )
    decayed, writes, states, wanted = by_tokens(*rule)
    assert near(out[0, :, 0], wanted) and near(final[0, 0], states[-1])
    d_out, d_final = torch.randn(T, V).double(), torch.randn(K, V).double()
    found = torch.autograd.grad([out[0, :, 0], final[0, 0]], leaves, [d_out, d_final])
    (q, k, v, g, beta, _), dS = rule, d_final
    dq, dk, dv, dg, dbeta = map(torch.zeros_like, (q, k, v, g, beta))
    for t in reversed(range(T)):
        dS = dS + K**-0.5 * q[t][:, None] * d_out[t]
        dq[t], du = K**-0.5 * states[t] @ d_out[t], beta[t] * dS.mT @ k[t]
        dv[t], dk[t] = du, dS @ writes[t] - decayed[t] @ du
        dbeta[t] = (v[t] - decayed[t].mT @ k[t]) @ (dS.mT @ k[t])
        dS = dS - k[t][:, None] * du
        dg[t] = (dS * decayed[t]).sum()
        dS = g[t].exp() * dS
    assert all(map(near, found, (dq, dk, dv, dg, dbeta, dS)))


def test_delta_rule_in_chunks_and_as_an_affine_map(rule):
    q, k, v, g, beta, state = rule
    _, writes, states, outs = by_tokens(*rule)
    G = g.cumsum(0)
    decay = (G[:, None] - G).tril().exp()
    A = (beta[:, None] * decay * (k @ k.mT)).tril(-1)
    U = torch.linalg.solve(
        torch.eye(T).double() + A, beta[:, None] * (v - G.exp()[:, None] * (k @ state))
    )
    read = K**-0.5 * (G.exp()[:, None] * (q @ state) + ((q @ k.mT) * decay).tril() @ U)
    after = G[-1].exp() * state + ((G[-1] - G).exp()[:, None] * k).mT @ U
    assert near(U, torch.stack(writes)) and near(read, outs) and near(after, states[-1])
    B = by_tokens(q, k, v, g, beta, torch.zeros_like(state))[2][-1]
    M = torch.eye(K).double()
    for t in range(T):
        M = g[t].exp() * (M - beta[t] * k[t][:, None] * (k[t] @ M))
    assert near(M @ state + B, states[-1])


def test_ssd_forward_backward_and_in_chunks():
    torch.manual_seed(0)
    x, B, C = (torch.randn(T, size).double() for size in (V, K, K))
    dt, A, D = torch.rand(T).double(), torch.tensor(-0.5).double(), torch.tensor(0.7).double()
    leaves = [one.clone().requires_grad_() for one in (x, dt, A, B, C, D)]
    heads = [one[None, :, None] if one.dim() else one[None] for one in leaves]
    y = ssd(*heads, PackedSequence.from_lengths([T]))[0, :, 0]
    states = [torch.zeros(K, V).double()]
    for t in range(T):
        states.append((dt[t] * A).exp() * states[t] + B[t][:, None] * (dt[t] * x[t]))
    assert near(y, torch.stack([states[t + 1].mT @ C[t] + D * x[t] for t in range(T)]))
    d_y = torch.randn_like(x)
    found, dS = torch.autograd.grad(y, leaves, d_y), torch.zeros(K, V).double()
    dx, ddt, dA, dB, dC, dD = map(torch.zeros_like, (x, dt, A, B, C, D))
    for t in reversed(range(T)):
        dS, dC[t] = dS + C[t][:, None] * d_y[t], states[t + 1] @ d_y[t]
        du, dB[t] = dS.mT @ B[t], dt[t] * dS @ x[t]
        dg = (dt[t] * A).exp() * (dS * states[t]).sum()
        dx[t], ddt[t] = dt[t] * du + D * d_y[t], du @ x[t] + A * dg
        dA, dD, dS = dA + dt[t] * dg, dD + d_y[t] @ x[t], (dt[t] * A).exp() * dS
    assert all(map(near, found, (dx, ddt, dA, dB, dC, dD)))
    S, U, G = states[3], (dt[:, None] * x)[3:], (dt[3:] * A).cumsum(0)
    decay, B, C = (G[:, None] - G).tril().exp(), B[3:], C[3:]
    read = ((C @ B.mT).tril() * decay) @ U + G.exp()[:, None] * (C @ S) + D * x[3:]
    after = G[-1].exp() * S + B.mT @ ((G[-1] - G).exp()[:, None] * U)
    assert near(read, y[3:]) and near(after, states[-1])


def test_kda(rule):
    q, k, v, _, beta, _ = rule
    g = -torch.rand(T, K).double()
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    heads, record = [x[None, :, None] for x in leaves], PackedSequence.from_lengths([T])
    out = kda(*heads, record, qk_l2norm=False)[0, :, 0]
    decayed, writes, states, wanted = by_tokens(q, k, v, g[:, :, None], beta, torch.zeros(K, V))
    assert near(out, wanted)
    d_out = torch.randn(T, V).double()
    found = torch.autograd.grad(out, leaves, d_out)
    dq, dk, dv, dg, dbeta = map(torch.zeros_like, (q, k, v, g, beta))
    dS = torch.zeros(K, V).double()
    for t in reversed(range(T)):
        dS = dS + K**-0.5 * q[t][:, None] * d_out[t]
        dq[t], du = K**-0.5 * states[t] @ d_out[t], beta[t] * dS.mT @ k[t]
        dv[t], dk[t] = du, dS @ writes[t] - decayed[t] @ du
        dbeta[t] = (v[t] - decayed[t].mT @ k[t]) @ (dS.mT @ k[t])
        dS = dS - k[t][:, None] * du
        dg[t] = (dS * decayed[t]).sum(1)
        dS = g[t].exp()[:, None] * dS
    assert all(map(near, found, (dq, dk, dv, dg, dbeta)))


def test_kda_in_chunks(rule):
    q, k, v, _, beta, state = rule
    g = -torch.rand(T, K).double()
    _, writes, states, outs = by_tokens(q, k, v, g[:, :, None], beta, state)
    G = g.cumsum(0)
    products = [
        torch.einsum("ic,jc,ijc->ij", x, k, (G[:, None] - G).exp()) for x in (beta[:, None] * k, q)
    ]
    A, P = products[0].tril(-1), products[1].tril()
    U = torch.linalg.solve(torch.eye(T).double() + A, beta[:, None] * (v - (G.exp() * k) @ state))
    read = K**-0.5 * ((G.exp() * q) @ state + P @ U)
    after = G[-1].exp()[:, None] * state + ((G[-1] - G).exp() * k).mT @ U
    assert near(U, torch.stack(writes)) and near(read, outs) and near(after, states[-1])


def test_convolution():
    torch.manual_seed(0)
    lengths, channels, taps = [4, 1, 6], 3, 4
    x, w, b = torch.randn(11, channels), torch.randn(channels, taps), torch.randn(channels)
    x, w, b = (one.double().requires_grad_() for one in (x, w, b))
    y = causal_conv1d(x[None], w, PackedSequence.from_lengths(lengths), bias=b)[0]
    d_y = torch.randn_like(y)
    found, places = torch.autograd.grad(y, [x, w, b], d_y), range(taps)
    dx, dw, du, outs = torch.zeros_like(x), torch.zeros_like(w), [], []
    documents = [one.detach() for one in (x, d_y)]
    parts = zip(*(one.split(lengths) for one in documents), dx.split(lengths), strict=True)
    for x_doc, d_doc, dx_doc in parts:
        padded = torch.cat([torch.zeros(taps - 1, channels).double(), x_doc])
        u = b.detach() + sum(w.detach()[:, i] * padded[i : i + len(x_doc)] for i in places)
        outs.append(silu(u))
        du.append(d_doc * u.sigmoid() * (1 + u * (1 - u.sigmoid())))
        behind = torch.cat([du[-1], torch.zeros(taps - 1, channels).double()])
        for i in places:
            dx_doc += w.detach()[:, i] * behind[taps - 1 - i :][: len(x_doc)]
            dw[:, i] += (du[-1] * padded[i : i + len(x_doc)]).sum(0)
    assert near(y, torch.cat(outs)) and all(map(near, found, (dx, dw, torch.cat(du).sum(0))))


def test_loss_and_log_probabilities():
    torch.manual_seed(0)
    x, W, b = torch.randn(T, K), torch.randn(V, K), torch.randn(V)
    x, W, b = (one.double().requires_grad_() for one in (x, W, b))
    y, z = torch.arange(T) % V, linear(x, W, b).detach()
    onehot, p = torch.eye(V).double()[y], z.softmax(-1)
    loss = linear_cross_entropy(x, W, y, bias=b)
    found, dz = torch.autograd.grad(loss, [x, W, b]), p - onehot
    # which is fp32, and so are its sums
    assert near(loss, (z.logsumexp(-1) - (z * onehot).sum(-1)).sum(), 1e-6)
    wanted = dz @ W.detach(), dz.mT @ x.detach(), dz.sum(0)
    assert all(near(*pair, 1e-5) for pair in zip(found, wanted, strict=True))
    tau, a, c = 0.7, torch.randn(T).double(), torch.randn(T).double()
    out = linear_log_probs(x, W, y, bias=b, temperature=tau, wanted=Wanted(entropy=True))
    p, lse = (z / tau).softmax(-1), (z / tau).logsumexp(-1)
    H = lse - (p * z / tau).sum(-1)
    assert near(out.log_probs, (z * onehot).sum(-1) / tau - lse) and near(out.entropy, H)
    dz = (a[:, None] * (onehot - p) - c[:, None] * p * (p.log() + H[:, None])) / tau
    wanted = dz @ W.detach(), dz.mT @ x.detach(), dz.sum(0)
    found = torch.autograd.grad([out.log_probs, out.entropy], [x, W, b], [a, c])
    assert all(map(near, found, wanted))


@pytest.mark.parametrize("capped", [False, True], ids=["scaled", "capped"])
def test_loss_of_a_head_that_scales_or_caps(capped):
    torch.manual_seed(0)
    x, W = (torch.randn(size, K).double().requires_grad_() for size in (T, V))
    y, z, a, c = torch.arange(T) % V, (x @ W.mT).detach(), 0.4 if capped else 3.0, 1 / 0.4
    loss = loss_after(lambda z: (z * a).tanh() * c if capped else z * a, x, W, y, "torch")
    found, onehot = torch.autograd.grad(loss, [x, W]), torch.eye(V).double()[y]
    u = c * (a * z).tanh() if capped else a * z
    slope = a * c * (1 - (a * z).tanh() ** 2) if capped else a
    assert near(loss, (u.logsumexp(-1) - (u * onehot).sum(-1)).sum(), 1e-6)
    dz = (u.softmax(-1) - onehot) * slope
    wanted = dz @ W.detach(), dz.mT @ x.detach()
    assert all(near(*pair, 1e-5) for pair in zip(found, wanted, strict=True))


@pytest.fixture
def lora():
    torch.manual_seed(0)
    D, F, r = 6, 4, 2
    x, W, A, B = (torch.randn(*size).double() for size in ((T, D), (F, D), (r, D), (F, r)))
    return *(one.requires_grad_() for one in (x, A, B)), W, 0.5, torch.randn(T, F).double()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_lora_forward_and_backward(lora, backend):
    x, A, B, W, s, dy = lora
    (y,) = projections(x, LoraLinear(W, (Adapter(A, B, s),)), backend=backend)
    found = torch.autograd.grad(y, [x, A, B], dy)
    h = s * x @ A.mT
    assert near(y, x @ W.mT + h @ B.mT)
    assert near(y, torch.cat([x, h], 1) @ torch.cat([W, B], 1).mT)
    dh = s * dy @ B
    dx = torch.cat([dy, dh], 1) @ torch.cat([W.mT, A.mT], 1).mT
    assert all(map(near, found, (dx, dh.mT @ x, dy.mT @ h)))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_dora_forward_and_backward(lora, backend):
    x, A, B, W, s, dy = lora
    m, norm = torch.rand(4).double().requires_grad_(), (W + s * B @ A).norm(dim=1).detach()
    c, h = m / norm, s * x @ A.mT
    layer = LoraLinear(scaled(W, c, W.dtype), (Adapter(A, c[:, None] * B, s),))
    (y,) = projections(x, layer, backend=backend)
    assert near(y, c * (x @ W.mT + h @ B.mT))
    found = torch.autograd.grad(y, [m, A, B, x], dy)
    dW, dB, dh = dy.mT @ x, dy.mT @ h, s * dy @ (c[:, None] * B)
    dm = ((dW * W).sum(1) + (dB * B).sum(1)) / norm
    wanted = dm, dh.mT @ x, c[:, None] * dB, dy @ (c[:, None] * W) + dh @ A
    # dW of a weight that is computed is fp32 in our op, and so is dm
    rtols = 1e-6 if backend == "triton" else 1e-10, 1e-10, 1e-10, 1e-10
    assert all(map(near, found, wanted, rtols))
