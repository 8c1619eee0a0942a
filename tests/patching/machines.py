"""What is installed on a machine that is pretended, and the published models' sizes."""

from __future__ import annotations

INSTALLED = {"triton": "3.6.0", "fla-core": "0.6.0", "flash-qla": "0.1.3", "tilelang": "0.1.15"}
SIZES = {
    "key_heads": 16,
    "value_heads": 32,
    "key_size": 128,
    "value_size": 128,
    "taps": 4,
    "head_size": 256,
}
