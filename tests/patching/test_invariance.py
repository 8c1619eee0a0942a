"""The report promises batch invariance where tests/gpu checks it, and names what is in the way
elsewhere, or not exact.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_packfree import apply_patches, patch_report
from hf_packfree.errors import BackendUnavailable, PatchConflict
from hf_packfree.models.state import state_of
from hf_packfree.ops import delta_rule
from hf_packfree.ops.backend import LongDocuments
from hf_packfree.ops.fused.linear import NARROW
from hf_packfree.ops.table import OPS
from hf_packfree.patching import apply, invariance, report
from hf_packfree.patching.announce import announce
from hf_packfree.patching.backends import choose_backends
from tests.benchmarks.shapes import SHAPES, Shape, configuration
from tests.gpu.op_table import OPS as TESTED
from tests.input_formats import row_batch
from tests.patching.machines import INSTALLED, SIZES
from tests.support import tiny

BITS = (
    "documents get the same bits alone and packed in the layers' forward pass (not under autocast "
    "or torch.compile)"
)
NEXT = Shape("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", 4, 48)
"""Whose configuration is the published model's without any argument."""
ROUNDING = "documents get what they get alone, up to rounding ({})"


@pytest.fixture
def hopper(gpu, monkeypatch):
    """Return a function that patches four layers of a published shape as on a Hopper GPU, without
    memory, and returns the model.
    """

    def patched(
        shape=SHAPES["2b"],
        *,
        dtype=torch.bfloat16,
        capability=(9, 0),
        release="2.11.0+cu130",
        **options,
    ):
        gpu(capability=capability)
        there = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
        monkeypatch.setattr(report, "what_layers_read", lambda *_: there)
        shape = replace(shape, layers=4)
        with torch.device("meta"):
            model = getattr(transformers, shape.causal_lm)(configuration(shape)).to(dtype)
        apply_patches(model, batch_invariant=True, **options)
        monkeypatch.setattr(torch, "__version__", release)
        return model

    return patched


def test_bits_are_promised_where_the_gpu_tests_check_them(hopper):
    for options in ({}, {"backend": {"delta_rule": "fla"}}, {"backend": {"attention": "varlen"}}):
        found = patch_report(hopper(**options))
        assert found.rounding is None and BITS in str(found)


def test_documents_with_media_are_left_out_of_the_promise(hopper, caplog):
    sentence = "those with images, videos or audio agree up to rounding"
    model = hopper(SHAPES["2b-vl"])
    found = patch_report(model)
    assert found.rounding is None and f"{BITS}; {sentence}" in str(found)
    announce(model, state_of(model))
    assert f"batch_invariant=True holds for documents of text; {sentence}" in caplog.text
    assert sentence not in str(patch_report(hopper()))


def test_batch_invariance_is_promised_where_it_is_wanted(gpu, caplog):
    found = patch_report(apply_patches(tiny()))
    assert (found.batch_invariant, found.rounding) == (False, "batch_invariant is off")
    assert ROUNDING.format(found.rounding) in str(found) and "not promised" not in caplog.text
    found = patch_report(apply_patches(tiny(), batch_invariant=True))
    assert (
        found.batch_invariant
        and f"batch_invariant=True is not promised here: {found.rounding}" in caplog.text
    )
    with pytest.raises(PatchConflict, match="batch_invariant"):
        apply_patches(apply_patches(tiny()), batch_invariant=True)
    with pytest.raises(ValueError, match="found batch_invariant='yes'; wanted True or False"):
        apply_patches(tiny(), batch_invariant="yes")


