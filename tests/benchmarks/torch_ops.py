"""Time the torch-native ops beside transformers' torch functions, in one process, in turns.

    python tests/benchmarks/torch_ops.py            # the shapes of the targets: minutes
    python tests/benchmarks/torch_ops.py --quick    # a quarter of the heads and channels: no target applies

Every ratio is of medians; the candidates run in turns, so that whatever else the machine does hits
all of them alike. fp32; lengths in tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.ops.delta_rule import gated_delta_rule
from hf_packfree.packing import PackedSequence

LENGTHS = [420, 31, 900, 64, 260, 751, 97, 389, 150, 333, 500, 201]
TOKENS = sum(LENGTHS)
Run = Callable[[], Tensor]
SHORT = 4.0


@dataclass(frozen=True)
class Ratio:
    """One row of the table: `over` took how many times as long as `under`; at least, or at most,
    `target` times.
    """

    what: str
    over: str
    under: str
    target: float
    at_most: bool = False


DELTA_RATIOS = [
    Ratio("one document, forward: upstream / ours", "upstream one", "ours one", 2.0),
    Ratio(
        "one document, forward + backward: upstream / ours", "upstream one f+b", "ours one f+b", 9.0
    ),
    Ratio("12 documents, forward: upstream per document / ours", "upstream loop", "ours pack", 1.8),
    Ratio(
        "12 documents, forward + backward: upstream per document / ours",
        "upstream loop f+b",
        "ours pack f+b",
        2.0,
    ),
    Ratio(
        "12 documents, forward + backward: upstream padded / ours",
        "upstream padded f+b",
        "ours pack f+b",
        12.0,
    ),
    Ratio("ours, forward: 12 documents / one", "ours pack", "ours one", 1.15, at_most=True),
    Ratio(
        "ours, forward + backward: 12 documents / one",
        "ours pack f+b",
        "ours one f+b",
        1.15,
        at_most=True,
    ),
]
CONV_RATIOS = [
    Ratio("one document, forward: upstream / ours", "upstream one", "ours one", 1.0),
    Ratio(
        "one document, forward + backward: upstream / ours", "upstream one f+b", "ours one f+b", 1.0
    ),
    Ratio("12 documents, forward: upstream per document / ours", "upstream loop", "ours pack", 1.0),
    Ratio(
        "12 documents, forward + backward: upstream per document / ours",
        "upstream loop f+b",
        "ours pack f+b",
        1.0,
    ),
]


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the heads and channels, one round"
    )
    parser.add_argument(
        "--rounds", type=int, default=None, help="rounds of each candidate; 3, or 1 with --quick"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shrink, rounds = (4, 1) if options.quick else (1, 3)
    rounds = options.rounds or rounds
    console = Console()
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        delta = delta_rule_candidates(16 // shrink, 32 // shrink, 128)
        conv = conv_candidates(8192 // shrink)
        saved = {name: saved_bytes(delta[name]) for name in ("upstream one", "ours one")}
        times = measure("delta rule", delta, rounds, progress)
        conv_times = measure("conv", conv, 3 * rounds, progress)
    console.print(
        f"torch {torch.__version__}, {options.threads} threads, fp32, {TOKENS} tokens; seconds, "
        f"median of each"
    )
    note = f"gated delta rule, {16 // shrink}/{32 // shrink} heads of 128"
    console.print(table(note, DELTA_RATIOS, times, saved))
    console.print(
        table(
            f"causal convolution + silu, {8192 // shrink} channels, 4 taps", CONV_RATIOS, conv_times
        )
    )


def delta_rule_candidates(key_heads: int, value_heads: int, size: int) -> dict[str, Run]:
    """Forward passes by name; all share the same leaves."""
    q, k = (torch.randn(1, TOKENS, key_heads, size).requires_grad_() for _ in range(2))
    v = torch.randn(1, TOKENS, value_heads, size).requires_grad_()
    g = (-torch.rand(1, TOKENS, value_heads) * 0.05).requires_grad_()
    beta = torch.rand(1, TOKENS, value_heads).requires_grad_()
    leaves = (q, k, v, g, beta)
    one, pack = PackedSequence.from_lengths([TOKENS]), PackedSequence.from_lengths(LENGTHS)

    def upstream(*inputs: Tensor) -> Tensor:
        out: Tensor = torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]
        return out

    def loop() -> Tensor:
        return torch.cat(
            [
                upstream(*document)
                for document in zip(*(x.split(LENGTHS, 1) for x in leaves), strict=True)
            ],
            1,
        )

    def padded() -> Tensor:
        rows = (
            torch.nn.utils.rnn.pad_sequence(x[0].split(LENGTHS), batch_first=True) for x in leaves
        )
        return upstream(*rows)

    return {
        "upstream one": lambda: upstream(*leaves),
        "ours one": lambda: gated_delta_rule(*leaves, one),
        "upstream loop": loop,
        "ours pack": lambda: gated_delta_rule(*leaves, pack),
        "upstream padded": padded,
    }


def conv_candidates(channels: int) -> dict[str, Run]:
    """Forward passes by name. As in the layer, upstream gets the channels transposed and gives
    them back transposed.
    """
    x = torch.randn(1, TOKENS, channels).requires_grad_()
    weight = torch.randn(channels, 4).requires_grad_()
    one, pack = PackedSequence.from_lengths([TOKENS]), PackedSequence.from_lengths(LENGTHS)

    def upstream(x: Tensor) -> Tensor:
        out: Tensor = causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)
        return out

    return {
        "upstream one": lambda: upstream(x),
        "ours one": lambda: causal_conv1d(x, weight, one),
        "upstream loop": lambda: torch.cat(
            [upstream(document) for document in x.split(LENGTHS, 1)], 1
        ),
        "ours pack": lambda: causal_conv1d(x, weight, pack),
    }


def measure(
    what: str, candidates: dict[str, Run], rounds: int, progress: Progress
) -> dict[str, float]:
    """Return the median forward, and forward + backward ("f+b"), of each candidate.

    In each round every candidate runs once, and those that take less than `SHORT` seconds three
    times in turns.
    """
    runs = {name: _forward(run) for name, run in candidates.items()}
    runs |= {f"{name} f+b": _both(run) for name, run in candidates.items()}
    times: dict[str, list[float]] = {name: [_seconds(run)] for name, run in runs.items()}
    short = [name for name in runs if times[name][0] < SHORT]
    turns = rounds * [*runs, *short, *short]
    for name in progress.track(turns, description=what):
        times[name].append(_seconds(runs[name]))
    # the first warms up
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def saved_bytes(run: Run) -> int:
    """Bytes that the forward pass keeps for the backward pass, each storage once."""
    storages: dict[int, int] = {}
    kept = []

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        # so that no address is used twice
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(storages.values())


def table(
    title: str,
    ratios: Iterable[Ratio],
    times: dict[str, float],
    saved: dict[str, int] | None = None,
) -> Table:
    """Lay the ratios out, target beside measured."""
    out = Table("ratio", "seconds", "target", "measured", title=title, title_justify="left")
    for ratio in ratios:
        over, under = times[ratio.over], times[ratio.under]
        sign = "<=" if ratio.at_most else ">="
        out.add_row(
            ratio.what,
            f"{over:.3f} / {under:.3f}",
            f"{sign} {ratio.target:g}",
            _verdict(over / under, ratio),
        )
    if saved:
        over, under = saved["ours one"], saved["upstream one"]
        ratio = Ratio("saved for backward: ours / upstream", "", "", 0.125, at_most=True)
        size = f"{over / 2**20:.0f} / {under / 2**20:.0f} MiB"
        out.add_row(ratio.what, size, "<= 0.125", _verdict(over / under, ratio))
    return out


def _verdict(measured: float, ratio: Ratio) -> str:
    met = measured <= ratio.target if ratio.at_most else measured >= ratio.target
    return f"[{'green' if met else 'red'}]{measured:.2f}{'' if met else ' MISSED'}[/]"


def _forward(run: Run) -> Callable[[], None]:
    def timed() -> None:
        with torch.no_grad():
            run()

    return timed


def _both(run: Run) -> Callable[[], None]:
    gradients: list[Tensor] = []

    def timed() -> None:
        out = run()
        if not gradients:
            gradients.append(torch.randn_like(out))
        out.backward(gradients[0])

    return timed


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
