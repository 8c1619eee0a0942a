"""Random batches in every input format, and what each has to give: documents run alone through the
unpatched model.

A batch is `numbers` [B, S]: the document of every token, counted per row from 0, below 0 for
padding. Each format turns it into arguments, and says what they mean: which tokens are real, and
which tokens belong together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from hf_packfree import apply_patches
from tests.input_formats import INT32, additive, block_mask
from tests.support import double, relative_rms, tiny

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
Gradients = tuple[torch.Tensor, ...]
LENGTHS = (1, 2, 3, 4, 7, 12, 65)
"""Of documents: shorter than the convolution, and longer than a chunk of the delta rule."""
VARIANTS = 8
IGNORED = -100


@dataclass(frozen=True)
class Described:
    """What a format says: `real` [B, S] if it marks padding, `groups` [B, S], equal within
    documents, if it separates them.
    """

    arguments: dict[str, Any]
    real: torch.Tensor | None = None
    groups: torch.Tensor | None = None


def whole(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers with padding inside documents given back to them: who does not mark padding
    cannot mark a hole.
    """
    numbers = numbers.clone()
    for row in numbers:
        for number in row[row >= 0].unique():
            place = (row == number).nonzero()[:, 0]
            row[place[0] : place[-1] + 1] = number
    return numbers


def with_padding_segments(numbers: torch.Tensor) -> torch.Tensor:
    """The same, where each span of padding has a number of its own, and those of different rows
    differ.
    """
    numbers = whole(numbers)
    changes = F.pad(numbers.diff(dim=1) != 0, (1, 0), value=True)
    return changes.reshape(-1).cumsum(0).view(numbers.shape)


