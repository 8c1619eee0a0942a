"""What `costs` counts with, in seconds and bytes.

Written by `python -m tests.benchmarks.context_parallel_costs --write` from
tests/benchmarks/results/parallel/2026-11-24-nvidia-h200-x2-context-parallel.jsonl and
tests/benchmarks/results/2026-11-26-nvidia-h200.json.
"""

BYTES_PER_S = 2.991e11
EXCHANGE_S = 3.409e-05
ATTENTION_S_PER_PAIR_AND_CHANNEL = 3.208e-14
COPY_S_PER_BYTE = 3.2e-12
RULE_S_PER_TOKEN_AND_HEAD = 8.553e-09
