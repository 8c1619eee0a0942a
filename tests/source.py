"""Python source, parsed once for all tests of a process that read it."""

from __future__ import annotations

import ast
from functools import cache


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return every node of it, as `ast.walk` yields them."""
    return tuple(ast.walk(ast.parse(source)))
