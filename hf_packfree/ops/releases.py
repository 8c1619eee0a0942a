"""Releases of other packages that packed rows depend on; nothing here needs torch, so that the doctor can read it."""

from __future__ import annotations

FLA_FLOOR = "0.5.2"
"""Every release of fla-core before it computes packed rows wrong, or fails on them, in at least one case."""

WRONG_TRITON = ("3.4.0", "3.7.1")
"""From the first, and before the second, Triton compiles FLA's gated backward wrongly on Hopper (FLA's issue 640)."""
