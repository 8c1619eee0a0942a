"""The cached launcher with a stand-in for Triton; tests/ops/triton/test_launch.py compares it
with the Triton installed.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hf_packfree.ops import launch as module
from hf_packfree.versions import LAUNCHED_TRITON, VERSIONS

# what torch calls the CPU, in the GPU's place
CPU = -1
X = torch.zeros(64)


class Kernel:
    """What `launch` uses of a kernel made by `triton.jit`; `asked` counts the launches that went
    through Triton.
    """

    arg_names = ["x", "size", "WIDTH"]

    def __init__(self, attribute=("tt.divisibility", 16), constants=None):
        self.asked, self.ran = [], []
        fn = SimpleNamespace(constexprs=[2])
        source = SimpleNamespace(
            fn=fn, constants={(2,): 32, **(constants or {})}, attrs={(0,): [list(attribute)]}
        )
        self.compiled = Compiled(source, self.ran)

    def __getitem__(self, grid):
        return lambda *arguments, **constants: (
            self.asked.append((grid, arguments, constants)) or self.compiled
        )


class Compiled:
    """What `launch` uses of a compiled kernel; a launch through Triton's own way is marked."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, source, ran):
        self.src, self.ran = source, ran

    def __getitem__(self, grid):
        return lambda *arguments: self.ran.append(("by Triton", grid, arguments))

    def run(self, x, y, z, stream, function, metadata, *more):
        assert (stream, function, metadata, more[:3]) == (
            f"stream of {CPU}",
            "function",
            "metadata",
            (None,) * 3,
        )
        self.ran.append(((x, y, z), more[3:]))


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    """A stand-in for Triton 3.6 with nothing compiled yet; returns its launch hooks."""
    hooks = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[])
    )
    active = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    triton, runtime = ModuleType("triton"), ModuleType("triton.runtime")
    triton.knobs, runtime.driver = SimpleNamespace(runtime=hooks), SimpleNamespace(active=active)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "installed", lambda package: "3.6.0")
    module.is_known.cache_clear()
    yield hooks
    module.is_known.cache_clear()


def run(kernel, x, size, **constants):
    module._launch(
        kernel, (7,), x.get_device(), (x, size), {"WIDTH": 32, "num_warps": 4, **constants}
    )


def test_triton_specialises_arguments_of_a_kind_once():
    kernel, x = Kernel(), X
    for size in (2048, 4096, 17, 33, 1):
        run(kernel, x, size)
    assert [call[1][1] for call in kernel.asked] == [2048, 17, 1], "multiples of 16, others, and 1"
    address = x.data_ptr()
    assert kernel.ran == [((7, 1, 1), (address, 4096, 32)), ((7, 1, 1), (address, 33, 32))], (
        "constants behind the arguments"
    )
    run(kernel, x[1:], 4096)
    run(kernel, x, 4096, num_warps=8)
    run(Kernel(), x, 4096)
    assert len(kernel.asked) == 5 and len(kernel.ran) == 2, (
        "unaligned memory, other options and other kernels are others"
    )


@pytest.mark.parametrize(
    "kernel",
    [Kernel(("tt.pointer_range", 32)), Kernel(constants={(1,): 16})],
    ids=["attribute", "value"],
)
def test_code_that_assumes_more_is_launched_by_triton(kernel):
    for _ in range(2):
        run(kernel, X, 16)
    assert len(kernel.asked) == 2 and not kernel.ran


@pytest.mark.parametrize("release", ["3.5.1", "3.60.0", None])
def test_a_triton_that_is_not_known_launches_itself(release, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "installed", lambda package: asked.append(package) or release)
    kernel = Kernel()
    for _ in range(2):
        run(kernel, X, 16)
    assert len(kernel.asked) == 2 and not kernel.ran
    assert asked == ["triton"], "looking up the installed version takes longer than a launch"


def test_hooks_get_every_launch(hooks):
    kernel, x = Kernel(), X
    run(kernel, x, 16)
    for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        hook.calls.append("a profiler")
        run(kernel, x, 16)
        hook.calls.clear()
    run(kernel, x, 16)
    assert kernel.ran == [
        *[("by Triton", (7, 1, 1), (x, 16, 32))] * 2,
        ((7, 1, 1), (x.data_ptr(), 16, 32)),
    ]


def test_a_triton_without_the_attributes_that_are_read_launches_itself():
    kernel = Kernel()
    del kernel.compiled.src.attrs
    for _ in range(2):
        run(kernel, X, 16)
    assert len(kernel.asked) == 2 and not kernel.ran


def test_a_tensor_on_another_device_is_of_another_kind():
    """It goes to Triton as it is, which looks its address up in the driver and raises if a GPU
    cannot read it.
    """
    x = X
    (here, there), values = zip(*(module._read((x, 5), device) for device in (CPU, 0)))
    assert here != there and values[0] == [x.data_ptr(), 5] and values[1][0] is x


def test_the_interpreter_is_called_as_it_is():
    kernel, x = Kernel(), X
    module.launch(kernel, (7, 2), x, 5, WIDTH=32)
    assert kernel.asked == [((7, 2), (x, 5), {"WIDTH": 32})] and not kernel.ran


def test_the_releases_of_triton_that_tests_run_with_are_launched():
    """So that a newer one is not left to Triton's own launcher without a word: run
    tests/ops/triton/test_launch.py with it, and add it.
    """
    assert VERSIONS["triton"].cpu
    for release in VERSIONS["triton"].cpu:
        assert release.startswith(LAUNCHED_TRITON)
