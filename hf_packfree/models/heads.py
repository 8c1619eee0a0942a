"""Patched heads: a batch becomes one row before upstream's head runs, so that head and loss run on
real tokens only.

Upstream's forward runs on the row; the outputs get the caller's shape.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForMaskedLMLoss

from hf_packfree.models import compat
from hf_packfree.models.attention import check_attention
from hf_packfree.models.base import mixin_for, put_in_front
from hf_packfree.models.base_head import Head, forget_losses, separate_logits
from hf_packfree.models.call import Call
from hf_packfree.models.classifiers import SequenceHead, SpanHead, TokenHead
from hf_packfree.models.context_parallel import check_call, forward_shard, refuse_labelled_padding
from hf_packfree.models.fused_head import fused_head_of, is_fused_head, run_fused_head
from hf_packfree.models.head_loss import HeadOfCall, taken_by
from hf_packfree.models.labels import (
    IGNORED,
    are_left_pad_tokens,
    kept_targets,
    own_targets,
    refuse_unshifted,
    row_targets,
    shifted_labels,
    targets_on_padding,
)
from hf_packfree.models.row import as_requested, restore_layers, row_of_each, row_positions
from hf_packfree.models.state import state_of
from hf_packfree.models.verl_head import HeadType, run_verls_head, verls_forward_of
from hf_packfree.packing import PackedSequence, lazy_repad, repad, uncompiled, with_left_pad_tokens
from hf_packfree.packing.lazy import LazyTensor
from hf_packfree.packing.marks import FORWARD_BEFORE

logger = logging.getLogger("hf_packfree")
_INSTEAD_OF_LOGITS = "log_probs", "entropy"
"""The fields that verl's fused forward returns in place of logits, [1, T] each."""


class PackedHead(Head, metaclass=HeadType):
    """Put in front of a family's causal language model, with or without a vision tower."""

    endings: ClassVar[tuple[str, ...]] = ("ForCausalLM", "ForConditionalGeneration")

    def __setattr__(self, name: str, value: Any) -> None:
        """Store TRL's fused head instead of assigning it as `forward`, where it would bypass this
        class; see `run_fused_head`.
        """
        if name == "forward" and is_fused_head(value):
            FORWARD_BEFORE.put(self, value)
        else:
            super().__setattr__(name, value)

    def _forward_as_row(self, upstream: Any, call: Call) -> Any:
        # without TRL's head the keyword says nothing, as to transformers
        wanted = call.arguments.pop("fused_lm_head", False)
        if wanted and (trls := fused_head_of(self)) is not None:
            return run_fused_head(call, trls, upstream, self._forward_with_loss)
        if (fused := verls_forward_of(self, upstream)) is not None:
            return run_verls_head(call, fused, self._forward_with_loss)
        output = self._forward_with_loss(upstream, call)
        separate_logits(self, output)
        return output

    def _forward_with_loss(self, upstream: Any, call: Call) -> Any:
        """Run upstream's forward on the row [1, T], or on the unchanged arguments if the batch has
        no record.

        Raises:
            BoundaryError, BoundaryConflict, CacheConflict, UnsupportedInput: before anything runs.
        """
        if not call.is_whole_batch:
            return upstream(self, **call.arguments)
        # generation without a cache stays upstream's, its padding included
        all_logits = call.wants_all_logits
        drop_padding = (
            all_logits
            or self.training
            or (state_of(self).runs_unpacked and not _goes_on_from_padding(call))
        )
        call = self._enter(call, drop_padding=drop_padding)
        if call.packed is None:
            return upstream(self, **call.arguments)
        settings = state_of(self).context_parallel
        if settings is not None:
            check_call(call)
        packed, loss = self._loss_arguments(call, call.packed)
        if loss is None:
            return upstream(self, **self._with_padding(call).arguments)
        row = (_row_arguments if all_logits else _batch_arguments)(call, packed) | loss
        ignored = call.get("ignore_index", IGNORED)
        waits = _can_wait() and not call.generates
        run = functools.partial(self._call, upstream, ignored, waits)
        if settings is not None:
            counted = call.get("num_items_in_batch") is not None
            output = forward_shard(self, run, row, packed, settings, counted=counted)
        else:
            output = run(row)
        # `forward_shard` returns logits in their final shape
        if all_logits and settings is None:
            self._restore_shape(output, packed)
        if packed.num_real_tokens == 0:
            forget_losses(output)
        return as_requested(output, call, self.config)

    def _call(
        self,
        upstream: Any,
        ignored: int,
        waits: bool,
        row: dict[str, Any],
        of_loss: dict[str, Any] | None = None,
    ) -> Any:
        """Run upstream's forward on a row.

        Args:
            ignored: the label that means no loss.
            waits: whether logits may be lazy.
        """
        # vision-language heads before transformers 5.17 do not pass `num_items_in_batch` on
        missing = of_loss and compat.LOSS_WITH_MEDIA_TAKES_NO_COUNT
        if torch.compiler.is_compiling() and not missing:
            return upstream(self, **row)
        call: Any = HeadOfCall(self, of_loss or {})
        if waits:
            call.defer_logits(row, ignored)
        return upstream(call, **row)

    @uncompiled
    def _loss_arguments(
        self, call: Call, packed: PackedSequence
    ) -> tuple[PackedSequence, dict[str, Any] | None]:
        """Return the record to run with, and the keywords of the loss; None for the keywords if the
        batch runs as upstream runs it.
        """
        if packed.tree is not None:
            refuse_unshifted(call)
        if call.labels is None:
            return packed, {}
        ignored, kept = call.get("ignore_index", IGNORED), None
        if self._loss() is ForMaskedLMLoss:
            targets = own_targets(call, packed, ignored)
        elif call.wants_all_logits:
            shifted = shifted_labels(call, packed, torch.Size(packed.batch_shape))
            kept = (
                None if shifted is None else self._with_labelled_padding(shifted, packed, ignored)
            )
            targets = (
                None if shifted is None or kept is None else row_targets(shifted, kept, ignored)
            )
        else:
            targets = kept_targets(call, packed, ignored)
        if targets is None:
            return packed, None
        items = call.get("num_items_in_batch")
        counted = {} if items is None else {"num_items_in_batch": at_least_one(items)}
        taken = taken_by(self._loss())
        return kept or packed, {
            name: value
            for name, value in (targets | counted).items()
            if name in call.arguments or taken(name)
        }

    def _with_labelled_padding(
        self, shifted: Tensor, packed: PackedSequence, ignored: int
    ) -> PackedSequence | None:
        """Return the record with the padding tokens that have labels added, or None if all padding
        has to run because of such labels.
        """
        if not packed.plain or packed.indices is None or packed.num_documents == 0:
            return packed
        labelled = targets_on_padding(shifted, packed, ignored)
        if labelled.numel() == 0:
            return packed
        config = self.config.get_text_config()
        attends_to_nothing = check_attention(config) != "mask" and not getattr(
            config, "attention_bias", False
        )
        if attends_to_nothing and are_left_pad_tokens(labelled, packed):
            return with_left_pad_tokens(packed, labelled)
        if state_of(self).context_parallel is not None:
            refuse_labelled_padding(labelled.numel(), ignored)
        # every batch of such data would say so
        if "labels" not in (said := state_of(self).said):
            said.add("labels")
            logger.warning(
                "found %d labels that padding would have to predict; the batch runs padded, as "
                "transformers does it; set the "
                "labels of padding, and of the first token after it, to %d to run real tokens only",
                labelled.numel(),
                ignored,
            )
        return None

    def _restore_shape(self, output: Any, packed: PackedSequence) -> None:
        restore_layers(output, packed)
        if output.logits is None:
            # the caller has put another forward on upstream's class
            for name in _INSTEAD_OF_LOGITS:
                if output.get(name) is not None:
                    output[name] = repad(output[name], packed)
            return
        # read the number of documents last: a compiled graph that reads it is compiled again for
        # another number
        later = isinstance(output.logits, LazyTensor) or (
            state_of(self).padded == "lazy"
            and self.training
            and _can_wait()
            and output.loss is not None
            and packed.indices is not None
            and packed.num_documents > 0
        )
        output.logits = (lazy_repad if later else repad)(output.logits, packed)


