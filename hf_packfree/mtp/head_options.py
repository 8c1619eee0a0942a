"""The options of the head: keep it or train it, and how."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

Choice = Literal["keep", "train"] | None


@dataclass(frozen=True, kw_only=True)
class MTPOptions:
    """How the multi-token prediction head is read and trained; `mtp="train"` means these defaults,
    "keep" `train=False`.

    Attributes:
        train: False freezes the head: it is there to be saved with the model, and never runs.
        depth: how many tokens after the next one are predicted in training, at least 1. Checkpoints
            have one layer, which runs again on its own output for each further depth.
        weight: the factor on the mean of all depths' losses, which is added to the main loss
            (DeepSeek-V3 and Megatron: 0.1).
        detach: True trains the head alone: the text model, the embedding and the language modelling
            head get the same gradients as without the head: bit for bit, if the model draws no
            random numbers (dropout), of which the head's layers draw some, too.
        from_scratch: start with random weights, drawn as the text model's were, instead of reading
            a checkpoint.
        checkpoint: folder or hub id to read the head from; the model's own checkpoint if not given.

    Raises:
        ValueError: an option has an unknown value, or `from_scratch` excludes another option.
    """

    train: bool = True
    depth: int = 1
    weight: float = 0.1
    detach: bool = True
    from_scratch: bool = False
    checkpoint: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check the options that do not depend on the model."""
        for name in ("train", "detach", "from_scratch"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"found {name}={getattr(self, name)!r}; wanted True or False; pass one"
                )
        check_depth(self.depth)
        if not _is_positive(self.weight):
            raise ValueError(
                f"found weight={self.weight!r}; wanted a number above 0; mtp='keep' trains nothing"
            )
        if not (self.checkpoint is None or _is_name(self.checkpoint)):
            raise ValueError(
                f"found checkpoint={self.checkpoint!r}; wanted a folder or a hub id; leave it out "
                "to read the head from where the model came from"
            )
        if self.from_scratch and (self.checkpoint is not None or not self.train):
            raise ValueError(
                "found from_scratch=True with a checkpoint or train=False; wanted it for a head "
                "that is trained and has none; leave one of the two options out"
            )


def check_depth(depth: Any) -> None:
    """Refuse, by `ValueError`, anything but a whole number of at least 1."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"found depth={depth!r}; wanted a whole number of at least 1; pass 1")


def _is_positive(value: Any) -> bool:
    number = not isinstance(value, bool) and isinstance(value, Real)
    return number and 0 < float(value) < float("inf")


def _is_name(value: object) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(str(value))


def mtp_options(choice: Choice | MTPOptions) -> MTPOptions | None:
    """Return the options that "keep", "train", options or None stand for.

    Raises:
        ValueError: `choice` is none of these.
    """
    if choice is None or isinstance(choice, MTPOptions):
        return choice
    if choice not in ("keep", "train"):
        raise ValueError(
            f"found mtp={choice!r}; wanted None, 'keep', 'train' or MTPOptions(...); pass one"
        )
    return MTPOptions(train=choice == "train")
