"""Samples that share prefixes: a whole step of them as a tree, packed without sharing, and by
tree-recurrence on transformers' own layers, in turns in one process.

    python -m tests.benchmarks.prefixes --out DIR [--only REGEX] [--minutes 6]
    python -m tests.benchmarks.prefixes --out DIR --device cpu --tiny       # a trial of the script itself

"2b-group16": a prompt of 2,048 tokens with 16 answers of 512. "2b-multiturn": three levels, every
segment but the last ones with four children, of 300 tokens each. A step has log-probabilities of
every sample's tokens (the same function for all, a weight by token), backward and fused AdamW;
"..., trunk" is forward and backward of the hidden states alone. "loss" tells that all compute the
same. "tokens" are those that the model computes, "times_as_long" the ratio to the tree's ms, and
"peak_gib" is without the weights and optimizers of the models that wait.

"packfree tree, CUDA graphs" comes when the others' models are freed, in turns with "packfree tree, no
graphs", to which its ratio is: graphs keep memory of their own. It makes the row's plans in every
step, the tree without graphs in its first; "cuda_graphs" says which rows were replayed.

tree-recurrence is called through its public `install`; "composed" is its strongest form: FLA's
convolution and gated norm, Liger's norms and SwiGLU, torch's varlen attention with the keys of each
segment's path, as TRL's tree attention gathers them; "forking" makes it hand states on by level,
which its default policy does for larger savings than these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree import patch_report
from hf_packfree.data import PrefixRow, pack_prefixes
from hf_packfree.ops.tree_paths import gather
from hf_packfree.packing import PackedSequence
from tests.benchmarks.batches import random_tokens
from tests.benchmarks.machine import machine
from tests.benchmarks.models import Variant, variant_of
from tests.benchmarks.shapes import SHAPES, Shape, configuration
from tests.benchmarks.timing import Clock, Results, failure, free, parser_of
from tests.benchmarks.workloads import COMPOSED, PACKFREE, UNPATCHED_CONV

TREE, PACKED, OTHER = "packfree tree", "packfree packed", "tree-recurrence"
GRAPHS = f"{TREE}, CUDA graphs"
OURS = TREE, GRAPHS
ENDINGS = {True: "", False: ", trunk"}
"""Of a variant's name, by whether the step is a whole one."""
Loads = dict[str, list[Tensor]]
"""{workload: its samples}."""
ATTENTION = "along paths of a tree"


@dataclass
class Candidate:
    """A row of the table that is timed in turns with others.

    Attributes:
        name: of the variant.
        step: what is timed; returns the loss.
        tokens: that the model computes.
        owner: the name of the model, of which several may be held.
    """

    name: str
    step: Callable[[], Tensor]
    tokens: int
    owner: str


def group(prompt: int, answers: int, length: int, words: int) -> list[Tensor]:
    """Return the samples of one prompt with some answers."""
    ids = random_tokens((prompt + answers * length,), words, "cpu")
    return [torch.cat([ids[:prompt], one]) for one in ids[prompt:].split(length)]


def turns(levels: int, branches: int, length: int, words: int) -> list[Tensor]:
    """Return the samples of a tree whose segments all have as many children and tokens."""
    count = sum(branches**level for level in range(levels))
    parts = iter(random_tokens((count * length,), words, "cpu").split(length))
    paths = [next(parts)]
    for _ in range(levels - 1):
        paths = [torch.cat([path, next(parts)]) for path in paths for _ in range(branches)]
    return paths


def shared(samples: Sequence[Tensor], device: str) -> PrefixRow:
    """Return the row that holds prefixes once."""
    return pack_prefixes(samples, shortest=1).to(device)


def packed(samples: Sequence[Tensor], device: str) -> PrefixRow:
    """Return the row of whole samples one after the other."""
    lengths = [len(sample) for sample in samples]
    record = PackedSequence.from_lengths(lengths)
    ids, places = torch.cat(list(samples))[None], torch.arange(sum(lengths))
    before = (places - 1).masked_fill(record.position_ids()[0] == 0, -1)[None]
    ones, labels = torch.ones_like(ids), ids.masked_fill(before < 0, -100)
    weights = (before >= 0).float()
    row = PrefixRow(ids, record, places.split(lengths), before, ones, labels, weights)
    return row.to(device)


