"""Rotary embeddings: of fixed frequencies, or refused where a long document of the row would
turn a short one otherwise.
"""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_packfree import apply_patches, patch_report, register_patches
from hf_packfree.errors import UnsupportedInput, UnsupportedModel
from hf_packfree.models.rotary import BY_LONGEST, FIXED, cos_and_sin
from tests.models.padded import padded_batch
from tests.support import LOGIT_TOL, by_family, documents, relative_rms, slow_decay, step

FAMILIES = ["qwen3_5", "qwen3_next"]
"""The third's rotary embedding is the first's."""
LIMIT = 32
"""Positions up to which all types turn alike."""


def built(family: str, kind: str) -> torch.nn.Module:
    """Return a tiny model in training mode whose rotary embedding is of this type, for LIMIT
    positions.
    """
    row = by_family[family]
    config = row.tiny_config()
    config.max_position_embeddings = LIMIT
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": kind,
        **parameters(kind, config),
    }
    torch.manual_seed(0)
    return slow_decay(
        getattr(__import__(row.upstream, fromlist=["_"]), row.causal_lm)(config)
    ).train()


def parameters(kind: str, config) -> dict[str, object]:
    """Settings of each type that change what it computes."""
    if kind == "default":
        return {}
    size = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)) // 2
    return {
        "factor": 4.0,
        **{
            "longrope": {
                "short_factor": [1.0] * size,
                "long_factor": [4.0] * size,
                "original_max_position_embeddings": LIMIT,
            },
            "yarn": {"original_max_position_embeddings": LIMIT},
            "llama3": {
                "original_max_position_embeddings": LIMIT,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        }.get(kind, {}),
    }


def packed_row(lengths) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"input_ids": torch.cat(documents(lengths))[None], "position_ids": positions[None]}


def error(model, lengths, wanted) -> float:
    with torch.no_grad():
        return relative_rms(
            model(**packed_row(lengths), use_cache=False).logits[0], torch.cat(wanted)
        )


def alone(family, kind, lengths) -> list[torch.Tensor]:
    """Return each document's logits, from a model that has seen nothing before."""
    with torch.no_grad():
        return [
            built(family, kind)(input_ids=one[None], use_cache=False).logits[0]
            for one in documents(lengths)
        ]


@pytest.mark.compat(kernels=False)
@pytest.mark.parametrize("kind", ["default", *ROPE_INIT_FUNCTIONS])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_type_of_this_release_is_in_the_table_it_belongs_to(family, kind):
    """What a token's cosine is with a longer document beside it, measured: a new type fails
    here.
    """
    trunk, x = built(family, kind).model, torch.zeros(1)
    short, both = torch.arange(5)[None], torch.cat([torch.arange(5), torch.arange(2 * LIMIT)])[None]
    same = torch.equal(cos_and_sin(trunk, x, short)[0], cos_and_sin(trunk, x, both)[0][:, :5])
    assert kind in (FIXED if same else BY_LONGEST)


@pytest.mark.compat(kernels=False)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["linear", "llama3", "proportional", "yarn"])
def test_fixed_frequencies_pack_at_any_length(family, kind):
    if kind not in ROPE_INIT_FUNCTIONS:
        pytest.skip("a type of later releases")
    lengths = (5, 2 * LIMIT, 9)
    wanted, model = alone(family, kind, lengths), built(family, kind)
    assert error(model, lengths, wanted) > 1e3 * LOGIT_TOL
    assert error(apply_patches(model), lengths, wanted) <= LOGIT_TOL


@pytest.mark.compat(kernels=False)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "longest"), [("dynamic", LIMIT - 1), ("longrope", LIMIT)])
def test_frequencies_by_length_pack_below_the_limit_alone(family, kind, longest):
    lengths = (5, longest, 9)
    model = apply_patches(built(family, kind))
    # the frequencies of a long document before stay in transformers 5.2, for documents alone too
    with torch.no_grad():
        model(input_ids=documents((2 * LIMIT,))[0][None], use_cache=False)
        wanted = [
            model(input_ids=one[None], use_cache=False).logits[0] for one in documents(lengths)
        ]
    assert error(model, lengths, wanted) <= LOGIT_TOL
    with pytest.raises(
        UnsupportedInput,
        match=f"ends at position {longest + 1} in a row of 3, and rope_type='{kind}'",
    ):
        model(**packed_row((5, longest + 1, 9)), use_cache=False)
    far = packed_row((5, 9, 9))
    far["position_ids"][0, -9:] += LIMIT
    with pytest.raises(UnsupportedInput, match="rope_type"):
        model(**far, use_cache=False)


@pytest.mark.parametrize("options", [{}, {"unpacked": "native"}])
@pytest.mark.parametrize("kind", sorted(BY_LONGEST))
def test_padded_batches_are_upstreams(kind, options):
    """Which turns all rows by the longest, padding included."""
    batch = padded_batch("right")
    wanted, grads = step(built("qwen3_5", kind), batch)
    found, found_grads = step(apply_patches(built("qwen3_5", kind), **options), batch)
    assert torch.equal(found.logits, wanted.logits) and torch.equal(found.loss, wanted.loss)
    assert all(torch.equal(found_grads[name], grads[name]) for name in grads)


def test_batch_invariance_is_not_promised_of_what_upstream_runs(monkeypatch):
    monkeypatch.setattr("hf_packfree.patching.invariance._machine", lambda x: None)
    monkeypatch.setattr("hf_packfree.patching.invariance._operations", lambda implementations: None)
    report = patch_report(apply_patches(built("qwen3_5", "longrope"), batch_invariant=True))
    assert "rope_type" in report.rounding
    assert (
        "rope_type"
        not in patch_report(apply_patches(built("qwen3_5", "yarn"), batch_invariant=True)).rounding
    )


@pytest.fixture
def unknown(monkeypatch):
    """A type that somebody registered, as transformers invites."""
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "my_dynamic", ROPE_INIT_FUNCTIONS["dynamic"])
    return "my_dynamic"


def test_an_unknown_type_is_refused_by_name(unknown):
    model = built("qwen3_5", unknown)
    with pytest.raises(UnsupportedModel, match="found rope_type='my_dynamic'"):
        apply_patches(model)
    assert not patch_report(model).patched


def test_an_unknown_type_is_refused_through_the_other_door(unknown):
    config = built("qwen3_5", unknown).config
    with pytest.raises(UnsupportedModel, match="my_dynamic"), register_patches():
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_config(config)(**packed_row((5, 9)))
