"""A Trainer callback that records what each step saw, cost and gave."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_packfree.demo.memory import PeakMemory


class Recorder(TrainerCallback):
    """Send one record per step to `send`, and one at the end.

    The step's batch is read by a hook on the model, as the Trainer hands it over; its time is from log to log.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._batch: dict[str, int] = {}
        self._memory: PeakMemory | None = None
        self._since = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start counting: everything is loaded, nothing has run."""
        kwargs["model"].register_forward_pre_hook(self._read, with_kwargs=True)
        self._memory = PeakMemory()
        self._since = time.perf_counter()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Send the step."""
        if not logs or "loss" not in logs or self._memory is None:
            return
        now = time.perf_counter()
        packing = {name: value for name, value in logs.items() if name.startswith("packfree/")}
        self._send(
            {
                "step": state.global_step,
                "loss": logs["loss"],
                "gradient_norm": float(logs.get("grad_norm", 0.0)),
                "seconds": now - self._since,
                "peak_memory_mib": self._memory.above(),
                "packing": packing,
                **self._batch,
            }
        )
        self._since = time.perf_counter()

    def _read(self, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        ids, mask, positions = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
        self._batch = {
            "documents": int((positions == 0).sum()) if isinstance(positions, Tensor) else ids.shape[0],
            "tokens": int(ids.numel() if mask is None else mask.sum()),
            "slots": ids.numel(),
            "targets": int(inputs["num_items_in_batch"]),
            "fingerprint": int(ids.sum() if mask is None else (ids * mask).sum()),
        }
