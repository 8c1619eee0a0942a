"""The command `packfree`: parse, call, show. Heavy modules are imported by the command that needs
them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from hf_packfree.cli.arguments import BROKEN, FINE, LEAK, STOPPED, UNREAD, USAGE, Parser, parser
from hf_packfree.cli.commands import COMMANDS
from hf_packfree.cli.quiet import logged
from hf_packfree.cli.text import complain
from hf_packfree.errors import LeakDetected, PackFreeError, in_short

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one sentence on stderr.

    Args:
        argv: arguments without the program's name; those of the process if not given.
    """
    _open_what_is_closed()
    try:
        try:
            return _run(argv)
        finally:
            # flushed here, where the error of a closed pipe can still be caught
            sys.stdout.flush()
    except BrokenPipeError:
        # stdout becomes /dev/null, so that Python's flush at exit does not fail on the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def _open_what_is_closed() -> None:
    """Let stdout and stderr that the process was started without (`>&-`) take what is written."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def _run(argv: Sequence[str] | None) -> int:
    words, reader = list(sys.argv[1:] if argv is None else argv), parser()
    if not words:
        reader.print_help()
        return FINE
    _refuse_unknown(words, reader)
    options, left = reader.parse_known_args(words)
    if left:
        command: Parser = options.parser
        command.refuse("argument", left[0], command.flags)
    try:
        with logged(options.verbose):
            return COMMANDS[options.command](options)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        complain("stopped")
        return STOPPED
    except Exception as error:
        return _complain_of(error, options.verbose)


def _refuse_unknown(words: Sequence[str], reader: Parser) -> None:
    """Exit with a usage error if the first word is no command."""
    first = words[0]
    if first.startswith("-"):
        if first not in ("-h", *reader.flags):
            reader.refuse("option", first, reader.flags)
    elif first not in COMMANDS:
        reader.refuse("command", first, COMMANDS)


def _has_fla() -> bool:
    from hf_packfree.ops.backend import installed

    return installed("fla-core") is not None


def _complain_of(error: Exception, verbose: bool) -> int:
    """Say what went wrong, and return its exit code."""
    if isinstance(error, (PackFreeError, OSError)):
        complain(error)
        return LEAK if isinstance(error, LeakDetected) else USAGE
    if isinstance(error, ImportError):
        complain(f"{error}; packfree doctor says what is installed and what to install")
        return BROKEN
    # Triton's
    if "0 active drivers" in str(error) and _has_fla():
        complain(
            "found fla-core where there is no GPU, and transformers calls its kernels all the same "
            "for rows of one document; wanted a GPU, or none of these kernels; pip uninstall "
            "fla-core"
        )
        return BROKEN
    # unexpected errors too get a sentence, and never the exit code of a leak
    if verbose or os.environ.get("PACKFREE_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exc()
    complain(
        f"found {in_short(error)}, an unexpected error; --verbose or PACKFREE_TRACEBACK=1 shows "
        "where; please report it, with what packfree doctor --json says"
    )
    return BROKEN
