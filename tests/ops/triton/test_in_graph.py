"""Our kernels in a whole graph: bit for bit what they give in eager mode, gradients included."""

from __future__ import annotations

import torch

from hf_packfree.ops.conv import qkv_conv, triton_native
from hf_packfree.packing import PackedSequence

LENGTHS = [5, 7, 1]


def mix(x, weight, packed):
    """q, k and v of one head of 16."""
    return torch.cat(
        qkv_conv(x, weight, packed, (1, 1), (16, 16), qk_l2norm=True, backend="triton")
    ).sin()


def test_convolution(launched, monkeypatch):
    # the interpreter takes seconds for a long one
    monkeypatch.setattr(triton_native, "_STRIP", 16)
    tokens = sum(LENGTHS)
    x, weight = torch.randn(1, tokens, 48, requires_grad=True), torch.randn(48, 4)
    weight.requires_grad_()
    found = []
    for call in (mix, torch.compile(mix, backend="aot_eager", fullgraph=True)):
        out = call(x, weight, PackedSequence.from_lengths(LENGTHS))
        found.append((out, *torch.autograd.grad(out.sum(), (x, weight))))
    assert launched >= {"conv", "conv_backward"}
    assert all(map(torch.equal, *found))
    leaking = mix(x, weight, PackedSequence.from_lengths([tokens]))
    assert (leaking - found[0][0])[:, LENGTHS[0] :].abs().max() > 1e-2
