"""No Triton kernel is without a test: each file here names the kernels that its tests launch,
and asserts that they do.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.ops.triton.kernels import all_kernels


def test_every_kernel_is_launched_by_a_test():
    files = [
        file.stem for file in Path(__file__).parent.glob("test_*.py") if file != Path(__file__)
    ]
    named = set().union(
        *(getattr(import_module(f"tests.ops.triton.{file}"), "KERNELS", ()) for file in files)
    )
    assert named == set(all_kernels())
