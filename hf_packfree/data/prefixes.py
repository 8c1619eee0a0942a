"""Samples that share prefixes, as one row that holds each prefix once.

Shapes: T tokens of the row, n of a sample, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_packfree.errors import BoundaryError
from hf_packfree.models.head_log_probs import token_log_probs
from hf_packfree.models.labels import IGNORED
from hf_packfree.ops.loss import TokenLogProbs
from hf_packfree.ops.tree_paths import gather
from hf_packfree.packing import PackedSequence

Tokens = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PrefixRow:
    """A row of samples, and where each one's tokens are in it.

    Attributes:
        input_ids: int64 [1, T].
        packed_sequence: the record of its segments.
        index: for each sample, int64 [n]: where its tokens are in the row.
        before: int64 [1, T]: for each token the place in the row of the token that predicts it, the
            one before it in its samples; -1 for the first token of a sample.
        counts: int64 [1, T]: how many samples hold each token.
        labels: int64 [1, T]: the token itself where some sample has a label, unshifted; -100
            elsewhere, and for the first token of a sample.
        loss_weights: float32 [1, T]: for each label, the sum of the weights of its samples.
    """

    input_ids: Tensor
    packed_sequence: PackedSequence
    index: tuple[Tensor, ...]
    before: Tensor
    counts: Tensor
    labels: Tensor
    loss_weights: Tensor

    @property
    def inputs(self) -> dict[str, Any]:
        """The keywords for a call of a patched model: `input_ids`, `position_ids` and the
        record.
        """
        packed = self.packed_sequence
        return {
            "input_ids": self.input_ids,
            "position_ids": packed.position_ids(),
            "packed_sequence": packed,
        }

    def log_probs(self, hidden: Tensor, model: Any, **options: Any) -> TokenLogProbs:
        """Return the log-probability of every label given the tokens before it in its samples, and
        the other statistics of `token_log_probs`; a token that several samples share is computed
        once.

        The last token of a prefix predicts the first of each branch.

        Args:
            hidden: [1, T, D], the text model's last hidden states of `inputs`.
            model: with the head, or the head's last layer.
            options: of `hf_packfree.token_log_probs`; a temperature for each token is that of the
                token being predicted.

        Returns:
            [1, T] each; 0 where there is no label.
        """
        of_predictors = gather(hidden, self.before[0].clamp(min=0).to(hidden.device))
        ignored = options.get("ignore_index", IGNORED)
        targets = self.labels.masked_fill(self.labels == IGNORED, ignored)
        return token_log_probs(of_predictors, targets, model, **options)

    def of_samples(self, values: Tensor) -> list[Tensor]:
        """Return every sample's part [n, ...] of a row [1, T, ...]: of logits, hidden states or
        log-probabilities.

        A shared token has its value in the part of every sample that holds it, also where another
        sample alone labels it: weigh a part by its own sample's labels before it is summed.
        """
        return list(
            gather(values, torch.cat(self.index).to(values.device))[0].split(
                [len(places) for places in self.index]
            )
        )

    def summed(self, of_samples: Sequence[Tensor]) -> Tensor:
        """Return a row [1, T] of sums: for each token, the sum of its samples' values, such as the
        weights of a loss.

        Args:
            of_samples: [n] for each sample, a value per token.
        """
        given = torch.cat(list(of_samples))
        row = given.new_zeros(self.input_ids.shape[1])
        return row.index_add(0, torch.cat(self.index).to(given.device), given)[None]

    def to(self, device: torch.device | str) -> PrefixRow:
        """Return the row with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            packed_sequence=self.packed_sequence.to(device),
            index=tuple(places.to(device) for places in self.index),
            before=self.before.to(device),
            counts=self.counts.to(device),
            labels=self.labels.to(device),
            loss_weights=self.loss_weights.to(device),
        )


