"""Checks, before the work begins, that the files of an option can be written."""

from __future__ import annotations

import os
from pathlib import Path

from hf_packfree.errors import UnsupportedInput


def check_picture(path: Path) -> None:
    """Check that matplotlib can write a picture to a path.

    Raises:
        UnsupportedInput: matplotlib cannot.
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
        "a file in a folder that exists, which ends in one of "
        f"{', '.join(f'.{kind}' for kind in sorted(kinds))}"
    )
    _refuse("--png", str(path), faults, wanted)


def check_folder(text: str, option: str = "--out") -> Path:
    """Return the path of a folder that exists or will be made.

    Args:
        text: the option's value.
        option: the option's name, for the message.

    Raises:
        UnsupportedInput: the path is no folder, and none can be made there.
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
    """Raise `UnsupportedInput` for the first fault that is True, if any."""
    for fault, holds in faults.items():
        if holds:
            raise UnsupportedInput(
                f"found {option} {text!r}, {fault}; wanted {wanted}; name another one"
            )