def positions_of(numbers: torch.Tensor, zeros: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions from 0 in each segment, padding as zeros or as a segment, and the groups that
    they show.
    """
    segments = with_padding_segments(numbers)
    positions = torch.zeros_like(segments)
    for row, segment in zip(positions, segments):
        for number in segment.unique():
            place = segment == number
            row[place] = torch.arange(int(place.sum()))
    if not zeros:
        return positions, segments
    padding = whole(numbers) < 0
    return positions.masked_fill(padding, 0), segments * 1000 + padding * torch.arange(
        numbers.shape[1]
    )


def _positions(
    rows: int = 0, zeros: bool = True, offset: int = 0
) -> Callable[[torch.Tensor], Described]:
    def describe(numbers: torch.Tensor) -> Described:
        positions, groups = positions_of(numbers, zeros)
        # behind padding the first document would seem to go on from it
        if offset and bool((numbers >= 0).all()):
            positions = positions + offset * (numbers == 0)
        if rows == 1 and len(positions) == 1:
            return Described({"position_ids": positions[0]}, None, groups)
        return Described(
            {"position_ids": positions[None].expand(rows, -1, -1) if rows > 1 else positions},
            None,
            groups,
        )

    return describe


def _offsets(*names: str, longest: bool = False) -> Callable[[torch.Tensor], Described]:
    def describe(numbers: torch.Tensor) -> Described:
        segments = with_padding_segments(numbers)
        flat = segments.reshape(-1)
        sizes = flat.unique_consecutive(return_counts=True)[1]
        offsets = F.pad(sizes.cumsum(0), (1, 0)).to(INT32)
        lengths = (
            {"max_length_q": int(sizes.max()), "max_length_k": int(sizes.max())} if longest else {}
        )
        return Described({**dict.fromkeys(names, offsets), **lengths}, None, segments)

    return describe


def _seq_idx(numbers: torch.Tensor) -> Described:
    return Described({"seq_idx": numbers.to(INT32)}, numbers >= 0, numbers)


def _padding(kind: torch.dtype) -> Callable[[torch.Tensor], Described]:
    return lambda numbers: Described({"attention_mask": (numbers >= 0).to(kind)}, numbers >= 0)


def _indexed(make: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Described]:
    def describe(numbers: torch.Tensor) -> Described:
        return Described(
            {"attention_mask": make(numbers + 1)},
            numbers >= 0,
            numbers if int(numbers.max()) > 0 else None,
        )

    return describe


def _blocks(make: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Described]:
    return lambda numbers: Described({"attention_mask": make(numbers)}, numbers >= 0, numbers)


def _gap(allowed: float, blocked: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda numbers: torch.where(block_mask(numbers), allowed, blocked)


FORMATS: dict[str, Callable[[torch.Tensor], Described]] = {
    "nothing": lambda numbers: Described({}),
    "positions": _positions(),
    "positions, padding counted": _positions(zeros=False),
    "positions from 7": _positions(offset=7),
    "positions of one dimension": _positions(rows=1),
    "3 rows of positions": _positions(rows=3),
    "4 rows of positions": _positions(rows=4, zeros=False),
    "cu_seq_lens_q": _offsets("cu_seq_lens_q"),
    "cu_seq_lens_k": _offsets("cu_seq_lens_k"),
    "all offsets": _offsets("cu_seq_lens_q", "cu_seq_lens_k", longest=True),
    "seq_idx": _seq_idx,
    "0/1": _padding(torch.int64),
    "0/1, bool": _padding(torch.bool),
    "0/1, float": _padding(torch.float32),
    "indexed": _indexed(lambda mask: mask),
    "blocks": _blocks(block_mask),
    "blocks of integers": _blocks(lambda numbers: block_mask(numbers).long()),
    "blocks of heads": _blocks(lambda numbers: block_mask(numbers).expand(-1, 4, -1, -1)),
    "additive blocks": _blocks(lambda numbers: additive(block_mask(numbers))),
    "additive blocks of 1 and -1e9": _blocks(_gap(1.0, -1e9)),
    "additive blocks of -inf": _blocks(_gap(0.0, -torch.inf)),
    "dict of blocks": _blocks(
        lambda numbers: {"full_attention": block_mask(numbers), "linear_attention": None}
    ),
    "dict of both": _blocks(
        lambda numbers: {
            "full_attention": additive(block_mask(numbers)),
            "linear_attention": (numbers >= 0).long(),
        }
    ),
    "dict of padding": lambda numbers: Described(
        {"attention_mask": {"full_attention": None, "linear_attention": (numbers >= 0).long()}},
        numbers >= 0,
    ),
    "dict of 2-D masks": lambda numbers: Described(
        {
            "attention_mask": dict.fromkeys(
                ("full_attention", "linear_attention"), (numbers >= 0).long()
            )
        },
        numbers >= 0,
    ),
    "dict of an indexed mask": _indexed(
        lambda mask: {"full_attention": None, "linear_attention": mask}
    ),
}


@dataclass(frozen=True)
class Case:
    """One call: tokens, and labels, [B, S]; what each format was made of; and how the model is
    patched and called.
    """

    ids: torch.Tensor
    formats: tuple[str, ...]
    described: tuple[Described, ...]
    family: str
    attention: str
    options: tuple[tuple[str, str], ...]
    train: bool
    embeds: bool
    first_labels: bool
    reads_logits: bool
    numbers: torch.Tensor = field(repr=False)

    def __repr__(self) -> str:
        return (
            f"{self.formats} of {self.numbers.tolist()}, {self.family}, {self.attention}, "
            f"{dict(self.options)}, training {self.train}, embeddings {self.embeds}, arguments "
            f"{[one.arguments for one in self.described]}"
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Of all formats together."""
        return {
            name: value
            for described in self.described
            for name, value in described.arguments.items()
        }


def tokens_of(length: int, variant: int) -> torch.Tensor:
    """The tokens of a document, all of the same length and variant alike; documents of one token
    differ by variant.
    """
    tokens = torch.randint(
        16, 128, (length,), generator=torch.Generator().manual_seed(length * VARIANTS + variant)
    )
    tokens[-1] = 2 + variant
    return tokens


def changed(numbers: torch.Tensor, row: int, kind: str, pick: int) -> torch.Tensor:
    """The numbers with one row's documents described otherwise: what a wrong or contradicting
    format is made of.
    """
    numbers = numbers.clone()
    line = numbers[row]
    place = {
        "merge": lambda: (line[1:] > line[:-1]) & (line[:-1] >= 0),
        "split": lambda: (line[1:] == line[:-1]) & (line[1:] >= 0),
        "hole": lambda: F.pad(
            (line[2:] == line[1:-1]) & (line[1:-1] == line[:-2]) & (line[2:] >= 0), (0, 1)
        ),
        "trim": lambda: (
            (line[1:] == line[:-1])
            & (line[1:] >= 0)
            & (F.pad(line[2:], (0, 1), value=-2) != line[1:])
        ),
    }[kind]().nonzero()[:, 0]
    if len(place) == 0:
        return numbers
    at = int(place[pick % len(place)]) + 1
    if kind in ("hole", "trim"):
        line[at] = -1
    else:
        line[at:] += (line[at:] >= 0) * (1 if kind == "split" else -1)
    return numbers


@st.composite
def cases(draw: Any) -> Case:
    """One or two formats of one batch, the second maybe of other documents than the first."""
    rows = draw(
        st.lists(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4), min_size=1, max_size=3)
    )
    padded = draw(st.booleans())
    gap = st.integers(0, 3) if padded else st.just(0)
    gaps = [[draw(gap) for _ in range(len(row) + 1)] for row in rows]
    width = max(sum(row) + sum(gap) for row, gap in zip(rows, gaps))
    # without padding all rows are as long: other orders of the same documents
    if not padded:
        rows = [draw(st.permutations(rows[0])) for _ in rows]
        width = sum(rows[0])
    ids, numbers = (
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.full((len(rows), width), -1),
    )
    count = 0
    for line, row in enumerate(rows):
        at = 0
        for number, length in enumerate(row):
            at += gaps[line][number] if padded else 0
            ids[line, at : at + length] = tokens_of(
                length, count % (VARIANTS if length == 1 else 3)
            )
            numbers[line, at : at + length] = number
            at, count = at + length, count + 1
    names = [draw(st.sampled_from(list(FORMATS)))]
    described = [FORMATS[names[0]](numbers)]
    others = [
        name
        for name, one in FORMATS.items()
        if not described[0].arguments.keys() & one(numbers).arguments.keys()
    ]
    if draw(st.integers(0, 3)) and others:
        names.append(draw(st.sampled_from(others)))
        kind = draw(st.sampled_from([None, None, "merge", "split", "hole", "trim"]))
        second = (
            numbers
            if kind is None
            else changed(
                numbers, draw(st.integers(0, len(rows) - 1)), kind, draw(st.integers(0, 9))
            )
        )
        described.append(FORMATS[names[1]](second))
    options = {
        "padded": draw(st.sampled_from(["lazy", "upstream"])),
        "unpacked": draw(st.sampled_from(["upstream", "native"])),
    }
    return Case(
        ids,
        tuple(names),
        tuple(described),
        draw(st.sampled_from(FAMILIES)),
        draw(st.sampled_from(["sdpa", "eager"])),
        tuple(options.items()),
        draw(st.booleans()),
        draw(st.integers(0, 4)) == 0,
        draw(st.booleans()),
        draw(st.booleans()),
        numbers,
    )


