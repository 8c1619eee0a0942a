"""The MLP of the decoder layer's packed branch: which ones a kernel may compute, and that those
are exact.
"""

from __future__ import annotations

from functools import wraps
from types import MethodType

import pytest
import torch
from torch import nn

from hf_packfree import apply_patches
from hf_packfree.models.base import upstream_of
from hf_packfree.models.gated_mlp import GatedMLP
from hf_packfree.models.plain_layers import norm_offset, swiglu_layers
from hf_packfree.ops.fused import swiglu_mlp
from tests.input_formats import row_batch
from tests.models.kernels import on_kernels, watched
from tests.support import ROW, assert_exact, relative_rms, tiny

BATCH = row_batch("positions", ROW)
DENSE = ["qwen3_5", "llama", "qwen2", "qwen3", "mistral", "smollm3"]


def ligers(mlp, x):
    return type(mlp).forward(mlp, x)


ligers.__module__, ligers.__qualname__ = (
    "liger_kernel.transformers.swiglu",
    "LigerQwen3MoeSwiGLUMLP.forward",
)


def another_of_ligers(mlp, x):
    return 2 * type(mlp).forward(mlp, x)


another_of_ligers.__module__, another_of_ligers.__qualname__ = (
    "liger_kernel.transformers.swiglu",
    "LigerPhi3SwiGLUMLP.forward",
)


def halved(forward):
    @wraps(forward)
    def half(self, x):
        return 0.5 * forward(self, x)

    return half


def other(forward):
    return lambda self, x: 0.5 * forward(self, x)


class Adapter(nn.Linear):
    """A linear layer that does more, as adapters' do."""

    def forward(self, x):
        return super().forward(x) + 1


@pytest.fixture
def fused(monkeypatch):
    """The gate weights of the MLPs that the op computes, here by its reference under the
    kernel's name.
    """
    return watched(monkeypatch, "swiglu_mlp", place=1)


@pytest.mark.parametrize("family", DENSE)
def test_every_mlp_is_computed_by_the_op_and_exact(family, fused):
    model = on_kernels(tiny(family))
    assert_exact(model, BATCH)
    wanted = [layer.mlp.gate_proj.weight for layer in model.model.layers]
    assert len(fused) == len(wanted) and all(a is b for a, b in zip(fused, wanted))


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_experts_are_called(family, fused):
    on_kernels(tiny(family))(**BATCH.inputs)
    assert not fused


def test_ligers_are_computed_too_but_not_another_formula_of_its(fused):
    model = on_kernels(tiny())
    for layer, forward in zip(model.model.layers, (ligers, ligers, another_of_ligers, ligers)):
        layer.mlp.forward = MethodType(forward, layer.mlp)
    model(**BATCH.inputs)
    assert len(fused) == 3 and not any(
        gate is model.model.layers[2].mlp.gate_proj.weight for gate in fused
    )


def _hook_activation(mlp, calls):
    mlp.act_fn.register_forward_hook(lambda *call: calls.append("called"))


def _hook_module(mlp, calls):
    mlp.register_forward_pre_hook(lambda *call: calls.append("called"))


def _hook_projection(mlp, calls):
    mlp.up_proj.register_forward_hook(lambda *call: calls.append("called"))


def _own_forward(mlp, calls):
    mlp.forward = lambda x: calls.append("called") or torch.zeros_like(x)


def _own_forward_of_the_activation(mlp, calls):
    mlp.act_fn.forward = lambda x: calls.append("called") or x


def _adapter(mlp, calls):
    mlp.down_proj = Adapter(mlp.down_proj.in_features, mlp.down_proj.out_features, bias=False)
    mlp.down_proj.register_forward_hook(lambda *call: calls.append("called"))


def _bias(mlp, calls):
    mlp.gate_proj.bias = nn.Parameter(torch.zeros(mlp.gate_proj.out_features))
    calls.append("called")


def _another_activation(mlp, calls):
    mlp.act_fn = nn.GELU()
    calls.append("called")


def _another_silu(mlp, calls):
    mlp.act_fn = type("SiLU", (nn.ReLU,), {})()
    calls.append("called")


