"""The gated norm's PyTorch reference against transformers' own module."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from hf_packfree.ops.fused.gated_norm import gated_rms_norm
from tests.support import by_family, relative_rms

EPS = 1e-6
LIMITS = {
    # bit for bit, in gradients too where this was measured
    torch.float32: (0.0, 1e-7),
    # upstream rounds once more on the way: 3.4e-3, 4.4e-3
    torch.bfloat16: (4e-3, 5e-3),
}
"""(values, gradients): relative RMS of ours against upstream's; in comments the worst of twenty
seeds.
"""
LEAVES = ("x", "z", "weight")


def leaves(dtype, wide=torch.float64):
    """x, z [1, 257, 4, 128] and weight [128], rounded to `dtype`, held in `wide`; and weights of
    the output's sum.
    """
    torch.manual_seed(0)
    x, z = (torch.randn(1, 257, 4, 128) for _ in range(2))
    weight = 1 + torch.randn(128) / 4
    rounded = [part.to(dtype).to(wide).requires_grad_() for part in (x, z, weight)]
    return rounded, torch.randn(x.shape, dtype=torch.float64)


def ours(x, z, weight):
    return gated_rms_norm(x, z, weight, EPS, backend="torch")


def upstreams(family):
    """Return upstream's module as a function of x, z and its weight."""
    module = import_module(by_family[family].upstream)
    (name,) = [
        name
        for name in vars(module)
        if name.endswith("RMSNormGated") and not name.startswith("Fused")
    ]

    def run(x, z, weight):
        norm = getattr(module, name)(weight.numel(), eps=EPS).to(weight.dtype)
        return torch.func.functional_call(norm, {"weight": weight}, (x, z))

    return run


def values_and_gradients(function, dtype, wide=None):
    """Return the output and the gradients of x, z and weight, by name."""
    inputs, sums = leaves(dtype, wide or dtype)
    out = function(*inputs)
    assert out.dtype == inputs[0].dtype
    gradients = torch.autograd.grad((out.double() * sums).sum(), inputs)
    return {"out": out.detach()} | dict(zip(LEAVES, gradients, strict=True))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    "family", [name for name, row in by_family.items() if "delta_rule" in row.ops]
)
def test_it_is_upstreams_module(family, dtype):
    found, wanted = (
        values_and_gradients(ours, dtype),
        values_and_gradients(upstreams(family), dtype),
    )
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype == dtype
        limit = LIMITS[dtype][name != "out"]
        assert relative_rms(value, wanted[name]) <= limit, name


def test_in_half_precision_it_is_no_further_from_the_truth_than_upstreams():
    exact = values_and_gradients(ours, torch.bfloat16, torch.float64)
    found, theirs = (
        values_and_gradients(run, torch.bfloat16) for run in (ours, upstreams("qwen3_5"))
    )
    for name, value in exact.items():
        assert relative_rms(found[name], value) <= relative_rms(theirs[name], value), name


def test_a_wrong_formula_is_noticed():
    """The weight one too large, as other norms of these models add it: the comparison above can
    fail.
    """
    wanted = values_and_gradients(upstreams("qwen3_5"), torch.bfloat16)
    wrong = values_and_gradients(lambda x, z, weight: ours(x, z, 1 + weight), torch.bfloat16)
    errors = {name: relative_rms(wrong[name], value) for name, value in wanted.items()}
    assert all(errors[name] > 20 * LIMITS[torch.bfloat16][1] for name in ("out", "x", "z"))
