"""A process group for tests of what one process can see."""

from __future__ import annotations

import pytest
from torch import distributed as dist


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