class Quantised(nn.Linear):
    """A linear layer that holds no weight of that name."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.packed = self._parameters.pop("weight")

    def forward(self, x):
        return nn.functional.linear(x, self.packed)


def _quantised(mlp, calls):
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = map(
        Quantised, (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    calls.append("called")


def _another_layout(mlp, calls):
    mlp.gate_up, mlp.down = (
        nn.Linear(mlp.gate_proj.in_features, 8),
        nn.Linear(8, mlp.gate_proj.in_features),
    )
    mlp.forward = MethodType(
        lambda self, x: calls.append("called") or self.down(self.gate_up(x)), mlp
    )
    del mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn


CHANGES = [
    _hook_activation,
    _hook_module,
    _hook_projection,
    _own_forward,
    _own_forward_of_the_activation,
    _adapter,
    _bias,
    _another_activation,
    _another_silu,
    _quantised,
    _another_layout,
]


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_what_somebody_changed_is_called(change, family, fused):
    model, calls = tiny(family), []
    mine = model.model.layers[1].mlp.gate_proj.weight
    change(model.model.layers[1].mlp, calls)
    on_kernels(model)(**BATCH.inputs)
    assert calls == ["called"] and len(fused) == 3 and not any(gate is mine for gate in fused)


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_a_class_whose_forward_somebody_replaced_is_called(family, fused, monkeypatch):
    model, calls = tiny(family), []
    kind = type(model.model.layers[0].mlp)
    whole = kind.forward
    monkeypatch.setattr(kind, "forward", lambda mlp, x: calls.append(1) or whole(mlp, x))
    # for gradients on a CPU, the MLP of ours runs in front
    with torch.no_grad():
        on_kernels(model)(**BATCH.inputs)
    assert not fused and len(calls) == 4


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_a_class_whose_forward_somebody_wrapped_is_called(family, fused, monkeypatch):
    """`functools.wraps` makes a wrapper look as if it came from upstream's module."""
    model = tiny(family)
    for kind in (type(model.model.layers[0].mlp), type(model.model.layers[0].input_layernorm)):
        monkeypatch.setattr(kind, "forward", halved(kind.forward))
    layer = on_kernels(model).model.layers[0]
    assert norm_offset(layer.input_layernorm, layer) is None
    model(**BATCH.inputs)
    assert not fused


@pytest.mark.parametrize("wrap", [halved, other], ids=["wrapped", "another"])
def test_our_class_whose_forward_somebody_replaced_is_called(wrap, fused, monkeypatch):
    """Ours in front of upstream's computes the formula, what stands in its place need not."""
    model = on_kernels(tiny("llama"))
    kind = type(model.model.layers[0].mlp)
    assert issubclass(kind, GatedMLP)
    model(**BATCH.inputs)
    assert len(fused) == 4
    monkeypatch.setattr(kind, "forward", wrap(kind.forward))
    model(**BATCH.inputs)
    assert len(fused) == 4


def test_an_mlp_of_another_layout_in_the_familys_class_is_called():
    layer = tiny().model.layers[0]
    x = torch.randn(3, layer.mlp.gate_proj.in_features)
    del layer.mlp.up_proj
    assert swiglu_layers(layer.mlp, layer, x) is None
    del layer.mlp.act_fn
    assert swiglu_layers(layer.mlp, layer, x) is None


def test_compiled_layers_do_not_break_where_the_mlp_is_chosen():
    """torch.compile fuses by itself, and has to get through in one graph."""
    layer = on_kernels(tiny()).model.layers[0]
    x = torch.randn(3, layer.mlp.gate_proj.in_features)
    compiled = torch.compile(layer._feed_forward, fullgraph=True, backend="eager")
    assert relative_rms(compiled(x, x), x + layer.mlp(x)) < 1e-6


def test_in_another_dtype_the_module_is_called_unless_autocast_rounds():
    layer = tiny().model.layers[0]
    x = torch.randn(3, layer.mlp.gate_proj.in_features)
    assert swiglu_layers(layer.mlp, layer, x) is not None
    assert swiglu_layers(layer.mlp, layer, x.double()) is None
    with torch.autocast("cpu", torch.bfloat16):
        read = swiglu_layers(layer.mlp, layer, x)
        assert read is not None and {weight.dtype for weight in read} == {torch.bfloat16}
        assert swiglu_layers(layer.mlp, layer, x.double()) is None


def test_the_torch_reference_is_upstreams_mlp_bit_for_bit_and_differentiable():
    mlp = tiny().bfloat16().model.layers[0].mlp
    weights = [part.weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    torch.manual_seed(0)
    x = torch.randn(1, 9, weights[0].shape[1], dtype=torch.bfloat16)
    assert torch.equal(swiglu_mlp(x, *weights), mlp(x))
    leaves = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 5, 6), (7, 6), (7, 6), (6, 7))
    ]
    assert torch.autograd.gradcheck(swiglu_mlp, leaves)


def test_a_forward_that_somebody_put_into_the_class_is_run_on_a_cpu_too(monkeypatch):
    model = apply_patches(tiny("llama"))
    mlp = model.model.layers[0].mlp
    x = torch.randn(1, 5, model.config.hidden_size)
    before, kind = mlp(x), upstream_of(type(mlp))
    monkeypatch.setattr(kind, "forward", halved(kind.forward))
    assert torch.equal(mlp(x), 0.5 * before)
