"""Classification heads, which run padding if its outputs enter the result or the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.base_head import Head, forget_losses
from hf_packfree.models.call import Call
from hf_packfree.models.labels import IGNORED
from hf_packfree.models.row import as_requested
from hf_packfree.packing import PackedSequence, repad
from hf_packfree.packing.tree import refuse_tree


class _Classifier(Head):
    """Base of classification heads: runs upstream's forward, with padding if `_reads_padding`
    returns True.
    """

    def _forward_as_row(self, upstream: Any, call: Call) -> Any:
        if not call.is_whole_batch:
            return upstream(self, **call.arguments)
        call = self._enter(call)
        packed = call.packed
        refuse_tree(packed, f"with a {type(self).__name__}")
        if packed is not None and not packed.plain and packed.num_documents > 0:
            self._check_documents(call, packed)
        if packed is not None and packed.num_documents == 0:
            output = upstream(self, **call.arguments | {"return_dict": True})
            forget_losses(output)
            return as_requested(output, call, self.config)
        if (
            packed is not None
            and packed.plain
            and packed.indices is not None
            and self._reads_padding(_is_real(packed), call)
        ):
            call = self._with_padding(call)
        return upstream(self, **call.arguments)

    def _reads_padding(self, real: Tensor, call: Call) -> bool:
        """Whether outputs at padding enter the result or the loss; `real` is bool [B, S]."""
        raise NotImplementedError

    def _check_documents(self, call: Call, packed: PackedSequence) -> None:
        """Refuse packed rows with a loss or a result that is not one of documents.

        Raises:
            UnsupportedInput: there is such a loss or result.
        """


def _is_real(packed: PackedSequence) -> Tensor:
    return repad(packed.is_real(), packed)


class SequenceHead(_Classifier):
    """One result per row, from the last token that is not the padding token. That token is real
    unless the mask contradicts the ids.
    """

    endings = ("ForSequenceClassification",)

    def _reads_padding(self, real: Tensor, call: Call) -> bool:
        pad, ids = self.config.get_text_config().pad_token_id, call.input_ids
        # upstream then reads the last token of every row
        if pad is None or ids is None:
            return not bool(real[:, -1].all())
        positions = torch.arange(ids.shape[1], device=ids.device) * (ids != pad)
        return not bool(real.gather(1, positions.argmax(1, keepdim=True)).all())

    def _check_documents(self, call: Call, packed: PackedSequence) -> None:
        labels, rows = call.labels, packed.batch_shape[0]
        # torch would broadcast labels of documents against a row's answer
        if isinstance(labels, Tensor) and labels.ndim and labels.shape[0] != rows:
            raise UnsupportedInput(
                f"found labels {tuple(labels.shape)} for {rows} packed row(s), of which a "
                f"{type(self).__name__} answers for the last document alone; wanted one document "
                "per row; pass documents in rows of their own, padded"
            )
        if packed.has_padding and self._reads_padding(_is_real(packed), call):
            raise UnsupportedInput(
                f"found padding where a {type(self).__name__} reads its answer, the last token of "
                "a packed row that is not config.pad_token_id; wanted a document's token there; "
                "set config.pad_token_id to the token of the padding, and pass input_ids"
            )


class TokenHead(_Classifier):
    """One result per token: padding is run if any padding token has a label."""

    endings = ("ForTokenClassification",)

    def _reads_padding(self, real: Tensor, call: Call) -> bool:
        labels = call.labels
        # upstream raises its own error
        if labels is None or labels.numel() != real.numel():
            return labels is not None
        return bool((labels.reshape(real.shape)[~real] != IGNORED).any())


class SpanHead(_Classifier):
    """Start and end of an answer's span: upstream's softmax is over all tokens of a row, padding
    included.
    """

    def _reads_padding(self, real: Tensor, call: Call) -> bool:
        return True

    def _check_documents(self, call: Call, packed: PackedSequence) -> None:
        if call.get("start_positions") is None or call.get("end_positions") is None:
            return
        if packed.has_padding or packed.num_documents != packed.batch_shape[0]:
            raise UnsupportedInput(
                "found start_positions and end_positions with packed rows, over all of whose "
                f"tokens a {type(self).__name__} takes one softmax; wanted one document per row; "
                "pass documents in rows of their own, padded with a 0/1 mask"
            )
