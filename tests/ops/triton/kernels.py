"""Which Triton kernels there are, models that run them here, and a record of launches."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hf_packfree
from hf_packfree import apply_patches
from hf_packfree.models.state import Kernels

HOUSE = Path(hf_packfree.__file__).parent


@cache
def all_kernels() -> dict[str, str]:
    """Return {kernel: its module}: every function under `triton.jit` that no other one calls."""
    found: list[tuple[str, str]] = []
    called: set[str] = set()
    for file in sorted(HOUSE.rglob("*.py")):
        module = ".".join(file.relative_to(HOUSE.parent).with_suffix("").parts)
        for function in ast.parse(file.read_text()).body:
            if isinstance(function, ast.FunctionDef) and "triton.jit" in map(
                _name, function.decorator_list
            ):
                found.append((function.name, module))
                called |= {_name(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
    kernels = [(name, module) for name, module in found if name not in called]
    assert len(dict(kernels)) == len(kernels), f"two kernels have one name: {sorted(kernels)}"
    return dict(kernels)


def _name(node: ast.expr) -> str:
    """What a call or a decorator is of: "triton.jit" of `triton.jit(...)`."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


class Recorded:
    """A kernel that notes its launches."""

    def __init__(self, name: str, kernel: Any, launched: set[str]) -> None:
        self.name, self.kernel, self.launched = name, kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launched.add(self.name)
        return self.kernel[grid]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


def on_kernels(model: Any, **kernels: str) -> Any:
    """Patch a model so that these {op: backend} run on this machine's CPU."""
    for module in apply_patches(model).modules():
        if "packfree" in vars(module):
            vars(module)["packfree"] = replace(vars(module)["packfree"], elsewhere=Kernels(kernels))
    return model
