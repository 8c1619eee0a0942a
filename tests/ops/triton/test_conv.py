"""The causal convolution, with heads split and normed and without."""

from __future__ import annotations

import pytest

from hf_packfree.ops.conv import causal_conv1d, qkv_conv
from hf_packfree.packing import PackedSequence
from tests.ops.triton.compare import DOCUMENTS, assert_matches, random, run

KERNELS = {"conv", "conv_backward"}
KEYS, VALUES, SIZE = 1, 2, 16
pytestmark = pytest.mark.usefixtures("short_strips")


def qkv_of(packed, value_size=SIZE, qk_l2norm=True):
    """The op that splits heads, on a slice of wider rows."""

    def op(x, weight, bias=None, *, backend):
        sizes = (KEYS, VALUES), (SIZE, value_size)
        return qkv_conv(
            x[..., 3:-5], weight, packed, *sizes, bias=bias, qk_l2norm=qk_l2norm, backend=backend
        )

    return op


def qkv_inputs(tokens, value_size=SIZE, taps=4):
    channels = 2 * KEYS * SIZE + VALUES * value_size
    return random((1, tokens, channels + 8), (channels, taps), (channels,))


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_without_heads(lengths, launched):
    packed = PackedSequence.from_lengths(lengths)

    def op(x, weight, *, backend):
        return causal_conv1d(x, weight, packed, activation=None, backend=backend)

    assert_matches(op, random((1, sum(lengths), 20), (20, 4)))
    assert launched == KERNELS | {"sum_partials"}


def test_bias_and_every_second_weight():
    packed = PackedSequence.from_lengths(DOCUMENTS["several"])

    def op(x, weight, bias, *, backend):
        return causal_conv1d(x, weight[::2], packed, bias=bias[::2], backend=backend)

    assert_matches(op, random((1, packed.num_tokens, 20), (40, 4), (40,)))


@pytest.mark.parametrize("lengths", [DOCUMENTS["65"], DOCUMENTS["several"]], ids=["65", "several"])
def test_heads_normed(lengths):
    assert_matches(qkv_of(PackedSequence.from_lengths(lengths)), qkv_inputs(sum(lengths))[:2])


@pytest.mark.parametrize(
    ("taps", "value_size"), [(3, SIZE), (4, 24)], ids=["three taps", "wider values"]
)
def test_heads_normed_with_a_bias(taps, value_size):
    packed = PackedSequence.from_lengths([1, 2, 3, 5, 20])
    assert_matches(qkv_of(packed, value_size), qkv_inputs(packed.num_tokens, value_size, taps))


def test_heads_without_norms():
    packed = PackedSequence.from_lengths([1, 2, 3, 5, 20])
    assert_matches(qkv_of(packed, qk_l2norm=False), qkv_inputs(packed.num_tokens))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nan_stays_in_its_document(backend):
    """What is past another document's end may not come in, times zero, as NaN."""
    packed = PackedSequence.from_lengths([5, 9, 6])
    x, weight = qkv_inputs(20)[:2]
    x[:, 5:14] = float("nan")
    # q, k, v, and the gradient of x
    for part in run(qkv_of(packed), (x, weight), backend)[:4]:
        tokens = part[..., 3:-5] if part.ndim == 3 else part
        assert (
            tokens[:, :5].isfinite().all()
            and tokens[:, 14:].isfinite().all()
            and tokens[:, 5:14].isnan().any()
        ), backend
