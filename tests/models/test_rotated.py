"""Upstream's attention with our rotation in the place of its module's function."""

from __future__ import annotations

import functools
import inspect
from functools import partial
from importlib import import_module

import pytest
import torch

from hf_packfree.models import rotated
from hf_packfree.models.rotated import NAME, angle_repeats, with_our_rotation
from tests.support import tiny

FUSED = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "smollm3", "gpt_oss"]


def attention_of(family):
    """Return an attention layer of a tiny stock model."""
    return tiny(family).model.layers[0].self_attn


def module_of(family):
    return import_module(type(attention_of(family)).__module__)


@pytest.mark.compat
@pytest.mark.parametrize("family", FUSED)
def test_attention_of_fused_layers_rotates_by_a_function_of_its_module(family):
    forward = inspect.unwrap(type(attention_of(family)).forward)
    assert NAME in forward.__code__.co_names
    # gpt-oss has half of the angles
    repeats = 2 if family == "gpt_oss" else 1
    assert angle_repeats(getattr(module_of(family), NAME)) == repeats
    assert with_our_rotation(type(attention_of(family)).forward, "torch") is not forward


@pytest.mark.parametrize("family", ["cohere2", "glm4"])
def test_another_formula_stays_upstreams(family):
    """Pairs of neighbouring channels turn in Cohere's and GLM's."""
    forward = type(attention_of(family)).forward
    assert angle_repeats(getattr(module_of(family), NAME)) == 0
    assert with_our_rotation(forward, "torch") is forward


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_upstreams_angles_turn_queries_and_keys_as_upstreams_function_does(family):
    """gpt-oss's are scaled by YaRN; their gradients are upstream's, too."""
    model, theirs, found = tiny(family), getattr(module_of(family), NAME), []
    head_size = model.model.layers[0].self_attn.head_dim
    q, k = torch.randn(1, 4, 70, head_size), torch.randn(1, 2, 70, head_size)
    cos, sin = model.model.rotary_emb(q, torch.arange(70)[None])
    repeats = angle_repeats(theirs)
    assert cos.shape[-1] == head_size // repeats
    for turn in (theirs, partial(rotated._rotate, forbidden, repeats, "torch")):
        given = [x.clone().requires_grad_() for x in (q, k)]
        out = turn(*given, cos, sin)
        grads = torch.autograd.grad(sum(x.sin().sum() for x in out), given)
        found.append((*out, *grads))
    for ours, wanted in zip(*found, strict=True):
        assert ours.shape == wanted.shape and torch.allclose(ours, wanted, atol=1e-6)


def forbidden(*_):
    raise AssertionError("upstream's function is called")


def test_the_formula_is_recognised_whatever_the_default_device_and_dtype_are():
    rotates = getattr(module_of("llama"), NAME)
    angle_repeats.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert angle_repeats(rotates) == 1
    finally:
        torch.set_default_dtype(before)


def test_a_function_that_somebody_put_into_the_module_is_called(monkeypatch):
    """Liger's patches do that, before our patches and after."""
    layer, module, called = attention_of("llama"), module_of("llama"), []
    before = with_our_rotation(type(layer).forward, "torch")

    def theirs(q, k, cos, sin, unsqueeze_dim=1):
        called.append(q.is_cuda)
        return 2 * q, k

    monkeypatch.setattr(module, NAME, theirs)
    after = with_our_rotation(type(layer).forward, "torch")
    assert before is not after and after is type(layer).forward
    x, turns = torch.randn(1, 5, layer.config.hidden_size), [torch.ones(1, 5, layer.head_dim)] * 2
    called.clear()
    after(layer, x, turns, None)
    assert called == [False]


def test_a_forward_that_somebody_wrapped_or_replaced_is_called(monkeypatch):
    kind = type(attention_of("llama"))
    forward = kind.forward

    @functools.wraps(forward)
    def doubled(*args, **kwargs):
        return 2 * forward(*args, **kwargs)[0], None

    for theirs in (doubled, torch.no_grad()(forward)):
        monkeypatch.setattr(kind, "forward", theirs)
        assert with_our_rotation(kind.forward, "torch") is theirs


def test_other_names_of_the_module_are_read_as_they_are_at_the_call(monkeypatch):
    layer, module, seen = attention_of("llama"), module_of("llama"), []
    forward = with_our_rotation(type(layer).forward, "torch")
    x, turns = torch.randn(1, 5, layer.config.hidden_size), [torch.ones(1, 5, layer.head_dim)] * 2
    wanted = type(layer).forward(layer, x, turns, None)[0]
    assert torch.allclose(forward(layer, x, turns, None)[0], wanted, atol=1e-6)

    def attend(module, q, k, v, mask, **kwargs):
        seen.append(q.shape)
        return v.transpose(1, 2).repeat_interleave(q.shape[1] // v.shape[1], 2), None

    monkeypatch.setitem(vars(module)["ALL_ATTENTION_FUNCTIONS"]._global_mapping, "sdpa", attend)
    forward(layer, x, turns, None)
    monkeypatch.setattr(module, "ALL_ATTENTION_FUNCTIONS", Interface(attend))
    forward(layer, x, turns, None)
    assert len(seen) == 2


class Interface:
    """In the place of transformers' table of attention functions."""

    def __init__(self, attend):
        self.attend = attend

    def get_interface(self, name, default):
        return self.attend


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, cos, sin: (q, k, cos[..., :2], sin[..., :2]),
        lambda q, k, cos, sin: (q, k, cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)),
        lambda q, k, cos, sin: (q.repeat(2, 1, 1, 1), k.repeat(2, 1, 1, 1), cos, sin),
    ],
    ids=["part of the channels", "more angles", "two rows"],
)
def test_other_shapes_go_to_upstreams_function(change, repeats, monkeypatch):
    called = []

    def upstreams(q, k, cos, sin):
        called.append(q.shape)
        return q, k

    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    cos, sin = torch.randn(2, 1, 5, 8 // repeats).unbind()
    rotated._rotate(upstreams, repeats, "torch", q, k, cos, sin)
    assert called == []
    q, k, cos, sin = change(q, k, cos, sin)
    rotated._rotate(upstreams, repeats, "torch", q, k, cos, sin)
    assert called == [q.shape]
