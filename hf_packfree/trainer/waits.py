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
    try:
        while frame is not None:
            # a frame keeps what is read of its locals: nobody else's frames are asked
            found = frame.f_locals.get("self") if frame.f_globals is vars(upstream) else None
            if isinstance(found, Trainer) and found.args is args:
                return found
            frame = frame.f_back
        return None
    finally:
        # or it would keep itself, and all that called it
        del frame


def copy_without_waiting(trainer: Trainer) -> None:
    """Let accelerate copy batches to a GPU as with `accelerator_config={"non_blocking": True}`;
    for a Trainer that has made no data loader yet.
    """
    if trainer.args.device.type == "cuda":
        trainer.accelerator.dataloader_config.non_blocking = True


def filter_losses(trainer: Trainer) -> None:
    """Do what `logging_nan_inf_filter=True` asks for, in one training: in the place of a loss that
    is not finite, the mean of those since the last log is logged. The Trainer would wait for each
    loss, to choose; now the device chooses, and the same numbers are logged.

    The Trainer of transformers 5.2, whose sum of losses is a local variable, goes on to wait, and
    so do loops of a trainer's own.
    """
    leave_losses(trainer)
    if not trainer.args.logging_nan_inf_filter:
        return
    if hasattr(trainer, "_tr_loss") and hasattr(trainer, "_globalstep_last_logged"):
        vars(trainer)["training_step"] = _FilteredStep(trainer)
        return
    logger.info(
        "the Trainer of this release of transformers waits for the GPU in each step, to leave "
        "losses that are not finite out of its logs; install transformers 5.3 or later, or set "
        "logging_nan_inf_filter=False"
    )


def leave_losses(trainer: Trainer) -> None:
    """End what `filter_losses` began."""
    own = vars(trainer)
    step = own.get("training_step")
    if isinstance(step, _FilteredStep):
        del own["training_step"]
        if step.before is not None:
            own["training_step"] = step.before


class _FilteredStep:
    """In the place of a trainer's `training_step`, whose loop, and nobody else, is given what it is
    to log.

    Attributes:
        before: what stood in that place on the trainer itself, or None.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._step = trainer, trainer.training_step
        self.before = vars(trainer).get("training_step")
        functools.update_wrapper(self, self._step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, filtered for the Trainer's loop."""
        loss = self._step(*args, **kwargs)
        return self._filtered(loss) if _is_called_by_upstream() else loss

    def _filtered(self, loss: Any) -> Any:
        """Return what the Trainer is to add to the losses since the last log, by its formula."""
        trainer = self._trainer
        total = trainer._tr_loss
        if not isinstance(loss, Tensor) or loss.device != total.device:
            return loss
        mean = total / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean).as_subclass(_Filtered)


def _is_called_by_upstream() -> bool:
    """Whether what calls this was called by transformers' Trainer."""
    frame = inspect.currentframe()
    try:
        for _ in range(2):
            frame = None if frame is None else frame.f_back
        return frame is not None and frame.f_globals is vars(upstream)
    finally:
        del frame


class _Filtered(Tensor):
    """A filtered loss: of whether it is to be logged, nobody need ask the device."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As for any tensor; `isnan` and `isinf` answer `False`, which is on the host."""
        if func in (torch.isnan, torch.isinf):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
