"""`verify_packing` on the GPU: a patched model passes with the kernels that are chosen for it,
an unpatched one does not.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree import verify_packing
from hf_packfree.errors import LeakDetected
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.gpu.small import EXPERTS, NARROW, small

pytestmark = gpu
CASES = {
    "fp32, published heads": (NARROW, torch.float32),
    "bf16, published heads": (NARROW, torch.bfloat16),
    "bf16, experts": (EXPERTS, torch.bfloat16),
}


def measured(model):
    """The report, also of a model that failed."""
    try:
        return verify_packing(model, device=DEVICE if isinstance(model, str) else None)
    except LeakDetected as error:
        return error.report


@pytest.mark.parametrize("case", CASES)
def test_a_patched_model_passes(case, record, request):
    shape, dtype = CASES[case]
    if not TRIAL and dtype == torch.float32:
        request.getfixturevalue("untuned")
    torch.manual_seed(0)
    report = measured(small(shape, dtype))
    found, limits, what = report.patched, report.limits, f"verify_packing {case}"
    for part, error, limit, control in (
        ("logits", found.logits, limits.logits, report.unpatched.logits),
        ("worst gradient", found.gradients, limits.gradients, report.unpatched.gradients),
        ("influence", found.influence, limits.influence, report.unpatched.influence),
        (
            "gradient of another document's inputs",
            found.cross_gradient,
            0.0,
            report.unpatched.cross_gradient,
        ),
    ):
        record(f"{what}: {part}", error, limit, unpatched=control, worst=found.worst_parameter)


def test_an_unpatched_model_does_not(request):
    if not TRIAL:
        request.getfixturevalue("untuned")
    torch.manual_seed(0)
    with pytest.raises(LeakDetected, match="documents react to each other's tokens"):
        verify_packing(small(NARROW, torch.float32, patched=False))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_images_in_fp32(family, record):
    """Whose patches cuDNN multiplies, by torch's default in TF32."""
    report = measured(family)
    record(f"verify_packing {family}, logits", report.patched.logits, 1e-5)
    record(f"verify_packing {family}, worst gradient", report.patched.gradients, 1e-4)
