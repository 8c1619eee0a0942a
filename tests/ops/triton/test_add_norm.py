"""Residual sum and RMS or layer norm."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from hf_packfree.ops.fused import add_layer_norm, add_norm
from tests.ops.triton.compare import TOKENS, assert_matches, random, run
from tests.support import relative_rms

KERNELS = {"add_norm", "add_norm_backward"}
SIZE = 72


@pytest.fixture(autouse=True)
def several_rows_of_a_program(monkeypatch):
    monkeypatch.setattr(import_module("hf_packfree.ops.fused.add_norm"), "_PROGRAMS", 7)


def sum_and_norm(x, z, weight, *, backend):
    return add_norm(x, z[..., 7:], weight, 1e-6, backend=backend)


def nothing_added(x, z, weight, *, backend):
    normed, total = add_norm(x, None, weight, 1e-6, backend=backend)
    return normed, total, 0 * z


def llamas(x, z, weight, *, backend):
    return add_norm(x, z[..., 7:], weight, 1e-6, offset=0.0, backend=backend)


def norm_alone(x, z, weight, *, backend):
    return add_norm(x, z[..., 7:], weight, 1e-6, backend=backend)[0]


def read_twice(x, z, weight, *, backend):
    """x and z go on to other things too, before and after: every gradient is a sum, into buffers
    of autograd's own.
    """
    y, z = x.sin(), z[..., 7:].cos()
    normed, total = add_norm(y, None, weight, 1e-6, backend=backend)
    again, total = add_norm(total, z * normed, weight.cos(), 1e-6, backend=backend)
    return again * y, total + z, total * y


def test_in_inference_mode_gradients_may_be_enabled():
    x, weight = random((1, 3, SIZE), (SIZE,))
    with torch.inference_mode(), torch.enable_grad():
        found, _ = add_norm(x, None, weight, 1e-6, backend="triton")
    assert relative_rms(found, add_norm(x, None, weight, 1e-6)[0]) < 1e-6


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("op", [sum_and_norm, llamas, nothing_added, norm_alone, read_twice])
def test_values_and_gradients(op, tokens, launched):
    assert_matches(op, random((1, tokens, SIZE), (1, tokens, SIZE + 7), (SIZE,)))
    assert launched == KERNELS | {"sum_partials"}


def sum_and_layer_norm(x, z, weight, bias, *, backend):
    return add_layer_norm(x, z[..., 7:], weight, bias, 1e-6, backend=backend)


def layer_norms_read_twice(x, z, weight, bias, *, backend):
    y, z = x.sin() + 3, z[..., 7:].cos()
    normed, total = add_layer_norm(y, None, weight, bias.sin(), 1e-6, backend=backend)
    again, total = add_layer_norm(total, z * normed, weight.cos(), bias, 1e-6, backend=backend)
    return again * y, total + z, total * y


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("op", [sum_and_layer_norm, layer_norms_read_twice])
def test_layer_norms(op, tokens, launched):
    assert_matches(op, random((tokens, SIZE), (tokens, SIZE + 7), (SIZE,), (SIZE,)))
    assert launched == KERNELS | {"sum_partials"}


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_gradients_of_frozen_parts_are_not_made(needs):
    x, weight, bias = random((9, SIZE), (SIZE,), (SIZE,))
    leaves = [x.requires_grad_(), weight.requires_grad_(needs[0]), bias.requires_grad_(needs[1])]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = [
        torch.autograd.grad(
            add_layer_norm(x, None, weight, bias, 1e-6, backend=backend)[0].sin().sum(), wanted
        )
        for backend in ("triton", "torch")
    ]
    assert max(relative_rms(a, b) for a, b in zip(*found, strict=True)) < 1e-5


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(
    ("dtype", "branch"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
    ids=["fp16", "bf16", "fp32 and bf16, as under autocast"],
)
def test_rounds_once_to_the_dtype_of_the_reference(dtype, branch, offset):
    x, z, weight = random((1, 65, SIZE), (1, 65, SIZE), (SIZE,))
    inputs = x.to(dtype), z.to(branch), weight.to(dtype)

    def op(x, z, weight, *, backend):
        return add_norm(x, z, weight, 1e-6, offset=offset, backend=backend)

    found, wanted = (run(op, inputs, backend) for backend in ("triton", "torch"))
    # to which the interpreter truncates
    if dtype is not torch.bfloat16:
        assert torch.equal(found[1], wanted[1])
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and relative_rms(a, b) < 2 * torch.finfo(b.dtype).eps


@pytest.mark.parametrize("stream", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("op", [add_norm, add_layer_norm], ids=["RMS", "layer"])
def test_a_norm_in_the_dtype_of_its_readers(op, stream):
    """As under autocast: weights are fp32, the total keeps the dtype of the sum."""
    x, z, *weights = random((1, 9, SIZE), (1, 9, SIZE), *[(SIZE,)] * (1 + (op is add_layer_norm)))
    inputs = x.to(stream), z.half(), *weights

    def cast(*inputs, backend):
        return op(*inputs, 1e-6, dtype=torch.float16, backend=backend)

    found, wanted = (run(cast, inputs, backend) for backend in ("triton", "torch"))
    assert (found[0].dtype, found[1].dtype) == (torch.float16, stream)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and relative_rms(a, b) < 2 * torch.finfo(torch.float16).eps
