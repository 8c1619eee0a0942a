"""What families beside Qwen's are timed against is exact where its note says so: stand-ins for the
kernels, documents one by one.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations import flex_attention

from hf_packfree.ops.attention import attention
from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.ops.kda import kda
from hf_packfree.ops.ssd import mamba_ssm, ssd
from hf_packfree.packing import PackedSequence
from tests.benchmarks import composed, family_report, models
from tests.benchmarks.batches import Load
from tests.benchmarks.families import ROWS, TITLES, family_groups
from tests.benchmarks.family_shapes import FAMILY_SHAPES, family_shape
from tests.benchmarks.models import build
from tests.benchmarks.shapes import configuration
from tests.support import CONTROL, LOGIT_TOL

LENGTHS = (5, 17, 1, 30)


def record_of(offsets: torch.Tensor | None, tokens: int) -> PackedSequence:
    lengths = [tokens] if offsets is None else offsets.diff().tolist()
    return PackedSequence.from_lengths(lengths)


def scan(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
):
    """As mamba-ssm's, which takes what upstream's layers hand it."""
    assert z is initial_states is None and dt_softplus and not return_final_states
    dt = torch.nn.functional.softplus(dt + dt_bias).clamp(*dt_limit)
    counts = [x.shape[1]] if seq_idx is None else seq_idx[0].unique(return_counts=True)[1].tolist()
    return ssd(x, dt, A, B, C, D, PackedSequence.from_lengths(counts))


def delta(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None, **words):
    """As FLA's `chunk_kda`."""
    packed = record_of(cu_seqlens, q.shape[1])
    return kda(q, k, v, g, beta, packed, qk_l2norm=use_qk_l2norm_in_kernel), None


def convolution():
    """As `fla_convolution`: [B, C, T]."""

    def convolve(x, weight, bias=None, activation=None, **words):
        packed = record_of(words.get("cu_seq_lens_q"), x.shape[2])
        out = causal_conv1d(x.mT, weight, packed, bias=bias, activation=activation)
        return out.mT

    return convolve


def varlen(q, k, v, ends, _, longest, __, scale=None, window_size=None):
    """As torch's `varlen_attn`: [T, heads, size]."""
    assert window_size == (-1, 0) and q.shape[-1] == v.shape[-1]
    parts = (x[None] for x in (q, k, v))
    return attention(*parts, PackedSequence.from_lengths(ends.diff().tolist()), scale=scale)[0]


def flex(module, q, k, v, mask, scaling, s_aux):
    """As transformers' `flex_attention_forward`, which takes no sinks on a CPU."""
    places = torch.arange(q.shape[2])
    seen = mask.mask_mod(None, None, places[:, None], places)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scaling).masked_fill(~seen, float("-inf"))
    sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (shares @ v).transpose(1, 2), None


@pytest.fixture
def stand_ins(monkeypatch):
    # before there are any: what a module takes when it is imported, it keeps for other tests
    for shape in FAMILY_SHAPES.values():
        import_module(f"transformers.models.{shape.family}.modeling_{shape.family}")
    for name, values in {
        "fla": {},
        "fla.modules": {"FusedRMSNormGated": None},
        "fla.ops": {},
        "fla.ops.kda": {"chunk_kda": delta},
        "torch.nn.attention.varlen": {"varlen_attn": varlen},
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flex_attention, "flex_attention_forward", flex)
    monkeypatch.setattr(mamba_ssm, "_kernel", lambda: scan)
    monkeypatch.setattr(models, "fla_convolution", convolution)
    yield
    AttentionInterface._global_mapping.pop(composed.NAME, None)


@contextmanager
def restored(upstream: Any):
    names = dict(vars(upstream))
    try:
        yield
    finally:
        vars(upstream).update(names)


def error_of(row: str, variant: Any) -> float:
    """The relative error of a packed row's hidden states against documents run one by one."""
    shape = family_shape(row, tiny=True)
    upstream = import_module(f"transformers.models.{shape.family}.modeling_{shape.family}")
    model = build(shape, "cpu", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    inputs = Load(LENGTHS).inputs(256, "cpu")
    parts = inputs["input_ids"].split(LENGTHS, dim=1)
    with torch.no_grad(), restored(upstream):
        # which a module that was imported before the stand-ins took from elsewhere
        name = "chunk_kimi_delta_attention"
        vars(upstream).update({name: delta} if hasattr(upstream, name) else {})
        trunk = model.base_model
        alone = torch.cat(
            [trunk(input_ids=part, use_cache=False).last_hidden_state for part in parts], 1
        )
        models._put_in(model, shape, variant, upstream)
        packed = trunk(use_cache=False, **inputs).last_hidden_state
    return ((packed - alone).norm() / alone.norm()).item()


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.composed])
def test_what_is_composed_is_exact(name, stand_ins):
    assert error_of(name, replace(ROWS[name].composed, liger="")) < LOGIT_TOL


