"""verl's fused kernels on a patched model: our operation computes the log-probabilities and entropy
of the next tokens.

With `use_fused_kernels=True` verl assigns a forward to a model's class, and so to all models of
that class, which returns log-probabilities and entropy in place of logits. If verl assigns the
forward to upstream's class, our head finds it as upstream's forward; if verl assigns it to our
class, `HeadType` stores it. Calls that our operation cannot answer run verl's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.call import Call, Run
from hf_packfree.models.head_log_probs import (
    Question,
    cap_of_logits,
    changed_logits,
    layer_log_probs,
    scale_of_logits,
)
from hf_packfree.models.head_loss import is_left_to_fused, last_layer
from hf_packfree.models.labels import IGNORED
from hf_packfree.models.state import state_of
from hf_packfree.ops.loss import Expected, Targets, Wanted
from hf_packfree.packing.marks import VERL_EXPECTED

_HOME = "verl.models.transformers."
_NAMES = {"forward_with_torch_backend", "forward_with_triton_backend"}
_OF_HEAD = {"labels", "shift_labels", "temperature", "logits_to_keep"}
"""Arguments of the head's forward that the forward of the model below does not take."""


@dataclass
class LogProbsOutput(CausalLMOutputWithPast):
    """The output of verl's fused forward.

    Attributes:
        log_probs: fp32 [B, S], the log-probability of each token's target; 0 in padding.
        entropy: fp32 [B, S], of each token's distribution, in nats; 0 in padding.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None


class HeadType(type):
    """The metaclass of patched heads: verl's fused forward, assigned to a patched class, is stored
    as `fused_forward` and does not replace our forward.
    """

    fused_forward: Any = None

    def __setattr__(cls, name: str, value: Any) -> None:
        """Set an attribute of the class; store verl's fused forward."""
        if name == "forward":
            fused = is_verls_forward(value)
            super().__setattr__("fused_forward", value if fused else None)
            if fused:
                return
        super().__setattr__(name, value)


def is_verls_forward(forward: Any) -> bool:
    """Whether a function is verl's forward with fused kernels, for any family."""
    return (
        isinstance(forward, FunctionType)
        and forward.__module__.startswith(_HOME)
        and forward.__name__ in _NAMES
    )


def verls_forward_of(head: Any, upstream: Any) -> Any:
    """Return the fused forward that verl has assigned to a patched head's class or to upstream's,
    or None.
    """
    return type(head).fused_forward or (upstream if is_verls_forward(upstream) else None)


def run_verls_head(call: Call, fused: Any, run: Run) -> Any:
    """Return the output of verl's fused forward for a call.

    Args:
        call: the call of a patched head.
        fused: verl's fused forward.

    Raises:
        UnsupportedInput: the model runs under context parallelism.
    """
    if not _is_ours(call):
        return run(fused, call)
    if state_of(call.module).context_parallel is not None:
        raise UnsupportedInput(
            "found verl's fused forward (use_fused_kernels) under context parallelism; wanted "
            "a call for logits; set use_fused_kernels=False"
        )
    asked = call.having(shift_labels=_next_tokens(call), labels=None, use_cache=False)
    return run(_Forward(call.module, fused), asked)


def _is_ours(call: Call) -> bool:
    head = call.module
    known = any(call.get(name) is not None for name in ("shift_labels", "labels", "input_ids"))
    in_order = known and call.wants_all_logits and call.is_whole_batch
    plain = last_layer(head)[1] is not None and changed_logits(head) is None
    plain = plain and scale_of_logits(head) == 1 and cap_of_logits(head) is None
    return in_order and plain and not torch.compiler.is_compiling()


def _next_tokens(call: Call) -> Tensor:
    """Return verl's targets [B, S], `torch.roll(input_ids, -1)`: the last token of a row predicts
    its first.
    """
    if call.shift_labels is not None:
        shifted: Tensor = call.shift_labels
        return shifted
    tokens: Tensor = call.input_ids if call.labels is None else call.labels
    return tokens.roll(-1, -1)


class _Forward:
    """Called in place of upstream's forward in one call of a head."""

    def __init__(self, head: Any, fused: Any) -> None:
        self.head, self.fused = head, fused

    def __call__(self, head: Any, **row: Any) -> Any:
        """Run the model and our operation on a row [1, T]; run verl's forward on a batch that is
        left to it.
        """
        if is_left_to_fused(head):
            return self.fused(head, **row)
        output = head.base_model(**{name: row[name] for name in row.keys() - _OF_HEAD})
        hidden, layer = output[0], last_layer(self.head)[1]
        backend = state_of(self.head).kernels_for(hidden.device, hidden.dtype)["loss"]
        expected = VERL_EXPECTED.of(self.head)
        if expected is None:
            VERL_EXPECTED.put(self.head, expected := Expected())
        found = layer_log_probs(
            hidden,
            layer,
            Targets.of(row["shift_labels"].to(layer.weight.device), IGNORED),
            Question(row.get("temperature", 1.0), Wanted(entropy=True), expected=expected),
            backend,
        )
        return LogProbsOutput(
            log_probs=found.log_probs,
            entropy=found.entropy,
            hidden_states=output.get("hidden_states"),
            attentions=output.get("attentions"),
        )
