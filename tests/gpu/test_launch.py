"""Our way of launching a Triton kernel gives what Triton's own gives, for arguments of every
kind in any order.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops import launch as module
from tests.gpu.checks import DEVICE, TRIAL, gpu

pytestmark = [*gpu, pytest.mark.skipif(TRIAL, reason="Triton's interpreter compiles nothing")]


def arguments(dtype, size, offset):
    """Of `hf_packfree.ops.fused.kernels.swiglu.swiglu`, their memory `offset` elements into its
    blocks of 16 bytes.
    """
    torch.manual_seed(size)
    gate, up = (torch.randn(3 * size + offset, device=DEVICE).to(dtype)[offset:] for _ in range(2))
    return (
        gate,
        up,
        torch.zeros(3 * size + offset, device=DEVICE, dtype=dtype)[offset:],
        size,
        size,
    )


@pytest.mark.parametrize("sizes", [(1, 16, 17, 2048, 15), (2048, 17, 1, 15, 16)], ids=str)
def test_equals_triton(sizes, monkeypatch):
    """Each kind twice: the second time Triton specialises nothing. Code for aligned memory would
    stop at an odd address.
    """
    from hf_packfree.ops.fused.kernels.swiglu import swiglu

    monkeypatch.setattr(module, "_compiled", {})
    looked_up, own = [], type(swiglu).run
    monkeypatch.setattr(
        type(swiglu), "run", lambda *words, **more: looked_up.append(1) or own(*words, **more)
    )
    constants = {"BLOCK": 512, "num_warps": 4}
    for again in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            for size in sizes:
                for offset in (0, 1):
                    found, wanted = arguments(dtype, size, offset), arguments(dtype, size, offset)
                    before, grid = len(looked_up), (3 * -(-size // 512),)
                    module.launch(swiglu, grid, *found, **constants)
                    assert not again or len(looked_up) == before, "a kind that was launched before"
                    swiglu[grid](*wanted, **constants)
                    torch.cuda.synchronize()
                    assert wanted[2].any() and torch.equal(found[2], wanted[2]), (
                        dtype,
                        size,
                        offset,
                    )


def test_code_that_assumes_more_is_not_kept(monkeypatch):
    """A later Triton may specialise on more than multiples of 16."""
    from hf_packfree.ops.fused.kernels.swiglu import swiglu

    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_ASSUMED", ["tt.divisibility", 8])
    found = arguments(torch.bfloat16, 2048, 0)
    module.launch(swiglu, (12,), *found, BLOCK=512, num_warps=4)
    assert found[2].any() and not module._compiled
