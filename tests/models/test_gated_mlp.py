"""MLPs that keep half for the backward pass on a CPU: bit for bit upstream's, whatever their layers
hold.
"""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_packfree import apply_patches, patch_report, remove_patches
from hf_packfree.bench import measure
from hf_packfree.models import from_upstream, gated_mlp
from hf_packfree.models.gated_mlp import GatedMLP
from hf_packfree.patching.registry import FAMILIES
from tests.input_formats import row_batch
from tests.integrations.marks import needs
from tests.models.test_unpacked import UNPACKED, assert_upstreams_bits
from tests.support import ROW, assert_exact, gradients, tiny

NAMES = [family.name for family in FAMILIES if family.mlp is not None]
TOKENS, CHANNELS, WIDTH = 256, 32, 96


def llama_mlp(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=CHANNELS,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        **more,
    )
    return transformers.LlamaForCausalLM(config)


def mlp_of(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("MLP"))


def outcome(mlp, x):
    """Return the output and the gradients of x and of the weights."""
    mlp.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out = mlp(x)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), x.grad, *(p.grad for p in mlp.parameters() if p.grad is not None)]


def assert_same_bits(model, change=lambda mlp: None, x=None, dtype=torch.float32):
    """Of MLPs of two copies of a model, of which one is patched, changed alike."""
    ours, stock = mlp_of(apply_patches(copy.deepcopy(model))).to(dtype), mlp_of(model).to(dtype)
    assert isinstance(ours, GatedMLP) and not isinstance(stock, GatedMLP)
    change(ours), change(stock)
    size = stock.gate_proj.in_features
    x = torch.randn(1, 37, size, dtype=dtype) if x is None else x
    found, wanted = outcome(ours, x), outcome(stock, x)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    return found


def kept_by(mlp):
    """Bytes that a forward pass leaves behind, its output included."""
    x, held = torch.randn(1, TOKENS, CHANNELS, requires_grad=True), []
    events = measure._allocations(lambda: held.append(mlp(x)))
    return sum(int(event["args"]["Bytes"]) for event in events)


@pytest.fixture
def again(monkeypatch):
    """What is computed by ours, forward or once more."""
    calls, product = [], gated_mlp.gated_product
    monkeypatch.setattr(
        gated_mlp, "gated_product", lambda *x: (calls.append(x[0].shape), product(*x))[1]
    )
    return calls


def test_gate_and_up_are_kept_alone():
    model = llama_mlp()
    of_channels, of_width = TOKENS * CHANNELS * 4, TOKENS * WIDTH * 4
    assert kept_by(mlp_of(model)) == of_channels + 4 * of_width
    assert kept_by(mlp_of(apply_patches(model))) == of_channels + 2 * of_width


def test_where_gate_and_up_need_no_gradients_the_product_is_kept_alone(again):
    """One tensor instead of two, and what becomes of the layers' outputs later is their owner's."""
    model, outputs = llama_mlp(), []
    for mlp in (mlp_of(apply_patches(copy.deepcopy(model))), mlp_of(model)):
        mlp.gate_proj.requires_grad_(False), mlp.up_proj.requires_grad_(False)
        mlp.up_proj.register_forward_hook(lambda layer, args, out: outputs.append(out))
        out = mlp(torch.ones(1, 5, CHANNELS))
        outputs.pop().mul_(3)
        out.sum().backward()
        outputs.insert(0, mlp.down_proj.weight.grad)
    assert torch.equal(*outputs) and len(again) == 1


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_is_that_of_every_family_whose_row_says_so(family, dtype, again):
    assert_same_bits(tiny(family), dtype=dtype)
    assert len(again) == 2, "forward, and for the gradient of the last weight"


def test_families_that_compute_something_else_are_left_alone():
    """Falcon-H1's has the same layers, and multipliers between them."""
    falcon = apply_patches(tiny("falcon_h1"))
    assert not any(isinstance(module, GatedMLP) for module in falcon.modules())
    assert {"falcon_h1", "gemma", "phi3", "glm4"}.isdisjoint(NAMES) and "llama" in NAMES


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("lara_mini", "eager")])
def test_rows_of_one_document_are_upstreams_in_training(family, attention, again):
    model = tiny(family, attention=attention).train()
    assert_upstreams_bits(model, UNPACKED["ids"])
    assert again


def test_packed_rows_are_exact(again):
    assert_exact(apply_patches(tiny("llama")), row_batch("positions", ROW))
    assert again