def test_what_differs_for_the_sake_of_bits_is_chosen_once_and_has_no_name_of_its_own(gpu):
    gpu(capability=(9, 0))
    chosen, exact = (
        choose_backends("auto", SIZES, batch_invariant=wanted) for wanted in (False, True)
    )
    differ = {op for op, name in exact.cuda_half.items() if name != chosen.cuda_half[op]}
    assert differ == {"delta_rule", "attention", "fused"}
    assert exact.cuda_half["attention"] == "triton, batch-invariant"
    assert exact.cuda_half.bare() == chosen.cuda_half and exact.elsewhere == chosen.elsewhere
    forced = choose_backends({"attention": "triton"}, SIZES, batch_invariant=True)
    assert forced.cuda_half == exact.cuda_half
    with pytest.raises(BackendUnavailable, match="found attention=triton, batch-invariant in"):
        choose_backends({"attention": "triton, batch-invariant"}, SIZES)
    for op, name in exact.cuda_half.items():
        found = OPS[op].backend(name)
        assert found.long is None and not getattr(found, "adapters", False), op
        assert found.batch_invariant == OPS[op].backends[chosen.cuda_half[op]].batch_invariant
    with pytest.raises(BackendUnavailable, match="found attention backend 'no, batch-invariant'"):
        OPS["attention"].backend("no, batch-invariant")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_documents_are_walked_whole_in_eager_mode_and_in_graphs(monkeypatch):
    rule, cut = delta_rule.OP.backends["torch"], []
    long = LongDocuments(
        lambda *x: (cut.append(x), rule.run(*x))[1], "in segments", lambda device, sizes: True
    )
    monkeypatch.setitem(delta_rule.OP.backends, "torch", replace(rule, long=long))
    inputs = row_batch("positions", [5, 17, 1, 9]).inputs
    for wanted in (True, False):
        model = apply_patches(tiny(), batch_invariant=wanted)
        layers = sum(kind == "linear_attention" for kind in model.config.layer_types)
        for run in (model, torch.compile(model, backend="eager")):
            cut.clear()
            with torch.no_grad():
                run(**inputs)
            assert len(cut) == (0 if wanted else layers)


def test_a_model_patched_without_it_differs_by_the_option_alone(gpu, monkeypatch):
    gpu(capability=(9, 0))
    monkeypatch.setattr(apply, "op_sizes", lambda *_: SIZES)
    with pytest.raises(PatchConflict) as caught:
        apply_patches(apply_patches(tiny()), batch_invariant=True)
    assert "batch_invariant=False; wanted batch_invariant=True; call" in str(caught.value)


def test_what_promises_bits_is_what_the_gpu_tests_check():
    promised = {
        name: {backend for backend, found in op.backends.items() if found.batch_invariant}
        for name, op in OPS.items()
    }
    layers = {name: op for name, op in OPS.items() if op.where != "head"}
    for op in layers:
        tested = [row for row in TESTED.values() if row.op is layers[op] and row.needs is None]
        assert tested, op
        for row in tested:
            promising = [
                other
                for other in tested
                if other.name in (row.name, f"{row.name}, batch-invariant")
            ]
            assert any(promised[op] <= set(other.exact) for other in promising), row.name
    assert promised == dict.fromkeys(OPS, {"triton"}) | {
        "delta_rule": {"flash_qla", "fla"},
        "attention": {"triton", "varlen"},
        "tower_attention": {"varlen"},
        "loss": set(),
        "ssd": set(),
        "kda": set(),
    }


def test_bits_are_promised_for_the_widths_that_were_compared(hopper):
    from tests.gpu.test_ops import PUBLISHED

    wide = {
        size
        for name, sizes in PUBLISHED.items()
        if name != "none"
        for size in sizes
        if size[0] >= NARROW
    }
    assert wide == invariance.COMPARED
    reason = (
        "batch invariance was not tested for products of 2048 inputs and 6272 outputs: "
        "layers.0.mlp.gate_proj"
    )
    other = replace(SHAPES["2b"], sizes=SHAPES["2b"].sizes | {"intermediate_size": 6272})
    assert patch_report(hopper(other)).rounding == reason
    assert patch_report(hopper()).rounding is None


def test_on_a_cpu_bits_are_not_promised():
    found = patch_report(apply_patches(tiny(), batch_invariant=True))
    assert found.rounding == "batch invariance is tested on GPUs, this is a cpu"
    assert ROUNDING.format(found.rounding) in str(found)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({"dtype": torch.float32}, "batch invariance is tested in bfloat16, this is float32"),
        ({"dtype": torch.float16}, "batch invariance is tested in bfloat16, this is float16"),
        (
            {"capability": (8, 0)},
            "batch invariance is tested on compute capability 9.0, this is 8.0",
        ),
        (
            {"release": "2.13.0"},
            "batch invariance is tested with torch 2.11, whose matrix library decides too; this is "
            "2.13.0",
        ),
        (
            {"backend": {"delta_rule": "torch"}},
            "batch invariance is not promised of what runs delta_rule",
        ),
        (
            {"backend": {"conv": "torch", "fused": "torch"}},
            "batch invariance is not promised of what runs conv, fused",
        ),
    ],
)
def test_what_is_in_the_way_of_bits_is_said(hopper, place, reason):
    found = patch_report(hopper(**place))
    assert found.rounding == reason and ROUNDING.format(reason) in str(found)


