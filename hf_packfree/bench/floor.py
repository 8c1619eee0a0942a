"""The matrix-product floor: what a training step's linear layers and experts take by themselves on this machine."""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch import nn

EXPERTS = ("gate_up_proj", "down_proj")
"""Parameters [experts, outputs, inputs] of transformers' layers of experts."""

_TURNS = {True: (2, 10), False: (0, 1)}
"""Untimed and timed turns of a product, on a GPU and elsewhere: one by itself takes a GPU less than its launch the host."""


class Floor:
    """All `nn.Linear` layers and experts of a model, as products of so many tokens: y = x W', dx = dy W and dW = dy' x.

    Layers of one shape are measured once; experts are evenly loaded.  A router, which is no `nn.Linear`, is not in it.
    """

    def __init__(self, model: nn.Module, tokens: int, choices: int = 1) -> None:
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._shapes: Counter[tuple[int, ...]] = Counter((module.in_features, module.out_features) for module in linears)
        self._shapes += Counter(_experts(model))
        self._tokens, self._choices, self._like = tokens, choices, next(model.parameters()).detach()

    @torch.no_grad()
    def seconds(self) -> float:
        """Run every shape's products, and return the seconds that all layers would take."""
        return sum(count * self._once(*shape) for shape, count in self._shapes.items())

    def _once(self, fan_in: int, fan_out: int, experts: int = 0) -> float:
        sizes = self._sizes(fan_in, fan_out, experts)
        x, weight, grad = (torch.randn_like(self._like.new_empty(size)) for size in sizes)  # zeros and ones run faster

        def multiply(turns: int) -> None:
            for _ in range(turns):
                x @ weight.mT, grad @ weight, grad.mT @ x
            self._wait()

        warm, timed = _TURNS[self._like.is_cuda]
        multiply(warm)
        began = time.perf_counter()
        multiply(timed)
        return (time.perf_counter() - began) / timed

    def _sizes(self, fan_in: int, fan_out: int, experts: int) -> tuple[tuple[int, ...], ...]:
        """Of x, W and dy; so few tokens that they cannot reach every expert reach as many as they have choices."""
        rows, experts = self._tokens, min(experts, self._tokens * self._choices)
        if not experts:
            return (rows, fan_in), (fan_out, fan_in), (rows, fan_out)
        rows = rows * self._choices // experts
        return (experts, rows, fan_in), (experts, fan_out, fan_in), (experts, rows, fan_out)

    def _wait(self) -> None:
        if self._like.is_cuda:
            torch.cuda.synchronize(self._like.device)


def _experts(model: nn.Module) -> list[tuple[int, ...]]:
    """Return inputs, outputs and experts of every product that each token takes with the experts it chose."""
    weights = (getattr(module, name, None) for module in model.modules() for name in EXPERTS)
    stacks = [weight.shape for weight in weights if isinstance(weight, nn.Parameter) and weight.ndim == 3]
    return [(fan_in, fan_out, experts) for experts, fan_out, fan_in in stacks]
