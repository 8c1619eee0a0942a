"""Attention with windows, capped scores, sinks and values of another size, against the formula."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.attention import attention
from hf_packfree.ops.attention.score_options import WANTED, plan_pieces
from hf_packfree.ops.backend import Target
from hf_packfree.ops.table import OPS
from hf_packfree.packing import PackedSequence
from tests.support import relative_rms

LENGTHS = (37, 16, 1, 15, 17, 33, 3, 64, 2)
"""Around a window of 16: below, at, above, and several of them."""
OPTIONS = {
    "causal": {},
    "window": {"window": 16},
    "window_of_one": {"window": 1},
    "wider_than_the_row": {"window": 1000},
    "softcap": {"softcap": 5.0},
    "softcap_window": {"softcap": 5.0, "window": 16},
    "sinks": {"sinks": True},
    "sinks_window": {"sinks": True, "window": 16},
    "all": {"sinks": True, "window": 16, "softcap": 5.0},
}


def formula(q, k, v, lengths, scale, window=None, softcap=None, sinks=None):
    """Every score of the row, those that are not seen minus infinity."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    token = torch.arange(len(number))
    seen = (number[:, None] == number) & (token[:, None] >= token)
    if window is not None:
        seen &= token[:, None] - token < window
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(token), 1)[None]], 3)
    weights = scores.softmax(3)[..., : len(token)]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def inputs(dtype=torch.float64, sizes=(16, 16), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, sizes[0]), (2, sizes[0]), (2, sizes[1]))
    q, k, v = (torch.randn(1, sum(LENGTHS), *shape, generator=generator) for shape in shapes)
    tensors = [q, k, v, torch.randn(4, generator=generator)]
    return [x.to(dtype).requires_grad_() for x in tensors]


def measured(run, tensors, options):
    q, k, v, sinks = tensors
    given = options | ({"sinks": sinks} if "sinks" in options else {})
    out = run(q, k, v, given)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    wanted = tensors if "sinks" in options else tensors[:3]
    return [out, *torch.autograd.grad((out * weight).sum(), wanted)]