@pytest.mark.parametrize(
    "package, found, options",
    [
        ("triton", "3.7.1", {}),
        ("flash-qla", "0.1.4", {}),
        ("fla-core", None, {"delta_rule": "fla"}),
    ],
)
def test_bits_are_promised_for_the_releases_they_were_tested_with(
    hopper, monkeypatch, package, found, options
):
    model = hopper(backend=options or "auto")
    monkeypatch.setattr(invariance, "installed", (INSTALLED | {package: found}).get)
    tested = INSTALLED[package].removesuffix(".0") if package == "triton" else INSTALLED[package]
    wanted = (
        f"batch invariance is tested with {package} {tested}, this is "
        f"{found or 'of unknown version'}"
    )
    assert patch_report(model).rounding == wanted


def test_of_kernels_that_are_tuned_bits_are_promised_within_a_process(hopper):
    tuned = "of one process, because fla chooses the shapes of its kernels by timing them in each"
    assert tuned in str(patch_report(hopper(backend={"delta_rule": "fla"}))) and tuned not in str(
        patch_report(hopper())
    )


def test_under_autocast_bits_are_not_promised(hopper):
    model = hopper()
    try:
        torch.set_autocast_enabled("cuda", True)
        assert patch_report(model).rounding == "batch invariance is not promised under autocast"
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert patch_report(model).rounding is None


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_of_the_models_own_attention_bits_are_not_promised(hopper, attention):
    model = hopper()
    model.config._attn_implementation = attention
    assert patch_report(model).rounding == "batch invariance is not promised of what runs attention"


def test_of_weights_that_fsdp_gathers_bits_are_not_promised(hopper, one_rank):
    # before a GPU is pretended, for which torch would want NCCL
    mesh = init_device_mesh("cpu", (1,))
    model = hopper()
    fully_shard(model.model.layers[0], mesh=mesh)
    reason = "batch invariance is not tested where FSDP gathers the weights"
    assert patch_report(model).rounding == reason


@pytest.mark.slow
def test_compiled_models_and_dropout_are_said(hopper):
    model = hopper()
    model.model.layers[1].compile()
    assert patch_report(model).rounding == "batch invariance is not promised in compiled graphs"
    model = hopper()
    model.model.layers[3].self_attn.attention_dropout = 0.1
    assert (
        patch_report(model).rounding
        == "attention with dropout runs in PyTorch eager while training"
    )


class Adapted(nn.Linear):
    pass


@pytest.mark.parametrize(
    "part",
    [
        "linear_attn.in_proj_qkv",
        "linear_attn.out_proj",
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.down_proj",
    ],
)
def test_a_layer_that_is_more_than_its_weight_is_named(hopper, part):
    model, index = hopper(), 3 if "self_attn" in part else 1
    layer = model.get_submodule(f"model.layers.{index}.{part}")
    layer.__class__ = Adapted
    name = f"layers.{index}." + (part if "mlp" not in part else "mlp")
    assert (
        patch_report(model).rounding
        == f"batch invariance is not promised where layers are called as they are: {name}"
    )
    layer.__class__ = nn.Linear
    layer.bias = nn.Parameter(torch.zeros(layer.out_features, dtype=torch.bfloat16))
    assert name in patch_report(model).rounding
    layer.bias = None
    assert patch_report(model).rounding is None


@pytest.mark.parametrize(
    "part", ["linear_attn.norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"]
)
def test_a_norm_that_somebody_watches_is_named(hopper, part):
    model = hopper()
    name = f"layers.{3 if 'self_attn' in part else 0}.{part}"
    handle = model.model.get_submodule(name).register_forward_hook(lambda *_: None)
    assert name in patch_report(model).rounding
    handle.remove()
    assert patch_report(model).rounding is None


@pytest.mark.parametrize("shape", [SHAPES["moe"], NEXT], ids=lambda shape: shape.family)
def test_experts_are_called_as_they_are(hopper, shape):
    reason = "batch invariance is not promised where layers are called as they are: layers.0.mlp"
    assert patch_report(hopper(shape)).rounding == reason


def test_without_patches_nothing_is_promised():
    assert patch_report(tiny()).rounding == "it is not patched"
