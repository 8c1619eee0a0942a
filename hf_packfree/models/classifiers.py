"""Classification heads: the trunk skips padding for them, unless what they read lies on padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_packfree.models.heads import Head
from hf_packfree.models.targets import IGNORED


class _Careful(Head):
    """Lets upstream's forward run, and the trunk keep the padding where `_reads_padding` says so."""

    def _forward_as_row(self, upstream: Any, arguments: dict[str, Any]) -> Any:
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            real = mask != 0
            if not bool(real.all()) and self._reads_padding(real, arguments):
                arguments = {**arguments, "keep_padding": True}
        return upstream(**arguments)

    def _reads_padding(self, real: Tensor, arguments: dict[str, Any]) -> bool:
        """Whether the outputs at padding enter the answer or the loss; `real` is bool [B, S]."""
        raise NotImplementedError


class SequenceHead(_Careful):
    """One answer per row, from the last token that is not the padding token: real, unless mask and token disagree."""

    def _reads_padding(self, real: Tensor, arguments: dict[str, Any]) -> bool:
        pad, ids = self.config.get_text_config().pad_token_id, arguments.get("input_ids")
        if pad is None or ids is None:  # upstream reads the last place of every row
            return not bool(real[:, -1].all())
        places = torch.arange(ids.shape[1], device=ids.device) * (ids != pad)
        return not bool(real.gather(1, places.argmax(1, keepdim=True)).all())


class TokenHead(_Careful):
    """One answer per token: padding matters where it has a label."""

    def _reads_padding(self, real: Tensor, arguments: dict[str, Any]) -> bool:
        labels = arguments.get("labels")
        return labels is not None and bool((labels[~real] != IGNORED).any())


class SpanHead(_Careful):
    """Start and end of an answer: upstream's softmax runs over padding too."""

    def _reads_padding(self, real: Tensor, arguments: dict[str, Any]) -> bool:
        return True
