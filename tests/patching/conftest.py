"""GPUs that are pretended."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops import attention, backend, conv, delta_rule, fla_support, ssd
from hf_packfree.patching import announce, invariance
from tests.patching.machines import INSTALLED


def forget():
    """Forget what was found of the packages that are there."""
    backend.broken.cache_clear()
    delta_rule.flash_qla.is_known.cache_clear()


@pytest.fixture(autouse=True)
def nothing_was_said():
    """Let what is said once per process be said again."""
    announce.warn_once.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that makes it look as if there were a GPU with these packages."""

    def pretend(capability=(9, 0), packages=INSTALLED, nvcc=True, broken=(), others=()):
        cards = (capability, *others)
        modules = {
            "triton": "triton",
            "fla": "fla-core",
            "flash_qla": "flash-qla",
            "tilelang": "tilelang",
            "causal_conv1d": "causal-conv1d",
            "mamba_ssm": "mamba-ssm",
        }

        def import_module(name):
            if name in broken:
                raise OSError("undefined symbol: _ZN3c10\nand more")

        def find_spec(name):
            return object() if modules.get(name) in packages else None

        readers = (fla_support, backend, conv.dao, delta_rule.flash_qla, ssd.mamba_ssm, invariance)
        for module in readers:
            monkeypatch.setattr(module, "installed", packages.get)
        for module in (one for one in readers if hasattr(one, "find_spec")):
            monkeypatch.setattr(module, "find_spec", find_spec)
        monkeypatch.setattr(backend, "import_module", import_module)
        forget()
        monkeypatch.setattr(fla_support, "has_nvcc", lambda: nvcc)
        monkeypatch.setattr(delta_rule.flash_qla, "has_nvcc", lambda: nvcc)
        monkeypatch.setattr(
            attention.cudnn, "takes", lambda head_size, device: device.type == "cuda"
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: cards[index])

    yield pretend
    forget()
