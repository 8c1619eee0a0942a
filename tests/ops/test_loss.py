"""Head and cross entropy in chunks against the product and torch's cross entropy, values and
gradients, and lazy logits.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from hf_packfree.errors import BackendUnavailable, UnsupportedInput
from hf_packfree.ops.loss import Targets, chunked_loss, lazy_logits, linear_cross_entropy
from tests.support import relative_rms

TOKENS, SIZE, WORDS = 90, 16, 50
IGNORED = -7
pytestmark = pytest.mark.usefixtures("small_chunks")


def leaves(dtype=torch.float32, bias=False):
    generator = torch.Generator().manual_seed(0)
    found = [
        torch.randn(*shape, generator=generator)
        for shape in ((2, TOKENS // 2, SIZE), (WORDS, SIZE), (WORDS,))
    ]
    return [x.to(dtype).requires_grad_() for x in found[: 2 + bias]]


def targets(kept: float):
    generator = torch.Generator().manual_seed(1)
    shape = 2, TOKENS // 2
    found = torch.randint(WORDS, shape, generator=generator)
    return found.masked_fill(torch.rand(shape, generator=generator) >= kept, IGNORED)


def outcome(x, weight, *bias, wanted, backend, factor=0.25):
    """The loss, and the gradients of it times a factor."""
    total = linear_cross_entropy(
        x, weight, wanted, bias=bias[0] if bias else None, ignore_index=IGNORED, backend=backend
    )
    return [total.detach(), *torch.autograd.grad(total * factor, [x, weight, *bias])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kept", [1.0, 0.98, 0.5, 0.0])
def test_equals_the_reference(kept, bias):
    wanted = targets(kept)
    found = outcome(*leaves(bias=bias), wanted=wanted, backend="torch")
    reference = outcome(*leaves(torch.float64, bias=bias), wanted=wanted, backend="upstream")
    assert found[0].dtype == torch.float32 and abs(found[0] - reference[0]) <= 1e-6 * abs(
        reference[0]
    )
    for ours, theirs in zip(found[1:], reference[1:], strict=True):
        assert (
            ours.shape == theirs.shape
            and relative_rms(ours, theirs, floor=1e-300 if kept else 1.0) <= 1e-6
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_farther_from_fp32_than_upstream(dtype):
    rounded, wanted = leaves(dtype, bias=True), targets(0.9)
    ours, theirs = (
        outcome(*rounded, wanted=wanted, backend=name, factor=1 / 3)
        for name in ("torch", "upstream")
    )
    exact = outcome(
        *(x.detach().float().requires_grad_() for x in rounded),
        wanted=wanted,
        backend="upstream",
        factor=1 / 3,
    )
    for found, upstream, best in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        assert found.dtype == dtype and relative_rms(found, best) <= 1.05 * relative_rms(
            upstream, best
        )
    assert abs(ours[0] / exact[0] - 1) <= max(abs(theirs[0] / exact[0] - 1), 1e-4)


def test_gradients_in_fp16_do_not_underflow():
    """Words by the ten thousand: their probabilities are below what fp16 holds."""
    x, weight = (
        torch.ones(4, 8, dtype=torch.float16),
        torch.zeros(60000, 8, dtype=torch.float16, requires_grad=True),
    )
    (found,) = torch.autograd.grad(linear_cross_entropy(x, weight, torch.arange(4)) * 1e3, weight)
    assert relative_rms(found[100], torch.full((8,), 4e3 / 60000)) < 1e-3


def test_what_needs_no_gradient_gets_none():
    x, weight = leaves()
    weight.requires_grad_(False)
    (found,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets(1.0)), x)
    frozen = chunked_loss.loss_and_gradients(
        x.detach().flatten(0, 1),
        weight,
        None,
        targets(1.0).flatten(),
        (True, False, False),
        lambda *given: (torch.zeros(len(given[0])), given[0]),
    )[1]
    assert found.abs().max() > 0 and frozen.weight is None and frozen.x is not None


def test_the_backward_pass_can_run_again():
    x, weight = leaves()
    loss = linear_cross_entropy(x, weight, targets(0.9), ignore_index=IGNORED)
    first = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    again = torch.autograd.grad(loss, [x, weight])
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("leaf", [0, 1], ids=["x", "weight"])
def test_second_derivatives_are_refused(leaf):
    found = leaves()
    loss = linear_cross_entropy(*found, targets(0.9), ignore_index=IGNORED)
    first = torch.autograd.grad(loss, found, create_graph=True)
    assert all(one.abs().max() > 0 for one in first)
    with pytest.raises(UnsupportedInput, match="found a second derivative"):
        torch.autograd.grad(sum(one.pow(2).sum() for one in first), found[leaf])


def test_one_chunk_at_a_time_has_logits():
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if (
                isinstance(found, torch.Tensor)
                and type(found) is torch.Tensor
                and found.ndim == 2
                and found.shape[1] == WORDS
            ):
                self.rows = max(self.rows, len(found))
            return found

    x, weight = leaves()
    with Largest() as seen:
        linear_cross_entropy(x, weight, targets(1.0)).backward()
    assert seen.rows == 30 == chunked_loss.rows_of_a_chunk(TOKENS, WORDS, "cpu")


@pytest.mark.parametrize("tokens, wanted", [(2000, 1), (2049, 2), (5559, 3), (8193, 4), (32768, 8)])
def test_few_tokens_are_cut_into_few_chunks(tokens, wanted):
    """Each adds its part to the fp32 gradient of the weight, all of which is read and written."""
    assert -(-tokens // chunked_loss.rows_of_a_chunk(tokens, 248_320, "cuda")) == wanted


def test_hooks_see_and_change_the_gradient_of_unread_logits():
    x, weight = leaves()
    wanted, found = targets(0.9), []
    plain = F.linear(x, weight)
    lazy = lazy_logits(x, weight)
    from hf_packfree.ops.loss import OP, loss_of

    losses = (
        F.cross_entropy(
            plain.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
        ),
        loss_of(lazy, Targets.of(wanted, IGNORED), OP.backend("torch")),
    )
    for logits, loss in zip((plain, lazy), losses):
        logits.register_hook(lambda grad: None)
        logits.register_hook(lambda grad: 2 * grad)
        logits.retain_grad()
        found.append(
            [*torch.autograd.grad(loss + logits.square().sum(), [x, weight], retain_graph=True)]
        )
        loss.backward()
        found[-1].append(logits.grad)
    for ours, theirs in zip(found[1], found[0]):
        assert relative_rms(ours, theirs) <= 1e-6


def test_logits_read_before_the_weight_changed_stay():
    x, weight = leaves()
    early, late = lazy_logits(x, weight), lazy_logits(x, weight)
    assert torch.equal(early, F.linear(x, weight))
    with torch.no_grad():
        weight.mul_(2)
    assert early.sum().isfinite()
    with pytest.raises(UnsupportedInput, match="'loss': 'upstream'"):
        late.sum()


def fused_step(kind):
    def change(x, weight):
        weight.grad = torch.ones_like(weight)
        kind([weight], lr=1e-3, fused=True).step()

    return change


CHANGES = {
    "fused AdamW": fused_step(torch.optim.AdamW),
    "fused SGD": fused_step(torch.optim.SGD),
    "an average of weights by .data": lambda x, weight: weight.data.lerp_(weight.data + 1, 1e-4),
    "one row by .data": lambda x, weight: weight.data[3].add_(1),
    "one column by .data": lambda x, weight: weight.data[:, 3].add_(1),
    "hidden states in place": lambda x, weight: x.detach().zero_(),
    "hidden states of one token by .data": lambda x, weight: x.data[0, 5].zero_(),
    "not a number": lambda x, weight: weight.data.fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_logits_read_after_a_change_are_refused(change):
    """Most of these write past autograd's count of versions."""
    x, weight = leaves()
    late, versions = lazy_logits(x, weight), (x._version, weight._version)
    CHANGES[change](x, weight)
    assert (versions == (x._version, weight._version)) != ("in place" in change)
    with pytest.raises(UnsupportedInput, match="found logits read for the first time after"):
        late.sum()


