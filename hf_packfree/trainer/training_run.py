"""One training run: counts packed batches and verifies the first, with hooks that are on the model
only during steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_packfree.errors import BlindMeasurement, UnsupportedInput
from hf_packfree.models.state import state_of
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.packing.tree import refuse_tree
from hf_packfree.patching.plan import trunks
from hf_packfree.patching.registry import family_of
from hf_packfree.trainer.flops import FlopsPerToken, peak_of, why_not_counted
from hf_packfree.trainer.remembered import Remembered
from hf_packfree.verify.first_batch import first_batch_influence, in_process_group, observers_of
from hf_packfree.verify.random_documents import media_source

logger = logging.getLogger("hf_packfree")
PATIENCE = 16
"""Batches that may come before the first packed one: a document as long as a row fills it alone."""


def outermost(model: nn.Module, trunks: list[nn.Module]) -> list[nn.Module]:
    """Return the modules to verify: the vision-language model, so that its towers are checked too,
    or else the text models.
    """
    source = media_source(model)
    return trunks if source is None else [source]


class _OfAStep:
    """A hook or observer that is on a model during a step; in copies and pickles of the model it
    becomes one that does nothing.
    """

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *args: Any) -> None:
        pass


class TrainingRun:
    """One training run: the hooks that are on its model during each step, and their results.

    Args:
        model: patched.
        verify: check the first packed batch.
        smooths: the Trainer smooths labels.
    """

    def __init__(self, model: nn.Module, verify: bool, *, smooths: bool = False) -> None:
        family = family_of(model)
        self.trunks = list(trunks(model, family)) if family else []
        self.counts = Counts()
        self.observers: list[Any] = [self.counts, *([SmoothedLabels()] if smooths else [])]
        self.flops, self.peak = None, None
        if len(self.trunks) == 1:
            self.peak = peak_of(next(model.parameters()).device)
            unknown = why_not_counted(self.trunks[0])
            if unknown is None:
                self.flops = FlopsPerToken(model, self.trunks[0])
            elif self.peak is not None:
                logger.warning("%s; packfree/mfu is not logged", unknown)
        self.stepped, self.remembered = False, Remembered(model)
        watched = outermost(model, self.trunks) if verify else []
        self.checks = [FirstBatch(module, self.take_off) for module in watched]

    def put_on(self) -> None:
        self.take_off()
        self._let_graphs_wait(not self.stepped)
        for observers in map(observers_of, self.trunks):
            observers += self.observers
        for check in self.checks:
            check.put_on()
        self.remembered.put_on()

    def take_off(self) -> None:
        self.remembered.take_off()
        for observers in map(observers_of, self.trunks):
            # by class, so that observers of a run that was interrupted within a step are removed
            # too
            observers[:] = [each for each in observers if not isinstance(each, _OfAStep)]
        for check in self.checks:
            check.take_off()
        self._let_graphs_wait(False)

    def facts(self) -> dict[str, float]:
        facts = self.counts.take()
        # not for ranks that share rows, each of which counts whole rows
        if self.peak is not None and self.flops is not None and not self.counts.shared:
            tokens = facts["packfree/tokens_per_second"]
            flops = self.flops(self.counts.mean_document)
            facts["packfree/mfu"] = 100 * flops * tokens / self.peak
        for check in self.checks:
            if check.influence is not None:
                facts["packfree/influence"], check.influence = check.influence, None
        return facts

    def after_step(self, *, skipped: bool) -> None:
        """Take the hooks off. After the optimizer's first step, which allocates its states, CUDA
        graphs, whose memory is their own, may be captured.

        Args:
            skipped: the optimizer made no step, because gradients overflowed.
        """
        self.take_off()
        self.counts.see()
        self.stepped = self.stepped or not skipped

    def _let_graphs_wait(self, wait: bool) -> None:
        for trunk in self.trunks:
            state_of(trunk).graphs.wait = wait

    def break_off(self) -> None:
        """Leave nothing on the model, nor anything that keeps it."""
        self.take_off()
        self.remembered.forget()

    def end(self) -> None:
        self.break_off()
        for check in self.checks:
            check.give_up()


class FirstBatch(_OfAStep):
    """Verifies the first packed batch of a module in training; `put_on` is for one batch.

    Args:
        module: see `first_batch_influence`.
        leave: called before an exception is raised on, to take all hooks off.
    """

    def __init__(self, module: nn.Module, leave: Callable[[], None]) -> None:
        self.module, self.leave = module, leave
        self.influence: float | None = None
        self.over, self.unpacked = False, 0
        self._handle: RemovableHandle | None = None

    def put_on(self) -> None:
        if not self.over:
            self._handle = self.module.register_forward_pre_hook(self, with_kwargs=True)

    def take_off(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # taken off before the forward, which may raise
        self.take_off()
        if self.over or not module.training:
            return
        try:
            self.influence = first_batch_influence(module, args, kwargs)
            self.over = self.influence is not None
        except BlindMeasurement as blind:
            logger.warning("%s", blind)
            self.over = True
        except BaseException:
            self.leave()
            raise
        self.unpacked += not self.over
        if self.unpacked == (1 if in_process_group() else PATIENCE):
            self.give_up()

    def give_up(self) -> None:
        if not self.over:
            logger.warning(
                "found no packed batch to verify among the first %d; wanted several documents in "
                "a batch%s; use a collator that packs, such as DataCollatorWithFlattening, or "
                "leave verify_first_batch out: nothing was verified",
                self.unpacked,
                ", on every process in its first" if in_process_group() else "",
            )
        self.over = True


class SmoothedLabels(_OfAStep):
    """Refuses trees of shared prefixes and rows that ranks share if the Trainer smooths labels: its
    loss shifts the batch's labels by one token, and reads the logits of the whole batch.
    """

    def __call__(self, packed: PackedSequence | None, shape: tuple[int, int], mask: Any) -> None:
        refuse_tree(packed, "with label_smoothing_factor, whose loss shifts labels across branches")
        if packed is not None and packed.ranks > 1:
            raise UnsupportedInput(
                f"found label_smoothing_factor for a row that {packed.ranks} ranks share, whose "
                "loss reads the logits of all its tokens; wanted the model's own loss, in which "
                "each rank has its tokens' part; set label_smoothing_factor=0"
            )


class Counts(_OfAStep):
    """Running totals of training since the last log; token counts stay on the device until the next
    log, so that no step waits for the device.
    """

    def __init__(self) -> None:
        self.rows = self.documents = self.tokens_with_padding = 0
        self.tokens: int | Tensor = 0
        self.since = self.seen = time.perf_counter()
        self.shared, self.mean_document = False, 0.0

    @uncompiled
    def __call__(self, packed: PackedSequence | None, shape: tuple[int, int], mask: Any) -> None:
        # a reference model's pass, or a token that is generated
        if not torch.is_grad_enabled():
            return
        # ranks that share a batch each count all of it
        if packed is not None and packed.is_shard:
            packed, self.shared = packed.whole_batch, True
            shape = packed.batch_shape
        self.rows += shape[0]
        self.tokens_with_padding += shape[0] * shape[1]
        if packed is not None:
            self.documents += packed.num_documents
            self.tokens = self.tokens + packed.num_real_tokens
        else:
            self.documents += shape[0]
            padded = isinstance(mask, Tensor) and mask.ndim == 2
            self.tokens = self.tokens + (mask.sum() if padded else shape[0] * shape[1])

    def see(self) -> None:
        """Note that training goes on at this time."""
        self.seen = time.perf_counter()

    def leave_out(self) -> None:
        """Leave out the time since training was last seen."""
        before = self.seen
        self.see()
        self.since += self.seen - before

    def take(self) -> dict[str, float]:
        tokens, seconds = float(self.tokens), time.perf_counter() - self.since
        facts = {
            "packfree/documents_per_row": self.documents / max(self.rows, 1),
            "packfree/real_token_share": tokens / max(self.tokens_with_padding, 1),
            "packfree/tokens_per_second": tokens / seconds,
        }
        self.mean_document = tokens / max(self.documents, 1)
        self.rows = self.documents = self.tokens_with_padding = 0
        self.see()
        self.tokens, self.since = 0, self.seen
        return facts