@pytest.mark.parametrize("name", ROWS)
def test_notes_say_what_leaks(name, stand_ins):
    row = ROWS[name]
    error = error_of(name, row.packed)
    assert error > CONTROL * LOGIT_TOL if "leaks" in row.packed_note else error < LOGIT_TOL


@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_layers_and_parameters_of_a_shape(name):
    """Cut down to what a GPU of 80 GB trains; never cut in another place than the shape says."""
    shape = FAMILY_SHAPES[name]
    config = configuration(shape)
    assert config.num_hidden_layers == shape.layers < shape.published_layers
    assert f"{shape.layers} of {shape.published_layers} layers" in shape.note()
    count = sum(parameter.numel() for parameter in build(shape, "meta").parameters())
    assert 0.5e9 < count < 5e9


def test_rows_have_names_and_titles():
    names = [row[:2] for group in family_groups() for row in group.rows]
    assert len(names) == len(set(names))
    assert {workload for workload, _ in names} == set(TITLES)
    assert {"granite4h-32k-packed", "kimi-32k-packed"} <= set(TITLES)


def test_tables_of_a_result_and_of_none(tmp_path):
    assert family_report.newest_of_each(tmp_path) == []
    assert set(family_report.tables([]).values()) == {family_report.MISSING}

    def row(variant, ms, kind="32k-packed", **more):
        return {
            "workload": f"granite4h-{kind}",
            "variant": variant,
            "ms": ms,
            "peak_gib": 20.0,
            "real_tokens_per_s": 1e6 / ms,
            "documents": 58,
            "layers": 10,
            **more,
        }

    third = {"input_format": "padded", "real_tokens": 34, "tokens": 100}
    rows = [
        row("packfree", 200.0, implementations={"ssd": "mamba_ssm"}),
        row("composed without packfree", 300.0, note="of parts"),
        row("unpatched packed", 400.0),
        row("packfree, padded", 100.0, "8x2048-padded", **third),
        row("unpatched padded", 500.0, "8x2048-padded", **third),
        row("unpatched padded, kernels put in", 250.0, "8x2048-padded", **third),
        {**row("torch", 9.0), "workload": "layer ssd", "forward_ms": 3.0},
    ]
    path = tmp_path / "2026-01-02-nvidia-test.json"
    made = {"machine": "NVIDIA Test", "date": "2026-01-02", "versions": {"torch": "2.11.0"}}
    path.write_text(json.dumps({**made, "rows": rows}))
    short, every = family_report.tables([path]).values()
    assert "| 400 ms, 20 GiB (2.0 x), leaks | 300 ms, 20 GiB (1.5 x) | 200 ms, 20 GiB |" in short
    assert "| 250 ms, 20 GiB (2.5 x) | 100 ms, 20 GiB |" in short
    assert "| ssd | `torch` 9.00 ms, 20.00 GiB |" in short
    assert "| composed without packfree | 300 | 3,333 | 20.0 | of parts |" in every
    assert "**Granite 4.0 H Micro (10 of 40 layers), 8 rows of 2,048 tokens, 34% of them" in every
    # ours alone: no empty columns, and what is missing is named
    ours = [row for row in rows if row["variant"].startswith("packfree")]
    path.write_text(json.dumps({**made, "rows": ours}))
    short, _ = family_report.tables([path]).values()
    assert "\n| one step | packfree | packfree, padded |\n|---|---|---|\n| Granite" in short
    missing = (
        "Not timed yet: transformers alone and what is composed by hand for Granite 4.0 H Micro"
    )
    assert f"{missing}; Llama 3.2 1B and LFM2" in short
    # what another machine's newest result has is not missing
    llama = [{**row, "workload": row["workload"].replace("granite4h", "llama")} for row in rows]
    for name in ("2026-01-01-nvidia-other.json", "2026-01-03-nvidia-other.json"):
        (tmp_path / name).write_text(json.dumps({**made, "rows": llama}))
    paths = family_report.newest_of_each(tmp_path)
    assert [found.name for found in paths] == ["2026-01-03-nvidia-other.json", path.name]
    short, _ = family_report.tables(paths).values()
    assert f"{missing}; LFM2 1.2B and Nemotron" in short
    assert all(f"families/{found.name}`" in short for found in paths)
