"""Linear layers of few outputs, in fp16: the interpreter does not multiply bfloat16."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.fused import joined_linear, projections
from tests.ops.triton.compare import TOKENS
from tests.support import relative_rms

KERNELS = {"narrow_linear"}
SIZES = [(3,), (16, 16), (5, 40, 31), (100, 5), (127, 127)]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("depth", [40, 128, 300])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_do_not_depend_on_the_number_of_rows(tokens, depth, sizes, launched):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, depth + 7, generator=generator).half()[..., 7:]
    weights = [torch.randn(size, depth, generator=generator).half() for size in sizes]
    found = projections(x, *weights, backend="triton, batch-invariant")
    wanted = projections(x.double(), *(weight.double() for weight in weights))
    fewer = projections(x[:, : tokens // 2 + 1], *weights, backend="triton, batch-invariant")
    for a, b, c in zip(found, wanted, fewer, strict=True):
        assert a.dtype == x.dtype and a.shape == b.shape and a.is_contiguous()
        assert relative_rms(a, b) < torch.finfo(x.dtype).eps
        assert torch.equal(a[:, : tokens // 2 + 1], c)
    assert launched == KERNELS


def test_gradients():
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator).half() for shape in ((1, 65, 40), (5, 40), (31, 40))
    ]
    gradients = []
    ours = {"backend": "triton, batch-invariant"}
    for inputs, options in ((leaves, ours), ([leaf.double() for leaf in leaves], {})):
        inputs = [x.detach().requires_grad_() for x in inputs]
        gradients.append(
            torch.autograd.grad(
                sum(out.sin().sum() for out in projections(*inputs, **options)), inputs
            )
        )
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == torch.float16 and relative_rms(a, b) < 8 * torch.finfo(a.dtype).eps


@pytest.mark.parametrize("sizes", [(3, 200, 16), (200, 3)], ids=str)
def test_without_batch_invariance_torch_multiplies(sizes, launched, monkeypatch):
    """Narrow products, too: no kernel of ours runs."""
    monkeypatch.setattr(joined_linear, "on_tensor_cores", lambda x: True)
    x, weights = (
        torch.randn(1, 5, 40).half(),
        [torch.randn(outputs, 40).half() for outputs in sizes],
    )
    found = projections(x, *weights, backend="triton")
    assert all(
        torch.equal(part, torch.nn.functional.linear(x, weight))
        for part, weight in zip(found, weights, strict=True)
    )
    assert not launched


def test_narrow_neighbours_read_their_input_together_on_a_gpu(launched, monkeypatch):
    monkeypatch.setattr(joined_linear, "on_tensor_cores", lambda x: True)
    x, weights = (
        torch.randn(1, 5, 40).half(),
        [torch.randn(outputs, 40).half() for outputs in (200, 3, 16)],
    )
    found = projections(x, *weights, backend="triton")
    assert launched == KERNELS
    for part, invariant in zip(
        found[1:], projections(x, *weights, backend="triton, batch-invariant")[1:], strict=True
    ):
        assert torch.equal(part, invariant)
