"""PEFT's layers, read as weights and adapters: the same numbers as a call, or left to be called."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from hf_packfree.models.plain_layers import dtype_read, plain_layers
from hf_packfree.models.unfused import why_not_fused
from hf_packfree.ops.fused import projections
from hf_packfree.ops.fused.lora import LoraLinear
from tests.integrations.marks import integration, needs
from tests.support import relative_rms

pytestmark = [needs("peft"), pytest.mark.filterwarnings("default")]


class Two(nn.Module):
    def __init__(self, size=24):
        super().__init__()
        self.q, self.k = nn.Linear(size, 40, bias=False), nn.Linear(size, 16, bias=False)

    def forward(self, x):
        return self.q(x), self.k(x)


def lora(name="default", model=None, base=None, **options):
    """A model of two layers with adapters that are not zero; onto one that has some already,
    further ones.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    options = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q", "k"],
        "init_lora_weights": False,
    } | options
    if model is None:
        return get_peft_model(base or Two(), LoraConfig(**options), adapter_name=name)
    model.add_adapter(name, LoraConfig(**options))
    return model


def two_active():
    model = lora("second", lora(), r=3)
    model.base_model.set_adapter(["default", "second"])
    return model


def merged(make=lora):
    model = make()
    model.merge_adapter()
    return model


def disabled(make=lora):
    model = make()
    model.base_model.disable_adapter_layers()
    return model


def dora(*names, **options):
    """The same with adapters of which some are DoRA, whose magnitudes have been trained."""
    model = None
    for name in names or ("dora",):
        model = lora(name, model, use_dora=name.startswith("dora"), **options)
    model.base_model.set_adapter(list(names or ("dora",)))
    return trained(model)


def trained(model):
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.3 * torch.rand(parameter.shape))
    return model


def one_layer():
    return lora(target_modules=["k"])


READ = {
    "plain": (lora, 1),
    "rslora": (lambda: lora(use_rslora=True), 1),
    "two active": (two_active, 2),
    "merged": (merged, 0),
    "disabled": (disabled, 0),
    "one of two layers": (one_layer, 0),
    "ranks of their own": (lambda: lora(rank_pattern={"k": 7}, alpha_pattern={"k": 1}), 1),
    "dropout in evaluation": (lambda: lora(lora_dropout=0.5).eval(), 1),
    "PiSSA": (lambda: lora(init_lora_weights="pissa"), 1),
    "DoRA": (dora, 1),
    "DoRA, rsLoRA": (lambda: dora(use_rslora=True), 1),
    "DoRA on DoRA": (lambda: dora("dora", "dora2"), 2),
    "DoRA between": (lambda: dora("first", "dora", "last"), 3),
    "DoRA merged": (lambda: merged(dora), 0),
    "DoRA disabled": (lambda: disabled(dora), 0),
}


@integration(
    "PEFT",
    "rsLoRA, PiSSA, ranks of their own, several adapters, merged or disabled ones",
    "works; fused",
)
@pytest.mark.parametrize(("make", "adapters"), READ.values(), ids=READ)
def test_what_is_read_gives_what_a_call_gives(make, adapters, record_property):
    record_property("error", assert_as_called(make().base_model.model, adapters))


