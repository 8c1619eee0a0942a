"""The Trainer callback: patches the model before it is wrapped, refuses to train if it is too late
for that, and logs facts about packing.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_packfree.errors import PatchConflict
from hf_packfree.models.compat import LOSS_WITH_MEDIA_TAKES_NO_COUNT, RELEASE
from hf_packfree.models.run_options import CudaGraphs, Padded, Unpacked
from hf_packfree.mtp.attached import AttachedHead, training_facts
from hf_packfree.mtp.head_options import Choice as MTPChoice
from hf_packfree.mtp.head_options import MTPOptions, mtp_options
from hf_packfree.parallel import context_parallel as ranks_of
from hf_packfree.parallel.accelerate import (
    cut_rows_again,
    leave_rows_whole,
    parallelism_in_force,
    refuse_rows_cut_twice,
    refuse_unreadable_launch,
    trainers_group,
)
from hf_packfree.patching.apply import patch
from hf_packfree.patching.backends import Choice
from hf_packfree.patching.options import Options
from hf_packfree.patching.report import patch_report
from hf_packfree.trainer.silent_rows import (
    warn_of_removed_columns,
    warn_of_rows_without_boundaries,
)
from hf_packfree.trainer.training_run import TrainingRun
from hf_packfree.trainer.waits import (
    copy_without_waiting,
    filter_losses,
    leave_losses,
    trainer_of,
)

logger = logging.getLogger("hf_packfree")


class PackFreeCallback(TrainerCallback):
    """Patch the Trainer's model; pass it as `Trainer(callbacks=[PackFreeCallback()])`.

    The model is patched when the Trainer is initialised, before accelerate, DDP or FSDP wrap it.
    `add_callback` comes too late for that, and so does the callback for the models that
    `Trainer(model_init=...)` builds anew for each run: training then refuses to start unless the
    model is patched already, by `apply_patches` in `model_init`. The patches stay after training;
    `remove_patches(model)` undoes them.

    The first and the last step are logged whatever `logging_steps` says. Every training log gains
    these values, over the steps since the last log, of this process, or of all processes
    (`mtp_...`):

    - packfree/documents_per_row: documents in the average row.
    - packfree/real_token_share: tokens that are not padding over all tokens, 0 to 1.
    - packfree/tokens_per_second: tokens per second that are not padding.
    - packfree/mfu: model FLOP/s utilisation in percent of the GPU's peak in bfloat16, where that is
      known; counted as by TRL, but with attention within documents and windows only. Left out, with
      a warning, for a model whose number of experts per token is not known.
    - packfree/mtp_loss_k: the mean loss of depth k of a multi-token prediction head that is
      trained.
    - packfree/mtp_accuracy_k: the share of depth k's targets that equal its most likely token.
    - packfree/influence: once, with `verify_first_batch`: how far the outputs of any document
      changed with the others, and 0 where nothing leaks.

    The Trainer's host does not wait for the GPU in each step: batches are copied without, and the
    GPU leaves losses that are not finite out of the log (`logging_nan_inf_filter`).

    Hooks that count and verify are on the model only during a step: copies and saved models have
    none, nor has a model whose training was interrupted between steps.

    Args:
        backend, batch_invariant, padded, mtp: as for `apply_patches`, whose errors are raised when
            the Trainer is initialised.
        unpacked: as for `apply_patches`; None: "native", so that batches of one document per row
            also train in the patched layers and without logits; of a model that was patched before,
            its own option. "upstream" gives the bits of an unpatched model.
        cuda_graphs: as for `apply_patches`; None: "auto", since the Trainer runs one backward pass
            for each loss; of a model that was patched before, its own option.
        context_parallel: "auto": if `cp_size` or `sp_size` is set in the Trainer's
            `parallelism_config`, or by `accelerate launch`, these ranks share each row, and
            accelerate does not cut rows until training ends; or a value as for `apply_patches`, for
            these ranks.
        verify_first_batch: on the first packed batch, change the tokens, pixels and audio of every
            second document and raise `LeakDetected` if the outputs of the others change, with the
            same dropout and noise; then the same with the others changed. Costs four forwards. If
            none of the first 16 batches is packed, a warning says that nothing was verified. In a
            process group only the first batch counts, so that all processes run the same forwards.

    Raises:
        ValueError: an option has an unknown value.
    """

    def __init__(
        self,
        *,
        backend: Choice = "auto",
        batch_invariant: bool = False,
        unpacked: Unpacked | None = None,
        padded: Padded = "lazy",
        cuda_graphs: CudaGraphs | None = None,
        mtp: MTPOptions | MTPChoice = None,
        context_parallel: Any = "auto",
        verify_first_batch: bool = False,
    ) -> None:
        self._options = Options(
            backend=backend,
            batch_invariant=batch_invariant,
            unpacked=unpacked or "native",
            padded=padded,
            cuda_graphs=cuda_graphs or "auto",
            mtp=mtp_options(mtp),
        )
        self._keeps_unpacked, self._keeps_graphs = unpacked is None, cuda_graphs is None
        if isinstance(context_parallel, str) and context_parallel != "auto":
            raise ValueError(
                f"found context_parallel={context_parallel!r}; wanted 'auto', None, a group or a "
                "mesh; pass one"
            )
        if context_parallel is not None:
            refuse_unreadable_launch()
        self._context_parallel = context_parallel
        self._verify = verify_first_batch
        self._run: TrainingRun | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Patch the model, before anything wraps it.

        Raises:
            PatchConflict: the Trainer uses DeepSpeed's sequence parallelism, gives several ranks
                the same batches, or shares rows although `context_parallel` is None.
        """
        given, parallelism = self._context_parallel, parallelism_in_force()
        ranks = trainers_group(parallelism, "auto" if isinstance(given, str) else ranks_of(given))
        options = replace(self._options, context_parallel=ranks)
        patch(kwargs["model"], self._kept(kwargs["model"], options), _autocast_in_force())
        if args.torch_compile:
            logger.info(
                "torch_compile=True: the Trainer compiles the model when training begins, and what "
                "mixes no tokens (projections, norms, MLPs) is torch.compile's then, not fused; "
                "leave it out for the fused layers"
            )
        if (trainer := trainer_of(args)) is not None:
            copy_without_waiting(trainer)
        warn_of_rows_without_boundaries(args, trainer)
        _warn_of_noise(args)
        if ranks is not None:
            leave_rows_whole(kwargs["model"])
            _warn_of_uncounted_tokens(parallelism)

    def _kept(self, model: nn.Module, options: Options) -> Options:
        """Return the options with those of a model that was patched before, where the callback was
        given none.
        """
        before = patch_report(model)
        if not before.patched:
            return options
        kept: dict[str, Any] = {}
        if self._keeps_unpacked:
            kept["unpacked"] = before.unpacked
        if self._keeps_graphs:
            kept["cuda_graphs"] = "auto" if before.cuda_graphs else "never"
        slower = {name: value for name, value in kept.items() if value != getattr(options, name)}
        if slower:
            logger.warning(
                "found the model patched with %s, which PackFreeCallback keeps; wanted %s, which "
                "train faster; let the callback patch the model, or give it and apply_patches the "
                "options you want",
                _named(slower),
                _named({name: getattr(options, name) for name in slower}),
            )
        return replace(options, **kept)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse to train an unpatched model.

        Raises:
            PatchConflict: the callback was added too late to patch, a `model_init` built another
                model since, or accelerate cuts the rows.
        """
        model = kwargs["model"]
        _refuse_unpatched(model, wants_head=self._options.mtp is not None)
        refuse_rows_cut_twice(model)
        _warn_of_unweighted_tokens(args, model)
        _warn_of_gradients_divided_twice()
        if self._run is not None:
            # a run that was interrupted left its hooks
            self._run.break_off()
        if (trainer := trainer_of(args)) is not None:
            _warn_of_labels_in_place(trainer, model)
            warn_of_removed_columns(trainer)
            filter_losses(trainer)
        smooths = args.label_smoothing_factor != 0
        self._run = TrainingRun(model, self._verify, smooths=smooths)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the counting and verifying hooks on the model."""
        if self._run is not None:
            self._run.put_on()

    on_substep_end = on_step_begin

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the hooks off until the next step; the first and the last step are logged in any
        case.
        """
        if self._run is not None:
            optimizer = kwargs.get("optimizer")
            self._run.after_step(skipped=getattr(optimizer, "step_was_skipped", False))
        if state.global_step in (1, state.max_steps) and args.logging_strategy != "no":
            control.should_log = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the run; warns if the first packed batch was to be verified but there was none."""
        cut_rows_again(kwargs["model"])
        if self._run is not None:
            self._run.end()
            self._run = None
        if (trainer := trainer_of(args)) is not None:
            leave_losses(trainer)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Leave the time that an evaluation took out of the facts about training."""
        if self._run is not None:
            self._run.counts.leave_out()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Leave the time that saving took out, too."""
        self.on_evaluate()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the facts about packing to a training log, both to the printed one and to
        `log_history`.
        """
        if logs is None or "loss" not in logs or self._run is None:
            return
        facts = self._run.facts() | training_facts(kwargs.get("model"))
        logs.update(facts)
        if state.log_history:
            state.log_history[-1].update(facts)


def _autocast_in_force() -> torch.dtype | None:
    """Return the dtype of accelerate's autocast, from the Trainer's arguments or `accelerate
    launch`, or None without autocast.
    """
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

    # under fp8, operations that do not run in fp8 are autocast to bfloat16
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(AcceleratorState().mixed_precision)


def _named(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _warn_of_noise(args: Any) -> None:
    """Warn of NEFTune, whose noise depends on how long a row is."""
    alpha = getattr(args, "neftune_noise_alpha", None)
    if alpha:
        logger.warning(
            "found neftune_noise_alpha=%s, whose noise transformers divides by the square root of "
            "a row's length; a padded batch runs as one row of its real tokens here, and gets less "
            "noise; wanted the noise of rows alone; multiply it by the square root of the real "
            "tokens of a batch over its padded length, or train on packed rows, whose noise is "
            "transformers' own",
            alpha,
        )


def _refuse_unpatched(model: nn.Module, *, wants_head: bool) -> None:
    """Refuse an unpatched model, and with `wants_head` a model without a multi-token prediction
    head.
    """
    found = None
    if not patch_report(model).patched:
        found = "an unpatched model"
    elif wants_head and not any(isinstance(module, AttachedHead) for module in model.modules()):
        found = "a model without the multi-token prediction head that mtp=... asks for"
    if found is not None:
        raise PatchConflict(
            f"found {found} at the start of training (Trainer(model_init=...) built it after this "
            "callback patched another, the callback was added after the Trainer was built, or the "
            "patches were removed since); wanted it patched before accelerate wraps it; let "
            "model_init return apply_patches(model) with the callback's options, pass "
            "Trainer(callbacks=[PackFreeCallback()]), or call apply_patches(model) first"
        )


def _warn_of_unweighted_tokens(args: TrainingArguments, model: Any) -> None:
    """Warn of vision-language classes, for which the Trainer computes no token count over
    accumulated micro-batches.
    """
    if args.gradient_accumulation_steps > 1 and not getattr(model, "accepts_loss_kwargs", True):
        logger.warning(
            "found a %s, whose class says accepts_loss_kwargs = False, with "
            "gradient_accumulation_steps=%d: micro-batches will count equally however many tokens "
            "they hold; wanted tokens to count equally; %sload the model yourself, set "
            "model.accepts_loss_kwargs = True and pass it to the Trainer",
            type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__,
            args.gradient_accumulation_steps,
            "install transformers 5.17 or later, and " if LOSS_WITH_MEDIA_TAKES_NO_COUNT else "",
        )


def _warn_of_labels_in_place(trainer: Trainer, model: nn.Module) -> None:
    """Warn of label smoothing under FSDP2: the Trainer shifts labels of classes that it knows by
    name, and FSDP2 gives the model's class another.
    """
    smoothing = trainer.args.label_smoothing_factor
    smooths = smoothing != 0 and type(trainer).compute_loss is Trainer.compute_loss
    # PEFT's models are looked into
    if smooths and isinstance(model, FSDPModule) and not hasattr(model, "get_base_model"):
        logger.warning(
            "found label_smoothing_factor=%s of a %s, as FSDP2 names its class, whose labels "
            "transformers' Trainer does not shift: every token is its own target; wanted the next "
            "token; set label_smoothing_factor=0, or train with TRL's SFTTrainer",
            smoothing,
            type(model).__name__,
        )


def _warn_of_gradients_divided_twice() -> None:
    """Warn of a Trainer that divides losses by the micro-batches of a step and lets accelerate
    divide them again.
    """
    from accelerate.state import AcceleratorState, GradientState

    steps = GradientState().num_steps
    # DeepSpeed's engine does not divide, so there only the Trainer does
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
