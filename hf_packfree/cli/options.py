"""The options of every command, and whether the files that they name can be written."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_packfree._version import __version__
from hf_packfree.errors import UnsupportedInput

FINE, LEAK, USAGE, BROKEN, STOPPED, UNREAD = 0, 1, 2, 3, 130, 141
EXIT_CODES = f"""exit codes:
  {FINE}  fine
  {LEAK}  documents influence each other, the demo's check failed, or a checkpoint's head is not
     what its configuration promises
  {USAGE}  wrong usage, or a model or input that is not supported
  {BROKEN}  something installed is broken, too old or missing, or a step that bench compares (any
     but unpatched packed) did not run; or an unexpected error: PACKFREE_TRACEBACK=1 shows where
  {STOPPED}  stopped with Ctrl-C
  {UNREAD}  the reader of the answer closed the pipe
"""
MOST_TOKENS = 2**24
"""The largest batch, padding included: no machine has memory for more."""

DTYPES = ("float32", "float64", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    """Return the parser; what it returns has `command` and that command's options."""
    packfree = argparse.ArgumentParser(
        prog="packfree",
        description="Packed and padding-free training of hybrid linear-attention models, exact and "
        "fast.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    packfree.add_argument("--version", action="version", version=f"packfree {__version__}")
    commands = packfree.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _doctor_options(
        _command(
            commands, "doctor", "what is installed, what works, what would run, what to install"
        )
    )
    _verify_options(
        _command(commands, "verify", "measure whether packed documents influence each other")
    )
    _json_option(_command(commands, "models", "the model families that are supported"))
    _bench_options(
        _command(
            commands, "bench", "time padded and packed training steps here, unpatched and patched"
        )
    )
    _mtp_options(
        _command(
            commands,
            "mtp",
            "a checkpoint's multi-token prediction head: is it there, put it back, try it",
        )
    )
    _demo_options(_command(commands, "demo", "train padded and packed on real text, compare, draw"))
    return packfree


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    sentence = f"{text[0].upper()}{text[1:]}."
    kind = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=sentence, epilog=EXIT_CODES, formatter_class=kind
    )
    parser.set_defaults(command=name)
    return parser


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="a config or checkpoint folder, a hub id or a built-in name: what would run for it",
    )
    _json_option(parser)


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a config or checkpoint folder, a hub id, or a built-in name: see packfree models",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's own")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--lengths", type=_lengths, help="tokens of each document, such as 5,64,1")
    parser.add_argument(
        "--no-gradients",
        action="store_true",
        help="compare outputs alone: faster, and half the memory",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )
    _json_option(parser)


def _bench_options(parser: argparse.ArgumentParser) -> None:
    model = (
        "a shape (small, 2b; with images: small-vl, small-qwen3-vl, 2b-vl), a config or "
        "checkpoint folder, a hub id, or a built-in name (default: small)"
    )
    parser.add_argument("model", nargs="?", default="small", help=model)
    lengths = (
        "instructions, uniform or equal, or a JSONL file with a length or input_ids per line "
        "(default: instructions)"
    )
    parser.add_argument("--lengths", default="instructions", help=lengths)
    documents, longest = _whole(2, MOST_TOKENS), _whole(1, MOST_TOKENS)
    count = (
        "documents of the batch, 2 or more: evenly spaced quantiles, of which a shorter file "
        "repeats some (default: 8)"
    )
    parser.add_argument("--documents", type=documents, default=8, help=count)
    most = (
        "tokens of the longest document (default: 512; a file's documents are cut only if this is "
        "given)"
    )
    parser.add_argument("--longest", type=longest, help=most)
    parser.add_argument(
        "--rounds", type=_whole(1), default=5, help="timed steps of each candidate (default: 5)"
    )
    parser.add_argument("--device", help="default: a CUDA GPU if there is one, else cpu")
    dtype = "default: the checkpoint's own; a shape's is bfloat16 on a GPU, float32 elsewhere"
    parser.add_argument("--dtype", choices=DTYPES, help=dtype)
    parser.add_argument("--threads", type=_threads, help="CPU threads (default: torch's choice)")
    parser.add_argument("--seed", type=_seed, default=0, help="of weights and tokens (default: 0)")
    parser.add_argument(
        "--png", type=Path, help="draw a picture into this file, which needs matplotlib"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )
    _json_option(parser)


