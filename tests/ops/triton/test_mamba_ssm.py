"""mamba-ssm's own kernels in Triton's interpreter, where that package is installed: packed rows
against the recurrence, and a control.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from hf_packfree.ops.ssd import mamba_ssm, recurrent_ssd, ssd
from tests.ops.test_ssd import SINGLE, make_inputs, run, worst

pytest.importorskip("einops")
triton = pytest.importorskip("triton")


@pytest.fixture
def interpreted(monkeypatch):
    """What the kernels ask of a GPU; one shape each, as there is nothing to time."""
    tune = triton.autotune

    def first(configs, key, **options):
        return tune(configs[:1], key=key)

    monkeypatch.setattr(triton, "autotune", first)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    processors = SimpleNamespace(multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: processors)
    monkeypatch.setattr(mamba_ssm, "_CHUNK", 64)
    try:
        mamba_ssm._kernel()
    except ImportError as error:
        pytest.skip(f"mamba-ssm is not there: {error}")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them")
def test_seq_idx_keeps_documents_apart(interpreted):
    lengths = [5, 64, 1, 129, 3, 70]
    inputs = make_inputs(lengths, 4, 2, 16, 16)
    wanted = run(recurrent_ssd, inputs, lengths)
    single = [x.float() for x in inputs]
    assert worst(run(ssd, single, lengths, backend="mamba_ssm"), wanted)[0] <= SINGLE
    assert worst(run(ssd, single, [sum(lengths)], backend="mamba_ssm"), wanted)[0] > 0.1
