"""flash-linear-attention on Hopper with a Triton that compiles its backward wrongly: only
TileLang makes it usable.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from hf_packfree.ops import backend, fla_support
from hf_packfree.ops.backend import Target
from hf_packfree.ops.ssd import fla as ssd_by_fla
from hf_packfree.patching.backends import choose_backends
from tests.patching.machines import SIZES

WITH_TILELANG = {"triton": "3.6.0", "fla-core": "0.6.0", "tilelang": "0.1.15"}


@pytest.mark.parametrize(
    "name, value", [("FLA_TILELANG", "0"), ("FLA_DISABLE_BACKEND_DISPATCH", "1")]
)
def test_hopper_with_tilelang_switched_off(gpu, monkeypatch, name, value):
    """FLA would raise at the first backward."""
    gpu(packages=WITH_TILELANG)
    monkeypatch.setenv(name, value)
    state = choose_backends("auto", SIZES)
    assert state.cuda_half["delta_rule"] == state.cuda_single["delta_rule"] == "torch"
    assert (
        f"{name}={value} in the environment leaves tilelang out; unset it"
        in state.why["delta_rule"]
    )


def test_hopper_with_a_broken_tilelang(gpu):
    gpu(packages=WITH_TILELANG, broken=["tilelang"])
    state = choose_backends("auto", SIZES)
    assert state.cuda_half["delta_rule"] == "torch"
    assert (
        "tilelang 0.1.15 is broken (OSError: undefined symbol: _ZN3c10); reinstall it"
        in state.why["delta_rule"]
    )


def test_hopper_with_a_triton_of_another_name(monkeypatch):
    """torch's own builds are called pytorch-triton; the module says which it is."""

    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(backend, "version", version)
    monkeypatch.setattr(fla_support, "find_spec", lambda name: None)
    for found, wrong in (("3.6.0", True), ("3.7.1", False)):
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=found))
        assert backend.installed("triton") == found
        reason = fla_support.wrong_on_hopper(Target("cuda", (9, 0)))
        assert (reason is not None and "with triton 3.6.0" in reason) == wrong
    assert backend.installed("no-such-package") is None


def test_ssd_on_hopper_has_no_use_for_tilelang(gpu):
    """FLA's backward of simple gated linear attention keeps states in fp32, which TileLang's
    kernel does not take: it raised in the first backward on a GPU.
    """
    gpu(packages=WITH_TILELANG)
    hopper, other = Target("cuda", (9, 0)), Target("cuda", (8, 0))
    assert fla_support.wrong_on_hopper(hopper) is None
    assert (
        "its backward refuses to run on Hopper with triton 3.6.0 (3.4.0 and later, before 3.7.1), "
        "with tilelang, too; pip install 'mamba-ssm>=2.3.2', or" in ssd_by_fla.unusable(hopper)
    )
    assert ssd_by_fla.unusable(other) is None
    gpu(packages=WITH_TILELANG | {"triton": "3.7.1"})
    assert ssd_by_fla.unusable(hopper) is None


def test_flash_qla_switched_off_for_fla_is_off_here_too(gpu, monkeypatch):
    gpu()
    assert choose_backends("auto", SIZES).cuda_half["delta_rule"] == "flash_qla"
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    state = choose_backends("auto", SIZES)
    assert state.cuda_half["delta_rule"] == "fla"
    assert (
        "not flash_qla: FLA_FLASH_QLA=0 in the environment turns it off" in state.why["delta_rule"]
    )
