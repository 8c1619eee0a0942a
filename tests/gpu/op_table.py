"""The operations as one table."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_packfree.ops.attention import cudnn
from hf_packfree.ops.backend import BATCH_INVARIANT
from hf_packfree.ops.delta_rule import flash_qla_segments
from hf_packfree.ops.delta_rule.segments import CHUNK, Segments
from hf_packfree.packing import PackedSequence
from tests.gpu.checks import ATTENTION, HEADS, TOWER, TRIAL, WIDTH
from tests.gpu.op import Op


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _delta_rule_leaves(tokens: int) -> dict[str, Tensor]:
    """Slow decay: A from 0.01 to 0.05, so that states live for hundreds of tokens."""
    keys, values, size = HEADS
    rate = torch.empty(values, dtype=torch.float64).uniform_(0.01, 0.05)
    return {
        "q": _random(1, tokens, keys, size),
        "k": _random(1, tokens, keys, size),
        "v": _random(1, tokens, values, size),
        "g": -rate * torch.nn.functional.softplus(_random(1, tokens, values)),
        "beta": _random(1, tokens, values).sigmoid(),
    }


def _kda_leaves(tokens: int) -> dict[str, Tensor]:
    """The same with a decay for every channel of a key."""
    _, heads, size = HEADS
    q, k, v, g = (_random(1, tokens, heads, size) for _ in range(4))
    rate = torch.empty(heads, size, dtype=torch.float64).uniform_(0.01, 0.05)
    g = -rate * torch.nn.functional.softplus(g)
    return {"q": q, "k": k, "v": v, "g": g, "beta": _random(1, tokens, heads).sigmoid()}


def unit_leaves(tokens: int) -> dict[str, Tensor]:
    """q and k as our convolution leaves them."""
    leaves = _delta_rule_leaves(tokens)
    return leaves | {
        name: torch.nn.functional.normalize(leaves[name], dim=-1) for name in ("q", "k")
    }


def _slow_leaves(tokens: int) -> dict[str, Tensor]:
    """The same with states that live through thousands of tokens."""
    leaves = unit_leaves(tokens)
    return leaves | {"g": leaves["g"] / 50, "beta": leaves["beta"] / 4}


def _between_states(
    function: Any, x: dict[str, Tensor], packed: PackedSequence, backend: str
) -> Tensor:
    """Documents begin with a state made of their first token; the queries read the final ones,
    so that all gets a gradient.
    """
    groups, firsts = x["v"].shape[2] // x["k"].shape[2], packed.cu_seqlens[:-1].long()
    keys, values = x["k"][0, firsts].repeat_interleave(groups, 1), x["v"][0, firsts]
    wide = torch.promote_types(keys.dtype, torch.float32)
    states = torch.einsum("nhk,nhv->nhkv", keys.to(wide), values.to(wide))
    out, final = function(*x.values(), packed, states, qk_l2norm=False, backend=backend)
    queries = x["q"][0].repeat_interleave(groups, 1).to(wide).split(packed.lengths)
    read = [
        torch.einsum("thk,hkv->thv", query, state)
        for query, state in zip(queries, final, strict=True)
    ]
    return torch.cat([out, torch.cat(read)[None].to(out.dtype)], -1)


def _in_segments(
    function: Any, x: dict[str, Tensor], packed: PackedSequence, backend: str
) -> Tensor:
    """Every document of more than two chunks is cut behind every second one."""
    if backend == "torch":
        return function(*x.values(), packed, qk_l2norm=False)  # type: ignore[no-any-return]
    step = 2 * CHUNK
    cut = [[step] * ((length - 1) // step) + [(length - 1) % step + 1] for length in packed.lengths]
    out: Tensor = flash_qla_segments.in_segments(
        *x.values(), Segments.of(packed, cut), qk_l2norm=False
    )
    return out


def _ssd_leaves(tokens: int) -> dict[str, Tensor]:
    """Four heads read each group's B and C; slow decay, as above."""
    groups, heads, size = HEADS[0] // 2, HEADS[1], HEADS[2] // 2
    rate = torch.empty(heads, dtype=torch.float64).uniform_(0.01, 0.05)
    return {
        "x": _random(1, tokens, heads, size),
        "dt": torch.nn.functional.softplus(_random(1, tokens, heads)),
        "A": -rate,
        "B": _random(1, tokens, groups, 2 * size) / 4,
        "C": _random(1, tokens, groups, 2 * size) / 4,
        "D": _random(heads),
    }


def _attention_leaves(tokens: int) -> dict[str, Tensor]:
    heads, keys, size = ATTENTION
    return {
        name: _random(1, tokens, n, size) for name, n in {"q": heads, "k": keys, "v": keys}.items()
    }


