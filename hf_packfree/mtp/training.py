"""The loss of the multi-token prediction head, added to the main loss, whether our language
modelling head computes that or a forward that replaced ours.

A pre-hook of the model notes the labels, the text model notes the row and its output, and a hook
adds the loss to the model's output. So the factors of mixed precision, accumulation and data
parallelism apply to both losses alike.
"""

from __future__ import annotations

import inspect
import logging
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.call import Call
from hf_packfree.models.entry import read_call
from hf_packfree.models.heads import at_least_one
from hf_packfree.models.labels import IGNORED, row_targets, shifted_labels
from hf_packfree.models.linear_weights import autocast_dtype
from hf_packfree.models.rotary import cos_and_sin
from hf_packfree.models.row import row_positions
from hf_packfree.models.state import PatchState, find_state, state_of
from hf_packfree.mtp.depth_losses import depth_losses
from hf_packfree.mtp.head_options import MTPOptions
from hf_packfree.mtp.routers import balance, router_logits, wants_balance
from hf_packfree.packing import PackedSequence, PackingInputs, uncompiled, unpad
from hf_packfree.parallel.collectives import with_right_context

logger = logging.getLogger("hf_packfree")


@dataclass(eq=False)
class _Noted:
    """One call of the model: its arguments, and, once the text model has run, its settings and row.

    Attributes:
        training: the `MTPTraining` of the model.
        given: the call with its arguments; None in evaluation.
        outer: the call of the same thread that this one is inside of, or None.
    """

    training: MTPTraining
    given: Call | None
    outer: _Noted | None
    backends: PatchState = PatchState()
    autocast: torch.dtype | None = None
    packed: PackedSequence | None = None
    row: dict[str, Any] = field(default_factory=dict)


_INNERMOST: ContextVar[_Noted | None] = ContextVar("innermost call", default=None)
"""This thread's innermost call: hooks see only a call's beginning and end, and a forward that
replaced the head's passes on no keyword of ours.
"""
_ADDING = threading.Lock()


@uncompiled
def _innermost() -> _Noted | None:
    return _INNERMOST.get()


@uncompiled
def _enter(call: _Noted | None) -> None:
    _INNERMOST.set(call)


