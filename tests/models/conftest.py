"""What tests of whole models share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def widened(monkeypatch):
    """In fp64 what transformers computes in fp32 whatever the weights: norms, rotary tables, the
    delta rule, the router.
    """
    to, cast, softmax = torch.Tensor.to, torch.Tensor.type, torch.nn.functional.softmax
    zeros, zeros_like = torch.zeros, torch.zeros_like

    def wide(value):
        return torch.float64 if value is torch.float32 else value

    def named(options):
        return {name: wide(one) for name, one in options.items()}

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *args, **options: to(x, *map(wide, args), **named(options))
    )
    monkeypatch.setattr(torch.Tensor, "type", lambda x, *args: cast(x, *map(wide, args)))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **options: zeros(*sizes, **named(options)))
    monkeypatch.setattr(torch, "zeros_like", lambda x, **options: zeros_like(x, **named(options)))
    monkeypatch.setattr(
        torch.nn.functional,
        "softmax",
        lambda x, *args, dtype=None, **more: softmax(x, *args, **more),
    )
