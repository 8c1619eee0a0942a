"""pytest's plugin of the job: with `--patched` every model that a test builds is patched, on the
same random numbers.
"""

from __future__ import annotations

import functools
import random
import sys
import zlib
from importlib import import_module
from typing import Any

import numpy
import pytest
import torch
from transformers import PreTrainedModel

from hf_packfree import apply_patches
from hf_packfree.models.base import Replacement
from hf_packfree.patching.registry import FAMILIES, family_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the runner say which of the two runs this is."""
    parser.addoption("--patched", action="store_true", help="patch every model that is built")


def pytest_configure(config: pytest.Config) -> None:
    """Use one thread, as the default suite does, and patch from here on."""
    torch.set_num_threads(1)
    if config.getoption("--patched"):
        _patch_what_is_built()
        family = FAMILIES[0]
        model = getattr(import_module(family.upstream), family.causal_lm)(family.tiny_config())
        # both runs would be the same, and nothing would be lost
        if not isinstance(model, Replacement):
            raise pytest.UsageError(
                f"found {family.causal_lm} unpatched; wanted a constructor that ends in post_init"
            )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test draw the same inputs and weights in both runs, whatever ran before it."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    common: Any = sys.modules.get("tests.test_modeling_common")
    if common is not None:
        common.global_rng.seed(seed)


def _patch_what_is_built() -> None:
    """Patch each model at the end of its constructor: every class of transformers calls
    `post_init` there.
    """
    whole = PreTrainedModel.post_init

    @functools.wraps(whole)
    def post_init(self: PreTrainedModel) -> None:
        whole(self)
        if family_of(self) is not None:
            apply_patches(self)

    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]
