"""The gain from sharing prefixes: a step of samples in a tree against a step of the same samples
packed one after the other, in turns, on the same weights.

Both have the same loss: the mean negative log-probability of the samples' tokens, without each
sample's first.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_packfree.bench.candidates import CommonOptions, Measured, Progress
from hf_packfree.bench.lengths import documents_of
from hf_packfree.bench.turns import Trial, in_turns, memory_for, patched_model, what_ran
from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.head_log_probs import token_log_probs
from hf_packfree.ops.tree_paths import gather
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.tree import Tree

PACKED = "packed"
SHARED = "tree"
MOST_SEGMENTS = 2**20
"""More than any row has room for, and few enough to be listed."""
_WANTED = (
    "a prompt's tokens and its answers' (512,64,80 or 512,64x16), or a JSON file such as "
    '{"lengths": [512, 64, 80], "parents": [null, 0, 0]}'
)
_LESS = "fewer or shorter segments (--tree) need less"


def read_tree(source: str) -> Tree:
    """Return the tree that `--tree` names.

    Args:
        source: lengths in tokens of a prompt and its answers, where `64x16` means sixteen answers
            of 64; or a JSON file with `lengths` and `parents` as for `PackedSequence.from_tree`.

    Raises:
        UnsupportedInput: `source` is neither.
        BoundaryError: the segments are no tree.
    """
    lengths, parents = _of_file(Path(source)) if Path(source).is_file() else _of_words(source)
    whole = [isinstance(one, int) and not isinstance(one, bool) for one in lengths]
    if len(lengths) < 2 or not all(whole) or min(lengths) < 1:
        raise UnsupportedInput(
            f"found {source!r} for --tree; wanted {_WANTED}; write the lengths of two segments or "
            "more, each of a token at least"
        )
    found = PackedSequence.from_tree(lengths, parents).tree
    if found is None:
        raise UnsupportedInput(
            f"found {source!r} for --tree, in which no segment goes on from another; wanted "
            f"{_WANTED}; leave --tree out to measure documents"
        )
    return found


def _of_words(source: str) -> tuple[list[Any], list[Any]]:
    groups = list[tuple[int, int]]()
    try:
        for part in source.split(","):
            length, _, times = part.partition("x")
            groups.append((int(length), int(times or 1)))
    except ValueError:
        return [], []
    if (many := sum(max(times, 0) for _, times in groups)) > MOST_SEGMENTS:
        raise UnsupportedInput(
            f"found {many:,} segments for --tree; wanted at most {MOST_SEGMENTS:,}, which a row "
            "has room for; give fewer"
        )
    lengths = [length for length, times in groups for _ in range(times)]
    return lengths, [None, *[0] * (len(lengths) - 1)]


def _of_file(path: Path) -> tuple[list[Any], list[Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        return list(found["lengths"]), list(found["parents"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return [], []


@dataclass(frozen=True)
class TreeOptions(CommonOptions):
    """The options of `run_tree_bench`.

    Attributes:
        parents: each segment's parent, -1 for a root.
    """

    parents: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TreeReport(Measured):
    """The results of `run_tree_bench`: the samples packed, and in a tree.

    Attributes:
        options: see `TreeOptions`.
        samples: how many, one for each segment without children.
        difference: relative difference of the two losses.
    """

    options: TreeOptions
    samples: int
    difference: float | None

    @property
    def complete(self) -> bool:
        """Whether both candidates ran."""
        return all(row.refused is None for row in self.candidates)

    @property
    def faster(self) -> float | None:
        """How many times as fast the tree is as the packed samples."""
        packed, tree = (row.median for row in self.candidates)
        return packed / tree if packed and tree else None

    @property
    def memory_share(self) -> float | None:
        """The tree's peak memory as a share of the packed samples'."""
        packed, tree = (row.peak_mib for row in self.candidates)
        return tree / packed if packed and tree is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        medians = {row.name: row.median for row in self.candidates}
        return asdict(self) | {
            "median_seconds": medians,
            "times_as_fast": self.faster,
            "memory_share": self.memory_share,
            "sentence": str(self),
        }

    def __str__(self) -> str:
        packed, tree = self.candidates
        what = (
            f"{self.model} on {self.device}: in a tree, {self.samples} samples of "
            f"{packed.computed_tokens:,} tokens are {tree.computed_tokens:,}"
        )
        if self.faster is None or self.memory_share is None:
            broken = next((row for row in self.candidates if row.refused), packed)
            return f"{what}; no comparison, because {broken.name} did not run ({broken.refused})"
        return (
            f"{what}, a step is {self.faster:.2f} times as fast, in {self.memory_share:.0%} of the "
            "peak memory"
        )


@dataclass
class _Samples(Trial):
    """A candidate: samples in one row, and for each token the one that predicts it.

    Attributes:
        before: int64 [T], the place of the token that predicts each token; -1 for first tokens.
        counts: [T], the samples that hold each token.
        loss: of the last step.
    """

    before: Tensor = field(default_factory=lambda: torch.empty(0))
    counts: Tensor = field(default_factory=lambda: torch.empty(0))
    loss: Tensor | None = None

    def step(self) -> None:
        """Run forward and backward."""
        self.model.zero_grad(set_to_none=True)
        model: Any = self.model
        hidden = model.base_model(**self.batch, use_cache=False)[0]
        predicted = self.before >= 0
        targets = self.batch["input_ids"].masked_fill(~predicted, -100)
        hidden = gather(hidden, self.before.clamp(min=0))
        log_probs = token_log_probs(hidden, targets, model).log_probs[0]
        loss = -(log_probs * self.counts).sum() / (self.counts * predicted).sum()
        loss.backward()
        self.loss = loss.detach()


def run_tree_bench(
    options: TreeOptions, progress: Progress = lambda what, done, total: None
) -> TreeReport:
    """Measure one step of samples packed, and of the same samples in a tree.

    Args:
        options: see `TreeOptions`.
        progress: called before and after every step.

    Raises:
        UnsupportedInput: memory ran out before the first step, or a layer does not support trees.
        UnsupportedModel, PatchConflict, ContractError, BackendUnavailable: as `apply_patches`.
    """
    with memory_for(options, "shorter segments (--tree)"):
        model = patched_model(options)
        words = model.config.get_text_config().vocab_size
        tree = Tree.of(options.lengths, options.parents)
        (ids,) = documents_of((sum(options.lengths),), words, options.seed)
        runners = [one(model, tree, ids.to(options.device)) for one in (_packed, _shared)]
        in_turns(runners, options, progress)
        packed, shared = (runner.loss for runner in runners)
        difference = None
        if packed is not None and shared is not None:
            difference = float((shared - packed).abs() / packed.abs())
        return TreeReport(
            options=options,
            **what_ran(model, options, runners),
            samples=len(tree.leaves),
            difference=difference,
        )


def _shared(model: Any, tree: Tree, ids: Tensor) -> _Samples:
    record = PackedSequence.from_tree(tree.lengths, tree.parents, device=ids.device)
    counts = torch.bincount(torch.cat(tree.samples()), minlength=len(ids)).to(ids.device)
    batch = {
        "input_ids": ids[None],
        "position_ids": record.position_ids(),
        "packed_sequence": record,
    }
    before = tree.predecessors().to(ids.device)
    return _Samples(SHARED, model, batch, True, less=_LESS, before=before, counts=counts)


def _packed(model: Any, tree: Tree, ids: Tensor) -> _Samples:
    places = tree.samples()
    record = PackedSequence.from_lengths([len(one) for one in places], device=ids.device)
    row, numbers = ids[torch.cat(places).to(ids.device)], record.position_ids()
    before = torch.arange(len(row), device=ids.device) - 1
    before = before.masked_fill(numbers[0] == 0, -1)
    batch = {"input_ids": row[None], "position_ids": numbers, "packed_sequence": record}
    ones = torch.ones_like(before)
    return _Samples(PACKED, model, batch, True, less=_LESS, before=before, counts=ones)
