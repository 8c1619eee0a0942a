"""Kimi Delta Attention in chunks against its definition, token by token in fp64, and its promises
about packing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.errors import BackendUnavailable, UnsupportedInput
from hf_packfree.ops.backend import Target
from hf_packfree.ops.kda import fla, kda, recurrent_kda
from hf_packfree.ops.kda.torch_chunked import passes
from hf_packfree.packing import PackedSequence
from tests.ops.recurrences import NAMES, assert_close, run

# every chunk edge, and windows of several time steps
EDGES = [1, 300, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257, 5, 1]
# relative RMS; measured: at most 2e-15 and 6e-7
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
# what a softplus of the gate is multiplied with: Kimi's A_log goes to 16
DECAYS = {"slow": (-4, 1.0), "strong": (0, 16.0), "hundreds": (0, 300.0)}


def make_inputs(
    lengths: list[int], heads: int = 2, k_size: int = 16, v_size: int = 24, decay: str = "slow"
) -> list[Tensor]:
    """q, k, v, g, beta in fp64."""
    generator, tokens = torch.Generator().manual_seed(sum(lengths)), sum(lengths)
    sizes = (k_size, k_size, v_size, k_size, 1)
    q, k, v, g, beta = (
        torch.randn(1, tokens, heads, size, generator=generator, dtype=torch.float64)
        for size in sizes
    )
    shift, factor = DECAYS[decay]
    return [q, k, v, -factor * F.softplus(g + shift), beta[..., 0].sigmoid()]


@pytest.mark.parametrize("lengths", [EDGES, [1] * 300], ids=["edges of chunks", "tokens alone"])
@pytest.mark.parametrize("decay", DECAYS)
def test_values_and_gradients_match_the_recurrence(decay: str, lengths: list[int]) -> None:
    inputs = make_inputs(lengths, decay=decay)
    wanted = run(recurrent_kda, inputs, lengths)
    for dtype, tolerance in TOLERANCE.items():
        assert_close(run(kda, [x.to(dtype) for x in inputs], lengths), wanted, tolerance)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    heads=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    decay=st.sampled_from(list(DECAYS)),
)
def test_any_lengths_heads_and_sizes(
    lengths: list[int], heads: int, sizes: tuple[int, int], decay: str
) -> None:
    inputs = make_inputs(lengths, heads, *sizes, decay=decay)
    # a key of size one is all norm: what is left of its gradient is far below what it is made of
    assert_close(run(kda, inputs, lengths), run(recurrent_kda, inputs, lengths), 1e-12, floor=1.0)


def forget_in_half_the_channels(g: Tensor) -> Tensor:
    """Everything in every other channel, nothing in those between."""
    return torch.stack(
        [torch.full_like(g[..., ::2], -1e4), torch.zeros_like(g[..., ::2])], -1
    ).flatten(-2)


def forget_at_times(g: Tensor) -> Tensor:
    """Everything at every fiftieth token."""
    return torch.where((torch.arange(g.shape[1]) % 50 == 0)[:, None, None], -1e4, g)


HARD: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "identical keys, beta near 1": {
        "k": lambda k: k[:, :1].expand_as(k).clone(),
        "g": lambda g: g * 0.01,
        "beta": lambda beta: torch.full_like(beta, 0.999),
    },
    "no decay": {"g": torch.zeros_like},
    "channels that forget all beside some that keep all": {"g": forget_in_half_the_channels},
    "endless decay": {"g": forget_at_times},
    "nothing but endless decay": {"g": lambda g: torch.full_like(g, -1e30)},
    "a lower bound": {"g": lambda g: -5 * (g * 100).sigmoid()},
    "beta zero": {"beta": torch.zeros_like},
    "beta one": {"beta": torch.ones_like},
}


@pytest.mark.parametrize("what", HARD)
def test_hard_numerics(what: str) -> None:
    inputs = [
        HARD[what].get(name, lambda x: x)(x)
        for name, x in zip(NAMES[1:], make_inputs([130, 65]), strict=True)
    ]
    wanted = run(recurrent_kda, inputs, [130, 65])
    # hardly any gradient, or none, reaches g: fp32 is as near as to what g's is computed from
    floor = 1.0 if what.startswith(("identical", "nothing")) else 1e-30
    for dtype, tolerance in TOLERANCE.items():
        found = run(kda, [x.to(dtype) for x in inputs], [130, 65])
        assert_close(found, wanted, tolerance, floor)


def test_gradients_numerically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_CHUNK", 8)
    inputs = [x.requires_grad_() for x in make_inputs([9, 1], 1, 2, 2)]
    packed = PackedSequence.from_lengths([9, 1])
    assert torch.autograd.gradcheck(lambda *x: kda(*x, packed), inputs)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 7), (2, 128, 128), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("decay", ["slow", "hundreds"])
def test_it_is_batch_invariant(shape: tuple[int, int, int], decay: str) -> None:
    lengths = [129, 1, 64, 40, 33, 32, 3]
    inputs = [x.float() for x in make_inputs(lengths, *shape, decay=decay)]
    whole = kda(*inputs, PackedSequence.from_lengths(lengths))
    for *document, expected in zip(*(x.split(lengths, 1) for x in (*inputs, whole)), strict=True):
        alone = kda(*document, PackedSequence.from_lengths([expected.shape[1]]))
        assert torch.equal(alone, expected)


def test_as_one_document_it_leaks() -> None:
    """The control: what the documents' boundaries are for."""
    lengths = [70, 3, 64]
    inputs = make_inputs(lengths)
    apart, joined = (run(kda, inputs, each) for each in (lengths, [137]))
    assert torch.equal(apart[0][:, :70], joined[0][:, :70])
    assert all(((x - y).norm() / x.norm()).item() > 0.1 for x, y in zip(apart, joined, strict=True))


