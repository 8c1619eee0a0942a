"""The rotary embedding of vision towers: what upstream computes, family by family."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from hf_packfree.ops.fused.rope import qkv_rope_reference
from hf_packfree.patching.registry import FAMILIES


@pytest.mark.compat
@pytest.mark.parametrize("family", [family.name for family in FAMILIES if family.towers])
def test_is_upstreams(family):
    row = next(row for row in FAMILIES if row.name == family)
    ours = import_module(row.replacement)
    towers = [
        getattr(ours, tower.attention)
        for tower in row.towers
        if hasattr(getattr(ours, tower.attention), "_rotate")
    ]
    torch.manual_seed(0)
    qkv, angle = torch.randn(5, 3, 2, 8), torch.randn(5, 4)
    cos, sin = (torch.cat([turn, turn], -1) for turn in (angle.cos(), angle.sin()))
    found = qkv_rope_reference(qkv, cos, sin)
    assert towers
    for tower in towers:
        wanted = tower._rotate(tower, *qkv[:, :2].unbind(1), cos, sin)
        assert [torch.equal(a, b) for a, b in zip(found, (*wanted, qkv[:, 2]), strict=True)] == [
            True
        ] * 3
