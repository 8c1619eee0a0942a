"""What every recurrence in PyTorch promises about packing, precision and memory: the delta rule,
Kimi Delta Attention and Mamba-2's SSD.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hf_packfree.ops.chunked.scratch import scratch_for
from hf_packfree.ops.delta_rule import gated_delta_rule
from hf_packfree.ops.kda import kda
from hf_packfree.ops.ssd import ssd
from hf_packfree.packing import PackedSequence
from tests.ops import test_delta_rule, test_kda, test_ssd
from tests.ops.recurrences import run
from tests.support import relative_rms


class Recurrence(NamedTuple):
    """One of them.

    Attributes:
        rule: takes its inputs, and the record.
        inputs: makes them in fp64, of documents of these lengths.
        wide: the same of one document, of 32 channels, which need no padding.
        eps: how many times the rounding of half precision it may be off there.
    """

    rule: Callable[..., Tensor]
    inputs: Callable[[list[int]], list[Tensor]]
    wide: Callable[[list[int]], list[Tensor]]
    eps: int


RECURRENCES = {
    "delta rule": Recurrence(
        gated_delta_rule,
        test_delta_rule.make_inputs,
        partial(test_delta_rule.make_inputs, k_size=32, v_size=32),
        4,
    ),
    "KDA": Recurrence(
        kda, test_kda.make_inputs, partial(test_kda.make_inputs, k_size=32, v_size=32), 1
    ),
    "SSD": Recurrence(
        ssd,
        test_ssd.make_inputs,
        partial(test_ssd.make_inputs, heads=2, groups=1, size=32, state=32),
        4,
    ),
}


@pytest.fixture(params=RECURRENCES)
def one(request: pytest.FixtureRequest) -> Recurrence:
    return RECURRENCES[request.param]


def of_tokens(x: Tensor) -> bool:
    """Whether an input has numbers for each token: SSD's A and D have none."""
    return x.dim() > 1


def test_no_gradient_crosses_documents(one: Recurrence) -> None:
    lengths = [70, 3, 64, 33]
    for number, part in enumerate(torch.arange(sum(lengths)).split(lengths)):
        leaves = [x.float().requires_grad_() for x in one.inputs(lengths)]
        out = one.rule(*leaves, PackedSequence.from_lengths(lengths))
        out[:, part].square().sum().backward()
        for other, tokens in enumerate(torch.arange(sum(lengths)).split(lengths)):
            reached = {bool((x.grad[:, tokens] != 0).any()) for x in leaves if of_tokens(x)}
            assert reached == {other == number}


def test_not_even_nan_crosses_documents(one: Recurrence) -> None:
    lengths = [70, 3, 64]
    inputs = [x.float() for x in one.inputs(lengths)]
    clean = run(one.rule, inputs, lengths)
    for x in filter(of_tokens, inputs):
        x[:, 70:73] = float("nan")
    for found, wanted in zip(run(one.rule, inputs, lengths), clean, strict=True):
        if of_tokens(found):
            assert torch.equal(found[:, :70], wanted[:, :70])
            assert torch.equal(found[:, 73:], wanted[:, 73:])
            assert found[:, 70:73].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_fp32(one: Recurrence, dtype: torch.dtype) -> None:
    lengths = [65, 5]
    inputs = [x.to(dtype) for x in one.inputs(lengths)]
    found, wanted = (run(one.rule, x, lengths) for x in (inputs, [x.float() for x in inputs]))
    assert all(x.dtype == dtype for x in found)
    assert torch.equal(found[0], wanted[0].to(dtype))
    limit = one.eps * torch.finfo(dtype).eps
    assert max(relative_rms(x, y) for x, y in zip(found, wanted, strict=True)) <= limit


def test_autocast_changes_nothing(one: Recurrence) -> None:
    inputs = [x.float() for x in one.inputs([65, 5])]
    wanted = run(one.rule, inputs, [65, 5])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(one.rule, inputs, [65, 5])
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_an_expanded_output_gradient_is_fine(one: Recurrence) -> None:
    inputs = [x.requires_grad_() for x in one.inputs([40])]
    one.rule(*inputs, PackedSequence.from_lengths([40])).sum().backward()
    assert all(float(x.grad.abs().sum()) > 0 for x in inputs)


def test_nothing_but_the_inputs_is_saved(one: Recurrence) -> None:
    inputs = [x.float().requires_grad_() for x in one.wide([300])]
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        one.rule(*inputs, PackedSequence.from_lengths([300]))
    assert sum(saved.values()) <= sum(x.untyped_storage().nbytes() for x in inputs)


def test_what_scratch_memory_holds_does_not_matter(one: Recurrence) -> None:
    lengths = [64, 1, 129, 5]
    packed, inputs = PackedSequence.from_lengths(lengths), [x.float() for x in one.inputs(lengths)]
    fresh = run(one.rule, inputs, lengths)
    for _ in range(2):
        buffers: Any = scratch_for(packed, torch.device("cpu"), torch.float32)._buffers
        for buffer in buffers.values():
            buffer.fill_(float("nan"))
        again = run(lambda *leaves: one.rule(*leaves[:-1], packed), inputs, lengths)
        assert all(torch.equal(x, y) for x, y in zip(again, fresh, strict=True))
