"""The matrix-product floor: what a training step's linear layers take by themselves on this machine."""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch import nn


class Floor:
    """All `nn.Linear` layers of a model, as products of so many tokens: y = x W', dx = dy W and dW = dy' x for each.

    Layers of one shape are measured once.  Experts that are no `nn.Linear` are not in it.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._shapes = Counter((module.in_features, module.out_features) for module in linears)
        self._tokens, self._like = tokens, next(model.parameters()).detach()

    @torch.no_grad()
    def seconds(self) -> float:
        """Run every product once, and return the seconds that all layers would take."""
        return sum(count * self._once(*shape) for shape, count in self._shapes.items())

    def _once(self, fan_in: int, fan_out: int) -> float:
        sizes = ((self._tokens, fan_in), (fan_out, fan_in), (self._tokens, fan_out))
        x, weight, grad = (torch.randn_like(self._like.new_empty(size)) for size in sizes)  # zeros and ones run faster
        self._wait()
        began = time.perf_counter()
        x @ weight.T, grad @ weight, grad.T @ x
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._like.is_cuda:
            torch.cuda.synchronize(self._like.device)