CHANGES = {
    "a hook on the last layer": lambda mlp: mlp.down_proj.register_forward_hook(
        lambda layer, args, out: 2 * out + args[0].sum()
    ),
    "a hook on an input's layer": lambda mlp: mlp.up_proj.register_forward_hook(
        lambda layer, args, out: out.relu()
    ),
    "a hook that writes over the last layer's input": lambda mlp: (
        mlp.down_proj.register_forward_pre_hook(lambda layer, args: (args[0].mul_(2),))
    ),
    "a bias": lambda mlp: setattr(mlp.gate_proj, "bias", nn.Parameter(torch.ones(WIDTH))),
    "a frozen last layer": lambda mlp: mlp.down_proj.requires_grad_(False),
    "frozen first layers": lambda mlp: (
        mlp.gate_proj.requires_grad_(False),
        mlp.up_proj.requires_grad_(False),
    ),
    "one layer in another dtype": lambda mlp: setattr(
        mlp, "up_proj", nn.Sequential(mlp.up_proj, Cast(torch.float64), Cast(torch.float16))
    ),
}
ALONE = {
    "another activation": lambda mlp: setattr(mlp, "act_fn", nn.GELU()),
    "a hook on the activation": lambda mlp: mlp.act_fn.register_forward_hook(
        lambda layer, args, out: 2 * out
    ),
}


class Cast(nn.Module):
    """Changes the dtype of what goes through it."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        """Return x in it."""
        return x.to(self.dtype)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_layers_are_called_with_what_they_have(change):
    assert_same_bits(llama_mlp(), change)


@pytest.mark.parametrize("change", ALONE.values(), ids=ALONE)
def test_another_activation_is_upstreams_forward(change, again):
    assert_same_bits(llama_mlp(), change)
    assert again == []


def test_nothing_is_computed_again_without_gradients_on_other_devices_and_in_graphs(again):
    mlp, x = mlp_of(apply_patches(llama_mlp())), torch.randn(1, 5, CHANNELS)
    with torch.no_grad():
        mlp(x)
    mlp.to("meta")(x.to("meta")).sum().backward()
    assert again == []


@needs("peft")
@pytest.mark.filterwarnings("default")
def test_adapters_train_as_upstreams():
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        target_modules=["gate_proj", "up_proj", "down_proj"],
        init_lora_weights=False,
        lora_dropout=0.0,
    )
    found = assert_same_bits(peft.get_peft_model(llama_mlp(), config))
    assert len(found) == 2 + 6


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_decides_what_is_kept(reentrant, again):
    model = llama_mlp()
    ours, stock, x = apply_patches(copy.deepcopy(model)), model, torch.randn(1, 9, CHANNELS)
    results = []
    for mlp in (mlp_of(ours), mlp_of(stock)):
        y = x.clone().requires_grad_()
        checkpoint(mlp, y, use_reentrant=reentrant).square().sum().backward()
        results.append([y.grad, *(p.grad for p in mlp.parameters())])
    assert all(map(torch.equal, *results))
    assert again == [(1, 9, WIDTH)] * 2, "once, and once more by checkpointing alone"


def test_under_autocast_and_offloading_gradients_are_upstreams():
    model, x = llama_mlp(), torch.randn(1, 37, CHANNELS)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(model, x=x)
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(model, x=x)


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj", "down_proj"])
def test_weights_changed_before_the_backward_pass_are_refused(layer):
    model = llama_mlp()
    for mlp in (mlp_of(apply_patches(copy.deepcopy(model))), mlp_of(model)):
        out = mlp(torch.ones(1, 5, CHANNELS, requires_grad=True))
        with torch.no_grad():
            getattr(mlp, layer).weight.mul_(2)
        with pytest.raises(RuntimeError, match="in ?place"):
            out.sum().backward()


def test_it_is_reported_left_alone_where_something_wraps_it_and_removed():
    model = tiny("llama")
    kinds = [type(module) for module in model.modules()]
    assert patch_report(apply_patches(model)).swaps["LlamaMLP"] == 4
    assert [type(module) for module in remove_patches(model).modules()] == kinds
    wrapped = mlp_of(model)
    wrapped.forward = lambda x, before=wrapped.forward: 2 * before(x)
    assert patch_report(apply_patches(model)).swaps["LlamaMLP"] == 3
    assert type(wrapped) is kinds[[*model.modules()].index(wrapped)]
    assert_exact(model, row_batch("positions", ROW))


def test_copies_and_transforms_are_as_upstreams():
    model, x = llama_mlp(), torch.randn(1, 5, CHANNELS)
    ours = mlp_of(copy.deepcopy(apply_patches(copy.deepcopy(model))))
    found, wanted = (
        torch.func.grad(lambda x, mlp=mlp: mlp(x).square().sum())(x)
        for mlp in (ours, mlp_of(model))
    )
    assert isinstance(ours, GatedMLP) and torch.equal(found, wanted)
    assert gradients(model) == {}


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if family.mlp is not None and family.made_from_upstream],
    ids=lambda family: family.name,
)
def test_it_is_found_where_liger_has_put_its_class_in_upstreams_module(family, monkeypatch):
    upstream = import_module(family.upstream)
    before = getattr(upstream, family.mlp)
    monkeypatch.setattr(upstream, family.mlp, type("LigerSwiGLUMLP", (nn.Module,), {}))
    # as in the first call of `apply_patches` in a process
    ours = from_upstream.replacements.__wrapped__(family.upstream)
    assert ours[family.mlp].__bases__ == (GatedMLP, before)
