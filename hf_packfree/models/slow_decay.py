"""States that live long, for measurements: fast decay hides leaks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def slow_decays(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return what to set the parameters of a model's decays to, on the host, so that a state lives
    for hundreds of tokens.

    A decay is -A softplus(x + dt_bias), of A from 0.01 to 0.05; or lower_bound sigmoid(A (x +
    dt_bias)) where a gate has a bound, which is near half of it for a small A: A is 1 there, and
    dt_bias from -6 to -4.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if (A_log := own.get("A_log")) is None:
            continue
        dt_bias = own.get("dt_bias")
        if getattr(module, "safe_gate", False) and dt_bias is not None:
            found[A_log], found[dt_bias] = torch.zeros(A_log.shape), _even(-6, -4, dt_bias)
        else:
            found[A_log] = _even(0.01, 0.05, A_log).log()
    return found


def _even(first: float, last: float, like: Tensor) -> Tensor:
    """Return numbers from the first to the last, in the shape of a parameter."""
    return torch.linspace(first, last, like.numel(), device="cpu").view(like.shape)