def test_a_weight_that_is_no_number_is_no_change():
    x, weight = leaves()
    weight.data[3] = float("nan")
    assert lazy_logits(x, weight).isnan().any()


@pytest.mark.parametrize(
    "replace",
    [lambda weight: torch.zeros_like(weight), lambda weight: weight.bfloat16()],
    ids=["other values", "another dtype"],
)
def test_a_parameter_that_is_given_other_memory_leaves_the_logits_as_they_were(replace):
    x, weight = leaves()
    wanted, late = F.linear(x, weight), lazy_logits(x, weight)
    weight.data = replace(weight.data)
    assert torch.equal(late, wanted)


def test_few_targets_are_chosen_before_the_products():
    few = Targets.of(targets(0.5), IGNORED)
    assert torch.equal(few.chosen(), (targets(0.5).flatten() != IGNORED).nonzero()[:, 0])
    assert Targets.of(targets(0.98), IGNORED).chosen() is None, "nearly all"


def test_an_event_is_waited_for_before_the_count_is_read():
    calls = []
    event = SimpleNamespace(synchronize=lambda: calls.append("waited"))
    found = Targets(torch.tensor([3, -1, -1]), torch.tensor(1), event)
    assert found.chosen().tolist() == [0] and calls == ["waited"]


def test_unknown_backends_are_refused():
    with pytest.raises(BackendUnavailable, match="wanted one of torch, triton, upstream"):
        linear_cross_entropy(*leaves(), targets(1.0), backend="liger")


def test_a_negative_target_is_above_all_words_unless_it_is_ignored():
    """So that kernels give NaN for it, as for other targets that are no words, and do not leave
    it out.
    """
    assert Targets.of(torch.tensor([3, -1, -100]), -100).flat.tolist() == [
        3,
        torch.iinfo(torch.int64).max,
        -1,
    ]