# what a case has to give
# -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Meaning:
    """What all formats of a case say together: `real` [B, S], the documents' tokens (row, indices),
    or a contradiction.

    Attributes:
        contradiction: whether two formats part documents' tokens otherwise: the call has to be
            refused.
        doubtful: whether they differ in padding that none of them marks: it may be refused.
        holes: whether padding is inside a document: refused, or upstream's.
    """

    real: torch.Tensor
    documents: list[tuple[int, torch.Tensor]]
    contradiction: bool
    doubtful: bool
    holes: bool


def meaning(case: Case) -> Meaning:
    """Work out what the formats say, without any code of the package."""
    real = torch.ones(case.ids.shape, dtype=torch.bool)
    for described in case.described:
        real = real & described.real if described.real is not None else real
    views = [described.groups for described in case.described if described.groups is not None] or [
        torch.zeros_like(case.ids)
    ]
    documents: list[tuple[int, torch.Tensor]] = []
    contradiction = doubtful = holes = False
    for row in range(len(real)):
        place = real[row].nonzero()[:, 0]
        starts = [
            F.pad(view[row][place].diff() != 0, (1, 0), value=True)[: len(place)] for view in views
        ]
        differ = place[(starts[0] != starts[-1])]
        padding = case.numbers[row] < 0
        at_padding = [bool(padding[t] or (t > 0 and padding[t - 1])) for t in differ.tolist()]
        contradiction, doubtful = contradiction or not all(at_padding), doubtful or bool(at_padding)
        for part in place.tensor_split(starts[0].nonzero()[1:, 0]) if len(place) else []:
            documents.append((row, part))
            holes = holes or bool((part.diff() != 1).any())
    return Meaning(real, documents, contradiction, doubtful, holes)


