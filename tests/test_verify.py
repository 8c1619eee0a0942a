"""verify_packing: numbers for a patched model, an error for a leak, an error when it could not
see one.
"""

from __future__ import annotations

import cProfile
import json
import math
import pstats
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_packfree import apply_patches, verify_packing
from hf_packfree.errors import BlindMeasurement, LeakDetected, UnsupportedModel
from hf_packfree.models.gated_delta_net import PackedGatedDeltaNet
from hf_packfree.verify import packing_report, verify
from hf_packfree.verify.model_source import build_model
from hf_packfree.verify.probe import Probe
from tests.support import by_family, leak_in_the_convolution, relative_rms, tiny

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_built_in_models(family):
    report = verify_packing(family)
    assert (
        report.family == family
        and report.patched.cross_gradient == 0
        and report.patched.influence == 0
    )
    assert report.patched.logits <= 1e-5 and report.patched.gradients <= 1e-4
    assert (
        report.unpatched.logits >= 1e-2
        and report.unpatched.influence >= 1e-2
        and report.unpatched.cross_gradient >= 1e-2
    )
    assert report.unpatched.per_document[0] <= 1e-5 < min(report.unpatched.per_document[1:])
    assert json.loads(json.dumps(report.as_dict()))["patched"]["influence"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    report = verify_packing("qwen3_5", dtype=dtype)
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert report.patched.influence == 0 and report.patched.cross_gradient == 0


def test_rounding_is_that_of_the_layers_whatever_the_embedding_is_kept_in():
    """As `prepare_model_for_kbit_training` keeps embeddings, head and norms in fp32."""
    model = apply_patches(tiny("llama").bfloat16())
    for part in (model.model.embed_tokens, model.lm_head):
        part.float()
    model.model.embed_tokens.register_forward_hook(lambda *args: args[2].bfloat16())
    model.lm_head.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    report = verify_packing(model, control=False)
    assert report.dtype == "bfloat16" and 1e-4 < report.patched.logits < 0.05
    assert report.patched.influence == report.patched.cross_gradient == 0


def test_rounding_is_that_of_what_fsdp_gathers(one_rank):
    model = apply_patches(tiny())
    shard(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    report = verify_packing(model, control=False)
    assert report.dtype == "bfloat16" and 1e-4 < report.patched.logits < 0.05


def shard(model, policy=MixedPrecisionPolicy()):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def test_a_sharded_model_is_measured_without_a_control(one_rank):
    shard(model := apply_patches(tiny()))
    decay = model.model.layers[0].linear_attn.A_log.full_tensor()
    with pytest.raises(UnsupportedModel, match="FSDP2 shards"):
        verify_packing(model)
    report = verify_packing(model, control=False)
    assert report.patched.influence == report.patched.cross_gradient == 0
    assert report.patched.logits <= 1e-5 and report.patched.gradients <= 1e-4
    assert torch.equal(model.model.layers[0].linear_attn.A_log.full_tensor(), decay)


def test_a_model_object_is_given_back_as_it_was():
    model = apply_patches(tiny())
    model.model.layers[1].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    verify_packing(model)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(
        torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters()
    )


@pytest.mark.parametrize("conv", ["tf32", "ieee"])
def test_cudnn_computes_in_fp32_meanwhile(conv, monkeypatch):
    """By torch's default its convolutions round to TF32, as those of images' patches."""
    cudnn, seen, run = torch.backends.cudnn, [], Probe.measure

    def measure(probe):
        # raises where torch takes its two interfaces to be mixed
        assert not cudnn.allow_tf32
        seen.append({cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision})
        return run(probe)

    monkeypatch.setattr(Probe, "measure", measure)
    default = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    assert default == ("tf32", "tf32") and cudnn.allow_tf32
    try:
        cudnn.conv.fp32_precision = conv
        verify_packing("qwen3_5", lengths=[5, 3], gradients=False)
        assert seen and not any(each & {"tf32"} for each in seen)
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == (conv, "tf32")
    finally:
        cudnn.allow_tf32 = True
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = default
    assert cudnn.allow_tf32


def test_an_unpatched_model_leaks():
    with pytest.raises(LeakDetected, match="apply_patches") as error:
        verify_packing(tiny())
    assert error.value.report.patched.logits > 1e-2


def test_a_leak_in_the_convolution_alone_is_seen(monkeypatch):
    """Half a fix: the state resets, the window does not."""
    model = apply_patches(tiny())
    leak_in_the_convolution(monkeypatch)
    with pytest.raises(LeakDetected, match="a gradient reaches another document"):
        verify_packing(model)


def test_nan_fails(monkeypatch):
    model, mix = apply_patches(tiny()), PackedGatedDeltaNet._mix
    monkeypatch.setattr(
        PackedGatedDeltaNet, "_mix", lambda self, x, packed: mix(self, x, packed) * math.nan
    )
    with pytest.raises(LeakDetected, match="nan"):
        verify_packing(model)


def test_a_measurement_that_could_not_see_a_leak_is_refused():
    model = apply_patches(tiny())
    with torch.no_grad():
        for layer in model.model.layers:
            for part in ("linear_attn", "self_attn"):
                if hasattr(layer, part):
                    getattr(
                        getattr(layer, part), "out_proj" if part == "linear_attn" else "o_proj"
                    ).weight.zero_()
    with pytest.raises(BlindMeasurement, match="control"):
        verify_packing(model)


def test_from_a_config_a_folder_and_a_config_file(tmp_path):
    model = tiny()
    config = model.config
    assert verify_packing(config, gradients=False).patched.gradients is None
    model.save_pretrained(tmp_path / "model")
    config.save_pretrained(tmp_path / "config")
    for folder in (tmp_path / "model", str(tmp_path / "config")):
        assert verify_packing(folder, gradients=False).patched.influence == 0


@pytest.mark.parametrize("name", ["Qwen3_5Config", "Qwen3_5MoeConfig"])
def test_from_a_multimodal_config_without_architectures(name):
    import transformers

    family = "qwen3_5_moe" if "Moe" in name else "qwen3_5"
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
    }
    config = getattr(transformers, name)(
        text_config=tiny(family).config.to_dict(), vision_config=vision
    )
    report = verify_packing(config, gradients=False)
    assert report.model.endswith("ForConditionalGeneration") and report.patched.influence == 0


def test_heads_without_logits_per_token():
    from transformers import Qwen3_5TextForSequenceClassification, Qwen3_5TextModel

    for cls in (Qwen3_5TextForSequenceClassification, Qwen3_5TextModel):
        assert verify_packing(apply_patches(cls(tiny().config))).unpatched.logits >= 1e-2


@pytest.mark.parametrize(
    ("name", "leaks", "why"),
    [
        ("mamba", True, "Mamba-1's selective scan mixes tokens"),
        ("opt", True, "does not hold its decoder layers as `layers`"),
        ("falcon", False, "does not go through transformers' AttentionInterface"),
        ("ctrl", False, "does not go through transformers' AttentionInterface"),
        pytest.param(
            "cpmant",
            True,
            "does not go through transformers' AttentionInterface",
            marks=pytest.mark.slow,
        ),
        ("nemotron", False, "hand no keywords to their attention"),
    ],
)
def test_any_language_model_is_measured_and_said_why_it_is_not_patched(name, leaks, why):
    """Nobody reads positions in those that leak. CTRL changes its embeddings in place, CPM-Ant embeds
    more than the row, and Nemotron's config does not say how many heads have keys.
    """
    lengths = (5, 40, 1, 17)
    try:
        report = verify_packing(name, lengths=lengths)
    except LeakDetected as leak:
        report = leak.report
        assert "in rows of their own: " in str(leak)
    assert (report.patched.influence > 1e-2) == leaks == bool(report.failures())
    assert report.family == name and why in report.not_patched and report.not_patched in str(report)


def test_embeddings_may_have_tokens_first():
    """XLNet's are [T, 1]."""
    sizes = {"vocab_size": 128, "d_model": 64, "n_layer": 1, "n_head": 4, "d_inner": 96}
    with pytest.raises(LeakDetected) as leak:
        verify_packing(transformers.XLNetConfig(**sizes), lengths=(5, 40, 1, 17))
    assert leak.value.report.patched.cross_gradient > 1e-3


def test_what_is_served_unlisted_is_measured_by_its_type():
    report = verify_packing("seed_oss", lengths=(5, 40, 1, 17))
    assert (report.family, report.not_patched) == ("seed_oss", None)
    assert report.unpatched.logits > 1e-3


def test_documents_hold_no_padding():
    """Whose embedding is zeros: Gemma 3n takes a root of their mean square, and nobody has its
    gradient.
    """
    report = verify_packing("gemma3n_text", lengths=(5, 64, 1, 129, 3, 63, 65))
    assert report.patched.cross_gradient == 0


def test_the_noise_of_training_is_not_blamed_on_packing():
    """Phi's experts jitter their input and router while they train."""
    model = build_model("phimoe").train()
    model.config.router_jitter_noise = model.config.input_jitter_noise = 0.3
    model = type(model)(model.config).train()
    ids = torch.arange(2, 60)[None]
    assert relative_rms(model(input_ids=ids).logits, model(input_ids=ids).logits) > 1e-3
    report = verify_packing(model, lengths=(5, 40, 1, 17))
    assert not report.failures() and model.training
    assert "sliding window is in its mask alone" in str(report)
    named = "measured without router_jitter_noise=0.3 and input_jitter_noise=0.3, by which training"
    assert named in str(report) and set(report.jitter) == {
        "router_jitter_noise=0.3",
        "input_jitter_noise=0.3",
    }
    model.config.router_jitter_noise = model.config.input_jitter_noise = 0.0
    assert "jitter" not in str(verify_packing(model, lengths=(5, 40, 1, 17)))


def test_what_cannot_be_verified():
    with pytest.raises(UnsupportedModel, match="no/such/model"):
        verify_packing("no/such/model")
    with pytest.raises(UnsupportedModel, match="Linear"):
        verify_packing(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="two documents"):
        verify_packing("qwen3_5", lengths=[5])


@pytest.mark.parametrize(
    "lengths", [[True, 5], [5, 2.0], [5, "9"], [5, None], [[5, 9]], 5, None, "5,9", [1, 1], [0, 5]]
)
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(
        ValueError, match=r"found lengths=\[.*\]; wanted (two documents|whole numbers)"
    ):
        verify_packing("qwen3_5", lengths=lengths)


def test_lengths_may_be_an_array():
    """One without a dimension raised numpy's error, or torch's."""
    lengths = np.array([5, 17])
    assert verify_packing("llama", lengths=lengths, gradients=False).lengths == (5, 17)
    for number in (np.array(5), torch.tensor(5)):
        with pytest.raises(ValueError, match=r"found lengths=\[5\]; wanted two documents"):
            verify_packing("llama", lengths=number)


class Int8(nn.Linear):
    """Rounds its input to 8 bits by one scale of the whole row, as dynamic quantisation and
    tensorwise FP8 do.
    """

    def scale(self, x):
        return x.abs().max()

    def forward(self, x):
        """Return the product with what is left of x."""
        step = self.scale(x) / 127
        return super().forward((x / step).round() * step)


class Int8PerToken(Int8):
    """One scale per token."""

    def scale(self, x):
        return x.abs().amax(-1, keepdim=True)


@pytest.mark.parametrize(("cls", "influenced"), [(Int8, True), (Int8PerToken, False)])
def test_scales_of_the_whole_row_couple_documents_and_are_seen(cls, influenced):
    """docs/compatibility.md says so: int8 rounding is far from fp32's limits, influence is 0 or
    is not.
    """
    model = apply_patches(tiny())
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = cls
    with pytest.raises(LeakDetected) as leak:
        verify_packing(model, gradients=False)
    assert (
        leak.value.report.patched.influence > 1e-2
        if influenced
        else leak.value.report.patched.influence == 0
    )


def test_a_profiler_that_runs_goes_on():
    """Before Python 3.12 cProfile is where the packages that run are counted, too."""

    def afterwards():
        return model.dtype

    model = apply_patches(tiny())
    with cProfile.Profile() as profiler:
        assert verify_packing(model, lengths=(5, 17, 3)).patched.influence == 0
        afterwards()
    seen = {name for _, _, name in pstats.Stats(profiler).stats}
    assert {"verify_packing", "afterwards"} <= seen


def test_frozen_models():
    model = apply_patches(tiny()).requires_grad_(False)
    report = verify_packing(model)
    assert report.patched.gradients is None and report.patched.cross_gradient == 0


def test_products_in_tf32_have_limits_of_their_own(monkeypatch):
    """flash-linear-attention's in fp32, on GPUs alone; whether documents react to each other is
    judged as strictly.
    """
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for ran, precision, tf32 in (
        ((), "none", False),
        ((), "ieee", False),
        ({"fla"}, "ieee", True),
        ((), "tf32", True),
    ):
        matmul = SimpleNamespace(fp32_precision=precision)
        monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
        assert packing_report.limits_for(cuda, torch.float32, ran) == (
            packing_report.TF32 if tf32 else packing_report.LIMITS[torch.float32]
        )
        assert (
            packing_report.limits_for(cpu, torch.float32, ran)
            == packing_report.LIMITS[torch.float32]
        )
        assert (
            packing_report.limits_for(cuda, torch.bfloat16, ran)
            == packing_report.LIMITS[torch.bfloat16]
        )
    assert packing_report.TF32.influence == packing_report.LIMITS[torch.float32].influence


def through(package, function):
    """A function of that package which calls this one."""
    namespace = {"__name__": f"{package}.ops", "function": function}
    exec("def kernel(*args, **options):\n    return function(*args, **options)", namespace)
    return namespace["kernel"]


@pytest.mark.parametrize("runs", ["packed", "alone", "nowhere"])
def test_limits_are_those_of_the_kernels_that_ran(monkeypatch, runs):
    """A package that is installed and imported, but not called, changes no limit."""
    asked = []
    monkeypatch.setattr(
        verify, "limits_for", lambda *what: asked.append(what) or packing_report.limits_for(*what)
    )
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    model = apply_patches(tiny())
    upstream = import_module(by_family["qwen3_5"].upstream).Qwen3_5GatedDeltaNet
    routes = {"packed": (PackedGatedDeltaNet, "_mix"), "alone": (upstream, "forward")}
    if runs in routes:
        owner, name = routes[runs]
        monkeypatch.setattr(owner, name, through("fla", getattr(owner, name)))
    verify_packing(model, lengths=(5, 9), gradients=False, control=False)
    ((_, _, packages),) = asked
    assert {"torch", "transformers", "hf_packfree"} <= packages and ("fla" in packages) is (
        runs != "nowhere"
    )
    assert sys.getprofile() is None