def words_of_trl(row: PrefixRow) -> dict[str, Any]:
    """Return the keywords with which TRL 1.16 and trl#7686 describe a row's tree."""
    tree: Any = row.packed_sequence.tree
    spans = [torch.arange(a, a + n) for a, n in zip(tree.starts, tree.lengths, strict=True)]
    paths = [torch.cat([spans[one] for one in tree.path(s)]) for s in range(len(spans))]

    def ends(parts: Sequence[Tensor]) -> Tensor:
        sizes = torch.tensor([len(part) for part in parts])
        return F.pad(sizes.cumsum(0), (1, 0)).to(row.input_ids.device, torch.int32)

    return {
        "tree_kv_index": torch.cat(paths).to(row.input_ids.device),
        "tree_cu_seqlens_q": ends(spans),
        "tree_cu_seqlens_k": ends(paths),
        "tree_max_seqlen_q": max(map(len, spans)),
        "tree_max_seqlen_k": max(map(len, paths)),
        "tree_segment_parents": torch.tensor(tree.parents),
        "tree_segment_depths": torch.tensor(tree.depths),
    }


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **words: Any,
) -> tuple[Tensor, None]:
    """Attend with each segment to its path; q, k, v are [1, heads, T, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    k, v = (gather(x[None], words["tree_kv_index"])[0] for x in (k, v))
    ends = words["tree_cu_seqlens_q"], words["tree_cu_seqlens_k"]
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        longest = words["tree_max_seqlen_q"], words["tree_max_seqlen_k"]
        out: Any = varlen_attn(q, k, v, *ends, *longest, scale=scaling, window_size=(-1, 0))
        return out[None], None
    return _attend_one_by_one(q, k, v, ends, scaling)[None], None


def _attend_one_by_one(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], scale: float | None
) -> Tensor:
    """Stand in for varlen attention on a CPU."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outs = []
    for (a, b), (c, d) in zip(*(zip(e.tolist(), e.tolist()[1:]) for e in ends)):
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
        parts = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        outs.append(F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale))
    return torch.cat([out.transpose(0, 1) for out in outs])


def step_of(
    model: Any, row: PrefixRow, inputs: dict[str, Any], optimizer: Any
) -> Callable[[], Tensor]:
    """Return one step of a policy's loss: the weighted mean of log-probabilities; without an
    optimizer, of the trunk alone.
    """
    weights = row.counts * (row.before >= 0)
    total = weights.sum()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        hidden = model.base_model(**inputs, use_cache=False)[0]
        if optimizer is None:
            loss = (hidden.float().pow(2).mean(-1) * row.counts).sum() / row.counts.sum()
        else:
            loss = -(row.log_probs(hidden, model.lm_head).log_probs * weights).sum() / total
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return step


@contextmanager
def following_trees(
    shape: Shape, variant: Variant, device: str, dtype: torch.dtype
) -> Iterator[Any]:
    """Build an unpatched model whose layers follow trees by tree-recurrence."""
    from transformers import AttentionInterface
    from tree_recurrence import install, uninstall

    AttentionInterface.register(ATTENTION, attend)
    with variant_of(shape, variant, device, dtype) as model:
        config: Any = model.config
        config._attn_implementation = ATTENTION
        support = install(model)
        assert support.mode == "tree", support.reason
        try:
            yield model
        finally:
            uninstall(model)


@dataclass
class Held:
    """The models of a run, and the memory that each keeps between its steps."""

    shape: Shape
    device: str
    stack: ExitStack
    models: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, variant: Variant) -> None:
        """Build a model and its optimizer's state."""
        before = self._allocated()
        build = variant_of if variant.packfree else following_trees
        model = self.stack.enter_context(
            build(self.shape, variant, self.device, _dtype(self.device))
        )
        on_cuda = self.device == "cuda"
        # small steps: the losses of candidates stay comparable
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=on_cuda)
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        self.models[name], self.optimizers[name] = model, optimizer
        self.bytes[name] = self._allocated() - before

    def others(self, name: str) -> float:
        """GiB that models but this one keep."""
        return sum(size for who, size in self.bytes.items() if who != name) / 2**30

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0


def add_others(held: Held, results: Results) -> None:
    """Build tree-recurrence's models; one that cannot be built is a row with its error."""
    # no kernels of other libraries run on a CPU
    on_cuda, bare = held.device == "cuda", Variant(packfree=False)
    theirs = {OTHER: UNPATCHED_CONV, f"{OTHER}, composed": COMPOSED}
    for name, variant in theirs.items():
        try:
            held.add(name, variant if on_cuda else bare)
        except Exception as error:
            results.add({"workload": "models", "variant": name, **failure(error)})


def candidates(
    held: Held, names: Sequence[str], samples: Sequence[Tensor], whole: bool
) -> list[Candidate]:
    """Return the variants of a workload with these names."""
    tree = shared(samples, held.device)
    words = words_of_trl(tree)
    found = []
    for name in names:
        owner, row = (TREE, packed(samples, held.device)) if name == PACKED else (name, tree)
        inputs = row.inputs
        if owner not in OURS:
            inputs = {k: v for k, v in inputs.items() if k != "packed_sequence"} | words
        optimizer = held.optimizers[owner] if whole else None
        step = step_of(held.models[owner], row, inputs, optimizer)
        found.append(Candidate(name, step, row.input_ids.shape[1], owner))
    return found