def _mtp_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a checkpoint folder or hub id")
    parser.add_argument(
        "--copy-from", metavar="BASE", help="a checkpoint that has the head, to copy it from"
    )
    parser.add_argument("--to", metavar="OUT", help="the new folder that --copy-from writes")
    parser.add_argument(
        "--accept",
        action="store_true",
        help="generate, and count the head's drafts that the model confirms",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="prompts for --accept, one per line"
    )
    parser.add_argument(
        "--new-tokens",
        type=_whole(2),
        default=64,
        help="tokens to generate after each prompt (default: 64)",
    )
    parser.add_argument("--depth", type=_whole(1), default=3, help="drafts per round (default: 3)")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    _json_option(parser)


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="packfree-demo", help="folder to write (default: packfree-demo)"
    )
    parser.add_argument(
        "--steps", type=_whole(1), default=60, help="optimizer steps of each training (default: 60)"
    )
    parser.add_argument(
        "--batch-size", type=_whole(2), default=8, help="documents per step, 2 or more (default: 8)"
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, help="of weights, documents and their order (default: 0)"
    )
    parser.add_argument("--threads", type=_threads, default=1, help="CPU threads (default: 1)")
    parser.add_argument(
        "--no-plots", action="store_true", help="draw no picture, which needs matplotlib"
    )


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if len(lengths) < 2 or min(lengths) < 1 or max(lengths) < 2:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; wanted two or more lengths, each of at least one token and one of "
            f"more, such as 5,64,1"
        )
    if sum(lengths) > MOST_TOKENS:
        raise argparse.ArgumentTypeError(
            f"found {sum(lengths)} tokens; wanted at most {MOST_TOKENS} in all; give fewer"
        )
    return lengths


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return what reads a whole number within these bounds, both included."""
    wanted = f"a whole number of at least {least}" + (
        "" if most is None else f" and at most {most}"
    )

    def read(text: str) -> int:
        number = int(text) if text.isdecimal() else -1
        if number < least or most is not None and number > most:
            raise argparse.ArgumentTypeError(f"found {text!r}; wanted {wanted}")
        return number

    return read


# what numpy takes, which transformers seeds too
_seed = _whole(0, 2**32 - 1)
# torch crashes at far more
_threads = _whole(1, os.cpu_count() or 1)


def check_picture(path: Path) -> None:
    """Make sure that matplotlib can write a picture there.

    Raises:
        UnsupportedInput: it cannot.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    faults = {
        "a folder": os.path.isdir(path),
        "whose ending names no kind of picture": path.suffix[1:].lower() not in kinds,
        "in a folder that does not exist": not os.path.isdir(path.parent),
        "which cannot be written": not os.access(
            path if os.path.exists(path) else path.parent, os.W_OK
        ),
    }
    wanted = (
        f"a file in a folder that exists, which ends in one of "
        f"{', '.join(f'.{kind}' for kind in sorted(kinds))}"
    )
    _refuse("--png", str(path), faults, wanted)


def check_folder(text: str, option: str = "--out") -> Path:
    """Return the path of a folder that exists or will be made.

    Args:
        text: what was given.
        option: for what.

    Raises:
        UnsupportedInput: neither is possible.
    """
    path = Path(text)
    nearest = next((place for place in (path, *path.parents) if os.path.exists(place)), Path())
    faults = {
        "which names nothing": not text,
        "a file": os.path.isfile(path),
        f"below {str(nearest)!r}, which is no folder": not os.path.isdir(nearest),
        "which cannot be written": not os.access(nearest, os.W_OK),
    }
    _refuse(option, text, faults, "a folder that can be written or made")
    return path


def _refuse(option: str, text: str, faults: dict[str, bool], wanted: str) -> None:
    """Raise for the first fault that holds."""
    for fault, holds in faults.items():
        if holds:
            raise UnsupportedInput(
                f"found {option} {text!r}, {fault}; wanted {wanted}; name another one"
            )