def test_units_that_have_norm_one_already() -> None:
    lengths = [65, 5]
    inputs = make_inputs(lengths)
    inputs[:2] = [F.normalize(x, dim=-1, eps=0) for x in inputs[:2]]
    # the recurrence divides by a norm of sqrt(1 + 1e-6)
    found, wanted = (
        run(kda, inputs, lengths, qk_l2norm=False)[0],
        run(recurrent_kda, inputs, lengths),
    )
    assert torch.allclose(found, wanted[0], rtol=1e-5, atol=1e-7)
    leaves, packed = make_inputs([3], 1, 2, 2), PackedSequence.from_lengths([3])
    leaves = [x.requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(lambda *x: kda(*x, packed, qk_l2norm=False), leaves)


def test_any_strides() -> None:
    lengths = [65, 5]
    q, k, v, g, beta = (x.float() for x in make_inputs(lengths, 2, 16, 32))
    packed = PackedSequence.from_lengths(lengths)
    wanted = kda(q, k, v, g, beta, packed)
    projected = torch.cat([x.flatten(2) for x in (q, k, v)], 2).split([32, 32, 64], 2)
    split = [x.unflatten(2, (-1, size)) for x, size in zip(projected, (16, 16, 32), strict=True)]
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, g, beta)]
    assert torch.equal(kda(*split, g, beta, packed), wanted)
    assert torch.equal(kda(*transposed, packed), wanted)


def test_what_it_cannot_do_is_refused() -> None:
    inputs = [x.requires_grad_() for x in make_inputs([3])]
    with pytest.raises(BackendUnavailable, match="kda backend 'nope'; wanted one of fla, torch"):
        kda(*inputs, PackedSequence.from_lengths([3]), backend="nope")
    tree = PackedSequence.from_tree([2, 1], [None, 0])
    with pytest.raises(UnsupportedInput, match="tree of shared prefixes for Kimi Delta"):
        kda(*inputs, tree)
    out = kda(*inputs, PackedSequence.from_lengths([3])).square().sum()
    (first,) = torch.autograd.grad(out, inputs[:1], create_graph=True)
    with pytest.raises(UnsupportedInput, match="second derivative"):
        first.sum().backward()


def test_fla_takes_keys_of_256_channels_at_most() -> None:
    wide = Target("cuda", (9, 0), sizes={"key_size": 512})
    assert fla.unusable(wide) == "it takes keys of 256 channels at most, the model has 512"
    assert fla.unusable(Target("cpu")) == "it runs on CUDA devices, this is a cpu"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("qk_l2norm", [True, False])
def test_flas_kernel_gets_boundaries_and_decays_in_fp32(
    monkeypatch: pytest.MonkeyPatch, qk_l2norm: bool
) -> None:
    import fla.ops.kda as stand_in

    lengths, calls = [5, 64, 1, 7], []
    own = stand_in.chunk_kda
    monkeypatch.setattr(stand_in, "chunk_kda", lambda *a, **k: calls.append((a, k)) or own(*a, **k))
    fla._kernel.cache_clear()
    inputs = [x.float() for x in make_inputs(lengths)]
    inputs[:2] = [F.normalize(x, dim=-1) for x in inputs[:2]]
    inputs[3] = inputs[3].bfloat16()
    options = {"qk_l2norm": qk_l2norm}
    found = run(kda, inputs, lengths, backend="fla", **options)
    fla._kernel.cache_clear()
    # the gradient of g is bf16, as g is
    assert_close(found, run(kda, inputs, lengths, **options), 2**-8)
    ((given, words),) = calls
    assert given[3].dtype == torch.float32 and words["use_qk_l2norm_in_kernel"] == qk_l2norm
    assert words["cu_seqlens_cpu"].tolist() == [0, 5, 69, 70, 77]
