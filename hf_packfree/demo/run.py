"""The demo from text to verdict. Heavy modules are imported where they are used, so that the
command shows progress at once.
"""

from __future__ import annotations

import json
import time
from copy import deepcopy
from dataclasses import replace
from typing import Any

from hf_packfree.demo.results import LEAKING, PACKED, PADDED, DemoOptions, DemoReport, Progress
from hf_packfree.errors import LeakDetected


def run_demo(
    options: DemoOptions, progress: Progress = lambda stage, done, total, note: None
) -> DemoReport:
    """Train padded, packed and packed without patches on the same documents, compare, draw, and
    write report.json.

    Returns:
        The report; its `failures()` are empty when packed training equals padded training.

    Raises:
        BlindMeasurement: the unpatched model did not leak, so nothing was shown.
        OSError: the folder cannot be written.
    """
    began = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    progress("text, tokenizer, model", 0, 1, "")
    from hf_packfree.bench.measure import threads

    with threads(options.threads):
        report = _measure(options, progress)
    if options.plots:
        from hf_packfree.demo.plot import draw

        progress("picture", 0, 1, "")
        draw(report, options.out / "demo.png")
        progress("picture", 1, 1, "demo.png")
    files = ("demo.png", "report.json") if options.plots else ("report.json",)
    report = replace(report, files=files, seconds=time.perf_counter() - began)
    (options.out / "report.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    return report


def _measure(options: DemoOptions, progress: Progress) -> DemoReport:
    import torch

    from hf_packfree.bench.measure import name_of
    from hf_packfree.demo.harm import continuations, influence
    from hf_packfree.demo.train import (
        build_model,
        choose_documents,
        passages,
        train,
        train_tokenizer,
    )
    from hf_packfree.patching import apply_patches, patch_report, remove_patches

    texts = passages()
    tokenizer = train_tokenizer(texts)
    documents = choose_documents(tokenizer, texts, options.steps * options.batch_size, options.seed)
    lengths = tuple(map(len, documents))
    model = build_model(tokenizer, options.seed)
    progress("text, tokenizer, model", 1, 1, f"{len(lengths)} documents, {sum(lengths)} tokens")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patched = apply_patches(deepcopy(model).to(device))
    found = _verified(patched, lengths[: options.batch_size], options.seed, progress)

    names = (PADDED, LEAKING, PACKED)
    trained = {name: train(name, model, tokenizer, documents, options, progress) for name in names}
    (padded, _), (unpatched, _), (packed, mended) = trained.values()

    progress("what the leak does", 0, 1, "")
    mended.eval()
    plain = remove_patches(deepcopy(mended))
    # enough for a map
    batch = documents[: min(options.batch_size, 8)]
    others = documents[-len(batch) :]
    leaking, exact = influence(plain, batch, others), influence(mended, batch, others)
    written = continuations(plain, mended, tokenizer, documents)
    progress(
        "what the leak does", 1, 1, f"influence {leaking.worst:.0e}, patched {exact.worst:.0e}"
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    versions = patch_report(patched).versions
    return DemoReport(
        options,
        versions,
        name_of(device),
        lengths,
        parameters,
        found,
        padded,
        packed,
        unpatched,
        leaking,
        exact,
        written,
    )


def _verified(patched: Any, lengths: tuple[int, ...], seed: int, progress: Progress) -> Any:
    """Return the report on a patched model, also that of a leak."""
    from hf_packfree.verify import verify_packing

    progress("leak per document", 0, 1, "")
    try:
        found: Any = verify_packing(patched, lengths=lengths, seed=seed)
    except LeakDetected as leak:
        found = leak.report
    note = (
        f"unpatched {found.unpatched.logits:.0e}, patched {found.patched.logits:.0e}"
        if found.unpatched
        else ""
    )
    progress("leak per document", 1, 1, note)
    return found
