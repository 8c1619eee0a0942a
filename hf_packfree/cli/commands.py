"""One function per command: call the package, show the answer, return the exit code.

Modules that need rich are imported by the commands that use them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_packfree.cli import doctor as doctors
from hf_packfree.cli.arguments import BROKEN, FINE, LEAK, MOST_TOKENS
from hf_packfree.cli.paths import check_folder, check_picture
from hf_packfree.cli.text import as_json, say
from hf_packfree.errors import (
    LeakDetected,
    MissingHead,
    UnsupportedInput,
    UnsupportedModel,
    in_short,
)


def doctor(options: argparse.Namespace) -> int:
    """Show which packages are installed and which backends would run, even where rich, torch or
    transformers is missing.
    """
    from hf_packfree.cli.quiet import quiet_libraries
    from hf_packfree.doctor import diagnose

    with quiet_libraries(bars=False, quiet=not options.verbose):
        diagnosis = diagnose(options.model)
    _answer(options, diagnosis, doctors.diagnosis)
    return FINE if diagnosis.healthy else BROKEN


def _answer(
    options: argparse.Namespace, found: Any, show: Callable[[Any], None], end: str = ""
) -> None:
    """Write the findings in the form that the options ask for: as JSON, as their sentence with this
    `end`, or by `show`.
    """
    if options.json:
        as_json(found.as_dict())
    elif options.quiet:
        say(f"{found}{end}")
    else:
        show(found)


def verify(options: argparse.Namespace) -> int:
    """Measure one model and show the numbers, also those of a leak."""
    from hf_packfree.cli import show

    with show.spinner(f"measuring {options.model}", _silent(options)):
        report, code = _measure(options)
    if options.json:
        as_json(
            {
                **report.as_dict(),
                "failures": report.failures(),
                "sentence": show.sentence_of(report),
            }
        )
    elif options.quiet:
        show.judged(report)
    else:
        show.packing(report)
    return code


def _silent(options: argparse.Namespace) -> bool:
    """Whether no progress is shown on stderr."""
    return bool(options.json or options.quiet)


def _measure(options: argparse.Namespace) -> tuple[Any, int]:
    import torch

    from hf_packfree.cli.quiet import quiet_libraries
    from hf_packfree.verify import verify_packing

    given: dict[str, Any] = {"lengths": options.lengths} if options.lengths else {}
    if options.tree and options.lengths and len(options.lengths) < 3:
        raise UnsupportedInput(
            f"found --tree with {len(options.lengths)} lengths; wanted a prompt's and two answers' "
            "or more, since one sample cannot leak; give three lengths, such as 20,5,64"
        )
    dtype = getattr(torch, options.dtype) if options.dtype else None
    device = _device(options.device or _fastest())
    try:
        with quiet_libraries(quiet=not options.verbose):
            return verify_packing(
                options.model,
                gradients=not options.no_gradients,
                tree=options.tree,
                device=device,
                dtype=dtype,
                trust_remote_code=options.trust_remote_code,
                **given,
            ), FINE
    except LeakDetected as leak:
        if leak.report is None:
            raise
        return leak.report, LEAK


def _fastest() -> str:
    """Return the default of `--device`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device(text: str) -> Any:
    import torch

    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # of an absent backend torch lists all others behind the first sentence
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise UnsupportedInput(
            f"found device {text!r}, which is not usable here ({reason}); wanted cpu, cuda or mps; "
            "packfree doctor lists them"
        ) from error
    if device.type == "meta":
        raise UnsupportedInput(
            "found device 'meta', which holds no numbers; wanted cpu, cuda or mps; name one of them"
        )
    return device


def models(options: argparse.Namespace) -> int:
    """Show the supported and the refused families; with --verbose, the classes that are swapped in
    families of the installed transformers.
    """
    from hf_packfree.doctor.families import SERVED
    from hf_packfree.refused_families import by_reason

    rows = [row.as_dict() for row in SERVED]
    swapped: tuple[Any, ...] = ()
    if options.verbose:
        from hf_packfree.doctor import supported_models

        swapped = supported_models()
        parts = {row.name: row.as_dict() for row in swapped}
        rows = [row | parts.get(row["name"], {}) for row in rows]
    if options.json:
        as_json(rows)
    elif options.quiet:
        say("\n".join(row.name for row in SERVED))
    else:
        doctors.swapped(swapped)
        doctors.served(SERVED)
        doctors.refused(by_reason())
    return FINE


