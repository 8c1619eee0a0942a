"""Parameters for slow decay of recurrent states, for measurements: fast decay hides leaks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def slow_decays(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return {parameter: value on the host} for the decays of a model's layers, with which a state
    lasts for hundreds of tokens.

    The log decay is -A softplus(x + dt_bias), and A is set to values from 0.01 to 0.05. In layers
    with `safe_gate` the log decay is lower_bound sigmoid(A (x + dt_bias)), which a small A would
    bring near lower_bound / 2: A is set to 1, and dt_bias to values from -6 to -4.
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
    """Return evenly spaced numbers from `first` to `last` in the shape of the parameter `like`, on
    the host.
    """
    return torch.linspace(first, last, like.numel(), device="cpu").view(like.shape)