class MTPTraining:
    """Follows the calls of one model in training, in any thread, and adds the head's loss."""

    def __init__(self, options: MTPOptions) -> None:
        self.options = options
        self.totals: Tensor | None = None
        self._warned = False

    def join(self, parent: nn.Module) -> None:
        """Follow the calls of a model, whose child `mtp` is the head."""
        parent.register_forward_pre_hook(self.before, with_kwargs=True)
        parent.register_forward_hook(self.after, always_call=True)
        if (state := find_state(parent)) is not None:
            state.followers.append(self.follow)

    def leave(self, parent: nn.Module) -> None:
        """Stop following the model's calls.

        The hooks are found by their owner: handles of hooks can only be copied with the model, and
        the head's layers, which PEFT copies alone, have the text model's settings and so this.
        """
        for hooks, ours, noted in (
            (parent._forward_pre_hooks, self.before, parent._forward_pre_hooks_with_kwargs),
            (parent._forward_hooks, self.after, parent._forward_hooks_always_called),
        ):
            for number in [number for number, hook in hooks.items() if hook == ours]:
                del hooks[number], noted[number]
        state = find_state(parent)
        if state is not None and self.follow in state.followers:
            state.followers.remove(self.follow)

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the model's arguments; a forward pre-hook."""
        given = None
        if model.training and torch.is_grad_enabled():
            names = inspect.signature(model.forward).parameters
            given = Call(model, dict(zip(names, args)) | kwargs)
        _enter(_Noted(self, given, _innermost()))

    def follow(self, of_text: Call, hidden: Tensor) -> None:
        """Note the row that the text model ran.

        Args:
            of_text: the text model's call, of the row [1, T], or, without a record, of the batch
                [B, S] that upstream's layers ran.
            hidden: the text model's output, [1, T, D_model] or [B, S, D_model].
        """
        call, trunk, packed = _innermost(), of_text.module, of_text.packed
        if call is None or call.training is not self or call.given is None:
            if torch.is_grad_enabled():
                found, wanted = (
                    f"that calls the {type(trunk).__name__} alone",
                    "the language model around it, with labels",
                )
                self._warn_of_nothing(found, wanted)
            return
        embeddings = of_text.get("inputs_embeds")
        with torch.set_grad_enabled(not self.options.detach):
            if embeddings is None:
                embeddings = trunk.get_input_embeddings()(of_text.get("input_ids"))
        positions = of_text.get("position_ids")
        if packed is None:
            packed = _record_of(of_text)
            if packed is None:
                return
            hidden, embeddings, positions = (
                unpad(hidden, packed),
                unpad(embeddings, packed),
                row_positions(positions, packed),
            )
        text, rotary = (
            (positions[0], positions[1:])
            if positions.ndim == 3 and len(positions) == 4
            else (None, positions)
        )
        # which may be another one where layers are on several
        embeddings = embeddings.to(hidden.device)
        if self.options.detach:
            hidden, embeddings = hidden.detach(), embeddings.detach()
        embeddings = with_right_context(embeddings[0], packed, self.options.depth)[None]
        call.packed, call.backends = packed, state_of(trunk)
        call.autocast = autocast_dtype(hidden.device)
        call.row = {
            "hidden": hidden,
            "embeddings": embeddings,
            "packed": packed.for_shape((1, packed.num_tokens)),
            "position_embeddings": cos_and_sin(trunk, hidden, rotary),
            "position_ids": text,
        }

    def after(self, model: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Add the head's loss to the model's output; a forward hook that is called after an error,
        too.

        Raises:
            UnsupportedInput: the output has labels but no loss, or labels do not fit the batch.
        """
        call = _innermost()
        if call is None or call.training is not self:
            return None
        _enter(call.outer)
        if output is None or call.given is None:
            return None
        name = type(model).__name__
        if all(call.given.get(name) is None for name in ("labels", "shift_labels")):
            self._warn_of_nothing(f"of {name} without labels", "it with labels")
            return None
        if call.packed is None:
            reason = "a cache, or a mask that is more than causal"
            self._warn_of_nothing(f"of {name} with {reason}", "it without")
            return None
        # autocast as in the text model: accelerate's ends with the model's forward, before this
        # hook
        kind, dtype = call.row["hidden"].device.type, call.autocast
        with torch.autocast(kind, dtype, enabled=dtype is not None):
            return _with_loss(output, *self._loss(model, call, call.given, call.packed))

    def _loss(
        self, model: Any, call: _Noted, given: Call, packed: PackedSequence
    ) -> tuple[Tensor, Any]:
        """Return the weighted sum of all depths' losses, and the count of targets to divide it
        by.
        """
        targets, items = _targets(given, packed, self.options.depth)
        with router_logits(model.mtp) as routed:
            states = model.mtp(depth=self.options.depth, **call.row)
        row: PackedSequence = call.row["packed"]
        losses = depth_losses(
            states, targets, row, model.lm_head, call.backends, detach=self.options.detach
        )
        self._add(torch.stack(losses.facts))
        total = self.options.weight / self.options.depth * torch.stack(losses.sums).sum()
        items = items.to(total.device) if isinstance(items, Tensor) else items
        # the balancing loss is a mean, the other losses are sums to be divided by `items`
        if wants_balance(given):
            # divided by the ranks, since each has the loss of the whole row
            total = total + self.options.weight * items * balance(model, routed, row) / row.ranks
        # without a given count, the mean of the ranks' losses counts
        if given.get("num_items_in_batch") is None:
            total = total * row.ranks
        return total, items

    def _warn_of_nothing(self, found: str, wanted: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "found a training step %s, from which the multi-token prediction head learns "
                "nothing; wanted its loss added to "
                "the main one; call %s, or apply_patches(model, mtp='keep')",
                found,
                wanted,
            )

    @uncompiled
    def _add(self, facts: Tensor) -> None:
        with _ADDING:
            self.totals = facts if self.totals is None else self.totals + facts

    def take(self, together: torch.device | None = None) -> dict[str, float]:
        """Return mean loss and accuracy of every depth since the last call, without depths that had
        no targets.

        Args:
            together: the device on which to sum over processes, all of which then have to call
                this; None: this process alone.
        """
        with _ADDING:
            totals, self.totals = self.totals, None
        if totals is None:
            totals = torch.zeros(self.options.depth, 4, dtype=torch.float64, device=together)
        if together is not None and dist.is_initialized():
            dist.all_reduce(totals)
        facts: dict[str, float] = {}
        for depth, (total, count, tried, right) in enumerate(totals.tolist(), start=1):
            if count:
                facts |= {
                    f"packfree/mtp_loss_{depth}": total / count,
                    f"packfree/mtp_accuracy_{depth}": right / max(tried, 1),
                }
        return facts


def _record_of(call: Call) -> PackedSequence | None:
    """Return the record of a batch that upstream's layers ran, with its real tokens as one row;
    None for a call with a cache, and for a mask that is more than causal.
    """
    if call.cache is not None:
        return None
    inputs = PackingInputs(attention_mask=call.attention_mask)
    return read_call(call, inputs, drop_padding=True, unpacked=True)


def _targets(given: Call, row: PackedSequence, depth: int) -> tuple[Tensor, Any]:
    """Return the main loss's targets, int64 [1, T], and the count that the main loss is divided by.

    Under context parallelism: [1, t + depth], and the count of the whole row.
    """
    packed = row.whole_batch
    ignored = given.get("ignore_index", IGNORED)
    if not given.wants_all_logits:
        raise UnsupportedInput(
            "found logits_to_keep in a training step with multi-token prediction; wanted the "
            "labels of every token; leave logits_to_keep out, or apply_patches(model, mtp='keep')"
        )
    shifted = shifted_labels(given, packed, torch.Size(packed.batch_shape))
    if shifted is None:
        raise UnsupportedInput(
            f"found labels unlike the batch of {packed.batch_shape} tokens in a training step with "
            "multi-token prediction; "
            "wanted one for each of these tokens; cut or pad labels as the tokens are"
        )
    targets, items = row_targets(shifted, packed, ignored), given.get("num_items_in_batch")
    wanted = targets["shift_labels"].masked_fill(targets["shift_labels"] == ignored, IGNORED)
    wanted = row.cut(wanted, more=depth, fill=IGNORED)
    return wanted, at_least_one(targets["num_items_in_batch"] if items is None else items)


def _with_loss(output: Any, total: Tensor, items: Any) -> Any:
    """Return the model's output with the head's summed loss, divided by `items`, added to its loss;
    or with the head's loss in the graph of the log probabilities from which TRL computes its loss.
    """
    if isinstance(output, tuple):
        return (output[0] + total.to(output[0].device) / items, *output[1:])
    found, scores = output.get("loss"), output.get("log_probs")
    if scores is not None:
        passed: Any = _LossFromScores.apply
        output["log_probs"] = passed(scores, output["label_mask"], total.to(scores.device))
    elif found is None:
        raise UnsupportedInput(
            f"found a {type(output).__name__} without a loss for labels in a training step with "
            "multi-token prediction; wanted "
            "one to add to; apply_patches(model, mtp='keep') keeps the head without training it"
        )
    if found is not None:
        output["loss"] = found + (total / items).to(found.device, found.dtype)
    return output


class _LossFromScores(torch.autograd.Function):
    """TRL computes its loss outside the model, from our log probabilities: pass them through
    unchanged, and read the loss's scale from their gradient.

    The gradient of the head's loss is the mean of theirs. A loss that lowers the probability of
    some targets, as those of rewards and preferences do, has no mean for a head to learn by.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, total: Tensor) -> Tensor:
        """Args: scores [B, S], mask bool [B, S] of targets, total scalar."""
        ctx.save_for_backward(mask)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return the gradients of scores and total.

        Raises:
            UnsupportedInput: the loss is no likelihood of the targets.
        """
        (mask,) = ctx.saved_tensors
        if bool((gradient * mask > 0).any()):
            raise UnsupportedInput(
                "found a loss that makes some labels less likely, as those of rewards and "
                "preferences do (GRPO, DPO), in a training step with multi-token prediction; "
                "wanted their likelihood; apply_patches(model, mtp='keep') keeps the head without "
                "training it"
            )
        return gradient, None, -(gradient * mask).sum() / mask.sum().clamp(min=1)
