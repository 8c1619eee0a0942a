"""The multi-token prediction head on the GPU: packed against a loop over documents, in fp32 and
in bf16.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree import MTPOptions, apply_patches
from tests.gpu.checks import DEVICE, gpu
from tests.gpu.small import NARROW, small
from tests.mtp.heads import WEIGHT, labelled, loop_over_documents, packed, worst_gradient
from tests.support import GRADIENT_TOL, gradients, slow_decay

pytestmark = [*gpu]
LENGTHS = (1, 2, 3, 63, 64, 65, 129, 200)
ROUNDING, FP32 = 1.5, 1e-5


def with_head(dtype, backend="auto"):
    """The same weights at every call, whatever the dtype."""
    torch.manual_seed(0)
    model = small(NARROW, torch.float32, patched=False)
    apply_patches(model, backend=backend, mtp=MTPOptions(from_scratch=True, depth=2, weight=WEIGHT))
    return slow_decay(model.cpu()).to(DEVICE, dtype)


def on_device(pairs):
    return [(ids.to(DEVICE), labels.to(DEVICE)) for ids, labels in pairs]


def in_a_row(model, pairs):
    row = {name: part.to(DEVICE) for name, part in packed(pairs).items()}
    model(**row, use_cache=False).loss.backward()
    return {name: one.float() for name, one in gradients(model).items() if name.startswith("mtp.")}


def in_a_loop(model, pairs):
    with torch.device(DEVICE):
        loop_over_documents(model, on_device(pairs), 2)[1].backward()
    return {name: one.float() for name, one in gradients(model).items() if name.startswith("mtp.")}


def test_fp32(record, precise, upstream_in_torch):
    pairs = labelled(LENGTHS)
    found = in_a_row(with_head(torch.float32, {"delta_rule": "torch"}), pairs)
    wanted = in_a_loop(with_head(torch.float32, "torch"), pairs)
    record(
        "the head, fp32: worst gradient against a loop over documents",
        worst_gradient(found, wanted),
        GRADIENT_TOL,
    )


@pytest.mark.parametrize("backend", ["auto", {"loss": "torch"}], ids=["auto", "loss in torch"])
def test_bf16_is_as_near_as_the_loop(backend, record, precise, upstream_in_torch):
    pairs = labelled(LENGTHS)
    exact = in_a_loop(with_head(torch.bfloat16, "torch").float(), pairs)
    unfused = in_a_loop(with_head(torch.bfloat16, "torch"), pairs)
    found = in_a_row(with_head(torch.bfloat16, backend), pairs)
    limit = max(ROUNDING * worst_gradient(unfused, exact), FP32)
    record(
        f"the head, bf16, {backend}: worst gradient from exact", worst_gradient(found, exact), limit
    )
