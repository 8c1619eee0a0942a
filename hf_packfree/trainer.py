"""The Trainer callback: patches the model before it is wrapped, refuses if that is too late,
logs what packing does.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_packfree.errors import PatchConflict
from hf_packfree.models.compat import LOSS_WITH_MEDIA_TAKES_NO_COUNT, RELEASE
from hf_packfree.mtp.attached import training_facts
from hf_packfree.mtp.options import Choice as MTPChoice
from hf_packfree.mtp.options import MTPOptions
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.parallel import context_parallel as ranks_of
from hf_packfree.parallel.accelerate import (
    cut_rows_again,
    leave_rows_whole,
    parallelism_in_force,
    refuse_rows_cut_twice,
    refuse_unreadable_launch,
    trainers_group,
)
from hf_packfree.patching.apply import Options, patch
from hf_packfree.patching.backends import Choice
from hf_packfree.patching.plan import trunks
from hf_packfree.patching.registry import family_of
from hf_packfree.patching.report import patch_report
from hf_packfree.verify.documents import media_source
from hf_packfree.verify.first_batch import first_batch_influence, in_process_group, observers_of

logger = logging.getLogger("hf_packfree")


class PackFreeCallback(TrainerCallback):
    """Patch the Trainer's model; pass it as `Trainer(callbacks=[PackFreeCallback()])`.

    The model is patched when the Trainer is initialised, before accelerate, DDP or FSDP wrap it.
    `add_callback` comes too late for that, and training then refuses to start unless the model is
    patched already. The patches stay after training; `remove_patches(model)` takes them back.

    Every training log gains these, over the steps since the last log, on this process, or on all of
    them (`mtp_...`):
        packfree/documents_per_row: documents in the average row.
        packfree/real_token_share: tokens that are not padding over all tokens, 0 to 1.
        packfree/tokens_per_second: tokens that are not padding.
        packfree/mtp_loss_k: the mean loss of depth k of a multi-token prediction head in training.
        packfree/mtp_accuracy_k: the share of depth k's targets that its most likely token hits.
        packfree/influence: once, with `verify_first_batch`: see `first_batch_influence`.

    Args:
        backend, batch_invariant, unpacked, padded, mtp: as for `apply_patches`, whose errors are
            raised when the Trainer is initialised; an unknown value is refused at once
            (ValueError).
        context_parallel: "auto": the ranks of `cp_size` or `sp_size` in the Trainer's
            `parallelism_config`, or that of `accelerate launch`, if there are any, share each row,
            and accelerate leaves that to the model until training ends; or as for `apply_patches`,
            of them.
        verify_first_batch: on the first packed batch, change the tokens, pixels and sounds of every
            second document and raise `LeakDetected` if the outputs of the others change; costs two
            forwards, three of a vision-language model. In a process group only the first batch is
            checked, so that all processes run the same forwards.
    """

    def __init__(
        self,
        *,
        backend: Choice = "auto",
        batch_invariant: bool = False,
        unpacked: Literal["upstream", "native"] = "upstream",
        padded: Literal["lazy", "full", "upstream"] = "lazy",
        mtp: MTPChoice | MTPOptions = None,
        context_parallel: Any = "auto",
        verify_first_batch: bool = False,
    ) -> None:
        self._options = Options(backend, batch_invariant, unpacked, padded, mtp)
        if isinstance(context_parallel, str) and context_parallel != "auto":
            raise ValueError(
                f"found context_parallel={context_parallel!r}; wanted 'auto', None, a group or a "
                f"mesh; pass one"
            )
        if context_parallel is not None:
            refuse_unreadable_launch()
        self._context_parallel = context_parallel
        self._verify = verify_first_batch
        self._influence: float | None = None
        self._trunks: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        self._counts = _Counts()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Patch the model, before anything wraps it.

        Raises:
            PatchConflict: the Trainer wants sequence parallelism by DeepSpeed's engine, gives other
                ranks the same batches, or shares rows where `context_parallel` is None.
        """
        given, parallelism = self._context_parallel, parallelism_in_force()
        ranks = trainers_group(parallelism, "auto" if isinstance(given, str) else ranks_of(given))
        patch(kwargs["model"], replace(self._options, context_parallel=ranks))
        if ranks is not None:
            leave_rows_whole(kwargs["model"])
            _warn_of_uncounted_tokens(parallelism)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse to train an unpatched model; start counting.

        Raises:
            PatchConflict: the callback was added too late to patch, or accelerate cuts the rows.
        """
        model = kwargs["model"]
        if not patch_report(model).patched:
            raise PatchConflict(
                "found an unpatched model at the start of training (the callback was added after "
                "the Trainer was built, or the patches were removed since); wanted it patched "
                "before accelerate wraps it; pass Trainer(callbacks=[PackFreeCallback()]), or "
                "call apply_patches(model) first"
            )
        refuse_rows_cut_twice(model)
        _warn_of_unweighted_tokens(args, model)
        _warn_of_gradients_divided_twice()
        family = family_of(model)
        self._trunks = list(trunks(model, family)) if family else []
        self._counts = _Counts()
        for trunk in self._trunks:
            observers_of(trunk).append(self._counts.count)
        if self._verify:
            for module in _outermost(model, self._trunks):
                self._hooks.append(
                    module.register_forward_pre_hook(self._verify_once(), with_kwargs=True)
                )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop counting and watching."""
        while self._hooks:
            self._hooks.pop().remove()
        cut_rows_again(kwargs["model"])
        for trunk in self._trunks:
            if self._counts.count in observers_of(trunk):
                observers_of(trunk).remove(self._counts.count)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the packing facts to a training log, where it is printed and where it is kept."""
        if logs is None or "loss" not in logs:
            return
        facts = self._counts.take() | training_facts(kwargs.get("model"))
        if self._influence is not None:
            facts["packfree/influence"], self._influence = self._influence, None
        logs.update(facts)
        if state.log_history:
            state.log_history[-1].update(facts)

    def _verify_once(self) -> Any:
        done = False

        def hook(trunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal done
            if done or not trunk.training:
                return
            done = True
            influence = first_batch_influence(trunk, args, kwargs)
            if influence is None and not in_process_group():
                # this batch is not packed; the first packed one is checked
                done = False
            self._influence = influence

        return hook


def _warn_of_unweighted_tokens(args: TrainingArguments, model: Any) -> None:
    """Warn of vision-language classes, for which the Trainer computes no token count over
    accumulated micro-batches.
    """
    if args.gradient_accumulation_steps > 1 and not getattr(model, "accepts_loss_kwargs", True):
        logger.warning(
            "found a %s, whose class says accepts_loss_kwargs = False, with "
            "gradient_accumulation_steps=%d: micro-batches will count equally however many tokens "
            "they hold; wanted tokens to count equally; %sset model.accepts_loss_kwargs = True "
            "before building the Trainer",
            type(model).__name__,
            args.gradient_accumulation_steps,
            "install transformers 5.17 or later, and " if LOSS_WITH_MEDIA_TAKES_NO_COUNT else "",
        )


def _warn_of_gradients_divided_twice() -> None:
    """Warn of a Trainer that divides losses by the micro-batches of a step and lets accelerate
    divide them again.
    """
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]

    steps = GradientState().num_steps
    # whose engine leaves it to the Trainer
    if steps > 1 and AcceleratorState().distributed_type != "DEEPSPEED":
        logger.warning(
            "found transformers %s, whose Trainer divides gradients by the %d micro-batches of a "
            "step twice, of any model (5.2 to 5.4 do); wanted gradients of the mean loss; install "
            "transformers 5.5 or later, or set trainer.accelerator.gradient_accumulation_steps = "
            "1 before trainer.train()",
            RELEASE,
            steps,
        )


def _warn_of_uncounted_tokens(parallelism: Any) -> None:
    """Warn of `sp_size`, for which the Trainer, made for DeepSpeed, counts no tokens before any
    callback runs.
    """
    size = getattr(parallelism, "sp_size", 1)
    if size > 1:
        logger.warning(
            "found sp_size=%d, which runs as cp_size=%d without the Trainer's token counts: "
            "micro-batches, and rows of data parallel ranks, will count equally however many "
            "targets they hold; wanted tokens to count equally; set ParallelismConfig(cp_size=%d)",
            size,
            size,
            size,
        )


def _outermost(model: nn.Module, trunks: list[nn.Module]) -> list[nn.Module]:
    """Return the vision-language model around the text model, whose towers are checked too, or
    else the text models.
    """
    source = media_source(model)
    return trunks if source is None else [source]


class _Counts:
    """Running totals since the last log; token counts stay on the device until then, so that no
    step waits for it.
    """

    def __init__(self) -> None:
        self.rows = self.documents = self.tokens_with_padding = 0
        self.tokens: int | Tensor = 0
        self.since = time.perf_counter()

    @uncompiled
    def count(self, packed: PackedSequence | None, shape: tuple[int, int], mask: Any) -> None:
        # of the batch that ranks share, each counts all
        if packed is not None and packed.shard is not None:
            packed, shape = packed.shard.batch, packed.shard.batch.batch_shape
        self.rows += shape[0]
        self.tokens_with_padding += shape[0] * shape[1]
        if packed is not None:
            self.documents += packed.num_documents
            self.tokens = self.tokens + packed.num_real_tokens
        else:
            self.documents += shape[0]
            padded = isinstance(mask, Tensor) and mask.ndim == 2
            self.tokens = self.tokens + (mask.sum() if padded else shape[0] * shape[1])

    def take(self) -> dict[str, float]:
        tokens, seconds = float(self.tokens), time.perf_counter() - self.since
        facts = {
            "packfree/documents_per_row": self.documents / max(self.rows, 1),
            "packfree/real_token_share": tokens / max(self.tokens_with_padding, 1),
            "packfree/tokens_per_second": tokens / seconds,
        }
        self.rows = self.documents = self.tokens_with_padding = 0
        self.tokens, self.since = 0, time.perf_counter()
        return facts
