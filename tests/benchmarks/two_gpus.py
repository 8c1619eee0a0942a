"""What two GPUs of one host have to say, part after part under a limit of time: FSDP2, context
parallelism, gradients, curves, the Trainer.

    python -m tests.benchmarks.two_gpus --out DIR [--seconds 480] [--parts NAME ...]
    python -m tests.benchmarks.two_gpus --out DIR --parts kernels       # compile; on one GPU, too
    python -m tests.benchmarks.two_gpus --keep DIR                      # into tests/benchmarks/results/parallel
    ... --device cpu --tiny                                             # a trial of the script itself

Every part is a torchrun of its own with a limit of its own; rows are written as they come, and
DIR/two_gpus.jsonl says how each part ended. A part in which a row failed goes on behind that row.
Keep TILELANG_CACHE_DIR and TRITON_CACHE_DIR: what "kernels" has compiled is not compiled again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.report import RESULTS, ROOT


class Part(NamedTuple):
    """One torchrun: which module with which arguments, for how many seconds at most."""

    name: str
    module: str
    arguments: tuple[str, ...]
    seconds: int
    ranks: int = 2
    resumes: bool = True


def _rows(name: str, only: str, seconds: int, *more: str) -> Part:
    return Part(name, "context_parallel", ("--only", only, *more), seconds)


MEASURED = r"(?!.*predicted)"
"""Of rows that are long, or were predicted before, there is no prediction."""
PARTS = (
    Part("kernels", "context_parallel_kernels", (), 200, ranks=4, resumes=False),
    Part("fsdp2", "fsdp2", ("--only", "^(?!.*wrapped:)"), 170),
    _rows("64k", "^(2b-64k-cp(?!.*predicted)|9b-64k-cp)", 150, "--ways", "state"),
    _rows(
        "128k-256k",
        f"^{MEASURED}(9b-128k-cp|2b-256k-cp.*8k)",
        160,
        *("--ways", "state", "--runs", "1"),
    ),
    Part("gradients", "context_parallel", ("--gradients", "--ways", "state"), 130, resumes=False),
    Part("curves", "context_parallel_curves", (), 200),
    Part("trainer", "context_parallel_trainer", (), 240),
    # FLA's exchanges compile kernels of their own
    _rows("fla", f"^{MEASURED}(2b|9b)-64k-cp2 8k.*fla", 240, "--ways", "fla"),
    _rows("kinds", f"^{MEASURED}2b-(64k-lora|64k-mtp|vl-44k)-cp", 120, "--ways", "state"),
    _rows(
        "256k-one-document", f"^{MEASURED}2b-256k-cp.*one", 180, "--ways", "state", "--runs", "1"
    ),
)
"""The important ones first."""
KEPT = {
    "context_parallel": "context-parallel-rows",
    "context_parallel_trainer": "trainer",
    "context_parallel_curves": "curves",
    "fsdp2": "fsdp2",
}
"""{file of the parts: what it is called among the results}."""
RESTARTS, LEAST = 3, 15


def run(part: Part, seconds: float, options: argparse.Namespace) -> str:
    """Run a part, again with --resume where it failed; return how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(part.ranks), "-m", f"tests.benchmarks.{part.module}"]
    command += ["--out", str(options.out), "--device", options.device, *part.arguments]
    command += ["--tiny"] * options.tiny
    deadline, end = time.monotonic() + seconds, ""
    for _ in range(RESTARTS):
        end = _ended(command + ["--resume"] * part.resumes, deadline - time.monotonic())
        if end in ("done", "out of time") or not part.resumes:
            break
    return end


def _ended(command: list[str], seconds: float) -> str:
    # NVLink multicast stays off on hosts that others share
    environment = {"NCCL_NVLS_ENABLE": "0", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(max(seconds, 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            # in which it ends its own processes
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return "out of time"
    return f"exit status {status}" if status else "done"


def keep(out: Path, target: Path) -> list[Path]:
    """Copy the rows under the date and the machine they were made on; skipped parts leave none."""
    # which brings torch along, whose import is not to be waited for before the first part
    from tests.benchmarks.timing import read_lines

    found = []
    for name, called in KEPT.items():
        lines = read_lines(out / f"{name}.jsonl")
        about = next((line for line in lines if line["workload"] == "machine"), None)
        if about is None or len(lines) < 2:
            continue
        gpu = about["machine"].lower().split(" 80gb")[0].replace(" ", "-")
        found.append(target / f"{about['date']}-{gpu}-x2-{called}.jsonl")
        target.mkdir(parents=True, exist_ok=True)
        found[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def main() -> None:
    """Run the chosen parts, or keep what an earlier call left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder of an earlier call")
    parser.add_argument("--seconds", type=float, default=480, help="for everything together")
    parser.add_argument("--parts", nargs="*", default=[part.name for part in PARTS])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.keep:
        print(*keep(options.keep, RESULTS / "parallel"), sep="\n")
        return
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    by_name = {part.name: part for part in PARTS}
    for part in map(by_name.__getitem__, options.parts):
        start, left = time.monotonic(), options.seconds - (time.monotonic() - began)
        end = run(part, min(part.seconds, left), options) if left > LEAST else "skipped"
        line = {"part": part.name, "end": end, "seconds": round(time.monotonic() - start, 1)}
        print(line, flush=True)
        with (options.out / "two_gpus.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
