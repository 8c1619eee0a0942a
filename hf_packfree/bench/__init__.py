"""What padding costs and packing saves, measured on the user's own machine, model and lengths."""

from hf_packfree.bench.documents import DISTRIBUTIONS, Sample, choose_lengths
from hf_packfree.bench.report import BenchOptions, BenchReport, Candidate, Progress
from hf_packfree.bench.run import run_bench
from hf_packfree.bench.shapes import PRESETS
from hf_packfree.bench.tree import TreeOptions, TreeReport, read_tree, run_tree_bench

__all__ = [
    "DISTRIBUTIONS",
    "PRESETS",
    "BenchOptions",
    "BenchReport",
    "Candidate",
    "Progress",
    "Sample",
    "TreeOptions",
    "TreeReport",
    "choose_lengths",
    "read_tree",
    "run_bench",
    "run_tree_bench",
]