def assert_as_called(layers, adapters) -> float:
    """Assert that what is read of both gives what a call does, of which the first has so many
    adapters; return how far off.
    """
    x = torch.randn(1, 9, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
    read = plain_layers(x, layers.q, layers.k)
    assert (len(read[0].adapters) if isinstance(read[0], LoraLinear) else 0) == adapters
    pairs = list(zip(results(layers, x, fused=True), results(layers, x), strict=True))
    assert all((a is None) == (b is None) for a, b in pairs)
    error = max(relative_rms(a, b) for a, b in pairs if a is not None)
    assert error < 1e-6
    return error


def results(layers, x, *, fused=False):
    """Outputs and gradients of what is read of both layers, or of a call."""
    trained = [x, *(p for p in layers.parameters() if p.requires_grad)]
    outs = (
        projections(x, *plain_layers(x, layers.q, layers.k), backend="triton")
        if fused
        else layers(x)
    )
    return *outs, *torch.autograd.grad(
        sum(out.sin().sum() for out in outs), trained, allow_unused=True
    )


@integration(
    "PEFT",
    "LoRA and DoRA on bf16 layers, adapters in fp32 or bf16",
    "works; as near to fp64 as PEFT's own layers",
)
@pytest.mark.parametrize("wide", [True, False], ids=["fp32 adapters", "bf16 adapters"])
@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_half_precision_is_no_farther_from_exact_than_a_call(use_dora, wide, record_property):
    layers = lora(base=Two(512).bfloat16(), use_dora=use_dora).base_model.model
    layers = layers if wide else layers.bfloat16()
    # an adapter adds less than the layer itself
    for name, parameter in layers.named_parameters():
        parameter.data.mul_(
            0.1
            if "lora_B" in name
            else 1 + 0.1 * torch.randn(parameter.shape)
            if "magnitude" in name
            else 1
        )
    x = torch.randn(1, 500, 512).bfloat16().requires_grad_()
    exact = results(deepcopy(layers).double(), x.detach().double().requires_grad_())
    for a, b, wanted in zip(results(layers, x, fused=True), results(layers, x), exact, strict=True):
        record_property("error", error := relative_rms(a, wanted))
        assert a.dtype == b.dtype and error < 1.1 * relative_rms(b, wanted)


def in_4_bits(compress_statistics=False, compute_dtype=None, **options):
    """The same, on layers of bitsandbytes'."""
    from bitsandbytes.nn import Linear4bit

    base = Two()
    # what PEFT asks a model
    base.is_loaded_in_4bit = True
    settings = {
        "bias": False,
        "quant_type": "nf4",
        "compress_statistics": compress_statistics,
        "compute_dtype": compute_dtype,
    }
    for name, layer in list(base.named_children()):
        quantised = Linear4bit(layer.in_features, layer.out_features, **settings)
        quantised.load_state_dict(layer.state_dict())
        setattr(base, name, quantised.to("cpu"))
    return trained(lora(base=base, **options))


BITS = {
    "all": {},
    "no adapters on one layer": {"target_modules": ["k"]},
    "constants quantised": {"compress_statistics": True},
    "DoRA": {"use_dora": True},
}


@needs("bitsandbytes")
@pytest.mark.parametrize("options", BITS.values(), ids=BITS)
def test_bases_in_4_bits_are_made_whole(options):
    layers = in_4_bits(**options).base_model.model
    assert_as_called(layers, adapters=0 if "target_modules" in options else 1)
    assert all(why_not_fused(layer, torch.randn(2, 24)) is None for layer in (layers.q, layers.k))


@needs("bitsandbytes")
def test_bases_in_4_bits_that_compute_in_another_dtype_are_called():
    layer, x = in_4_bits(compute_dtype=torch.bfloat16).base_model.model.q, torch.randn(2, 24)
    kind = "Linear4bit whose bnb_4bit_compute_dtype is bfloat16, not float32"
    assert plain_layers(x, layer) is None and why_not_fused(layer, x) == f"LoRA on {kind}"
    assert plain_layers(x, layer.base_layer) is None and why_not_fused(layer.base_layer, x) == kind


@needs("bitsandbytes")
def test_bases_in_4_bits_on_fp32_activations_are_fused_under_autocast():
    """As PEFT's `prepare_model_for_kbit_training` leaves them; bitsandbytes returns fp32 there."""
    layers = in_4_bits(compute_dtype=torch.bfloat16).base_model.model
    x = torch.randn(1, 300, 24, generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert dtype_read(x, [layers.q]) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert plain_layers(x, layers.q, layers.k) and why_not_fused(layers.q, x) is None
        assert dtype_read(x, [layers.q, layers.k]) == torch.bfloat16
        found, called = results(layers, x, fused=True), results(layers, x)
    for a, b in zip(found, called, strict=True):
        assert relative_rms(a, b) < 2 * torch.finfo(torch.bfloat16).eps


def disabled_while_merged():
    model = merged()
    model.base_model.disable_adapter_layers()
    return model


def hooked_inside():
    model = lora()
    model.base_model.model.q.lora_A["default"].register_forward_hook(lambda *call: None)
    return model


def hooked():
    model = lora()
    model.base_model.model.q.register_forward_pre_hook(lambda *call: None)
    return model


def with_a_forward_of_its_own():
    model = lora()
    model.base_model.model.q.forward = lambda x: x
    return model


def peft(name, **options):
    """A model with adapters of another method."""
    import peft

    return peft.get_peft_model(
        Two(), getattr(peft, f"{name}Config")(target_modules=["q", "k"], **options)
    )


def trained_under_dora():
    model = dora()
    model.requires_grad_(True)
    return model


def test_without_weights_adapters_are_read_too():
    """As `packfree doctor --model` does, on a device that has no autocast."""
    layer = lora().base_model.model.q.to("meta")
    assert why_not_fused(layer, torch.empty(2, 24, device="meta")) is None


def of_two_dtypes():
    model = lora()
    model.base_model.model.q.lora_B.bfloat16()
    return model


HOOKS = "LoRA with hooks or a forward of its own"
CALLED = {
    "DoRA with dropout": lambda: lora(use_dora=True, lora_dropout=0.5),
    "LoRA with a bias": lambda: lora(lora_bias=True),
    "DoRA on a trained layer": trained_under_dora,
    "IA3": lambda: peft("IA3", feedforward_modules=[]),
    "VERA": lambda: peft("Vera", r=4),
    "disabled while merged": disabled_while_merged,
    HOOKS: hooked,
    "hooked inside": hooked_inside,
    "another forward": with_a_forward_of_its_own,
    "ModulesToSaveWrapper": lambda: lora(target_modules=["k"], modules_to_save=["q"]),
    "bfloat16 adapters on fp32": lambda: lora().to(torch.bfloat16),
    "two dtypes": of_two_dtypes,
}
NAMES = {
    "another forward": HOOKS,
    "DoRA on a trained layer": "DoRA",
    "bfloat16 adapters on fp32": "LoRA in bfloat16 on activations in float32",
    "two dtypes": "LoRA in float32 and bfloat16 on activations in float32",
    **dict.fromkeys(("disabled while merged", "hooked inside"), "LoRA that is not fused"),
}


@pytest.mark.filterwarnings("ignore:.*lora_bias")
@pytest.mark.parametrize("kind", CALLED)
def test_what_is_more_than_lora_is_called(kind):
    layers = CALLED[kind]().base_model.model
    x = torch.randn(1, 9, 24)
    assert plain_layers(x, layers.q, layers.k) is None
    assert why_not_fused(layers.q, x) == NAMES.get(kind, kind)


def test_plain_lora_is_named_only_where_it_is_not_fused():
    layer, x = lora().base_model.model.q, torch.randn(2, 24)
    assert why_not_fused(layer, x) is None and why_not_fused(layer.base_layer, x) is None
    assert why_not_fused(layer, x, adapters=False) == "LoRA under batch_invariant=True"


def test_dropout_in_training_and_adapters_that_are_wider_than_x():
    layers = lora(lora_dropout=0.25).base_model.model
    (layer,) = plain_layers(torch.randn(2, 24), layers.q)
    assert layer.adapters[0].dropout == 0.25
    half = lora().base_model.model
    half.q.base_layer.bfloat16()
    (layer,) = plain_layers(torch.randn(2, 24).bfloat16(), half.q)
    assert layer.weight.dtype == torch.bfloat16 and layer.adapters[0].A.dtype == torch.float32
    assert plain_layers(torch.randn(2, 24).bfloat16(), half.q, adapters=False) is None


BASES = {
    "bf16 base": lambda two, **options: lora(base=two.bfloat16(), **options),
    "fp32 base": lambda two, **options: lora(base=two, **options),
    "trained": lambda two, **options: two,
}


@integration(
    "PEFT",
    "LoRA and DoRA under autocast, adapters and base in any dtype",
    "works; as near to fp64 as PEFT's own layers",
)
@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)]
)
@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("base", BASES)
def test_under_autocast_no_farther_from_exact_than_a_call(base, use_dora, dtype, wide):
    layers = BASES[base](Two(256), use_dora=use_dora)
    layers = getattr(layers, "base_model", layers)
    layers = getattr(layers, "model", layers)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            parameter.mul_(0.1 if "lora_B" in name else 1)
    x = torch.randn(1, 300, 256, generator=torch.Generator().manual_seed(2))
    x = (x if wide else x.to(dtype)).requires_grad_()
    exact = results(deepcopy(layers).double(), x.detach().double().requires_grad_())
    with torch.autocast("cpu", dtype):
        assert plain_layers(x, layers.q, layers.k)
        found, called = results(layers, x, fused=True), results(layers, x)
    each = [*zip(found, called, exact, strict=True)]
    assert all(a.dtype == b.dtype for a, b, _ in each)
    ratios = [relative_rms(a, wanted) / relative_rms(b, wanted) for a, b, wanted in each]
    # the gradient of a magnitude has few elements, so that its error scatters
    assert sum(ratios) / len(ratios) <= 1 and max(ratios) < 1.3, ratios