def pack_prefixes(
    samples: Sequence[Sequence[int] | Tensor],
    *,
    labels: Sequence[Sequence[int] | Tensor] | None = None,
    loss_weights: Sequence[float | Sequence[float] | Tensor] | None = None,
    shortest: int = 32,
) -> PrefixRow:
    """Lay samples out as one row that holds the prefixes they share once.

    Args:
        samples: token ids, one or more each.
        labels: for each sample, of the same length: the token's id where it is trained, -100 where
            not. Default: every token is trained.
        loss_weights: for each sample, one number for all its labels (such as an advantage) or one
            per token. Default: 1.
        shortest: the fewest tokens of a shared segment; shorter ones are repeated in their
            children, because every level of depth costs a call of the delta rule.

    Raises:
        BoundaryError: there is no sample, or a sample is no row of whole numbers; labels or weights
            do not fit the samples.

    Examples:
        A prompt of three tokens, and two answers:

        >>> from hf_packfree.data import pack_prefixes
        >>> row = pack_prefixes([[5, 6, 7, 1], [5, 6, 7, 2, 3]], shortest=1)
        >>> row.input_ids, row.inputs["position_ids"]
        (tensor([[5, 6, 7, 1, 2, 3]]), tensor([[0, 1, 2, 3, 3, 4]]))
        >>> row.index
        (tensor([0, 1, 2, 3]), tensor([0, 1, 2, 4, 5]))

        The prompt untrained, the answers by their advantages:

        >>> labels = [[-100, -100, -100, 1], [-100, -100, -100, 2, 3]]
        >>> row = pack_prefixes(
        ...     [[5, 6, 7, 1], [5, 6, 7, 2, 3]], labels=labels, loss_weights=[1, -0.5], shortest=1
        ... )
        >>> row.labels
        tensor([[-100, -100, -100,    1,    2,    3]])
        >>> row.loss_weights
        tensor([[ 0.0000,  0.0000,  0.0000,  1.0000, -0.5000, -0.5000]])
    """
    given = [_tokens(number, sample) for number, sample in enumerate(samples)]
    if not given:
        raise BoundaryError(
            "found no samples to pack; wanted one or more; pass token ids, a list of each sample's"
        )
    root = _Node(np.empty(0, dtype=np.int64))
    for sample in given:
        _insert(root, sample)
    _repeat_short(root, shortest)
    segments = list(_laid_out(root))
    packed = PackedSequence.from_tree(
        [len(node.tokens) for node, _ in segments], [parent for _, parent in segments]
    )
    index = tuple(torch.from_numpy(_places(root, sample)) for sample in given)
    tokens = torch.from_numpy(np.concatenate([node.tokens for node, _ in segments]))
    before = torch.empty_like(tokens)
    for places in index:
        before[places[0]], before[places[1:]] = -1, places[:-1]
    every = torch.cat(index)
    counts = torch.bincount(every, minlength=len(tokens))
    of_row, weights = torch.full_like(tokens, IGNORED), torch.zeros(len(tokens))
    # nothing predicts the first token of a sample
    has_label = torch.from_numpy(_have_labels(given, labels)) & (before[every] >= 0)
    places = every[has_label]
    of_row[places] = tokens[places]
    weights.index_add_(0, places, torch.from_numpy(_weights(given, loss_weights))[has_label])
    return PrefixRow(
        tokens[None], packed, index, before[None], counts[None], of_row[None], weights[None]
    )


def _have_labels(
    samples: list[Tokens], labels: Sequence[Sequence[int] | Tensor] | None
) -> NDArray[np.bool_]:
    """Return for all samples' tokens, one after the other, whether they have a label."""
    if labels is None:
        return np.ones(sum(map(len, samples)), dtype=np.bool_)
    found = []
    for number, (sample, given) in enumerate(zip(samples, _one_each(samples, labels, "labels"))):
        own = np.asarray(_in_python(given))
        if own.shape != sample.shape or not (own == sample)[own != IGNORED].all():
            raise BoundaryError(
                f"found labels of sample {number} that are not its {len(sample)} tokens or "
                f"{IGNORED}; wanted each token's own id, or {IGNORED} where it is not trained; "
                "pass them unshifted"
            )
        found.append(own != IGNORED)
    return np.concatenate(found)


