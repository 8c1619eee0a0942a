"""What a package index shows: README without links and pictures that only a checkout can resolve.

All else is in setup.cfg.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup


def description(readme: str) -> str:
    """Return README's text with the words of relative links, and without relative pictures."""
    readme = re.sub(r"^!\[[^\]]*\]\((?!https://)[^)]*\)\n+", "", readme, flags=re.M)
    return re.sub(r"\[([^\]]+)\]\((?!https://)[^)]+\)", r"\1", readme)


if __name__ == "__main__":
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=description(text))
