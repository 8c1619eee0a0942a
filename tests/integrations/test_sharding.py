"""DeepSpeed's ZeRO-3 and upstream's tensor parallel plan in two processes; pipelines."""

from __future__ import annotations

import json

import pytest
import torch

from hf_packfree import apply_patches, patch_report
from hf_packfree.errors import ContractError
from tests.input_formats import row_batch
from tests.integrations.marks import integration, needs
from tests.integrations.test_parallel import launch
from tests.support import CONTROL, GRADIENT_TOL, ROW, tiny


def error_of(way: str, folder, patched: str) -> float:
    """Train in two processes and return the worst gradient error."""
    out = folder / f"{patched}.json"
    done = launch("tests/integrations/two_processes.py", way, str(out), str(folder / "checkpoint"), patched)
    assert out.exists(), done.stderr[-4000:]
    return json.loads(out.read_text())["error"]


def check(way: str, folder, record_property) -> None:
    tiny().save_pretrained(folder / "checkpoint")
    error, control = (error_of(way, folder, kind) for kind in ("patched", "unpatched"))
    record_property("error", error)
    record_property("control", control)
    assert error <= GRADIENT_TOL and control >= CONTROL * GRADIENT_TOL


@integration("DeepSpeed", "ZeRO-3, weights sharded while loading")
@needs("deepspeed")
def test_zero3(tmp_path, record_property):
    check("zero3", tmp_path, record_property)


def test_a_sharded_parameter_is_measured_by_what_it_stands_for():
    """As ZeRO-3 leaves it, without DeepSpeed: empty, with its shape beside it."""
    model = tiny()
    layer = model.model.layers[0].linear_attn
    for parameter in (layer.A_log, layer.dt_bias, layer.conv1d.weight, layer.norm.weight):
        parameter.ds_shape, parameter.data = parameter.shape, parameter.data.new_empty(0)
    assert patch_report(apply_patches(model)).patched
    model = tiny()
    layer = model.model.layers[0].linear_attn
    layer.A_log.ds_shape, layer.A_log.data = torch.Size([7]), layer.A_log.data.new_empty(0)
    with pytest.raises(ContractError, match="A_log is \\(7,\\)"):
        apply_patches(model)


@integration("transformers", 'tensor parallel, `tp_plan="auto"`', "works if patched after loading; ranks repeat the delta rule")
def test_tensor_parallel(tmp_path, record_property):
    check("tensor_parallel", tmp_path, record_property)


@integration(
    "torch", "pipeline parallel, traced (`torch.distributed.pipelining`)",
    "refused by torch with `RuntimeError`: where boundaries are read cannot be traced",
)
@pytest.mark.filterwarnings("default")
def test_a_traced_pipeline_is_refused():
    from torch.distributed.pipelining import SplitPoint, pipeline

    inputs, split = row_batch("positions", ROW).inputs, {"model.layers.2": SplitPoint.BEGINNING}
    with pytest.raises(RuntimeError, match="full graph"):
        pipeline(apply_patches(tiny().eval()), mb_args=(), mb_kwargs=inputs, split_spec=split)
    assert not torch.distributed.is_initialized()