@pytest.mark.parametrize("sizes", [(16, 16), (24, 16), (15, 15), (8, 12)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_the_formulas(name, sizes):
    packed = PackedSequence.from_lengths(LENGTHS)
    found = measured(
        lambda q, k, v, given: attention(q, k, v, packed, scale=0.3, **given),
        inputs(sizes=sizes),
        OPTIONS[name],
    )
    wanted = measured(
        lambda q, k, v, given: formula(q, k, v, LENGTHS, 0.3, **given),
        inputs(sizes=sizes),
        OPTIONS[name],
    )
    # with one key a query has no gradient
    assert max(relative_rms(one, other, 0.1) for one, other in zip(found, wanted)) <= 1e-13
    one_document = measured(
        lambda q, k, v, given: formula(q, k, v, [sum(LENGTHS)], 0.3, **given),
        inputs(sizes=sizes),
        OPTIONS[name],
    )
    if OPTIONS[name].get("window") != 1:
        assert relative_rms(one_document[0], wanted[0]) > 1e-2, "the control leaks"


@pytest.mark.parametrize("name", OPTIONS)
def test_half_precision_rounds_like_its_inputs(name):
    packed, tensors = PackedSequence.from_lengths(LENGTHS), inputs(torch.bfloat16)
    found = measured(
        lambda q, k, v, given: attention(q, k, v, packed, **given), tensors, OPTIONS[name]
    )
    exact = [x.detach().double().requires_grad_() for x in tensors]
    wanted = measured(
        lambda q, k, v, given: formula(q, k, v, LENGTHS, 0.25, **given), exact, OPTIONS[name]
    )
    assert all(part.isfinite().all() for part in found)
    assert relative_rms(found[0], wanted[0]) <= 2**-7


def test_sinks_keep_their_digits_in_half_precision():
    """A score of 20.1 over a scale that is no power of two is off by .06 in bfloat16 alone."""
    q, k, v = (torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16) for _ in range(3))
    v += 1
    sinks = torch.tensor([1.3])
    out = attention(q, k, v, PackedSequence.from_lengths([4]), scale=0.3, sinks=sinks)
    wanted = torch.arange(1, 5) / (torch.arange(1, 5) + sinks.exp())
    assert relative_rms(out.flatten(1)[0, ::8], wanted) <= 2**-8


def test_weights_are_dropped_and_sinks_are_not():
    """Of the mean over many draws, nothing but its own error is left."""
    packed, (q, k, v, sinks) = PackedSequence.from_lengths([40, 3]), inputs(torch.float32)
    q, k, v = (x[:, :43].detach() for x in (q, k, v))
    for options in ({"sinks": sinks.detach(), "window": 16}, {"softcap": 5.0, "sinks": sinks}):
        wanted = attention(q, k, v, packed, **options)
        torch.manual_seed(0)
        draws = [attention(q, k, v, packed, dropout=0.3, **options) for _ in range(400)]
        assert not torch.equal(draws[0], draws[1])
        assert relative_rms(torch.stack(draws).mean(0), wanted) <= 0.1


@pytest.mark.parametrize("name", ["causal", "window", "softcap", "sinks"])
def test_as_many_weights_are_dropped_as_is_asked(name):
    """Values are places, so that outputs are weights: a share of them is zero, and what is left is
    scaled up.
    """
    packed, tokens, dropped = PackedSequence.from_lengths([150, 50]), 200, 0.3
    q = k = torch.zeros(1, tokens, 1, 8)
    v = torch.eye(tokens)[None, :, None]
    options = OPTIONS[name] | ({"sinks": torch.zeros(1)} if name == "sinks" else {})
    wanted = attention(q, k, v, packed, **options)
    torch.manual_seed(0)
    found = attention(q, k, v, packed, dropout=dropped, **options)
    kept, seen = found != 0, wanted != 0
    assert (kept <= seen).all() and abs(1 - (kept.sum() / seen.sum()).item() - dropped) <= 0.03
    assert relative_rms(found[kept], wanted[kept] / (1 - dropped)) <= 1e-6


def test_every_token_is_planned_once_and_memory_grows_with_the_window():
    packed = PackedSequence.from_lengths(LENGTHS)
    for window in (None, 1, 16, 33, 64, 500):
        plan = plan_pieces(packed, window)
        tokens = torch.cat([piece.queries.flatten()[piece.real] for piece in plan.pieces])
        assert torch.equal(tokens[plan.order], torch.arange(sum(LENGTHS)))
    assert max(piece.keys.shape[1] for piece in plan_pieces(packed, 16).pieces) == 32


@pytest.mark.parametrize(
    "backend, takes",
    {
        "triton": {"window", "sinks"},
        "varlen": {"window", "other_value_size"},
        "torch": set(WANTED),
    }.items(),
)
def test_kernels_without_them_are_refused(backend, takes):
    found = OPS["attention"].backends[backend]
    assert found.takes == takes
    q, packed = torch.zeros(1, 4, 2, 8), PackedSequence.from_lengths([4])
    calls = {
        "window": partial(attention, q, q, q, packed, window=2),
        "softcap": partial(attention, q, q, q, packed, softcap=2.0),
        "sinks": partial(attention, q, q, q, packed, sinks=torch.zeros(2)),
        "other_value_size": partial(attention, q, q, q[..., :4], packed),
    }
    for name, words in WANTED.items():
        reason = found.unusable(Target("cuda", (9, 0), sizes={name: 16}))
        if name in takes:
            assert not reason or "lack" not in reason
        else:
            assert reason == f"its kernels lack {words}"
            with pytest.raises(BackendUnavailable, match=f"found {words} for attention on"):
                calls[name](backend=backend)
