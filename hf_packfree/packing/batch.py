"""The tokens of a batch, which tell trailing padding from one-token documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of S tokens. Their values are read only where a row ends in one-token documents.

    Attributes:
        tokens: ids [B, S], or embeddings [B, S, D].
        pad: the id of the padding token; None: unknown, or the tokens are embeddings.
    """

    tokens: Tensor
    pad: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self.tokens.device

    def equal(self, indices: Tensor, index: int) -> Tensor:
        """Return bool [M] on the host: whether each of M tokens equals the token at `index`.

        Args:
            indices: int64 [M] into the flattened [B*S].
            index: into the flattened [B*S].
        """
        flat = self.tokens.detach().flatten(0, 1)
        same = flat[indices.to(flat.device)] == flat[index]
        return same.reshape(indices.numel(), -1).all(1).to("cpu", torch.bool)

    def is_padding(self, index: int) -> bool:
        """Whether the token at an index into the flattened [B*S] is the padding token."""
        return self.pad is not None and bool(self.tokens.detach().flatten()[index] == self.pad)
