"""One thread per test process: tiny models gain nothing from more, and workers that share cores lose a lot."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# machines are shared and noisy: no test fails for being slow
settings.register_profile("packfree", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("packfree")
