"""The chunked gated delta rule against its definition, token by token in fp64, and its promises
about packing.
"""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.chunked.scratch import scratch_for
from hf_packfree.ops.chunked.solve import unit_lower_inverse
from hf_packfree.ops.delta_rule import gated_delta_rule, recurrent_gated_delta_rule
from hf_packfree.ops.delta_rule.torch_chunked import passes
from hf_packfree.packing import PackedSequence
from tests.ops.recurrences import assert_close, run

ALL_LENGTHS = [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200, 513]
MIXES = [ALL_LENGTHS, ALL_LENGTHS[::-1], [64, 1, 513, 5, 130], [128, 64], [200], [1, 1, 1]]
# relative RMS; measured: at most 1e-14 and 8e-7
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}


def make_inputs(
    lengths: list[int],
    heads: int = 2,
    groups: int = 2,
    k_size: int = 16,
    v_size: int = 24,
    *,
    decay: float = 0.05,
) -> list[Tensor]:
    """q, k, v, g, beta in fp64; log decays between -decay and 0."""
    generator, tokens = torch.Generator().manual_seed(sum(lengths)), sum(lengths)
    q, k = (
        torch.randn(1, tokens, heads, k_size, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    v = torch.randn(1, tokens, heads * groups, v_size, generator=generator, dtype=torch.float64)
    g, beta = (
        torch.rand(1, tokens, heads * groups, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    return [q, k, v, -decay * g, beta]


both_threads = pytest.mark.parametrize(
    "threads",
    [pytest.param(1, id="1 thread"), pytest.param(2, id="2 threads", marks=pytest.mark.slow)],
    indirect=True,
)


@pytest.mark.parametrize("lengths", MIXES, ids=lambda lengths: "+".join(map(str, lengths)))
@pytest.mark.parametrize("decay", [0.01, 0.05])
def test_values_and_gradients_match_the_recurrence(lengths: list[int], decay: float) -> None:
    inputs = make_inputs(lengths, decay=decay)
    wanted = run(recurrent_gated_delta_rule, inputs, lengths)
    for dtype, tolerance in TOLERANCE.items():
        assert_close(
            run(gated_delta_rule, [x.to(dtype) for x in inputs], lengths), wanted, tolerance
        )


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
def test_any_lengths_heads_and_sizes(
    lengths: list[int], heads: int, groups: int, sizes: tuple[int, int]
) -> None:
    inputs = make_inputs(lengths, heads, groups, *sizes)
    found = run(gated_delta_rule, inputs, lengths)
    # a key of size one is all norm: what is left of its gradient is far below what it is computed
    # from
    assert_close(found, run(recurrent_gated_delta_rule, inputs, lengths), 1e-12, floor=1.0)


def hard_inputs(what: str) -> list[Tensor]:
    """130 + 65 tokens of one hard case."""
    q, k, v, g, beta = make_inputs([130, 65])
    one_key, now_and_then = k[:, :1].expand_as(k).clone(), torch.arange(195)[None, :, None]
    changed = {
        "identical keys, beta near 1": {"k": one_key, "beta": beta * 0 + 0.999, "g": g * 0.01},
        "identical keys, beta near 2": {"k": one_key, "beta": beta * 0 + 1.998, "g": g * 0.01},
        "beta up to 2": {"beta": 2 * beta},
        # every token turns its key's share of the state around, and none is forgotten
        "reflections": {"beta": beta * 0 + 2, "g": g * 0},
        "strong decay": {"g": g * 0 - 20},
        "strong and slow decay": {"g": g.where(now_and_then % 7 > 0, -20)},
        "no decay": {"g": g * 0},
        "endless decay": {"g": g.where(now_and_then % 50 > 0, -1e4)},
        "beta zero": {"beta": beta * 0},
    }[what]
    return list(({"q": q, "k": k, "v": v, "g": g, "beta": beta} | changed).values())


HARD = [
    "identical keys, beta near 1",
    "identical keys, beta near 2",
    "beta up to 2",
    "reflections",
    "strong decay",
    "strong and slow decay",
    "no decay",
    "endless decay",
    "beta zero",
]


@pytest.mark.parametrize("what", HARD)
def test_hard_numerics(what: str) -> None:
    inputs = hard_inputs(what)
    wanted = run(recurrent_gated_delta_rule, inputs, [130, 65])
    # identical keys overwrite each other: hardly any gradient reaches g (rms 3e-4, fp32 error of
    # the recurrence 1e-6)
    floor = 1.0 if what == "identical keys, beta near 1" else 1e-30
    # writes of alternating signs cancel: of the recurrence, token by token, fp32 leaves 2e-5
    limits = TOLERANCE | ({torch.float32: 5e-5} if what.endswith("near 2") else {})
    for dtype, tolerance in limits.items():
        assert_close(
            run(gated_delta_rule, [x.to(dtype) for x in inputs], [130, 65]),
            wanted,
            tolerance,
            floor,
        )


def test_gradients_numerically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_CHUNK_ON_CPU", 8)
    inputs = [x.requires_grad_() for x in make_inputs([9, 2], 1, 2, 2, 3)]
    packed = PackedSequence.from_lengths([9, 2])
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, packed), inputs)


@pytest.mark.parametrize("lengths", MIXES[:3], ids=["ascending", "descending", "mixed"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 8, 8), (1, 3, 5, 7), (3, 2, 16, 24), (1, 2, 128, 128), (2, 1, 1, 1)], ids=str
)
@both_threads
def test_it_is_batch_invariant(lengths: list[int], shape: tuple[int, int, int, int]) -> None:
    inputs = [x.float() for x in make_inputs(lengths, *shape)]
    whole = gated_delta_rule(*inputs, PackedSequence.from_lengths(lengths))
    for *document, expected in zip(*(x.split(lengths, 1) for x in (*inputs, whole)), strict=True):
        alone = gated_delta_rule(*document, PackedSequence.from_lengths([expected.shape[1]]))
        assert torch.equal(alone, expected)


@both_threads
def test_it_is_batch_invariant_at_full_width() -> None:
    lengths = [129, 1, 64, 40]
    inputs = [x.float() for x in make_inputs(lengths, 16, 2, 128, 128)]
    whole = gated_delta_rule(*inputs, PackedSequence.from_lengths(lengths))
    for *document, expected in zip(*(x.split(lengths, 1) for x in (*inputs, whole)), strict=True):
        alone = gated_delta_rule(*document, PackedSequence.from_lengths([expected.shape[1]]))
        assert torch.equal(alone, expected)


def test_any_strides() -> None:
    lengths = [65, 5]
    q, k, v, g, beta = (x.float() for x in make_inputs(lengths, 2, 2, 16, 32))
    wanted = run(gated_delta_rule, [q, k, v, g, beta], lengths)
    projected = torch.cat([x.flatten(2) for x in (q, k, v)], 2).split([32, 32, 128], 2)
    split = [x.unflatten(2, (-1, size)) for x, size in zip(projected, (16, 16, 32), strict=True)]
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, g, beta)]
    packed = PackedSequence.from_lengths(lengths)
    assert torch.equal(gated_delta_rule(*split, g, beta, packed), wanted[0])
    assert torch.equal(gated_delta_rule(*transposed, packed), wanted[0])


