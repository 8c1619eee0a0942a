"""Importable where the stand-ins are on the path; shows them to releases that look for kernels
only beside CUDA.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
from transformers.utils import import_utils


def show_to_transformers() -> None:
    """Let transformers find the stand-ins on a machine without CUDA.

    Up to 5.14 it asks once whether each package is there and CUDA too, and remembers; up to 5.12 it
    builds the gated norm on CUDA's current device. Call it before a model's module is imported.
    """
    if torch.cuda.is_available():
        return
    with patch.object(import_utils, "is_torch_cuda_available", lambda: True):
        assert (
            import_utils.is_flash_linear_attention_available()
            and import_utils.is_causal_conv1d_available()
        )
    torch.cuda.current_device = lambda: torch.device("cpu")