def bench(options: argparse.Namespace) -> int:
    """Time padded and packed steps, and show how they compare."""
    from hf_packfree.bench import BenchOptions, choose_lengths, run_bench
    from hf_packfree.cli import show

    if options.tree is not None:
        return _bench_tree(options)
    if options.png is not None and find_spec("matplotlib") is None:
        raise ImportError("found no matplotlib; wanted it for --png; pip install matplotlib")
    if options.png is not None:
        check_picture(options.png)
    sample = choose_lengths(options.lengths, options.documents, options.longest)
    lengths = _affordable(sample.lengths)
    report = _timed(options, run_bench, BenchOptions, lengths, origin=sample.origin, cut=sample.cut)
    drawn = None
    try:
        if options.png is not None:
            from hf_packfree.bench.bars import draw

            draw(report, options.png)
            drawn = options.png
    finally:
        # a measurement that took minutes is shown even if its picture fails
        _answer(options, report, partial(show.bench, picture=drawn), ".")
    return FINE if report.complete else BROKEN


def _bench_tree(options: argparse.Namespace) -> int:
    from hf_packfree.bench import TreeOptions, read_tree, run_tree_bench
    from hf_packfree.cli import show

    others = ("lengths", "documents", "longest", "png")
    changed = [one for one in others if getattr(options, one) != options.parser.get_default(one)]
    if changed:
        raise UnsupportedInput(
            f"found --{changed[0]} with --tree; wanted one of them: the tree says all lengths, and "
            "has no picture; leave one out"
        )
    tree = read_tree(options.tree)
    samples = tuple(tree.before[leaf] + tree.lengths[leaf] for leaf in tree.leaves)
    _affordable(samples, "fewer or shorter segments")
    report = _timed(options, run_tree_bench, TreeOptions, tree.lengths, parents=tree.parents)
    _answer(options, report, show.tree_bench, ".")
    return FINE if report.complete else BROKEN


def _timed(
    options: argparse.Namespace,
    run: Callable[..., Any],
    kind: Callable[..., Any],
    lengths: tuple[int, ...],
    **more: Any,
) -> Any:
    """Run a benchmark with options of class `kind`, of which `more` are its own, and return its
    report.
    """
    from hf_packfree.cli import show
    from hf_packfree.cli.quiet import quiet_libraries

    names = ("rounds", "dtype", "threads", "seed", "trust_remote_code")
    given = {name: getattr(options, name) for name in names} | more
    device = str(_device(options.device or _fastest()))
    wanted = kind(options.model, lengths, device=device, **given)
    with show.bars(_silent(options)) as move, quiet_libraries(quiet=not options.verbose):
        return run(wanted, lambda name, done, total: move("training steps", done, total, name))


def _affordable(
    lengths: tuple[int, ...], less: str = "fewer --documents or a smaller --longest"
) -> tuple[int, ...]:
    tokens = len(lengths) * max(lengths)
    if tokens > MOST_TOKENS:
        raise UnsupportedInput(
            f"found {len(lengths):,} documents of up to {max(lengths):,} tokens, padded "
            f"{tokens:,}; wanted at most "
            f"{MOST_TOKENS:,}; give {less}"
        )
    return lengths


def mtp(options: argparse.Namespace) -> int:
    """Report on a checkpoint's head, copy the checkpoint with the head of another, or count the
    drafts that are accepted.
    """
    from hf_packfree.cli import show
    from hf_packfree.cli.quiet import quiet_libraries
    from hf_packfree.mtp.files import copy_head, examine

    if (options.copy_from is None) != (options.to is None) or options.accept != (
        options.text is not None
    ):
        raise UnsupportedInput(
            "found one of two options that belong together; wanted --copy-from with --to, and "
            "--accept with --text; give both"
        )
    if options.accept and options.to is not None:
        raise UnsupportedInput(
            "found --accept with --copy-from; wanted one of them; copy first, then try the new "
            "folder"
        )
    if options.accept:
        return _accept(options)
    with (
        show.spinner(f"reading {options.checkpoint}", _silent(options)),
        quiet_libraries(quiet=not options.verbose),
    ):
        if options.to is None:
            report = examine(options.checkpoint)
        else:
            report = copy_head(
                options.copy_from, options.checkpoint, check_folder(options.to, "--to")
            )
    _answer(options, report, lambda found: say(str(found)))
    return FINE if report.agrees else LEAK


