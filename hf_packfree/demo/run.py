"""The demo from text to verdict; each training runs in a process of its own, so that its peak memory is its own."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from hf_packfree.demo.report import Corpus, DemoError, DemoOptions, DemoReport, Progress, Stage, Training
from hf_packfree.errors import LeakDetected

TITLES = {
    "padded": "padded, stock",
    "packed": "packed, hf_packfree",
    "unpatched": "packed, stock (leaks)",
}
PACKAGES = ("torch", "transformers", "accelerate", "tokenizers")


def run_demo(options: DemoOptions, progress: Progress = lambda stage: None) -> DemoReport:
    """Train padded, packed and packed without patches on the same documents, compare, draw, and write report.json.

    Args:
        options: see `DemoOptions`.
        progress: called with every change of a `Stage`.

    Returns:
        The report; `failures()` is empty when packed training equals padded training.

    Raises:
        DemoError: a training process broke off; its output is in the folder's logs.
        BlindMeasurement: the stock model did not leak, so nothing was shown.
        OSError: the folder cannot be written.
    """
    began = time.perf_counter()
    (options.out / "model").mkdir(parents=True, exist_ok=True)
    corpus, parameters, first = _prepare(options, progress)
    verification, leaks = _verify(options, first, progress)
    padded, packed, unpatched = (_train(name, options, progress) for name in TITLES)
    report = DemoReport(options, _versions(), corpus, parameters, verification, leaks, padded, packed, unpatched)
    files = _draw(report, progress) if options.plots else []
    report = replace(report, files=(*files, "report.json"), seconds=time.perf_counter() - began)
    (options.out / "report.json").write_text(json.dumps(_finite(report.as_dict()), indent=1) + "\n")
    return report


def _prepare(options: DemoOptions, progress: Progress) -> tuple[Corpus, int, list[int]]:
    """Write the documents, the tokenizer and the model; return the corpus, the model's size and the first lengths."""
    progress(Stage("text, tokenizer, model", 0, 1))
    from hf_packfree.demo.model import build_model
    from hf_packfree.demo.text import SOURCE, choose_documents, passages, train_tokenizer

    texts = passages()
    tokenizer = train_tokenizer(texts)
    documents = choose_documents(tokenizer, texts, options.steps * options.batch_size, options.seed)
    model = build_model(tokenizer, options.seed)
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")
    (options.out / "documents.json").write_text(json.dumps(documents))
    lengths = [len(ids) for ids in documents]
    shape = (min(lengths), round(statistics.median(lengths)), max(lengths))
    corpus = Corpus(SOURCE, len(lengths), sum(lengths), len(tokenizer), *shape)
    progress(Stage("text, tokenizer, model", 1, 1, f"{corpus.documents} documents, {corpus.tokens} tokens"))
    return corpus, sum(p.numel() for p in model.parameters()), lengths[: options.batch_size]


def _verify(options: DemoOptions, lengths: list[int], progress: Progress) -> tuple[dict[str, Any], tuple[str, ...]]:
    progress(Stage("leak per document", 0, 1))
    import torch

    from hf_packfree.verify import verify_packing

    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leaks: list[str] = []
    try:
        report: Any = verify_packing(options.out / "model", lengths=lengths, seed=options.seed, device=device)
    except LeakDetected as leak:
        report = leak.report
        leaks = report.failures()
    finally:
        torch.set_num_threads(threads)
    found = f"stock {report.stock.logits:.0e}, patched {report.patched.logits:.0e}" if report.stock else ""
    progress(Stage("leak per document", 1, 1, found))
    return report.as_dict(), tuple(leaks)


def _train(name: str, options: DemoOptions, progress: Progress) -> Training:
    title, total = TITLES[name], options.steps
    progress(Stage(title, 0, total, "loading"))
    log = options.out / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    records: list[dict[str, Any]] = []
    with log.open("w") as errors, _start(name, options, errors) as process:
        try:
            for line in process.stdout or ():
                if line.startswith("{"):
                    records.append(json.loads(line))
                    progress(Stage(title, len(records), total, f"loss {records[-1]['loss']:.3f}"))
        except BaseException:
            process.kill()
            raise
    if process.returncode or len(records) != total:
        raise DemoError(_broken(title, process.returncode, len(records), total, log))
    return _training(name, records)


def _start(name: str, options: DemoOptions, errors: IO[str]) -> subprocess.Popen[str]:
    numbers = {"steps": options.steps, "batch-size": options.batch_size, "seed": options.seed, "threads": options.threads}
    flags = [f"--{flag}={number}" for flag, number in numbers.items()]
    command = [sys.executable, "-m", "hf_packfree.demo.train", name, str(options.out), *flags]
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "OMP_NUM_THREADS": str(options.threads),
        "CUDA_VISIBLE_DEVICES": one_gpu,
    }
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)


def _broken(title: str, code: int, done: int, total: int, log: Path) -> str:
    last = (log.read_text().strip().splitlines() or ["no output"])[-1]
    return (
        f"found the training '{title}' ended with code {code} after {done} of {total} steps ({last.strip()}); wanted all of "
        f"them; read {log}, and run packfree doctor"
    )


def _training(name: str, records: list[dict[str, Any]]) -> Training:
    timed = records[1:] or records

    def column(key: str) -> tuple[Any, ...]:
        return tuple(record[key] for record in records)

    return Training(
        name=name,
        title=TITLES[name],
        losses=column("loss"),
        gradient_norms=column("gradient_norm"),
        documents=column("documents"),
        tokens=column("tokens"),
        slots=column("slots"),
        targets=column("targets"),
        fingerprints=column("fingerprint"),
        seconds=column("seconds"),
        tokens_per_second=sum(record["tokens"] for record in timed) / sum(record["seconds"] for record in timed),
        peak_memory_mib=records[-1]["peak_memory_mib"],
        device=records[-1]["device"],
        packing=records[-1]["packing"],
    )


def _draw(report: DemoReport, progress: Progress) -> list[str]:
    progress(Stage("pictures", 0, 1))
    from hf_packfree.demo.plots import draw

    files = [path.name for path in draw(report, report.options.out)]
    progress(Stage("pictures", 1, 1, ", ".join(files)))
    return files


def _versions() -> dict[str, str | None]:
    from hf_packfree._version import __version__
    from hf_packfree.ops.backend import installed

    found = {package: installed(package) for package in PACKAGES}
    return {"python": platform.python_version(), **found, "hf_packfree": __version__}


def _finite(data: Any) -> Any:
    """Put None in the place of NaN and infinity, which JSON cannot hold."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