def _long_attention(
    function: Any, x: dict[str, Tensor], packed: PackedSequence, backend: str
) -> Tensor:
    if backend == "torch":
        return function(*x.values(), packed)  # type: ignore[no-any-return]
    return cudnn.attend(*x.values(), packed, long=200)


def _tower_leaves(tokens: int, size: int) -> dict[str, Tensor]:
    return {name: _random(1, tokens, TOWER[0], size) for name in ("q", "k", "v")}


def _gated_norm_leaves(tokens: int) -> dict[str, Tensor]:
    x, z = (_random(1, tokens, *HEADS[1:]) for _ in range(2))
    return {"x": x, "z": z, "weight": 1 + _random(HEADS[2]) / 4}


def _unit_qkv(
    function: Any, x: Tensor, weight: Tensor, packed: PackedSequence, backend: str
) -> Tensor:
    """q and k of unit length beside v, [1, T, C]."""
    keys, values, size = HEADS
    qkv = function(x, weight, packed, (keys, values), (size, size), qk_l2norm=True, backend=backend)
    return torch.cat([part.flatten(2) for part in qkv], -1)


def _turned(function: Any, x: Tensor, weight: Tensor | None, backend: str) -> Tensor:
    """q is half of a projection, and a quarter of its channels turn, as in the published models."""
    size = x.shape[-1] // 2
    angle = torch.arange(size // 8, device=x.device).expand(1, x.shape[1], -1).to(x.dtype)
    cos, sin = (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))
    if weight is None:
        return function(x[..., :size], cos, sin, backend=backend)
    return function(x[..., :size], weight, cos, sin, 1e-6, backend=backend)


def _turned_qkv(function: Any, qkv: Tensor, backend: str) -> Tensor:
    """All channels of q and k turn, as in vision towers."""
    angle = (
        torch.arange(qkv.shape[-1] // 2, device=qkv.device).expand(qkv.shape[1], -1).to(qkv.dtype)
    )
    cos, sin = (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))
    return torch.stack(function(qkv[0], cos, sin, backend=backend), 1)[None]


def _gates_leaves(tokens: int) -> dict[str, Tensor]:
    """b and a side by side, as one product leaves them; rates and biases as the published models
    start.
    """
    values = HEADS[1]
    rate, bias = torch.empty(values, dtype=torch.float64).uniform_(1, 16), _random(values) - 4
    return {"ba": _random(1, tokens, 2 * values), "A_log": rate.log(), "dt_bias": bias}


def _gates(function: Any, ba: Tensor, A_log: Tensor, dt_bias: Tensor, backend: str) -> Tensor:
    """Log decay beside write strength, [1, T, 2 HV]."""
    b, a = ba.chunk(2, -1)
    return torch.cat(function(a, b, A_log, dt_bias, backend=backend), -1)


def _swiglu_leaves(tokens: int) -> dict[str, Tensor]:
    shapes = {"gate": (3 * WIDTH, WIDTH), "up": (3 * WIDTH, WIDTH), "down": (WIDTH, 3 * WIDTH)}
    return {"x": _random(1, tokens, WIDTH)} | {
        name: _random(*shape) * shape[1] ** -0.5 for name, shape in shapes.items()
    }


def _layer_norm_leaves(tokens: int) -> dict[str, Tensor]:
    return {name: _random(1, tokens, WIDTH) for name in ("x", "branch")} | {
        "weight": _random(WIDTH),
        "bias": _random(WIDTH),
    }


_PROJECTED = {"qkv": 3 * WIDTH, "z": WIDTH, "b": HEADS[1], "a": HEADS[1]}


def _projections_leaves(tokens: int) -> dict[str, Tensor]:
    weights = {name: _random(outputs, WIDTH) * WIDTH**-0.5 for name, outputs in _PROJECTED.items()}
    return {"x": _random(1, tokens, WIDTH)} | weights


def _projection(channels: int) -> dict[str, Tensor]:
    return {"projection": _random(WIDTH, channels) * channels**-0.5}


def _channels() -> int:
    return (2 * HEADS[0] + HEADS[1]) * HEADS[2]


def _conv_leaves(tokens: int) -> dict[str, Tensor]:
    return {"x": _random(1, tokens, _channels()), "weight": _random(_channels(), 4) / 2}


def _with_products(
    name: str,
    leaves: Any,
    call: Any,
    function: str,
    *,
    shared: tuple[str, ...],
    exact_gradients: tuple[str, ...] = (),
) -> tuple[Op, Op]:
    """An operation with a matrix product: as it is, which promises rounding, and
    batch-invariant, which promises bits.
    """

    def invariant(f: Any, x: dict[str, Tensor], packed: PackedSequence, backend: str) -> Tensor:
        found: Tensor = call(f, x, packed, backend + BATCH_INVARIANT)
        return found

    room = "hf_packfree.ops.fused"
    return (
        Op(name, room, leaves, call, function, shared=shared, mixes=False),
        Op(
            f"{name}, batch-invariant",
            room,
            leaves,
            invariant,
            function,
            shared=shared,
            mixes=False,
            exact=("triton",),
            exact_gradients=exact_gradients,
        ),
    )