class CountCalls(TorchDispatchMode):
    """Count the calls of operators."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(lengths: list[int]) -> int:
    inputs = [x.float().requires_grad_() for x in make_inputs(lengths, 1, 1, 16, 16)]
    packed = PackedSequence.from_lengths(lengths)
    with CountCalls() as counter:
        gated_delta_rule(*inputs, packed).sum().backward()
    return counter.count


def test_calls_grow_with_time_not_with_documents() -> None:
    assert calls([30] * 64) < calls([2048]) / 4
    assert calls([2048]) < 2.2 * calls([1024])


def test_tables_are_shared_between_layers() -> None:
    packed = PackedSequence.from_lengths([70, 3])
    inputs = make_inputs([70, 3])
    gated_delta_rule(*inputs, packed)
    tables = dict(packed._memo)
    gated_delta_rule(*inputs, packed)
    assert tables and packed._memo.keys() == tables.keys()
    assert all(packed._memo[key] is tables[key] for key in tables)


def test_scratch_memory_is_shared_by_the_layers_of_a_row_and_goes_with_it() -> None:
    cpu, row, other = (
        torch.device("cpu"),
        PackedSequence.from_lengths([3]),
        PackedSequence.from_lengths([3]),
    )
    space = scratch_for(row, cpu, torch.float32)
    assert space is scratch_for(row, cpu, torch.float32)
    assert space is not scratch_for(row, cpu, torch.float64)
    with torch.inference_mode():
        assert space is not scratch_for(row, cpu, torch.float32)
    with ThreadPoolExecutor(1) as pool:
        assert space is not pool.submit(scratch_for, row, cpu, torch.float32).result()
    assert space is scratch_for(row, cpu, torch.float32)
    assert space is not scratch_for(other, cpu, torch.float32), "one row's memory at a time"
    kept = weakref.ref(scratch_for(other, cpu, torch.float32))
    assert kept() is not None
    del other
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("fill", [2.0, 1.9, 1.0, 0.9, -0.9, 0.0])
def test_triangular_inverse(fill: float) -> None:
    strict = torch.full((3, 64, 64), fill).tril(-1)
    inverse = unit_lower_inverse(strict + torch.ones(64, 64).triu(), torch.empty_like(strict))
    whole = strict.double() + torch.eye(64, dtype=torch.float64)
    wanted = torch.linalg.inv(whole).tril()
    # what substitution may lose (Higham, Accuracy and Stability of Numerical Algorithms, 14.2)
    bound = wanted.abs() @ whole.abs() @ wanted.abs()
    eps = torch.finfo(torch.float32).eps
    assert ((inverse - wanted).abs() <= eps * bound).all()
    assert torch.equal(inverse, inverse.tril())


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match=r"'nope'; wanted one of fla, flash_qla, torch"):
        gated_delta_rule(*make_inputs([3]), PackedSequence.from_lengths([3]), backend="nope")
