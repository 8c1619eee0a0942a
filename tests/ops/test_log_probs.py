"""Log-probabilities and entropies in chunks against the whole logits, values and gradients, and
what each way to their gradients costs.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from hf_packfree.errors import BackendUnavailable, UnsupportedInput
from hf_packfree.ops.loss import Expected, Wanted, linear_log_probs, log_probs
from tests.support import relative_rms

ROWS, LENGTH, SIZE, WORDS = 3, 30, 16, 50
IGNORED = -7
pytestmark = pytest.mark.usefixtures("small_chunks")
EVERYTHING = Wanted(entropy=True, top1=True, moments=True)
PER_ROW = torch.tensor([[0.5], [1.0], [1.7]])
PER_TOKEN = torch.linspace(0.5, 1.7, ROWS * LENGTH).view(ROWS, LENGTH)


def leaves(dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, LENGTH, SIZE), (WORDS, SIZE), (WORDS,))[: 2 + bias]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def targets(kept: float = 0.5):
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    return found.masked_fill(torch.rand(found.shape, generator=generator) >= kept, IGNORED)


def whole(x, weight, bias=None, *, wanted, temperature=1.0):
    """All that `linear_log_probs` returns, from all logits."""
    logits = torch.nn.functional.linear(x, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    has, z = wanted != IGNORED, logits.to(wide) / torch.as_tensor(temperature).to(wide)[..., None]
    log_p = z.log_softmax(-1)
    found = (
        log_p.gather(-1, wanted.clamp(min=0)[..., None])[..., 0],
        -(log_p.exp() * log_p).sum(-1),
        z.argmax(-1),
        z.argmax(-1) == wanted,
        (2 * log_p).logsumexp(-1),
        z.mean(-1),
    )
    return [torch.where(has, one, torch.zeros_like(one)) for one in found]


def ours(x, weight, bias=None, *, wanted, temperature=1.0, also=EVERYTHING, **options):
    found = linear_log_probs(
        x,
        weight,
        wanted,
        bias=bias,
        temperature=temperature,
        wanted=also,
        ignore_index=IGNORED,
        **options,
    )
    return list(vars(found).values())


def weights(scale: float = 1.0):
    """What the outputs' gradients are: of the log-probabilities and of the entropies."""
    generator = torch.Generator().manual_seed(2)
    return [scale * torch.randn(ROWS, LENGTH, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kept", [1.0, 0.98, 0.5, 0.0])
@pytest.mark.parametrize(
    "temperature", [1.0, 0.6, PER_ROW, PER_TOKEN], ids=["1", "0.6", "per row", "per token"]
)
def test_equals_the_whole_logits(kept, bias, temperature):
    wanted = targets(kept)
    inputs, exact = leaves(bias=bias), leaves(torch.float64, bias=bias)
    found = ours(*inputs, wanted=wanted, temperature=temperature)
    reference = whole(*exact, wanted=wanted, temperature=temperature)
    for one, other in zip(found, reference, strict=True):
        assert one.shape == wanted.shape
        assert relative_rms(one, other, floor=1e-300 if kept else 1.0) <= 1e-6
    assert found[0].dtype == torch.float32 and torch.equal(found[2], reference[2])
    got, want = (
        torch.autograd.grad(values[:2], of, [one.to(values[0].dtype) for one in weights()])
        for values, of in ((found, inputs), (reference, exact))
    )
    for one, other in zip(got, want, strict=True):
        assert relative_rms(one, other, floor=1e-300 if kept else 1.0) <= 1e-6


def gradients(of, values, given):
    return torch.autograd.grad(values, of, given)


@pytest.mark.parametrize("expected", [Expected(), Expected(uniform=True), Expected(entropy=True)])
@pytest.mark.parametrize("kept", [0.98, 0.5])
def test_temperatures_of_tokens_without_targets_count_nothing(kept, expected):
    """As padding of temperatures fills them, with zeros."""
    wanted, inputs = targets(kept), leaves()
    has = wanted != IGNORED
    assert not has.all()
    runs = []
    for temperature in (PER_TOKEN * has, PER_TOKEN):
        values = ours(*inputs, wanted=wanted, temperature=temperature, expected=replace(expected))
        runs.append((*values, *gradients(inputs, values[:2], weights())))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("expected", [Expected(), Expected(uniform=True), Expected(entropy=True)])
def test_half_precision_is_no_farther_from_fp32_than_whole_logits(dtype, expected):
    wanted, rounded = targets(0.9), leaves(dtype)
    exact = [x.detach().float().requires_grad_() for x in rounded]
    # as mixed precision scales them, and as a mean does
    given = weights(2.0**17 / 90)
    values = (
        ours(*rounded, wanted=wanted, expected=expected),
        whole(*rounded, wanted=wanted),
        whole(*exact, wanted=wanted),
    )
    for one, other, best in zip(*(v[:2] + v[4:] for v in values), strict=True):
        assert relative_rms(one, best) <= 1.05 * relative_rms(other, best)
    for used in (1, 2):
        found, full, best = (
            torch.autograd.grad(v[:used], of, given[:used], retain_graph=True)
            for v, of in zip(values, (rounded, rounded, exact), strict=True)
        )
        for one, other, third in zip(found, full, best, strict=True):
            error = relative_rms(one, third)
            assert one.dtype == dtype
            assert error <= 2**-7 and error <= 1.05 * min(relative_rms(other, third), 1.0)


@pytest.mark.parametrize("expected", [Expected(), Expected(uniform=True), Expected(entropy=True)])
def test_gradients_that_are_all_zero_are_zeros_in_fp16(expected):
    """As of a group of answers whose rewards are equal: NaN would spoil the whole step."""
    of, wanted = leaves(torch.float16), targets(0.9)
    found = ours(*of, wanted=wanted, expected=expected)[:2]
    for used in (1, 2):
        given = [torch.zeros_like(one) for one in found[:used]]
        for one in torch.autograd.grad(found[:used], of, given, retain_graph=True):
            assert one.abs().max() == 0


@pytest.mark.parametrize("temperature", [0.02, 0.015, 0.001, 0.02 * PER_TOKEN, 0.001 * PER_ROW])
@pytest.mark.parametrize("expected", [Expected(), Expected(uniform=True), Expected(entropy=True)])
def test_low_temperatures_do_not_overflow_in_fp16(temperature, expected):
    """Gradients of logits are 1 / temperature times as large as those of scores."""
    wanted, rounded = targets(0.9), [0.1 * x.detach() for x in leaves(torch.float16)]
    rounded = [x.requires_grad_() for x in rounded]
    exact = [x.detach().float().requires_grad_() for x in rounded]
    options = {"wanted": wanted, "temperature": temperature}
    values, best = ours(*rounded, expected=expected, **options), whole(*exact, **options)
    for used in (1, 2):
        # by as much as they grow here, so that the gradients of x fit into fp16
        given = [1e-3 * one for one in weights(1.0)[:used]]
        found = torch.autograd.grad(values[:used], rounded, given, retain_graph=True)
        right = torch.autograd.grad(best[:used], exact, given, retain_graph=True)
        for one, other in zip(found, right, strict=True):
            assert relative_rms(one, other) <= 2**-7


def test_fp32_weights_are_multiplied_in_half_precision_and_get_fp32_gradients():
    wanted, (x, weight, bias) = targets(), leaves()
    found = ours(x, weight, bias, wanted=wanted, dtype=torch.bfloat16)
    rounded = [one.detach().bfloat16().float().requires_grad_() for one in (x, weight, bias)]
    best = whole(*rounded, wanted=wanted)
    got, want = (
        torch.autograd.grad(values[0], of, weights()[0])
        for values, of in ((found, (x, weight, bias)), (best, rounded))
    )
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32 and relative_rms(one, other) <= 2**-7
        assert not torch.equal(one, one.bfloat16().float())


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products, in tokens, and notes how many of them have logits at a time."""

    tokens = rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = [one for one in args if isinstance(one, torch.Tensor)][-2:]
            self.tokens += a.shape[0] * a.shape[1] * b.shape[1] // (SIZE * WORDS)
            if found.shape[1] == WORDS:
                self.rows = max(self.rows, len(found))
        return found


@pytest.mark.parametrize("kept", [1.0, 0.5])
@pytest.mark.parametrize(
    ("trained", "expected", "given", "products"),
    [
        (False, {}, "any", 2),
        (False, {"entropy": True}, "entropy", 3),
        (False, {}, "entropy", 4),
        (True, {"uniform": True}, "uniform", 3),
        (True, {}, "any", 4),
        (True, {"uniform": True}, "any", 6),
        (True, {"entropy": True}, "entropy", 4),
    ],
)
def test_what_it_costs(trained, expected, given, products, kept):
    x, weight = leaves(bias=False)
    weight.requires_grad_(trained)
    wanted, expected = targets(kept), Expected(**expected)
    count = int((wanted != IGNORED).sum())
    with Products() as seen:
        log_p, entropy, *_ = ours(x, weight, wanted=wanted, expected=expected)
        if given == "uniform":
            (log_p.sum() / 7).backward()
        else:
            torch.autograd.backward(
                [log_p, entropy][: 1 + (given == "entropy")], weights()[: 1 + (given == "entropy")]
            )
    assert seen.tokens == products * count and 0 < seen.rows <= 32
    # the next call knows
    assert expected.entropy == (given == "entropy")
    assert expected.uniform == (trained and given == "uniform")


def test_gradients_that_are_not_expected_are_right_all_the_same():
    wanted, found = targets(), []
    for expected in (Expected(), Expected(uniform=True), Expected(entropy=True)):
        x, weight, bias = leaves()
        log_p, entropy, *_ = ours(x, weight, bias, wanted=wanted, expected=expected)
        for outputs, given in (
            ([log_p], weights()[:1]),
            ([log_p, entropy], weights()),
            ([log_p], [torch.full_like(log_p, 0.3)]),
            ([entropy], weights()[:1]),
        ):
            found.append(torch.autograd.grad(outputs, [x, weight, bias], given, retain_graph=True))
    for one, *others in zip(found[:4], found[4:8], found[8:]):
        for other in others:
            assert all(relative_rms(a, b) <= 1e-5 for a, b in zip(one, other))


@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_statistics_can_be_masked_in_place(kept):
    mask, grads = weights()[0], []
    for change in (torch.Tensor.mul, torch.Tensor.mul_):
        x, weight, bias = leaves()
        log_p, entropy, *_ = ours(x, weight, bias, wanted=targets(kept))
        loss = (change(log_p, mask) + change(entropy, mask)).sum()
        grads.append(torch.autograd.grad(loss, [x, weight, bias]))
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_without_gradients_there_is_one_product():
    x, weight, bias = leaves()
    with torch.no_grad(), Products() as seen:
        found = ours(x, weight, bias, wanted=targets(1.0))
    assert seen.tokens == ROWS * LENGTH and not any(one.requires_grad for one in found)


def test_what_is_not_wanted_is_none():
    x, weight = leaves(bias=False)
    found = linear_log_probs(x, weight, targets().clamp(min=0))
    assert found.log_probs.requires_grad
    assert [name for name, one in vars(found).items() if one is not None] == ["log_probs"]


def test_ties_go_to_the_first_and_words_of_no_probability_count_nothing():
    x, weight = torch.ones(1, 2), torch.zeros(4, 2)
    bias = torch.tensor([float("-inf"), 2.0, 2.0, 1.0])
    found = linear_log_probs(x, weight, torch.tensor([2]), bias=bias, wanted=EVERYTHING)
    p = torch.tensor([2.0, 2.0, 1.0]).softmax(0)
    assert found.top1.tolist() == [1] and not found.is_top1.item()
    assert float(found.entropy) == pytest.approx(float(-(p * p.log()).sum()))
    x.requires_grad_(), bias.requires_grad_()
    found = linear_log_probs(x, weight, torch.tensor([2]), bias=bias, wanted=EVERYTHING)
    (grad,) = torch.autograd.grad([found.log_probs.sum() + found.entropy.sum()], [bias])
    assert grad[0] == 0 and grad.isfinite().all()


def test_second_derivatives_are_refused():
    x, weight = leaves(bias=False)
    found = linear_log_probs(x, weight, targets().clamp(min=0))
    (first,) = torch.autograd.grad(found.log_probs.sum(), x, create_graph=True)
    with pytest.raises(UnsupportedInput, match="second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_nothing_keeps_itself_alive(kept):
    x, weight, bias = leaves()
    gc.collect()
    gc.disable()
    try:
        found = linear_log_probs(
            x, weight, targets(kept), bias=bias, wanted=EVERYTHING, ignore_index=IGNORED
        )
        seen = [
            weakref.ref(one)
            for one in (found.log_probs, found.entropy, found.log_probs._base, found.entropy._base)
        ]
        del found
        assert [one() for one in seen] == [None] * 4
    finally:
        gc.enable()


def test_unknown_backend():
    x, weight = leaves(bias=False)
    with pytest.raises(BackendUnavailable, match="log probs backend 'liger'"):
        linear_log_probs(x, weight, targets(), backend="liger")
    assert set(log_probs.OP.backends) == {"triton", "torch"}