def labels_of(case: Case, said: Meaning) -> torch.Tensor:
    """Labels [B, S]: none at padding, nor at first tokens behind it, which in padded rows
    padding has to predict.
    """
    labels = case.ids.clone()
    labels[~said.real | (case.numbers < 0)] = IGNORED
    for row, part in said.documents:
        behind_padding = part[0] > 0 and not bool(
            said.real[row, part[0] - 1] and case.numbers[row, part[0] - 1] >= 0
        )
        if behind_padding or not case.first_labels:
            labels[row, part[0]] = IGNORED
    return labels


@cache
def unpatched(family: str, attention: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The unpatched model, with the same weights in every dtype."""
    if dtype == torch.float64:
        return double(family, attention)
    return tiny(family, attention=attention)


@cache
def patched(
    family: str,
    attention: str,
    options: tuple[tuple[str, str], ...],
    dtype: torch.dtype = torch.float32,
) -> torch.nn.Module:
    """The same model, patched."""
    model = copy.deepcopy(unpatched(family, attention, dtype))
    return apply_patches(model, **dict(options))


def weights_of(tokens: torch.Tensor) -> torch.Tensor:
    """A fixed functional of a document's logits [n, V]."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    return torch.randn(len(tokens), 128, generator=generator)


@cache
def alone(
    family: str,
    attention: str,
    dtype: torch.dtype,
    tokens: tuple[int, ...],
    learned: tuple[bool, ...],
) -> tuple[torch.Tensor, torch.Tensor, Gradients, Gradients]:
    """A document's logits, its summed loss over the tokens after the first that are learned, and
    the gradients of both.

    The logits' gradients are those of a fixed functional, see `weights_of`.
    """
    model, ids = unpatched(family, attention, dtype), torch.tensor([tokens])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    target = ids[0, 1:].masked_fill(~torch.tensor(learned, dtype=torch.bool), IGNORED)
    loss = F.cross_entropy(logits[:-1], target, ignore_index=IGNORED, reduction="sum")
    parameters, grads = list(model.parameters()), []
    for objective in (loss, (logits * weights_of(ids[0])).sum()):
        grads.append(
            torch.autograd.grad(objective, parameters, retain_graph=True, materialize_grads=True)
        )
    return logits.detach(), loss.detach(), grads[0], grads[1]


@dataclass(frozen=True)
class Wanted:
    """What a case has to give.

    Attributes:
        documents: row, tokens in it, and logits [n, V] of each document.
        read: which of them the objective reads the logits of, see `weights_of`.
        loss: the mean over what is learned; None where nothing is.
        gradients: of loss and functionals together.
    """

    documents: list[tuple[int, torch.Tensor, torch.Tensor]]
    read: bool
    loss: float | None
    gradients: list[torch.Tensor]


def wanted(
    case: Case, said: Meaning, labels: torch.Tensor, dtype: torch.dtype = torch.float32
) -> Wanted:
    """Run every document alone through the unpatched model."""
    learned = sum(int((labels[row, part[1:]] != IGNORED).sum()) for row, part in said.documents)
    read, loss, documents = case.reads_logits or not learned, 0.0, []
    grads = [
        torch.zeros_like(weight)
        for weight in unpatched(case.family, case.attention, dtype).parameters()
    ]
    for row, part in said.documents:
        # padding that no format marks: a segment that may be any
        if bool((case.numbers[row, part] < 0).all()):
            continue
        tokens, known = (
            tuple(case.ids[row, part].tolist()),
            tuple((labels[row, part[1:]] != IGNORED).tolist()),
        )
        logits, of_document, by_loss, by_logits = alone(
            case.family, case.attention, dtype, tokens, known
        )
        documents.append((row, part, logits))
        loss += float(of_document)
        for grad, one, other in zip(grads, by_loss, by_logits):
            grad += (one / learned if learned else 0) + (other if read else 0)
    return Wanted(documents, read, loss / learned if learned else None, grads)


def gradient_error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Relative RMS of the worst parameter's gradient; a tiny one counts as a hundredth of the
    median's size at least.
    """
    sizes = sorted(float(grad.double().pow(2).mean().sqrt()) for grad in wanted)
    floor = max(1e-2 * sizes[len(sizes) // 2], 1e-300)
    return max(relative_rms(one, other, floor) for one, other in zip(found, wanted, strict=True))
