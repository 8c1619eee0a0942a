"""The causal convolution against `F.conv1d` per document in fp64, and its promises about
packing.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.conv import causal_conv1d, qkv_conv, torch_native
from hf_packfree.ops.conv.triton_native import plan_masks
from hf_packfree.packing import PackedSequence

MIXES = [
    [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200, 513],
    [513, 200, 129, 128, 127, 65, 64, 63, 5, 4, 3, 2, 1],
    [1, 1, 1, 2, 1],
    [130],
]


def make_inputs(lengths: list[int], channels: int, taps: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias in fp64."""
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = ((1, sum(lengths), channels), (channels, taps), (channels,))
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return x, weight, bias


def reference(
    x: Tensor, weight: Tensor, lengths: list[int], bias: Tensor | None, activation: str | None
) -> Tensor:
    """One document at a time."""
    outputs = []
    for document in x.split(lengths, 1):
        padded = F.pad(document.mT, (weight.shape[1] - 1, 0))
        u = F.conv1d(padded, weight[:, None], bias, groups=len(weight)).mT
        outputs.append(u if activation is None else F.silu(u))
    return torch.cat(outputs, 1)


@pytest.fixture(params=[1 << 18, 64], ids=["one block", "many blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The elements of a block."""
    monkeypatch.setattr(torch_native, "_BLOCK_ELEMENTS", request.param)
    return int(request.param)


@pytest.mark.parametrize("lengths", MIXES, ids=["ascending", "descending", "tiny", "one"])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("activation", ["silu", "swish", None])
def test_values_and_gradients(
    lengths: list[int], taps: int, activation: str | None, block: int
) -> None:
    x, weight, bias = (t.requires_grad_() for t in make_inputs(lengths, 6, taps))
    for offset in (bias, None):
        leaves = [x, weight, *([bias] if offset is not None else [])]
        found = causal_conv1d(
            x, weight, PackedSequence.from_lengths(lengths), bias=offset, activation=activation
        )
        wanted = reference(x, weight, lengths, offset, activation)
        d_out = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
        pairs = zip(
            torch.autograd.grad(found, leaves, d_out),
            torch.autograd.grad(wanted, leaves, d_out),
            strict=True,
        )
        assert float((found - wanted).detach().abs().max()) <= 1e-12
        for one, other in pairs:
            assert float((one - other).abs().max()) <= 1e-11


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    channels=st.integers(1, 9),
    taps=st.integers(1, 6),
)
def test_any_lengths_channels_and_taps(lengths: list[int], channels: int, taps: int) -> None:
    x, weight, bias = make_inputs(lengths, channels, taps)
    found = causal_conv1d(x, weight, PackedSequence.from_lengths(lengths), bias=bias)
    assert float((found - reference(x, weight, lengths, bias, "silu")).abs().max()) <= 1e-12


def test_gradients_numerically(block: int) -> None:
    inputs = [t.requires_grad_() for t in make_inputs([5, 1, 2, 9], 3, 4)]
    packed = PackedSequence.from_lengths([5, 1, 2, 9])
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: causal_conv1d(x, weight, packed, bias=bias), inputs
    )


@pytest.mark.parametrize("lengths", MIXES[:3], ids=["ascending", "descending", "tiny"])
@pytest.mark.parametrize("channels", [1, 6, 37, 512])
@pytest.mark.parametrize(
    "threads",
    [pytest.param(1, id="1 thread"), pytest.param(2, id="2 threads", marks=pytest.mark.slow)],
    indirect=True,
)
def test_it_is_batch_invariant(lengths: list[int], channels: int) -> None:
    x, weight, bias = (t.float() for t in make_inputs(lengths, channels, 4))
    whole = causal_conv1d(x, weight, PackedSequence.from_lengths(lengths), bias=bias)
    for document, expected in zip(x.split(lengths, 1), whole.split(lengths, 1), strict=True):
        alone = causal_conv1d(
            document, weight, PackedSequence.from_lengths([document.shape[1]]), bias=bias
        )
        assert torch.equal(alone, expected)


