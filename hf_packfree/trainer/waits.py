"""What the Trainer waits for the GPU for in each step, done without waiting: losses that are not
finite are left out of its logs on the GPU, and batches are copied while the host goes on.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers import trainer as upstream

logger = logging.getLogger("hf_packfree")


def trainer_of(args: TrainingArguments) -> Trainer | None:
    """Return the Trainer that calls a callback with `args`: no event names it."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and found.args is args:
            return found
        frame = frame.f_back
    return None


def copy_without_waiting(trainer: Trainer) -> None:
    """Let accelerate copy batches to a GPU as with `accelerator_config={"non_blocking": True}`;
    for a Trainer that has made no data loader yet.
    """
    if trainer.args.device.type == "cuda":
        trainer.accelerator.dataloader_config.non_blocking = True


class LossFilter:
    """Does what `logging_nan_inf_filter=True` asks for: in the place of a loss that is not finite,
    the mean of those since the last log is logged. The Trainer would wait for each loss, to choose;
    here the device chooses, and the same numbers are logged.

    Args:
        trainer: whose loop, and nobody else, is given what to log.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._before: Any = None
        self._put_on: Any = None

    def put_on(self) -> None:
        """Begin a training. That of transformers 5.2, whose sum of losses is a local variable, goes
        on to wait; so do loops of a trainer's own.
        """
        trainer = self._trainer
        if not trainer.args.logging_nan_inf_filter:
            return
        if not (hasattr(trainer, "_tr_loss") and hasattr(trainer, "_globalstep_last_logged")):
            logger.info(
                "the Trainer of this release of transformers waits for the GPU in each step, to "
                "leave losses that are not finite out of its logs; install transformers 5.3 or "
                "later, or set logging_nan_inf_filter=False"
            )
            return
        step, self._before = trainer.training_step, vars(trainer).get("training_step")

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss, frame = step(*args, **kwargs), inspect.currentframe()
            caller = None if frame is None else frame.f_back
            asks = caller is not None and caller.f_globals is vars(upstream)
            return self._filtered(loss) if asks else loss

        self._put_on = trainer.training_step = training_step

    def take_off(self) -> None:
        """End a training."""
        own = vars(self._trainer)
        if self._put_on is not None and own.get("training_step") is self._put_on:
            del own["training_step"]
            if self._before is not None:
                own["training_step"] = self._before
        self._put_on = None

    def _filtered(self, loss: Any) -> Any:
        """Return what the Trainer is to add to the losses since the last log, by its formula."""
        trainer = self._trainer
        total = trainer._tr_loss
        if not isinstance(loss, Tensor) or loss.device != total.device:
            return loss
        mean = total / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean).as_subclass(_Filtered)


class _Filtered(Tensor):
    """A filtered loss: of whether it is to be logged, nobody need ask the device."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As for any tensor; `isnan` and `isinf` answer `False`, which is on the host."""
        if func in (torch.isnan, torch.isinf):
            return False
        plain = [x.as_subclass(Tensor) if isinstance(x, cls) else x for x in args]
        return func(*plain, **(kwargs or {}))
