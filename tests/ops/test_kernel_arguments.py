"""What the packages of kernels get: heads that are not repeated, gates in fp32, rows that are
not copied.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree import apply_patches
from hf_packfree.ops import conv_delta_rule
from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.ops.delta_rule import fla as fla_rule
from hf_packfree.ops.delta_rule import gated_delta_rule
from hf_packfree.packing import PackedSequence
from tests.support import tiny

PACKED = PackedSequence.from_lengths([5, 64, 1, 7])
TOKENS = PACKED.num_tokens


@pytest.fixture
def calls(stand_ins, monkeypatch):
    """[(arguments, keywords)] of what the stand-ins' functions get."""
    import causal_conv1d as dao
    from fla.ops import gated_delta_rule as rule

    found = []
    for owner, name in (
        (dao, "causal_conv1d_fn"),
        (rule, "chunk_gated_delta_rule"),
    ):
        own = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, own=own, **k: found.append((a, k)) or own(*a, **k)
        )
    fla_rule._kernel.cache_clear()
    yield found
    fla_rule._kernel.cache_clear()


def heads(dtype=torch.bfloat16):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, count, 8).to(dtype) for count in (2, 2, 4))
    return q, k, v, -torch.rand(1, TOKENS, 4).to(dtype), torch.rand(1, TOKENS, 4).to(dtype)


def test_grouped_heads_are_not_repeated_and_the_gate_is_fp32(calls):
    q, k, v, g, beta = heads()
    gated_delta_rule(q, k, v, g, beta, PACKED, qk_l2norm=False, backend="fla")
    ((given, words),) = calls
    assert [x.data_ptr() for x in given[:3]] == [x.data_ptr() for x in (q, k, v)], "a copy"
    assert (given[0].shape[2], given[2].shape[2]) == (2, 4) and given[3].dtype == torch.float32
    assert words["cu_seqlens"] is PACKED.cu_seqlens and not words["use_qk_l2norm_in_kernel"]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_the_layers_repeat_no_heads_and_copy_no_row(family, monkeypatch):
    """q, k and v of the delta rule have their own heads; the convolution reads its channels
    last, as projected.
    """
    model = apply_patches(tiny(family))
    config, seen = model.config, {}
    for name in ("gated_delta_rule", "qkv_conv"):
        own = getattr(conv_delta_rule, name)
        monkeypatch.setattr(
            conv_delta_rule,
            name,
            lambda *a, own=own, name=name, **k: seen.update({name: a}) or own(*a, **k),
        )
    ids = torch.randint(0, config.vocab_size, (1, 12))
    model.model(input_ids=ids, position_ids=torch.arange(12)[None] % 5, use_cache=False)
    counts = config.linear_num_key_heads, config.linear_num_key_heads, config.linear_num_value_heads
    assert (
        counts[0] < counts[2] and tuple(x.shape[2] for x in seen["gated_delta_rule"][:3]) == counts
    )
    assert seen["qkv_conv"][0].stride(2) == 1


@pytest.mark.parametrize("cut", [slice(0, 32), slice(8, 40)], ids=["first", "further"])
def test_the_convolution_copies_nothing(cut, calls):
    """A part of a wider projection goes in as it is, and what comes out has its channels last
    again.
    """
    x = torch.randn(1, TOKENS, 48)[..., cut]
    out = causal_conv1d(x, torch.randn(32, 4), PACKED, backend="causal_conv1d")
    ((given, words),) = calls
    assert given[0].data_ptr() == x.data_ptr() and out.stride(2) == 1
    assert given[0].shape == (1, 32, TOKENS) and given[0].stride(1) == 1
    assert words["seq_idx"] is PACKED.seq_idx
