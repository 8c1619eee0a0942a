"""Refuses what callers ask of log-probabilities in a form that would be read as something else."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Size, Tensor

from hf_packfree.errors import UnsupportedInput


def refuse_misread(
    tokens: Size, targets: Tensor, temperature: float | Tensor, entropy: Any
) -> None:
    """Refuse arguments of `token_log_probs` that would be read as something else than was meant.

    Args:
        tokens: the shape of the tokens, [B, S].

    Raises:
        UnsupportedInput: targets of another shape, or that are no integers; a temperature that does
            not broadcast to it, or only along another axis; a number that is not above 0.
        ValueError: an entropy that is no option.
    """
    if targets.shape != tokens:
        raise UnsupportedInput(
            f"found targets of shape {list(targets.shape)} for tokens of shape {list(tokens)}; "
            "wanted one target for every token; pad them with the ignore_index"
        )
    # which would be read as ids 0 and 1
    if targets.dtype not in (torch.int64, torch.int32):
        raise UnsupportedInput(
            f"found targets of {targets.dtype}; wanted ids of tokens, torch.int64; call .long() on "
            "ids, and pass the ignore_index where a mask says that there is no target"
        )
    _refuse_temperature(tokens, temperature)
    if entropy not in (True, False, "detached"):
        raise ValueError(f"found entropy={entropy!r}; wanted True, False or 'detached'; pass one")


def _refuse_temperature(tokens: Size, temperature: float | Tensor) -> None:
    if isinstance(temperature, Tensor):
        given = temperature.shape
        # [S] for one row, but not [B] for rows that may be as many as their tokens
        repeated = tokens[: len(tokens) - len(given)] if temperature.numel() > 1 else ()
        axes = zip(reversed(given), reversed(tokens), strict=False)
        fits = len(given) <= len(tokens) and all(one in (1, of_all) for one, of_all in axes)
        if not fits or math.prod(repeated) > 1:
            raise UnsupportedInput(
                f"found a temperature of shape {list(given)} for tokens of shape {list(tokens)}; "
                "wanted a number, [B, 1] or [B, S]; of one for each row make it [B, 1] with "
                "[:, None]"
            )
    elif not temperature > 0:
        raise _cold(temperature)


def refuse_values(
    targets: Tensor, temperature: float | Tensor, words: int, ignore_index: int
) -> None:
    """Refuse values that mean nothing. On CPUs alone: to read a GPU's, the host would wait.

    Args:
        targets: [B, S], or of tokens without padding [1, T].
        words: the size of the vocabulary.

    Raises:
        UnsupportedInput: a target that is no token of the vocabulary; a target's temperature that
            is not above 0.
    """
    if targets.device.type != "cpu":
        return
    wanted = targets != ignore_index
    ids = targets[wanted]
    if ids.numel() and not (ids.min() >= 0 and ids.max() < words):
        raise UnsupportedInput(
            f"found targets from {ids.min()} to {ids.max()} for a vocabulary of {words}; wanted "
            "ids of its tokens; pass the ignore_index where there is no target"
        )
    if isinstance(temperature, Tensor) and temperature.device.type == "cpu":
        given = temperature.expand(targets.shape)[wanted]
        if not (given > 0).all():
            raise _cold(float(given.min()))


def _cold(temperature: Any) -> UnsupportedInput:
    return UnsupportedInput(
        f"found a temperature of {temperature}; wanted one above 0; for the most likely tokens "
        "pass top1=True"
    )
