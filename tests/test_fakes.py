"""The stand-ins for kernel packages compute what they should and refuse what the real ones
refuse.
"""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.ops.delta_rule import recurrent_gated_delta_rule
from hf_packfree.ops.kda import recurrent_kda
from hf_packfree.packing import PackedSequence
from tests.support import relative_rms

PACKED = PackedSequence.from_lengths([5, 64, 1, 7])
TOKENS = PACKED.num_tokens
pytestmark = pytest.mark.usefixtures("stand_ins")


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, TOKENS, *size, generator=generator, dtype=dtype)
        for size in ((2, 8), (2, 8), (4, 16))
    )
    g, beta = (
        -torch.rand(1, TOKENS, 4, generator=generator),
        torch.rand(1, TOKENS, 4, generator=generator),
    )
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_the_delta_rule_is_that_of_the_reference(name):
    from fla.ops import gated_delta_rule as stand_in

    def call(q, k, v, g, beta):
        options = {"cu_seqlens": PACKED.cu_seqlens, "use_qk_l2norm_in_kernel": True}
        return getattr(stand_in, name)(q, k, v, g=g, beta=beta, **options)[0]

    found, wanted = inputs(), inputs()
    outputs = call(*found), recurrent_gated_delta_rule(*wanted, PACKED)
    assert relative_rms(*outputs) <= 1e-6
    for out in outputs:
        out.square().sum().backward()
    assert max(relative_rms(x.grad, y.grad) for x, y in zip(found, wanted)) <= 1e-5


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_kimi_delta_attention_is_that_of_the_reference(name):
    from fla.ops import kda as stand_in

    def call(q, k, v, g, beta):
        options = {"cu_seqlens": PACKED.cu_seqlens, "use_qk_l2norm_in_kernel": True}
        return getattr(stand_in, name)(q, k, v, g=g, beta=beta, **options)[0]

    def per_channel():
        q, k, v, g, beta = inputs()
        decays = (g.detach()[..., :2, None] * torch.linspace(0, 2, 8)).requires_grad_()
        beta = beta.detach()[..., :2].requires_grad_()
        return [q, k, v.detach()[:, :, :2].requires_grad_(), decays, beta]

    found, wanted = per_channel(), per_channel()
    outputs = call(*found), recurrent_kda(*wanted, PACKED)
    assert relative_rms(*outputs) <= 1e-6
    for out in outputs:
        out.square().sum().backward()
    assert max(relative_rms(x.grad, y.grad) for x, y in zip(found, wanted)) <= 1e-5


def test_a_state_carries_on_where_the_first_half_ended():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

    whole, _ = rule(*inputs(), use_qk_l2norm_in_kernel=True)
    first, state = rule(
        *(x[:, :30] for x in inputs()), use_qk_l2norm_in_kernel=True, output_final_state=True
    )
    second, none = rule(
        *(x[:, 30:] for x in inputs()), use_qk_l2norm_in_kernel=True, initial_state=state
    )
    assert none is None and relative_rms(torch.cat([first, second], 1), whole) <= 1e-6


def test_the_convolution_is_ours():
    from causal_conv1d import causal_conv1d_fn

    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(size, generator=generator) for size in ((1, TOKENS, 16), (16, 4), (16,))
    )
    wanted = causal_conv1d(x, weight, PACKED, bias=bias, activation="silu")
    options = {"bias": bias, "activation": "silu"}
    found = causal_conv1d_fn(x.transpose(1, 2), weight, seq_idx=PACKED.seq_idx, **options)
    assert relative_rms(found.transpose(1, 2), wanted) <= 1e-6


def test_tokens_of_no_document_are_not_written():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

    short = torch.tensor([0, 5, 60])
    assert rule(*inputs(), cu_seqlens=short)[0].isnan().all((0, 2, 3)).nonzero()[0] == 60


def test_what_the_real_packages_refuse():
    from causal_conv1d import causal_conv1d_fn
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
    from fla.ops.utils import prepare_chunk_indices

    q, k, v, g, beta = inputs()
    with pytest.raises(ValueError, match="batch of 1, found 2"):
        rule(*(torch.cat([x, x]) for x in (q, k, v, g, beta)), cu_seqlens=PACKED.cu_seqlens)
    with pytest.raises(ValueError, match="3 value heads are no multiple"):
        rule(q, k, v[:, :, :3], g, beta)
    with pytest.raises(AssertionError, match="64-token chunks"):
        rule(
            q,
            k,
            v,
            g,
            beta,
            cu_seqlens=PACKED.cu_seqlens,
            chunk_indices=prepare_chunk_indices(PACKED.cu_seqlens, 32),
        )
    x, weight = torch.randn(1, 16, TOKENS), torch.randn(16, 4)
    with pytest.raises(RuntimeError, match="wanted channel-last"):
        causal_conv1d_fn(x, weight, seq_idx=PACKED.seq_idx)
    last = x.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(RuntimeError, match="wanted int32"):
        causal_conv1d_fn(last, weight, seq_idx=PACKED.seq_idx.long())
    with pytest.raises(RuntimeError, match="multiples of 8"):
        causal_conv1d_fn(last[:, :12], weight[:12])


def test_chunk_indices_are_pairs_of_document_and_chunk():
    from fla.ops.utils import prepare_chunk_indices

    offsets = torch.tensor([0, 3, 3, 133], dtype=torch.int32)
    assert prepare_chunk_indices(offsets, 64).tolist() == [[0, 0], [2, 0], [2, 1], [2, 2]]


def test_they_are_installed_under_their_own_names():
    assert (metadata.version("fla-core"), metadata.version("causal-conv1d")) == ("0.6.0", "1.7.0")
