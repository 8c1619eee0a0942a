"""Stand-in for flash-linear-attention 0.6.0: its signatures and argument checks, CPU arithmetic,
nothing of its speed.

Like the whole package, and unlike fla-core alone, importing the root makes `fla.ops` reachable.
"""

from fla import modules, ops

__version__ = "0.6.0"
__all__ = ["modules", "ops"]
