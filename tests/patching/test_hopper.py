"""flash-linear-attention on Hopper with a Triton that compiles its backward wrongly: only TileLang makes it usable."""

from __future__ import annotations

import pytest

from hf_packfree.patching.backends import choose_backends
from tests.patching.machines import SIZES

WITH_TILELANG = {"triton": "3.6.0", "fla-core": "0.6.0", "tilelang": "0.1.15"}


@pytest.mark.parametrize("name, value", [("FLA_TILELANG", "0"), ("FLA_DISABLE_BACKEND_DISPATCH", "1")])
def test_hopper_with_tilelang_switched_off(gpu, monkeypatch, name, value):
    """FLA would raise at the first backward."""
    gpu(packages=WITH_TILELANG)
    monkeypatch.setenv(name, value)
    state = choose_backends("auto", "upstream", SIZES)
    assert state.cuda_half.delta_rule == state.cuda_single.delta_rule == "torch"
    assert f"{name}={value} in the environment leaves tilelang out; unset it" in state.why["delta_rule"]


def test_hopper_with_a_broken_tilelang(gpu):
    gpu(packages=WITH_TILELANG, broken=["tilelang"])
    state = choose_backends("auto", "upstream", SIZES)
    assert state.cuda_half.delta_rule == "torch"
    assert "tilelang 0.1.15 is broken (OSError: undefined symbol: _ZN3c10); reinstall it" in state.why["delta_rule"]
