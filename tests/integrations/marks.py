"""The marks of tests that prove a row of docs/compatibility.md, and of those that need a
package.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def integration(library: str, what: str, says: str = "works") -> pytest.MarkDecorator:
    """Mark a test as proof of a row in docs/compatibility.md: whose feature, which, and what
    holds if the test passes.
    """
    return pytest.mark.integration(library=library, what=what, says=says)


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip, by name, where a package is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed")
