"""torch's varlen attention has had three signatures; each is called, causal or not, by its own
parameters.
"""

from __future__ import annotations

from functools import partial
from inspect import signature

import pytest
import torch
from torch.backends.cuda import cudnn_sdp_enabled, flash_sdp_enabled

from hf_packfree.ops.attention import OP, attention, towers, varlen
from hf_packfree.ops.backend import Target
from hf_packfree.packing import PackedSequence
from tests.support import relative_rms

module = pytest.importorskip("torch.nn.attention.varlen")


def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    return locals()


def of_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
):
    return locals()


def of_2_13(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    return locals()


FAKES = {
    "2.10.0": of_2_10,
    "2.11.0": of_2_11,
    "2.13.0": of_2_13,
    "2.14.1": of_2_13,
    "2.15.0": of_2_13,
}
CAUSAL = {
    "2.10.0": {"is_causal": True},
    "2.11.0": {"window_size": (-1, 0), "scale": 0.5},
    **{
        release: {"window_size": (-1, 0), "enable_gqa": True, "scale": 0.5}
        for release in ("2.13.0", "2.14.1", "2.15.0")
    },
}


@pytest.fixture
def called(monkeypatch):
    """Put a release's function in; return the list of what it is then called with."""

    def put_in(release: str) -> list[dict]:
        calls = []

        def varlen_attn(*given, **words):
            enabled = {"flash": flash_sdp_enabled(), "cudnn": cudnn_sdp_enabled()}
            calls.append(FAKES[release](*given, **words) | enabled)
            return given[0]

        varlen_attn.__signature__ = signature(FAKES[release])
        monkeypatch.setattr(module, "varlen_attn", varlen_attn)
        monkeypatch.setattr(torch, "__version__", release)
        forget()
        return calls

    def forget():
        varlen._parameters.cache_clear()
        varlen._options.cache_clear()

    yield put_in
    # what it read of the fake
    forget()


def half(heads: int) -> torch.Tensor:
    return torch.randn(1, 8, heads, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize("release", FAKES)
def test_it_is_called_for_causal_attention_and_nothing_else(release, called):
    calls, packed, (q, k, v) = (
        called(release),
        PackedSequence.from_lengths([3, 5]),
        (half(2) for _ in range(3)),
    )
    # which scales by a quarter, 16 ** -0.5, and takes no other factor
    scaled = q * 2 if release == "2.10.0" else q
    assert torch.equal(varlen.attend(q, k, v, packed, scale=0.5), scaled)
    (call,) = calls
    defaults = {
        name: parameter.default for name, parameter in signature(FAKES[release]).parameters.items()
    }
    asked = {
        name: value
        for name, value in call.items()
        if name in list(defaults)[7:] and value != defaults[name]
    }
    assert asked == CAUSAL[release]
    assert (
        call["cu_seq_q"] is call["cu_seq_k"] is packed.cu_seqlens
        and call["max_q"] == call["max_k"] == 5
    )
    assert all(
        torch.equal(call[name], x[0]) for name, x in zip(("query", "key", "value"), (scaled, k, v))
    )


@pytest.mark.parametrize("release", FAKES)
def test_both_directions_are_its_default(release, called):
    calls, packed, (q, k, v) = (
        called(release),
        PackedSequence.from_lengths([3, 5]),
        (half(2) for _ in range(3)),
    )
    towers.tower_attention(q, k, v, packed, backend="varlen")
    # 2.14 would take cuDNN without a window: one that reaches over the longest document is none
    wide = (5, 5) if release == "2.14.1" else (-1, -1)
    assert not calls[0].get("is_causal") and calls[0].get("window_size", wide) == wide


@pytest.mark.parametrize("causal", [True, False])
def test_a_torch_that_would_rather_take_cudnn_is_told_flash_attention(causal, called):
    calls, (q, k, v) = called("2.15.0"), (half(2) for _ in range(3))
    varlen.attend(q, k, v, PackedSequence.from_lengths([3, 5]), causal=causal)
    assert calls[0]["flash"] and not calls[0]["cudnn"]
    assert cudnn_sdp_enabled(), "as before the call"


@pytest.mark.parametrize("release", FAKES)
def test_the_default_scale_leaves_queries_as_they_are(release, called):
    calls, (q, k, v) = called(release), (half(2) for _ in range(3))
    for scale in (None, 16**-0.5):
        varlen.attend(q, k, v, PackedSequence.from_lengths([3, 5]), scale=scale)
    assert all(torch.equal(call["query"], q[0]) for call in calls)


@pytest.mark.parametrize("release", FAKES)
def test_fewer_key_heads_are_repeated_where_they_are_not_taken(release, called):
    calls, (q, k, v) = called(release), (half(heads) for heads in (4, 2, 2))
    varlen.attend(q, k, v, PackedSequence.from_lengths([3, 5]))
    for name, x in (("key", k), ("value", v)):
        assert torch.equal(
            calls[0][name], x[0].repeat_interleave(2, 1) if release == "2.10.0" else x[0]
        )


def flash(query, key, value, cu_seq_q, scale, window_size):
    """What torch documents: document by document, `window_size` tokens before a query and after it,
    -1 any number; one size for all, fewer key heads taken.
    """
    assert query.shape[2] == key.shape[2] == value.shape[2] and cu_seq_q[-1] == len(query)
    outputs = []
    for parts in zip(*(x.split(cu_seq_q.diff().tolist()) for x in (query, key, value))):
        q, k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in parts)
        ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None]
        left, right = (len(q) if reach < 0 else reach for reach in window_size)
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        scores = scores.masked_fill((ahead < -left) | (ahead > right), float("-inf"))
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(2), v))
    return torch.cat(outputs)


