"""Linear layers with low-rank adapters: values and gradients, what is kept, what is not
computed; here in torch, on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_packfree.ops.fused import projections
from hf_packfree.ops.fused.computed_weights import ComputedWeight
from hf_packfree.ops.fused.dropped_products import Mask, left
from hf_packfree.ops.fused.lora import Adapter, LoraLinear
from hf_packfree.ops.seeds import Seed
from tests.support import relative_rms

T, D = 37, 24
SIZES = (200, 40, 3)


def tensors(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def adapter(size, rank, scale, dtype=torch.float64, dropout=0.0, seed=0):
    return Adapter(*tensors((rank, D), (size, rank), dtype=dtype, seed=seed), scale, dropout)


def layers(*ranks, dtype=torch.float64, of_adapters=None, dropout=0.0):
    """A frozen layer of every size, with one adapter for each of its ranks, which adds less than
    the layer itself.
    """
    found = []
    for weight, mine in zip(
        tensors(*((size, D) for size in SIZES[: len(ranks)]), dtype=dtype), ranks
    ):
        made = partial(adapter, len(weight), dtype=of_adapters or dtype, dropout=dropout)
        adapters = tuple(
            made(rank, 0.1 + 0.1 * i, seed=10 * rank + i) for i, rank in enumerate(mine)
        )
        weight = weight.detach()
        found.append(LoraLinear(weight, adapters) if adapters else weight)
    return found


def leaves(x, layers):
    adapters = [
        each for layer in layers if isinstance(layer, LoraLinear) for each in layer.adapters
    ]
    return [x, *(tensor for each in adapters for tensor in (each.A, each.B))]


def results(x, layers, **options):
    outs = projections(x, *layers, **options)
    d_outs = tensors(*(out.shape for out in outs), seed=3)
    grads = torch.autograd.grad(
        outs, leaves(x, layers), [d_out.detach().to(x.dtype) for d_out in d_outs]
    )
    return [*outs, *grads]


RANKS = {
    "one layer": ((4,),),
    "one of three": ((), (4,), ()),
    "of different ranks": ((4,), (2,), (3,)),
    "several": ((4, 2), (), (3, 1, 2)),
}


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_equals_the_reference(ranks):
    (x,), made = tensors((1, T, D)), layers(*ranks)
    found, wanted = results(x, made, backend="triton"), results(x, made)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and relative_rms(a, b) < 1e-12


def test_outputs_can_be_changed_in_place():
    """As hooks on a layer around them do."""
    (x,), made = tensors((1, T, D)), layers((4,), (), (3, 1))
    grads = []
    for backend in ("triton", "torch"):
        outs = projections(x, *made, backend=backend)
        for out in outs:
            out *= 2
        grads.append(torch.autograd.grad(sum(out.sum() for out in outs), leaves(x, made)))
    assert all(relative_rms(a, b) < 1e-12 for a, b in zip(*grads, strict=True))


def quantised(weight):
    """The weight as if it were kept in fewer bits, and how often it was dequantised."""
    count, size, dtype = [], tuple(weight.shape), weight.dtype
    return ComputedWeight(
        weight.int(), size, dtype, lambda bits: count.append(1) or bits.to(dtype)
    ), count


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_quantised_weights_are_dequantised_where_they_are_read_and_not_kept(ranks):
    (x,), made = tensors((1, T, D)), layers(*ranks)
    dense = [one.weight if isinstance(one, LoraLinear) else one for one in made]
    rounded = [weight.mul_(3).round_() for weight in dense]
    kept, counts = zip(*map(quantised, rounded))
    small = [
        replace(one, weight=bits) if isinstance(one, LoraLinear) else bits
        for one, bits in zip(made, kept)
    ]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saves: saved.append(saves) or saves, lambda saves: saves
    ):
        found = results(x, small, backend="triton")
    for other in (results(x, made, backend="triton"), results(x, small)):
        assert all(relative_rms(a, b) < 1e-12 for a, b in zip(found, other, strict=True))
    assert not any(
        each.is_floating_point() and torch.equal(each, weight)
        for each in saved
        for weight in rounded
    )
    assert all(len(count) == 3 for count in counts), "forward and backward, and the reference"


def test_only_what_is_trained_gets_a_gradient():
    (x,), (first, second) = tensors((1, T, D)), layers((4, 2), (3,))
    first.adapters[0].B.requires_grad_(False)
    second.adapters[0].A.requires_grad_(False)
    trained = [tensor for tensor in leaves(x, (first, second)) if tensor.requires_grad]
    outs = [
        sum(out.sin().sum() for out in projections(x, first, second, backend=name))
        for name in ("triton", "torch")
    ]
    for a, b in zip(*(torch.autograd.grad(out, trained) for out in outs), strict=True):
        assert relative_rms(a, b) < 1e-12


def test_keeps_the_input_and_h():
    (x,), made = (
        tensors((1, T, D), dtype=torch.bfloat16),
        layers((3,), (3,), dtype=torch.bfloat16, of_adapters=torch.float32),
    )
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        projections(x, *made, backend="triton")
    wide = [tensor.shape for tensor in kept if tensor.dtype == torch.float32]
    assert wide.pop() == (T, 6) and set(wide) == {tensor.shape for tensor in leaves(x, made)[1:]}
    assert sorted(tensor.shape for tensor in kept if tensor.dtype == torch.bfloat16) == sorted(
        [x.shape, (200, D), (40, D)]
    )


def test_frozen_layers_without_adapters_keep_no_input():
    (x,), made, kept = tensors((1, T, D)), layers((), ()), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor
    ):
        outs = projections(x, *made, backend="triton")
    assert kept == [weight.shape for weight in made]
    (d_x,) = torch.autograd.grad(sum(out.sum() for out in outs), x)
    assert relative_rms(d_x, sum(weight.sum(0) for weight in made).expand_as(x)) < 1e-12


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("second", [torch.float32, torch.bfloat16])
def test_half_precision_is_no_farther_from_exact_than_the_reference(
    first, second, dtype=torch.bfloat16
):
    (x,) = tensors((1, T, D), dtype=dtype)
    made = [
        layers((4,), (2, 3), dtype=dtype, of_adapters=of_adapters)[i]
        for i, of_adapters in enumerate((first, second))
    ]
    exact = results(
        x.double(),
        [
            LoraLinear(
                one.weight.double(),
                tuple(Adapter(a.A.double(), a.B.double(), a.scaling) for a in one.adapters),
            )
            for one in made
        ],
    )
    for a, b, c in zip(results(x, made, backend="triton"), results(x, made), exact, strict=True):
        assert a.dtype == b.dtype and relative_rms(a, c) < 1.1 * relative_rms(b, c)


def test_dropout_zeroes_the_share_and_keeps_the_mean():
    (x,) = tensors((500, D))

    def dropped(seed):
        drawn = Seed(torch.tensor([seed]), 3)
        return left(x, Mask(drawn, 0.25, False))

    read = dropped(1)
    assert abs(float((read == 0).double().mean()) - 0.25) < 0.02
    assert torch.equal(read, dropped(1)) and not torch.equal(read, dropped(2))
    zeros, ones = torch.zeros(1, D, dtype=x.dtype), torch.ones(4000, D, dtype=x.dtype)
    one = LoraLinear(
        zeros,
        (Adapter(torch.ones(1, D, dtype=x.dtype), torch.ones(1, 1, dtype=x.dtype), 1.0, 0.25),),
    )
    torch.manual_seed(0)
    (out,) = projections(ones, one, backend="triton")
    assert abs(float(out.mean()) - D) < 0.2 and out.std() > 1


@pytest.mark.slow
def test_with_dropout_the_backward_pass_draws_the_masks_of_the_forward_pass():
    (x,), made = tensors((1, 5, D)), layers((4,), (2, 3), dropout=0.3)

    def run(*inputs):
        torch.manual_seed(7)
        rest = iter(inputs[1:])
        again = [
            LoraLinear(
                one.weight,
                tuple(Adapter(next(rest), next(rest), a.scaling, a.dropout) for a in one.adapters),
            )
            for one in made
        ]
        return projections(inputs[0], *again, backend="triton")

    assert torch.autograd.gradcheck(run, leaves(x, made))
    assert not torch.equal(run(*leaves(x, made))[0], projections(x, *made, backend="triton")[0]), (
        "every call draws its own"
    )


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_a_checkpoint_draws_the_masks_again(reentrant):
    """Gradient checkpointing runs the forward pass twice, from one state of the generator: the
    gradients keep every bit.
    """
    (x,), made = tensors((1, T, D)), layers((4, 2), (3,), dropout=0.3)
    run = partial(projections, backend="triton")
    grads, draws = [], []
    for call in (run, partial(checkpoint, run, use_reentrant=reentrant)):
        torch.manual_seed(7)
        first, second = call(x, *made)
        x.grad, loss = None, first.sin().sum() + second.cos().sum()
        for leaf in leaves(x, made):
            leaf.grad = None
        # whatever draws in between moves the generator on
        torch.rand(3)
        loss.backward()
        grads.append([leaf.grad for leaf in leaves(x, made)])
        draws.append(torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and torch.equal(*draws)