OPS = {
    op.name: op
    for op in (
        Op(
            "delta rule",
            "hf_packfree.ops.delta_rule",
            _delta_rule_leaves,
            lambda f, x, packed, backend: f(*x.values(), packed, backend=backend + BATCH_INVARIANT),
            "gated_delta_rule",
            exact=("fla", "flash_qla"),
            exact_gradients=("fla", "flash_qla"),
        ),
        Op(
            "Kimi delta attention",
            "hf_packfree.ops.kda",
            _kda_leaves,
            lambda f, x, packed, backend: f(*x.values(), packed, backend=backend),
            "kda",
        ),
        # as the layers call it
        Op(
            "delta rule, unit keys",
            "hf_packfree.ops.delta_rule",
            unit_leaves,
            lambda f, x, packed, backend: f(
                *x.values(), packed, qk_l2norm=False, backend=backend + BATCH_INVARIANT
            ),
            "gated_delta_rule",
            exact=("fla", "flash_qla"),
            exact_gradients=("fla", "flash_qla"),
        ),
        Op(
            "delta rule with states",
            "hf_packfree.ops.delta_rule",
            _slow_leaves,
            _between_states,
            "gated_delta_rule_with_states",
            needs="with_states",
        ),
        Op(
            "delta rule in segments",
            "hf_packfree.ops.delta_rule",
            _slow_leaves,
            _in_segments,
            "gated_delta_rule",
            needs="long",
        ),
        Op(
            "ssd",
            "hf_packfree.ops.ssd",
            _ssd_leaves,
            lambda f, x, packed, backend: f(*x.values(), packed, backend=backend),
            "ssd",
            shared=("A", "D"),
        ),
        Op(
            "conv",
            "hf_packfree.ops.conv",
            _conv_leaves,
            lambda f, x, packed, backend: f(x["x"], x["weight"], packed, backend=backend),
            "causal_conv1d",
            shared=("weight",),
            exact=("torch", "triton", "causal_conv1d"),
            exact_gradients=("causal_conv1d",),
        ),
        Op(
            "conv, bias",
            "hf_packfree.ops.conv",
            lambda tokens: _conv_leaves(tokens) | {"bias": _random(_channels())},
            lambda f, x, packed, backend: f(
                x["x"], x["weight"], packed, bias=x["bias"], backend=backend
            ),
            "causal_conv1d",
            shared=("weight", "bias"),
            exact=("torch", "triton", "causal_conv1d"),
            exact_gradients=("causal_conv1d",),
        ),
        Op(
            "qkv conv",
            "hf_packfree.ops.conv",
            _conv_leaves,
            lambda f, x, packed, backend: _unit_qkv(f, x["x"], x["weight"], packed, backend),
            "qkv_conv",
            shared=("weight",),
            exact=("triton",),
            needs="qkv_conv",
        ),
        Op(
            "attention",
            "hf_packfree.ops.attention",
            _attention_leaves,
            lambda f, x, packed, backend: f(
                x["q"], x["k"], x["v"], packed, backend=backend + BATCH_INVARIANT
            ),
            "attention",
            exact=("triton", "varlen"),
            exact_gradients=("triton",),
        ),
        Op(
            "attention, long documents",
            "hf_packfree.ops.attention",
            _attention_leaves,
            _long_attention,
            "attention",
            needs="long",
        ),
        *(
            Op(
                name,
                "hf_packfree.ops.attention.towers",
                partial(_tower_leaves, size=size),
                lambda f, x, packed, backend: f(x["q"], x["k"], x["v"], packed, backend=backend),
                "tower_attention",
                exact=("varlen",),
            )
            for name, size in (
                ("tower attention", TOWER[1]),
                ("tower attention, heads of 72", 72),
                ("tower attention, heads of 80", 80),
            )
        ),
        Op(
            "gated norm",
            "hf_packfree.ops.fused",
            _gated_norm_leaves,
            lambda f, x, packed, backend: f(x["x"], x["z"], x["weight"], eps=1e-6, backend=backend),
            "gated_rms_norm",
            shared=("weight",),
            mixes=False,
            exact=("torch", "triton"),
            exact_gradients=("triton",),
        ),
        *_with_products(
            "gated norm, projected",
            lambda tokens: _gated_norm_leaves(tokens) | _projection(HEADS[1] * HEADS[2]),
            lambda f, x, packed, backend: f(
                x["x"], x["z"], x["weight"], 1e-6, projection=x["projection"], backend=backend
            ),
            "gated_rms_norm",
            shared=("weight", "projection"),
            exact_gradients=("triton",),
        ),
        *_with_products(
            "output gate, projected",
            lambda tokens: (
                {name: _random(1, tokens, ATTENTION[0], ATTENTION[2]) for name in ("x", "z")}
                | _projection(ATTENTION[0] * ATTENTION[2])
            ),
            lambda f, x, packed, backend: f(
                x["x"], x["z"], projection=x["projection"], backend=backend
            ),
            "output_gate",
            shared=("projection",),
            exact_gradients=("triton",),
        ),
        Op(
            "norm rope",
            "hf_packfree.ops.fused",
            lambda tokens: {
                "x": _random(1, tokens, ATTENTION[0], 2 * ATTENTION[2]),
                "weight": _random(ATTENTION[2]) / 4,
            },
            lambda f, x, packed, backend: _turned(f, x["x"], x["weight"], backend),
            "norm_rope",
            shared=("weight",),
            mixes=False,
            exact=("triton",),
            exact_gradients=("triton",),
        ),
        Op(
            "output gate",
            "hf_packfree.ops.fused",
            lambda tokens: {
                name: _random(1, tokens, ATTENTION[0], ATTENTION[2]) for name in ("x", "z")
            },
            lambda f, x, packed, backend: f(x["x"], x["z"], backend=backend),
            "output_gate",
            mixes=False,
            exact=("triton",),
            exact_gradients=("triton",),
        ),
        Op(
            "rope",
            "hf_packfree.ops.fused",
            lambda tokens: {"x": _random(1, tokens, ATTENTION[0], 2 * ATTENTION[2])},
            lambda f, x, packed, backend: _turned(f, x["x"], None, backend),
            "rope",
            mixes=False,
            exact=("triton",),
            exact_gradients=("triton",),
        ),
        Op(
            "rope of a tower",
            "hf_packfree.ops.fused",
            lambda tokens: {"qkv": _random(1, tokens, 3, 16, 64)},
            lambda f, x, packed, backend: _turned_qkv(f, x["qkv"], backend),
            "qkv_rope",
            mixes=False,
            exact=("triton",),
            exact_gradients=("triton",),
        ),
        Op(
            "gates",
            "hf_packfree.ops.fused",
            _gates_leaves,
            lambda f, x, packed, backend: _gates(f, x["ba"], x["A_log"], x["dt_bias"], backend),
            "gates",
            shared=("A_log", "dt_bias"),
            mixes=False,
            exact=("triton",),
            exact_gradients=("triton",),
        ),
        *_with_products(
            "swiglu",
            _swiglu_leaves,
            lambda f, x, packed, backend: f(x["x"], x["gate"], x["up"], x["down"], backend=backend),
            "swiglu_mlp",
            shared=("gate", "up", "down"),
        ),
        *_with_products(
            "projections",
            _projections_leaves,
            lambda f, x, packed, backend: torch.cat(f(*x.values(), backend=backend), -1),
            "projections",
            shared=tuple(_PROJECTED),
        ),
        Op(
            "add norm",
            "hf_packfree.ops.fused",
            lambda tokens: {
                "x": _random(1, tokens, WIDTH),
                "branch": _random(1, tokens, WIDTH),
                "weight": _random(WIDTH) / 4,
            },
            lambda f, x, packed, backend: torch.cat(
                f(x["x"], x["branch"], x["weight"], 1e-6, backend=backend), -1
            ),
            "add_norm",
            shared=("weight",),
            mixes=False,
            exact=("triton",),
            exact_gradients=("triton",),
        ),
        Op(
            "add norm, as Llama's",
            "hf_packfree.ops.fused",
            lambda tokens: {
                "x": _random(1, tokens, WIDTH),
                "branch": _random(1, tokens, WIDTH),
                "weight": 1 + _random(WIDTH) / 4,
            },
            lambda f, x, packed, backend: torch.cat(
                f(x["x"], x["branch"], x["weight"], 1e-6, offset=0.0, backend=backend), -1
            ),
            "add_norm",
            shared=("weight",),
            mixes=False,
            exact=("triton",),
            exact_gradients=("triton",),
        ),
        Op(
            "add layer norm",
            "hf_packfree.ops.fused",
            _layer_norm_leaves,
            lambda f, x, packed, backend: torch.cat(f(*x.values(), 1e-6, backend=backend), -1),
            "add_layer_norm",
            shared=("weight", "bias"),
            mixes=False,
            exact=("triton",),
            exact_gradients=("triton",),
        ),
    )
}


def op_cases(*, torch_too: bool) -> list[Any]:
    """(operation, backend) of everything there is."""
    return [
        pytest.param(op, backend, id=f"{op.name}-{backend}")
        for op in OPS.values()
        for backend in op.backends()
        if backend != "torch" or torch_too or TRIAL
    ]
