"""TRL's fused head, `model(..., labels=labels, fused_lm_head=True)`, on a patched model: the batch
becomes a row, and our operation computes the statistics of every label that TRL wants.

TRL assigns a forward to the instance (`add_fused_lm_head`), which would bypass the patched class. A
patched head stores TRL's forward instead, and reads its settings. Calls that our operation cannot
answer run TRL's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import getclosurevars
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.call import Call, Run
from hf_packfree.models.head_log_probs import Question, layer_log_probs
from hf_packfree.models.head_loss import HeadOfCall, is_left_to_fused, last_layer
from hf_packfree.models.labels import IGNORED, refuse_unshifted
from hf_packfree.models.state import state_of
from hf_packfree.ops.loss import Targets, TokenLogProbs, Wanted
from hf_packfree.packing import PackedSequence, repad
from hf_packfree.packing.lazy import LazyTensor, Origin
from hf_packfree.packing.marks import FORWARD_BEFORE, FUSED_HEAD
from hf_packfree.packing.tree_keywords import has_tree

_SETTINGS = {
    "backbone_attr",
    "cast_lm_head_to_fp32",
    "final_logit_softcapping",
    "logit_scale",
    "original_forward",
    "outputs",
    "temperature",
    "text_config",
}
"""The variables in the closure of TRL's forward, which has no public name; a test fails when they
change.
"""


@dataclass(frozen=True, eq=False)
class FusedHead:
    """A fused head that TRL added.

    Attributes:
        forward: TRL's forward, bound to the model.
        output: TRL's class of outputs.
        names: the fields of the output that the caller wants.
        question: the statistics for these fields, as `layer_log_probs` takes them.
    """

    forward: Any
    output: Any
    names: frozenset[str]
    question: Question


def is_fused_head(forward: Any) -> bool:
    """Whether a forward on an instance is TRL's fused head, with settings that our operation
    supports: no softcap and no scale.
    """
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType):
        return False
    code = function.__code__
    made_by = function.__globals__.get("__name__"), code.co_name
    if made_by != ("trl.trainer.utils", "_fused_forward") or set(code.co_freevars) != _SETTINGS:
        return False
    found = getclosurevars(function).nonlocals
    return found["final_logit_softcapping"] is None and found["logit_scale"] == 1.0


def fused_head_of(head: Any) -> FusedHead | None:
    """Return the fused head that was added to a patched head, or None."""
    forward = FORWARD_BEFORE.of(head)
    known: FusedHead | None = FUSED_HEAD.of(head)
    if known is None or known.forward is not forward:
        known = _read(forward) if is_fused_head(forward) else None
        FUSED_HEAD.put(head, known)
    return known


def _read(forward: Any) -> FusedHead:
    found = getclosurevars(forward.__func__)
    given, names = found.nonlocals, frozenset(found.nonlocals["outputs"])
    wanted = Wanted(
        entropy="entropy" in names,
        top1="is_top1" in names,
        moments=bool(names & {"log_sum_sq_probs", "mean_logits"}),
    )
    question = Question(given["temperature"], wanted, given["cast_lm_head_to_fp32"])
    # SFTTrainer asks for the accuracy, and its loss is a mean: all log-probabilities get the same
    # gradient
    question.expected.uniform = wanted.top1
    return FusedHead(forward, found.globals["FusedCausalLMOutput"], names, question)


def run_fused_head(call: Call, fused: FusedHead, upstream: Any, run: Run) -> Any:
    """Return the output of TRL's fused head for a call.

    Args:
        call: the call of a patched head to which TRL has added a fused head; without
            `fused_lm_head`.
        fused: that head.
        upstream: the forward of upstream's class.

    Raises:
        UnsupportedInput: the model runs under context parallelism; or see `refuse_unshifted`.
    """
    head = call.module
    if not _is_ours(call):
        # without `shift_labels`, TRL's forward shifts the labels itself
        if has_tree(call.arguments) and call.shift_labels is None:
            refuse_unshifted(call)
        return vars(head)[FORWARD_BEFORE.name](**call.arguments, fused_lm_head=True)
    if state_of(head).context_parallel is not None:
        raise UnsupportedInput(
            "found TRL's fused head (fused_lm_head=True) under context parallelism; wanted a "
            "trainer that calls the model with labels alone; train with transformers' Trainer, or "
            "without context parallelism"
        )
    shifted = call.shift_labels
    forward = _Forward(head, upstream, fused.question)
    more: dict[str, Any] = {"use_cache": False, "return_dict": True}
    if call.labels is None:
        more["labels"] = shifted
    # vision-language models read this option only from the arguments
    if getattr(call.config, "output_router_logits", False):
        more["output_router_logits"] = call.get("output_router_logits", True)
    output = run(forward, call.having(**more))
    if forward.found is None:
        # the batch runs as upstream runs it, bit for bit
        return fused.forward(**forward.row, fused_lm_head=True)
    fields = forward.fields(fused.names)
    if shifted is None:
        # the last token of a row has no label
        fields = {name: one[:, :-1] for name, one in fields.items()}
    return fused.output(loss=output.loss, aux_loss=output.get("aux_loss"), **fields)


def _is_ours(call: Call) -> bool:
    has_labels = any(call.get(name) is not None for name in ("labels", "shift_labels"))
    in_order = has_labels and call.wants_all_logits and last_layer(call.module)[1] is not None
    return in_order and not torch.compiler.is_compiling()


class _Forward:
    """Called in place of upstream's forward in one call of a head; keeps the log-probabilities.

    For this call, the head's last layer only keeps the hidden states, and the head's loss computes
    the log-probabilities of the targets from these hidden states.
    """

    def __init__(self, head: Any, upstream: Any, question: Question) -> None:
        self.head, self.upstream, self.question = head, upstream, question
        self.hidden: Tensor | None = None
        self.row: dict[str, Any] = {}
        self.targets: Targets | None = None
        self.found: TokenLogProbs | None = None

    def __call__(self, head: Any, **row: Any) -> Any:
        """Run upstream's forward on a row [1, T]; return None for a batch that is left to TRL's."""
        self.row = row
        if is_left_to_fused(head):
            return None
        call: Any = head if type(head) is HeadOfCall else HeadOfCall(self.head, {})
        name, layer = last_layer(self.head)
        self.shape = row["labels"].shape
        # the targets are counted while the model runs
        self.targets = Targets.of(_shifted(row).to(layer.weight.device), IGNORED)
        vars(call)[name], vars(call)["loss_function"] = self._layer, self._loss
        return self.upstream(call, **row)

    def _layer(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        words = self.head.config.get_text_config().vocab_size
        layer = last_layer(self.head)[1]
        return LazyTensor(
            Origin((*hidden.shape[:-1], words), hidden.dtype, hidden.device, lambda: layer(hidden))
        )

    def _loss(self, *args: Any, **kwargs: Any) -> Tensor:
        assert self.hidden is not None and self.targets is not None
        hidden, layer = self.hidden, last_layer(self.head)[1]
        backend = state_of(self.head).kernels_for(hidden.device, hidden.dtype)["loss"]
        if self.question.in_fp32:
            hidden = hidden.float()
        found = layer_log_probs(hidden, layer, self.targets, self.question, backend)
        self.found, items = found, self.row.get("num_items_in_batch")
        if items is None:
            items = (self.targets.flat >= 0).sum().clamp(min=1)
        return -found.log_probs.sum() / items

    def fields(self, names: frozenset[str]) -> dict[str, Tensor]:
        """Return the fields of these names, and `label_mask`, whether a token has a target, all [B,
        S].
        """
        assert self.found is not None and self.targets is not None
        fields = {name: one for name, one in vars(self.found).items() if name in names}
        fields["log_probs"] = self.found.log_probs
        fields["label_mask"] = (self.targets.flat >= 0).view(self.shape)
        packed = self.row.get("packed_sequence")
        if isinstance(packed, PackedSequence):
            fields = {name: repad(one, packed) for name, one in fields.items()}
        return fields


def _shifted(row: dict[str, Any]) -> Tensor:
    """Return the target of every token of a row."""
    if row.get("shift_labels") is not None:
        found: Tensor = row["shift_labels"]
        return found
    return F.pad(row["labels"], (0, 1), value=IGNORED)[..., 1:]
