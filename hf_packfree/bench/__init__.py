"""The cost of padding and the gain from packing, measured on the user's own machine, model and
lengths.
"""

from hf_packfree.bench.candidates import BenchOptions, BenchReport, Candidate, Progress
from hf_packfree.bench.lengths import DISTRIBUTIONS, Sample, choose_lengths
from hf_packfree.bench.shapes import PRESETS
from hf_packfree.bench.shared_prefixes import TreeOptions, TreeReport, read_tree, run_tree_bench
from hf_packfree.bench.turns import run_bench

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
