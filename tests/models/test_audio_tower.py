"""Audio towers: every audio is what it is alone, its windows kept apart, in every release."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configuration
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as upstream

from hf_packfree.models import compat, vision_attention
from hf_packfree.models.audio_tower import chunk_widths
from hf_packfree.models.qwen3_omni_moe import Qwen3OmniMoeAudioAttention, Qwen3OmniMoeAudioEncoder
from hf_packfree.models.state import PatchState
from tests.models.omni import errors
from tests.support import CONTROL, GRADIENT_TOL, LOGIT_TOL, assert_rounding, checkpoint_layers

pytestmark = pytest.mark.compat
MEL = 16
LENGTHS = (330, 60, 100, 30, 30, 199, 1, 99)
"""Frames; 100 are a chunk, of 13 tokens."""
SHORT = (60, 30, 1)


def tower(*, window=800, attention="sdpa", patched=False):
    """A tiny tower whose convolutions' padding is far from zero; `window` in frames."""
    config = configuration.Qwen3OmniMoeAudioEncoderConfig(
        num_mel_bins=MEL,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=48,
        d_model=32,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_source_positions=64,
        n_window=50,
        output_dim=24,
        n_window_infer=window,
        conv_chunksize=3,
        downsample_hidden_size=8,
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = upstream.Qwen3OmniMoeAudioEncoder._from_config(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(8 if "_proj.weight" in name else 1)
            if name.startswith("conv2d"):
                parameter.normal_(std=0.3)
    return patch(model) if patched else model


def patch(model):
    ours = {
        upstream.Qwen3OmniMoeAudioEncoder: Qwen3OmniMoeAudioEncoder,
        upstream.Qwen3OmniMoeAudioAttention: Qwen3OmniMoeAudioAttention,
    }
    for module in model.modules():
        if type(module) in ours:
            module.__class__, vars(module)["packfree"] = ours[type(module)], PatchState()
    return model


def frames(lengths=LENGTHS):
    return torch.randn(MEL, sum(lengths), generator=torch.Generator().manual_seed(1))


def tokens(length):
    """As upstream counts them."""
    rest = length % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + length // 100 * 13


def features(model, x, lengths):
    out = model(x, feature_lens=torch.tensor(lengths))
    return out.last_hidden_state.split([tokens(length) for length in lengths])


def step(model, x, groups):
    """Features of every audio, in calls of these groups of lengths, and the gradients under a
    fixed functional.
    """
    model.zero_grad(set_to_none=True)
    x, generator = x.clone().requires_grad_(), torch.Generator().manual_seed(2)
    outs = []
    for part, group in zip(x.split([sum(group) for group in groups], 1), groups, strict=True):
        for out in features(model, part, group):
            (out * torch.randn(out.shape, generator=generator)).sum().backward(retain_graph=True)
            outs.append(out.detach())
    # softmax ignores the keys' bias: its gradient is noise
    grads = {
        name: p.grad
        for name, p in model.named_parameters()
        if p.grad is not None and not name.endswith("k_proj.bias")
    }
    return outs, {"features": x.grad, **grads}


def together(model, lengths=LENGTHS):
    return step(model, frames(lengths), [lengths])


def alone(model, lengths=LENGTHS):
    return step(model, frames(lengths), [(length,) for length in lengths])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [LENGTHS, SHORT, (60, 60), (250, 100)], ids=str)
def test_audios_are_what_they_are_alone(lengths, attention):
    wanted = alone(tower(attention=attention), lengths)
    assert_rounding(errors(together(tower(attention=attention, patched=True), lengths), wanted))


def test_unpatched_they_are_not():
    lengths = (100, *SHORT)
    values, grads = errors(together(tower(), lengths), alone(tower(), lengths))
    assert values >= CONTROL * LOGIT_TOL and grads >= CONTROL * GRADIENT_TOL


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_windows_are_kept_apart(attention):
    """Two chunks each; what is alone is upstream's where it keeps them, too."""
    model, plain = (
        tower(window=200, attention=attention, patched=True),
        tower(window=200, attention=attention),
    )
    if not compat.AUDIO_IGNORES_WINDOWS:
        assert_rounding(errors(together(model), alone(plain)))
    assert_rounding(errors(together(model), alone(model)))
    x = frames((330,)).requires_grad_()
    (out,) = features(model, x, (330,))
    out[26:].pow(2).sum().backward()
    assert not x.grad[:, :200].any() and x.grad[:, 200:].any()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_audio_influences_no_other(attention):
    model, x = tower(attention=attention, patched=True), frames()
    for number, part in enumerate(x.split(LENGTHS, 1)):
        before, changed = features(model, x, LENGTHS), x.clone()
        start = sum(LENGTHS[:number])
        changed[:, start : start + part.shape[1]] = 3
        after = features(model, changed, LENGTHS)
        same = [torch.equal(one, other) for one, other in zip(before, after)]
        assert same == [other != number for other in range(len(LENGTHS))]
    x.requires_grad_()
    features(model, x, LENGTHS)[1].pow(2).sum().backward()
    assert [bool(part.any()) for part in x.grad.split(LENGTHS, 1)] == [
        number == 1 for number in range(len(LENGTHS))
    ]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(use_reentrant):
    wanted, model = alone(tower()), tower(patched=True)
    checkpoint_layers(model, use_reentrant)
    assert_rounding(errors(together(model), wanted))


def test_lengths_of_windows_are_read_once_a_call(monkeypatch):
    reads, build = [], vision_attention.PackedSequence.from_lengths
    monkeypatch.setattr(
        vision_attention.PackedSequence,
        "from_lengths",
        lambda *args, **kwargs: reads.append(1) or build(*args, **kwargs),
    )
    features(tower(patched=True), frames(), LENGTHS)
    assert len(reads) == 1


def test_one_audio_is_upstreams_bit_for_bit():
    """On a CPU; half precision on a GPU runs another kernel."""
    for lengths in ((330,), (60,)):
        wanted, found = (
            features(tower(), frames(lengths), lengths),
            features(tower(patched=True), frames(lengths), lengths),
        )
        assert torch.equal(found[0], wanted[0])


def test_nothing_is_left_on_the_convolutions():
    model, calls = tower(patched=True), []
    model.conv2d3.register_forward_hook(lambda *_: calls.append(1))
    features(model, frames(), LENGTHS)
    with pytest.raises(RuntimeError):
        model(frames(), feature_lens=torch.tensor(LENGTHS) + 1)
    assert calls and not model.conv2d2._forward_pre_hooks and not model.conv2d3._forward_pre_hooks


def test_adapters_on_projections_count():
    def adapt(model):
        torch.manual_seed(3)
        for layer in model.layers:
            layer.self_attn.v_proj = torch.nn.Sequential(
                layer.self_attn.v_proj, torch.nn.Linear(32, 32)
            )
        return model

    assert_rounding(errors(together(patch(adapt(tower()))), alone(adapt(tower()))))


def test_chunks_are_as_wide_as_their_audio_alone_makes_them():
    assert chunk_widths([330, 60, 100, 101], 100) == [100] * 4 + [60] + [100] + [100] * 2