def _weights(
    samples: list[Tokens], given: Sequence[float | Sequence[float] | Tensor] | None
) -> NDArray[np.float32]:
    """Return the weights of all samples' tokens, one after the other."""
    of_samples = (
        [1.0] * len(samples) if given is None else _one_each(samples, given, "loss weights")
    )
    found = []
    for number, (sample, weight) in enumerate(zip(samples, of_samples)):
        own = np.asarray(_in_python(weight), dtype=np.float32)
        if own.shape not in ((), sample.shape):
            raise BoundaryError(
                f"found loss weights of sample {number} of shape {own.shape}; wanted one number, "
                f"or one for each of its {len(sample)} tokens; pass a float, or a list as long as "
                "the sample"
            )
        found.append(np.broadcast_to(own, sample.shape))
    return np.concatenate(found)


def _one_each(samples: list[Tokens], given: Sequence[Any], what: str) -> Sequence[Any]:
    count = len(given) if hasattr(given, "__len__") else "no list of"
    if count != len(samples):
        raise BoundaryError(
            f"found {what} of {count} samples; wanted those of {len(samples)}, one each; pass a "
            "list as long as samples"
        )
    return given


def _in_python(values: Any) -> Any:
    """Return a tensor, of any dtype and on any device, as lists; other values unchanged."""
    return values.tolist() if isinstance(values, Tensor) else values


@dataclass(eq=False)
class _Node:
    """A node of the prefix tree: tokens that the same samples share, the children, and the node's
    start in the row.
    """

    tokens: Tokens
    children: list[_Node] = field(default_factory=list)
    start: int = 0


def _tokens(number: int, sample: Any) -> Tokens:
    found = np.asarray(_in_python(sample))
    if found.ndim != 1 or found.dtype.kind not in "iu" or not found.size:
        raise BoundaryError(
            f"found sample {number} of shape {found.shape} and type {found.dtype}; wanted one or "
            "more token ids in a row; drop empty samples before packing"
        )
    return found.astype(np.int64)


def _insert(node: _Node, sample: Tokens) -> None:
    """Follow a sample down the tree, and add a node for the rest of it."""
    while sample.size:
        shared, child = _closest(node, sample)
        if child is None:
            node.children.append(_Node(sample))
            return
        if shared < len(child.tokens) and shared < len(sample):
            rest = _Node(child.tokens[shared:], child.children)
            child.tokens, child.children = child.tokens[:shared], [rest]
        node, sample = child, sample[shared:]


def _repeat_short(root: _Node, shortest: int) -> None:
    """Merge short nodes into their children."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        while short := [
            one for one in node.children if one.children and len(one.tokens) < shortest
        ]:
            for child in short:
                place = node.children.index(child)
                node.children[place : place + 1] = child.children
                for one in child.children:
                    one.tokens = np.concatenate([child.tokens, one.tokens])
        waiting += node.children


def _closest(node: _Node, sample: Tokens) -> tuple[int, _Node | None]:
    """Return the child that shares most of a sample's beginning, and how many tokens."""
    best: tuple[int, _Node | None] = 0, None
    for child in node.children:
        size = min(len(child.tokens), len(sample))
        differs = child.tokens[:size] != sample[:size]
        shared = int(differs.argmax()) if differs.any() else size
        if shared > best[0]:
            best = shared, child
    return best


def _laid_out(root: _Node) -> Iterator[tuple[_Node, int | None]]:
    """Yield the nodes depth first, with the number of each one's parent, and note where they
    start.
    """
    end, number = 0, 0
    waiting: list[tuple[_Node, int | None]] = [(child, None) for child in root.children[::-1]]
    while waiting:
        node, parent = waiting.pop()
        yield node, parent
        node.start, end = end, end + len(node.tokens)
        waiting += [(child, number) for child in node.children[::-1]]
        number += 1


def _places(root: _Node, sample: Tokens) -> Tokens:
    """Return where a sample's tokens are in the row."""
    places, node = list[Tokens](), root
    while sample.size:
        # the child that shares most of the sample leads to the sample's own node
        shared, child = _closest(node, sample)
        assert child is not None
        places.append(np.arange(child.start, child.start + shared))
        node, sample = child, sample[shared:]
    return np.concatenate(places)