def compare(
    workload: str, held: Held, wanted: list[Candidate], results: Results, clock: Clock, ending: str
) -> None:
    """Time candidates in turns and write a row for each; one that fails is left out of them."""
    running = []
    for one in wanted:
        if results.late() or not results.wanted(workload, one.name + ending):
            continue
        try:
            one.step()
            running.append(one)
        except Exception as error:
            row = {"workload": workload, "variant": one.name + ending, **failure(error)}
            results.add(row)
        # what an out-of-memory error's traceback kept alive
        free()
    if not running:
        return
    timings = clock.in_turns([one.step for one in running])
    for one, timing in zip(running, timings, strict=True):
        # the tree's, where it ran
        ratio = timing["ms"] / timings[0]["ms"] if running[0].name.startswith(TREE) else None
        result = timing | {
            "peak_gib": max(timing["peak_gib"] - held.others(one.owner), 0.0),
            "tokens": one.tokens,
            "real_tokens_per_s": one.tokens / timing["ms"] * 1e3,
            "times_as_long": ratio,
            "loss": float(one.step()),
            "whole_step": "trunk" not in ending,
        }
        if one.owner == GRAPHS:
            result["cuda_graphs"] = patch_report(held.models[GRAPHS]).cuda_graphs
        results.add({"workload": workload, "variant": one.name + ending, **result})


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def main() -> None:
    """Measure the chosen rows."""
    options = parser_of(__doc__, minutes=1e9).parse_args()
    results = Results(options.out / "prefixes.jsonl", options.minutes, options.only)
    results.add({"workload": "machine", "variant": "", **machine(options.device)})
    clock = Clock(options.device, warmup=2, least=1.5, longest=8.0)
    if options.device == "cpu":
        clock = replace(clock, warmup=1, runs=2)
    measure(SHAPES["tiny" if options.tiny else "2b"], loads(options.tiny), results, clock)


def loads(tiny: bool) -> Loads:
    """Return the workloads, of few tokens where that is asked for."""
    shape = SHAPES["tiny" if tiny else "2b"]
    words = configuration(shape).get_text_config().vocab_size
    return {
        "2b-group16": group(*(40, 4, 12) if tiny else (2048, 16, 512), words),
        "2b-multiturn": turns(3, *(2, 9) if tiny else (4, 300), words),
    }


def measure(shape: Shape, samples: Loads, results: Results, clock: Clock) -> None:
    """Time everything; graphs when the models that they do not stand beside are gone."""
    compare_with_others(shape, samples, results, clock)
    # now that nothing refers to their models
    free()
    compare_with_graphs(shape, samples, results, clock)


def compare_with_others(shape: Shape, samples: Loads, results: Results, clock: Clock) -> None:
    """Time the tree beside whole samples packed and beside tree-recurrence."""
    with ExitStack() as stack:
        held = Held(shape, clock.device, stack)
        held.add(TREE, PACKFREE)
        add_others(held, results)
        theirs = [name for name in held.models if name != TREE]
        for workload, whole in product(samples, ENDINGS):
            names = [TREE, PACKED, *(theirs if whole else [])]
            found = candidates(held, names, samples[workload], whole)
            compare(workload, held, found, results, clock, ENDINGS[whole])
        if theirs:
            fork(held, theirs, samples, results, clock)


def fork(held: Held, theirs: Sequence[str], samples: Loads, results: Results, clock: Clock) -> None:
    """Time tree-recurrence once more where it hands states on by level, beside the tree again."""
    from tree_recurrence import Policy, install

    for name in theirs:
        install(held.models[name], policy=Policy(fork_min_saved_tokens=0))
    for workload in samples:
        found = [
            replace(one, name=f"{one.name}, {'once more' if one.owner == TREE else 'forking'}")
            for one in candidates(held, [TREE, *theirs], samples[workload], True)
        ]
        compare(workload, held, found, results, clock, "")


def compare_with_graphs(shape: Shape, samples: Loads, results: Results, clock: Clock) -> None:
    """Time the tree in CUDA graphs beside the tree without them."""
    with ExitStack() as stack:
        held = Held(shape, clock.device, stack)
        held.add(TREE, PACKFREE)
        held.add(GRAPHS, replace(PACKFREE, cuda_graphs="auto"))
        for workload, whole in product(samples, ENDINGS):
            plain, graphs = candidates(held, OURS, samples[workload], whole)
            found = [replace(plain, name=f"{TREE}, no graphs"), graphs]
            compare(workload, held, found, results, clock, ENDINGS[whole])


if __name__ == "__main__":
    main()