OPTIONS = {
    "values_narrower": (None, 24, 16),
    "values_wider": (None, 16, 24),
    **{f"window_of_{window}": (window, 16, 16) for window in (1, 4, 5, 100)},
    "both": (4, 24, 16),
}


@pytest.mark.parametrize("window, size, value_size", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("release", ["2.11.0", "2.15.0"])
def test_windows_and_values_of_another_size(release, window, size, value_size, called, monkeypatch):
    """Values and gradients against PyTorch eager; a window that is one token wider is another."""
    calls = called(release)
    signed = module.varlen_attn

    def varlen_attn(*given, **words):
        signed(*given, **words)
        names = "query", "key", "value", "cu_seq_q", "scale", "window_size"
        return flash(*(calls[-1][name] for name in names))

    varlen_attn.__signature__ = signed.__signature__
    monkeypatch.setattr(module, "varlen_attn", varlen_attn)
    monkeypatch.setattr(varlen, "refuse_wide", lambda *_: None)
    lengths = (3, 5, 12, 1, 4)
    packed = PackedSequence.from_lengths(lengths)
    shapes = (4, size), (2, size), (2, value_size)
    torch.manual_seed(0)
    leaves = [torch.randn(1, sum(lengths), *shape, requires_grad=True) for shape in shapes]
    direction = torch.randn(1, sum(lengths), 4, value_size)

    def run(backend, window, packed=packed):
        out = attention(*leaves, packed, window=window, scale=0.3, backend=backend)
        return [out, *torch.autograd.grad((out * direction).sum(), leaves)]

    found, wanted = run("varlen", window), run("torch", window)
    assert relative_rms(found[0], wanted[0]) <= 1e-6
    # with one key a query has no gradient
    assert max(map(partial(relative_rms, floor=0.1), found[1:], wanted[1:])) <= 1e-5
    if window == 1:
        assert relative_rms(run("varlen", 2)[0], wanted[0]) > 0.1
    else:
        whole = PackedSequence.from_lengths([sum(lengths)])
        assert relative_rms(run("varlen", window, whole)[0], wanted[0]) > 0.1
    if window in (4, 5):
        assert relative_rms(run("varlen", window + 1)[0], wanted[0]) > 1e-2


def test_a_window_needs_torch_2_11(called):
    target = Target("cuda", (8, 0), sizes={"head_size": 64, "window": 128})
    called("2.10.0")
    reason = "it takes a window from torch 2.11 on, this is 2.10.0"
    assert OP.backends["varlen"].unusable(target) == reason
    varlen._parameters.cache_clear()
    called("2.11.0")
    assert OP.backends["varlen"].unusable(target) is None
    wide = Target("cuda", (8, 0), sizes={"head_size": 192, "other_value_size": 264})
    assert "the model has 264" in OP.backends["varlen"].unusable(wide)


def test_the_installed_function_has_one_of_these_ways_to_be_causal():
    known = set(signature(module.varlen_attn).parameters)
    assert "is_causal" in known or known >= {"scale", "window_size"}