def _can_wait() -> bool:
    """Whether logits may be lazy: not in compiled graphs, and not in inference mode, whose tensors
    do not record changes in place.
    """
    return not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled())


def _goes_on_from_padding(call: Call) -> bool:
    """True if the caller wants only the last logit and some row ends in padding: generation from
    right-padded prompts.
    """
    mask, kept = call.attention_mask, call.get("logits_to_keep")
    last = mask[:, -1] if isinstance(mask, Tensor) and mask.ndim == 2 else None
    return last is not None and isinstance(kept, int) and kept == 1 and not bool(last.all())


def _batch_arguments(call: Call, packed: PackedSequence) -> dict[str, Any]:
    """Return upstream's arguments for the batch, which the text model turns into a row; the mask is
    for the experts' statistics.
    """
    partly = packed.num_real_tokens and packed.has_padding
    return call.arguments | {
        "attention_mask": repad(packed.is_real(), packed).long() if partly else None,
        "return_dict": True,
    }


def at_least_one(items: Any) -> Any:
    """Return the count by which the sum of losses is divided: the caller's, or 1 instead of 0,
    where the sum is zero.
    """
    return items + (items == 0) if isinstance(items, Tensor) else items or 1


def _row_arguments(call: Call, packed: PackedSequence) -> dict[str, Any]:
    """Return upstream's arguments for the row; the mask, if any, is for the experts' statistics."""
    # the vision-language model computes the positions
    numbered_inside = call.has_media and call.position_ids is None
    return row_of_each(call.arguments, packed) | {
        "attention_mask": packed.is_real().long()
        if packed.padding_segments and packed.num_real_tokens
        else None,
        "position_ids": None if numbered_inside else row_positions(call.position_ids, packed),
        "use_cache": False,
        "packed_sequence": packed,
        "return_dict": True,
    }


def heads_of(upstream: Any, home: str, *more: type[Head]) -> dict[str, Any]:
    """Return {name: our class} for every head of the modeling module `upstream`.

    The `endings` of our heads, those of `more` included, decide which of them is put in front of
    upstream's head. Releases have different heads; `SpanHead`, which keeps padding, is put in front
    of a head with another ending.
    """
    kinds: tuple[type[Head], ...] = (PackedHead, SequenceHead, TokenHead, *more)
    # modeling code that comes with a checkpoint may have no `__all__`
    known = getattr(upstream, "__all__", None) or [
        name
        for name, each in vars(upstream).items()
        if getattr(each, "__module__", None) == upstream.__name__
    ]
    names = [name for name in known if "For" in name]
    heads = {getattr(upstream, name): mixin_for(name, kinds) or SpanHead for name in names}
    return put_in_front(upstream, home, heads)
