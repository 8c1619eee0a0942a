"""The command `packfree`: parse, call, show.  What is heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

from hf_packfree.cli.commands import COMMANDS
from hf_packfree.cli.options import BROKEN, LEAK, STOPPED, USAGE, parser
from hf_packfree.cli.show import complain
from hf_packfree.errors import LeakDetected, PackFreeError, in_short

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what goes wrong is one sentence on stderr.

    Args:
        argv: arguments without the program's name; those of the process if not given.
    """
    options = parser().parse_args(argv)
    try:
        return COMMANDS[options.command](options)
    except LeakDetected as leak:
        complain(leak)
        return LEAK
    except (PackFreeError, OSError) as error:
        complain(error)
        return USAGE
    except ImportError as error:
        complain(f"{error}; packfree doctor says what is installed and what to install")
        return BROKEN
    except Exception as error:  # a sentence for this one too, and never the exit code of a leak
        if os.environ.get("PACKFREE_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
        complain(f"found {in_short(error)}, which nobody expected; PACKFREE_TRACEBACK=1 shows where; please report it")
        return BROKEN
    except KeyboardInterrupt:
        complain("stopped")
        return STOPPED
