"""verify_packing wherever it is called: autocast, without gradients, on another default device, of
weights without numbers.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from packaging.version import Version
from transformers import Qwen3NextConfig

from hf_packfree import apply_patches, remove_patches, verify_packing
from hf_packfree.cli import main
from hf_packfree.errors import BlindMeasurement, LeakDetected, UnsupportedModel
from hf_packfree.models.compat import RELEASE
from hf_packfree.ops.attention import score_options
from hf_packfree.verify import LIMITS, build_model, verify
from hf_packfree.verify.packing_report import Limits
from tests.support import leak_in_the_convolution, tiny

pytestmark = pytest.mark.compat(kernels=False)
SHORT = (5, 9, 33)


@pytest.fixture
def model():
    return apply_patches(tiny())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_that_are_no_numbers_are_no_leak(model, name, value):
    """Documents alone have them too, so that nothing can be compared."""
    model.get_parameter(name).data.view(-1)[3] = value
    for options in ({}, {"gradients": False, "control": False}):
        with pytest.raises(BlindMeasurement, match=f"NaN or Inf in the outputs.* and in {name}"):
            verify_packing(model, lengths=SHORT, **options)
    with pytest.raises(BlindMeasurement, match="NaN or Inf"):
        verify_packing(remove_patches(model), lengths=SHORT)


def test_gradients_that_are_no_numbers_are_no_leak(model):
    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    model.model.norm.register_forward_hook(lambda module, args, x: Infinite.apply(x))
    with pytest.raises(BlindMeasurement, match="NaN or Inf in the gradient of model.embed_tokens"):
        verify_packing(model, lengths=SHORT)


def test_the_command_says_so_and_calls_it_no_leak(model, tmp_path, capsys):
    remove_patches(model).lm_head.weight.data[3] = float("nan")
    model.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--lengths", "5,9"]) == 2
    assert "NaN or Inf" in capsys.readouterr().err


def gpt_oss(seed):
    torch.manual_seed(seed)
    return apply_patches(build_model("gpt_oss", dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [5e-2, 1e-6])
def test_experts_that_rounding_changes_are_no_leak(limit, monkeypatch):
    """These were called one: by gradients of routers, .52 at a limit of .5, or by logits."""
    if limit != LIMITS[torch.bfloat16].logits:
        monkeypatch.setattr(verify, "limits_for", lambda *what: Limits(limit, limit, 5e-2))
    for seed in (0, 2, 7):
        report = verify_packing(gpt_oss(seed), control=False)
        assert report.patched.influence == report.patched.cross_gradient == 0
        # measured: .04 and .5 off, twice .08 and .7 allowed
        assert report.limits.influence == 5e-2 and 1e-3 < report.limits.logits < 0.3


@pytest.mark.slow
def test_a_control_of_many_layers_leaks_by_its_influence():
    """Rounding is .04 of the logits there, and their leak .4; influence is 0 and .4."""
    config = build_model("qwen3_next").config.to_dict() | {"num_hidden_layers": 32}
    config["layer_types"] = config["layer_types"] * 8
    torch.manual_seed(0)
    model = build_model(Qwen3NextConfig(**config), dtype=torch.bfloat16)
    report = verify_packing(apply_patches(model))
    assert report.unpatched.logits < 10 * report.patched.logits
    assert report.patched.influence == 0 and report.unpatched.influence > 0.1


@pytest.mark.parametrize(("slow", "advice"), [(True, "longer documents"), (False, "slow_decay")])
def test_a_blind_control_names_what_was_not_passed(model, slow, advice, monkeypatch):
    monkeypatch.setattr(verify, "_control", lambda model, probe: probe.measure())
    with pytest.raises(BlindMeasurement, match=f"found a control .*; pass {advice}"):
        verify_packing(model, lengths=SHORT, gradients=False, slow_decay=slow)


def test_rounding_excuses_no_wrong_attention(monkeypatch):
    """Without its window a document reads more of itself, and nothing of others."""
    own = score_options.plan_pieces
    monkeypatch.setattr(score_options, "plan_pieces", lambda packed, window: own(packed, None))
    with pytest.raises(LeakDetected, match="^found .*logits differ from a forward per doc") as leak:
        verify_packing(gpt_oss(0))
    assert leak.value.report.patched.influence == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [torch.float32, torch.float64])
def test_autocast_has_the_limits_of_its_dtype(model, weights, dtype):
    model.to(weights)
    with torch.autocast("cpu", dtype=dtype):
        report = verify_packing(model, lengths=SHORT)
    name = str(dtype).removeprefix("torch.")
    assert report.autocast == name == report.as_dict()["autocast"]
    assert f"in {name} autocast" in str(report) and report.limits == LIMITS[dtype]
    # which would be a leak in fp32
    assert report.patched.logits > LIMITS[torch.float32].logits
    assert report.patched.influence == 0 and report.patched.cross_gradient == 0
    assert report.unpatched.logits > 0.1


def test_a_leak_is_seen_under_autocast(model, monkeypatch):
    leak_in_the_convolution(monkeypatch)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(LeakDetected, match="a gradient reaches another document"),
    ):
        verify_packing(model, lengths=SHORT)


def test_autocast_of_another_device_changes_nothing(model):
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=torch.cuda.is_available()):
        report = verify_packing(model, lengths=SHORT, gradients=False)
    assert report.autocast is None and report.limits == LIMITS[torch.float32]


@contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default device": lambda: default_device("meta"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_the_caller_change_nothing(model, mode):
    if mode == "default device" and Version("5.8") > RELEASE:
        pytest.skip("upstream's own delta rule, the reference, makes states on the default device")
    wanted = verify_packing(model, lengths=SHORT)
    with MODES[mode]():
        enabled = torch.is_grad_enabled()
        assert verify_packing(model, lengths=SHORT) == wanted
        assert torch.is_grad_enabled() is enabled


@pytest.mark.slow
@pytest.mark.skipif(
    Version("5.24") > RELEASE, reason="older releases build parts on the default device"
)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_built_alike_in_these_modes(mode):
    with MODES[mode]():
        built = verify_packing("qwen3_5", lengths=SHORT, device="cpu")
    assert built == verify_packing("qwen3_5", lengths=SHORT)


def offloaded():
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(apply_patches(tiny()), execution_device=torch.device("cpu"))


@torch.inference_mode()
def made_for_inference():
    return apply_patches(tiny())


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: apply_patches(build_model("qwen3_5", device="meta")), "on the meta device"),
        (offloaded, "on the meta device"),
        (made_for_inference, "torch.inference_mode"),
    ],
)
def test_weights_that_hold_nothing_or_cannot_be_trained_are_refused(make, found):
    with pytest.raises(UnsupportedModel, match=f"found model.embed_tokens.weight .*{found}"):
        verify_packing(make(), lengths=SHORT)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, "x", 1.5, None, True])
def test_seeds_that_are_none_are_refused(seed):
    with pytest.raises(ValueError, match=r"found seed=.*; wanted a whole number"):
        verify_packing("qwen3_5", seed=seed)


def test_the_largest_seed():
    report = verify_packing("qwen3_5", lengths=SHORT, seed=2**63 - 1, gradients=False)
    assert report.patched.influence == 0


@pytest.mark.parametrize("lengths", [[10**9, 3], [2**62, 2**62], [2**20, 1]])
def test_more_tokens_than_memory_are_refused_at_once(lengths):
    with pytest.raises(ValueError, match=rf"lengths of {sum(lengths)} tokens.*wanted 1048576"):
        verify_packing("qwen3_5", lengths=lengths)
