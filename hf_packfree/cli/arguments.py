"""The options and examples of every command."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from hf_packfree._version import __version__
from hf_packfree.cli.text import width, wrapped

FINE = 0
LEAK = 1
USAGE = 2
BROKEN = 3
STOPPED = 130
UNREAD = 141
EXIT_CODES = f"""exit codes:
  {FINE}  fine
  {LEAK}  documents influence each other, the demo's check failed, or a checkpoint's head is not \
what its configuration promises
  {USAGE}  wrong usage, or a model or input that is not supported
  {BROKEN}  something installed is broken, too old or missing, or a step that bench compares (any \
but unpatched packed) did not run; or an unexpected error: --verbose shows where
  {STOPPED}  stopped with Ctrl-C
  {UNREAD}  the reader of the answer closed the pipe
"""
EXAMPLES = {
    "": """packfree doctor
packfree verify Qwen/Qwen3.5-2B
packfree bench --lengths my.jsonl""",
    "doctor": """packfree doctor
packfree doctor --json                       # for an issue
packfree doctor --model Qwen/Qwen3.5-2B      # what would run for it""",
    "verify": """packfree verify qwen3_5                      # a tiny random model
packfree verify Qwen/Qwen3.5-2B --dtype bfloat16
packfree verify out/checkpoint-300           # a checkpoint, or PEFT's adapters
packfree verify my-checkpoint --quiet && python train.py""",
    "models": """packfree models
packfree models --verbose                    # the classes that are swapped""",
    "bench": """packfree bench                               # a small model, here
packfree bench Qwen/Qwen3.5-2B --lengths my.jsonl
packfree bench 2b --longest 2048 --png bench.png
packfree bench --tree 512,64x16              # a prompt of 512 tokens, 16 answers of 64""",
    "mtp": """packfree mtp my-checkpoint                   # is the head there?
packfree mtp my-checkpoint --copy-from Qwen/Qwen3.5-2B --to with-head
packfree mtp with-head --accept --text prompts.txt""",
    "demo": """packfree demo
packfree demo --steps 20 --out /tmp/demo --json""",
}
"""{command: example lines}; the first entry is for `packfree --help`."""
MOST_TOKENS = 2**24
"""The largest batch, padding included: no machine has memory for more."""
MOST_VERIFIED = 2**20
"""The longest row that `verify_packing` measures."""

DTYPES = ("float32", "float64", "bfloat16", "float16")


class Parser(argparse.ArgumentParser):
    """argparse's parser, which also proposes the nearest option for an unknown one."""

    def __init__(self, **options: Any) -> None:
        self.flags: list[str] = []
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument, and remember its name."""
        self.flags += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def refuse(self, what: str, found: str, known: Iterable[str]) -> NoReturn:
        """Exit with a usage error for something unknown; it proposes the nearest of `known`, if one
        is near.
        """
        near = difflib.get_close_matches(found, list(known), n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        self.error(f"found {what} {found!r}, which is not known{meant}")

    def error(self, message: str) -> NoReturn:
        """Exit with a usage error; its lines are broken between words."""
        self.print_usage(sys.stderr)
        self.exit(USAGE, wrapped(f"{self.prog}: error: {message}", stream=sys.stderr) + "\n")


def parser() -> Parser:
    """Return the parser; the parsed namespace has `command`, that command's options, and `parser`.

    `shtab` calls this too, for a shell's completion.
    """
    packfree = Parser(
        prog="packfree",
        description=wrapped(
            "Packed and padding-free training of linear-attention hybrids and plain decoders, "
            "exact and fast."
        ),
        epilog=f"{_examples('')}\n\n{_filled(EXIT_CODES)}",
    )
    packfree.add_argument("--version", action="version", version=f"packfree {__version__}")
    commands = packfree.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    _doctor_options(
        _command(
            commands, "doctor", "what is installed, what works, what would run, what to install"
        )
    )
    _verify_options(
        _command(commands, "verify", "measure whether packed documents influence each other")
    )
    _command(commands, "models", "the model families that are supported")
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


def _command(commands: Any, name: str, text: str) -> Parser:
    sentence = f"{text[0].upper()}{text[1:]}."
    epilog = f"{_examples(name)}\n\nexit codes: packfree --help"
    parser: Parser = commands.add_parser(name, help=text, description=sentence, epilog=epilog)
    parser.set_defaults(command=name, parser=parser)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the last sentence alone")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print more: logs, and where an error is from"
    )
    return parser


def _examples(command: str) -> str:
    return "examples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[command].splitlines())


def _filled(text: str) -> str:
    """Break lines between words, except in a pipe, where lines may have any length."""
    return (
        text if width() is None else "\n".join(wrapped(line, " " * 6) for line in text.splitlines())
    )


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="a config or checkpoint folder, a folder of PEFT's adapters, a hub id or a built-in "
        "name: what would run for it",
    )


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a config or checkpoint folder, a folder of PEFT's adapters, a hub id, or a built-in "
        "name: see packfree models",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's own")
    parser.add_argument("--device", help="default: a CUDA GPU if there is one, else cpu")
    parser.add_argument("--lengths", type=_lengths, help="tokens of each document, such as 5,64,1")
    parser.add_argument(
        "--tree",
        action="store_true",
        help="the first of the lengths is a prompt that the others share",
    )
    parser.add_argument(
        "--no-gradients",
        action="store_true",
        help="compare outputs alone: faster, and half the memory",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )


def _bench_options(parser: argparse.ArgumentParser) -> None:
    model = (
        "a shape (small, small-llama, small-gpt-oss, small-granite4h, small-lfm2, small-kimi, 2b; "
        "with images: small-vl, small-qwen3-vl, 2b-vl), a config or checkpoint "
        "folder, a folder of PEFT's adapters, a hub id, or a built-in name (default: small)"
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
        "--tree",
        help="what samples that share their beginnings save: a prompt's length and its answers', "
        "such as 512,64x16, or a JSON file of lengths and parents, in place of documents",
    )
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


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="packfree-demo", help="folder to write (default: packfree-demo)"
    )
    parser.add_argument(
        "--steps", type=_whole(1), default=40, help="optimizer steps of each training (default: 40)"
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
            "more, such as 5,64,1"
        )
    if sum(lengths) > MOST_VERIFIED:
        raise argparse.ArgumentTypeError(
            f"found {sum(lengths)} tokens; wanted at most {MOST_VERIFIED} in all; give fewer"
        )
    return lengths


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type for whole numbers within these bounds, both included."""
    wanted = f"a whole number of at least {least}" + (
        "" if most is None else f" and at most {most}"
    )

    def read(text: str) -> int:
        number = int(text) if text.isdecimal() else -1
        if number < least or most is not None and number > most:
            raise argparse.ArgumentTypeError(f"found {text!r}; wanted {wanted}")
        return number

    return read


# the largest seed of numpy, which transformers seeds too
_seed = _whole(0, 2**32 - 1)
# torch crashes at far more
_threads = _whole(1, os.cpu_count() or 1)
