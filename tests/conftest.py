"""One thread per test process: tiny models gain nothing from more, and workers that share cores lose a lot."""

from __future__ import annotations

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