def _accept(options: argparse.Namespace) -> int:
    import torch

    from hf_packfree.cli import show
    from hf_packfree.cli.quiet import quiet_libraries
    from hf_packfree.mtp.accept import accepted_drafts
    from hf_packfree.mtp.files import examine
    from hf_packfree.patching import apply_patches
    from hf_packfree.verify.model_source import build_model

    lines = _prompts(options.text)
    with (
        show.spinner(f"generating with {options.checkpoint}", _silent(options)),
        quiet_libraries(quiet=not options.verbose),
    ):
        # checked before all weights are read
        if not examine(options.checkpoint).tensors:
            raise MissingHead(
                f"found no tensor of a multi-token prediction head in {options.checkpoint}; wanted "
                "one to try; packfree mtp "
                f"{options.checkpoint} --copy-from BASE --to OUT puts the base model's there"
            )
        device = _device(options.device)
        model = apply_patches(build_model(options.checkpoint, device=device), mtp="keep").eval()
        tokenizer = _tokenizer(options.checkpoint)
        ids = [tokenizer(line)["input_ids"] for line in lines]
        prompts = [torch.tensor(one, dtype=torch.int64, device=device) for one in ids]
        found = accepted_drafts(model, prompts, new_tokens=options.new_tokens, depth=options.depth)
    _answer(options, found, lambda found: say(str(found)))
    return FINE


def _tokenizer(checkpoint: str) -> Any:
    """Return a checkpoint's tokenizer; code of the checkpoint is not run.

    Raises:
        UnsupportedModel: there is no such tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except Exception as error:
        # loaders raise whatever a damaged file makes them raise
        raise UnsupportedModel(
            f"found no tokenizer in {checkpoint!r} ({in_short(error)}); wanted transformers' own "
            "with the model, to read prompts; save it there"
        ) from error


def _prompts(path: Path) -> list[str]:
    """Return a file's lines that are not empty.

    Raises:
        UnsupportedInput: there is no such file, or it holds no text.
    """
    if not path.is_file():
        raise UnsupportedInput(
            f"found no file {str(path)!r}; wanted prompts, one in a line; check the name"
        )
    try:
        # not splitlines, which breaks inside a prompt, too: at U+2028, say
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        lines = [line for line in lines if line.strip()]
    except ValueError as error:
        raise UnsupportedInput(
            f"found {str(path)!r}, which is no text ({error}); wanted UTF-8; save it as that"
        ) from error
    if not lines:
        raise UnsupportedInput(
            f"found no line of text in {str(path)!r}; wanted prompts, one in a line; write some"
        )
    return lines


def demo(options: argparse.Namespace) -> int:
    """Train padded and packed, and show how they compare."""
    # one visible GPU, because the Trainer would use all
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[
        0
    ]
    from hf_packfree.cli import show
    from hf_packfree.cli.quiet import quiet_libraries
    from hf_packfree.demo import DemoOptions, run_demo

    out = check_folder(options.out)
    plots = not options.no_plots and find_spec("matplotlib") is not None
    wanted = DemoOptions(
        out, options.steps, options.batch_size, options.seed, options.threads, plots
    )
    with (
        show.bars(_silent(options)) as progress,
        quiet_libraries(bars=False, quiet=not options.verbose),
    ):
        report = run_demo(wanted, progress)
    if options.json:
        as_json(report.as_dict())
        return LEAK if report.failures() else FINE
    if not plots and not options.no_plots:
        say("No picture: matplotlib is absent; pip install matplotlib, --no-plots does without.")
    if options.quiet:
        say(str(report))
    else:
        show.demo(report)
    return LEAK if report.failures() else FINE


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "doctor": doctor,
    "verify": verify,
    "models": models,
    "bench": bench,
    "mtp": mtp,
    "demo": demo,
}