def test_nothing_crosses_documents(block: int) -> None:
    lengths = [5, 2, 9]
    x, weight, _ = (t.float() for t in make_inputs(lengths, 8, 4))
    packed = PackedSequence.from_lengths(lengths)
    clean = causal_conv1d(x, weight, packed)
    x[:, 5:7] = float("nan")
    x.requires_grad_()
    out = causal_conv1d(x, weight, packed)
    assert torch.equal(out[:, :5], clean[:, :5])
    assert torch.equal(out[:, 7:], clean[:, 7:])
    (d_x,) = torch.autograd.grad(out, x, torch.cat([torch.zeros(1, 7, 8), torch.ones(1, 9, 8)], 1))
    assert (
        bool((d_x[:, :5] == 0).all())
        and bool(d_x[:, 7:].isfinite().all())
        and bool((d_x[:, 7:] != 0).any())
    )


def test_extreme_values_make_no_nan() -> None:
    x = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4])[None, :, None].requires_grad_()
    out = causal_conv1d(x, torch.ones(1, 1), PackedSequence.from_lengths([5]))
    (d_x,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out.detach(), F.silu(x.detach()))
    assert torch.equal(d_x.flatten(), torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_accumulates_in_fp32(dtype: torch.dtype) -> None:
    x, weight, bias = (t.to(dtype).requires_grad_() for t in make_inputs([9, 3], 6, 4))
    packed = PackedSequence.from_lengths([9, 3])
    out = causal_conv1d(x, weight, packed, bias=bias)
    exact = causal_conv1d(x.float(), weight.float(), packed, bias=bias.float())
    assert torch.equal(out, exact.to(dtype))
    gradients = torch.autograd.grad(out.float().sum(), (x, weight, bias))
    assert all(
        d.dtype == dtype and d.shape == t.shape
        for d, t in zip(gradients, (x, weight, bias), strict=True)
    )


def test_any_strides() -> None:
    x, weight, _ = (t.float() for t in make_inputs([9, 30], 6, 4))
    packed = PackedSequence.from_lengths([9, 30])
    wanted = causal_conv1d(x, weight, packed)
    channels_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    slice_of_wider = torch.cat([x, x], 2)[..., :6]
    assert torch.equal(causal_conv1d(channels_first, weight, packed), wanted)
    assert torch.equal(causal_conv1d(slice_of_wider, weight, packed), wanted)


def test_the_input_alone_is_saved() -> None:
    x, weight, bias = (t.float().requires_grad_() for t in make_inputs([100], 64, 4))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        causal_conv1d(x, weight, PackedSequence.from_lengths([100]), bias=bias)
    assert sum(saved) == x.numel() + weight.numel() + bias.numel()


def test_refusals() -> None:
    x, weight, _ = make_inputs([3], 2, 4)
    packed = PackedSequence.from_lengths([3])
    with pytest.raises(ValueError, match="found activation 'gelu'; wanted 'silu', 'swish' or None"):
        causal_conv1d(x, weight, packed, activation="gelu")
    with pytest.raises(
        BackendUnavailable, match=r"'nope'; wanted one of causal_conv1d, torch, triton"
    ):
        causal_conv1d(x, weight, packed, backend="nope")


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_kernel_masks_nothing_where_four_tokens_and_their_windows_are_of_one_document(
    lengths,
) -> None:
    packed = PackedSequence.from_lengths(lengths)
    plan, positions = (
        plan_masks(packed),
        [position for length in lengths for position in range(length)],
    )
    assert plan.pos_in_seq.tolist() == positions
    fours = [positions[start : start + 4] for start in range(0, packed.num_tokens, 4)]
    assert plan.interior.tolist() == [int(len(four) == 4 and min(four) >= 3) for four in fours]
    assert {part.dtype for part in plan} == {torch.int32}


@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_q_k_and_v_are_the_convolutions_channels_by_heads(qk_l2norm) -> None:
    x, weight, bias = make_inputs([5, 1, 9], 2 * 2 * 3 + 4 * 5, 4)
    packed = PackedSequence.from_lengths([5, 1, 9])
    q, k, v = qkv_conv(x, weight, packed, (2, 4), (3, 5), bias=bias, qk_l2norm=qk_l2norm)
    assert (q.shape, k.shape, v.shape) == ((1, 15, 2, 3), (1, 15, 2, 3), (1, 15, 4, 5))
    flat = causal_conv1d(x, weight, packed, bias=bias)
    for part, wanted in ((q, flat[..., :6]), (k, flat[..., 6:12])):
        wanted = wanted.reshape(part.shape)
        norm = (wanted.square().sum(-1, keepdim=True) + 1e-6).sqrt() if qk_l2norm else 1.0
        assert torch.allclose(part, wanted / norm, rtol=1e-6, atol=1e-6)
    assert torch.equal(v.flatten(2), flat[..., 12:])
