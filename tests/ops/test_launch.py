"""Launching without asking Triton: kinds of arguments are told apart at least as finely as Triton tells them apart."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_packfree.ops import launch as module


class Kept(torch.Tensor):
    pass


HERE = -1  # what torch calls the CPU, in the GPU's place
BUFFERS = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32)}
tensors = st.builds(
    lambda dtype, offset, kind: BUFFERS[dtype][offset:].as_subclass(kind),
    st.sampled_from(list(BUFFERS)), st.integers(0, 16), st.sampled_from([torch.Tensor, Kept]),
)
edges = st.sampled_from([2**31 - 16, 2**31, -(2**31), -(2**31) - 16])
integers = st.one_of(st.integers(-5, 40), st.integers(-(2**40), 2**40), edges)
values = st.one_of(tensors, integers, st.floats(allow_nan=False), st.none(), st.booleans())


class Size(IntEnum):
    SIXTEEN, SEVENTEEN = 16, 17


def of_triton(argument):
    """What Triton 3.6 and 3.7 compile an argument for on an NVIDIA GPU."""
    if isinstance(argument, torch.Tensor):
        return "*", argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, bool):
        return "u1", argument
    if isinstance(argument, int):
        return 1 if argument == 1 else ("i32" if -(2**31) <= argument < 2**31 else "i64", argument % 16 == 0)
    return type(argument)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=4))
@example([(BUFFERS[torch.float32][1:], BUFFERS[torch.float32]), (1, 1)])
@example([(1, 1.0)])
@example([(True, 1)])  # which Python calls equal
@example([(Size.SIXTEEN, Size.SEVENTEEN)])
def test_what_triton_tells_apart_has_other_kinds(pairs):
    left, right = zip(*pairs)
    if list(map(of_triton, left)) != list(map(of_triton, right)):
        assert module._read(left, -1)[0] != module._read(right, -1)[0]


class Kernel:
    """As `triton.jit` makes one, as far as `launch` looks; counts who was asked."""

    arg_names = ["x", "size", "WIDTH"]

    def __init__(self, attribute=("tt.divisibility", 16), constants=None):
        self.asked, self.ran = [], []
        fn = SimpleNamespace(constexprs=[2])
        source = SimpleNamespace(fn=fn, constants={(2,): 32, **(constants or {})}, attrs={(0,): [list(attribute)]})
        self.compiled = Compiled(source, self.ran)

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.asked.append((grid, arguments, constants)) or self.compiled


class Compiled:
    """Started by Triton's own way it says so."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, source, ran):
        self.src, self.ran = source, ran

    def __getitem__(self, grid):
        return lambda *arguments: self.ran.append(("heard", grid, arguments))

    def run(self, x, y, z, stream, function, metadata, *more):
        assert (stream, function, metadata, more[:3]) == (f"stream of {HERE}", "function", "metadata", (None,) * 3)
        self.ran.append(((x, y, z), more[3:]))


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    """Triton 3.6, of which nothing was compiled; returns the hooks that hear of launches."""
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
    active = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    triton, runtime = ModuleType("triton"), ModuleType("triton.runtime")
    triton.knobs, runtime.driver = SimpleNamespace(runtime=hooks), SimpleNamespace(active=active)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "installed", lambda package: "3.6.0")
    module._is_known.cache_clear()
    yield hooks
    module._is_known.cache_clear()


def run(kernel, x, size, **constants):
    module._launch(kernel, (7,), x.get_device(), (x, size), {"WIDTH": 32, "num_warps": 4, **constants})


def test_a_kind_is_asked_about_once():
    kernel, x = Kernel(), BUFFERS[torch.float32]
    for size in (2048, 4096, 17, 33, 1):
        run(kernel, x, size)
    assert [call[1][1] for call in kernel.asked] == [2048, 17, 1], "multiples of 16, others, and 1"
    place = x.data_ptr()
    assert kernel.ran == [((7, 1, 1), (place, 4096, 32)), ((7, 1, 1), (place, 33, 32))], "with the constant in its place"
    run(kernel, x[1:], 4096)
    run(kernel, x, 4096, num_warps=8)
    run(Kernel(), x, 4096)
    assert len(kernel.asked) == 5 and len(kernel.ran) == 2, "unaligned memory, other options and other kernels are others"


@pytest.mark.parametrize("kernel", [Kernel(("tt.pointer_range", 32)), Kernel(constants={(1,): 16})], ids=["attribute", "value"])
def test_what_assumes_more_is_asked_every_time(kernel):
    for _ in range(2):
        run(kernel, BUFFERS[torch.float32], 16)
    assert len(kernel.asked) == 2 and not kernel.ran


@pytest.mark.parametrize("release", ["3.5.1", "3.60.0", None])
def test_a_triton_that_is_not_known_is_asked_every_time(release, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "installed", lambda package: asked.append(package) or release)
    kernel = Kernel()
    for _ in range(2):
        run(kernel, BUFFERS[torch.float32], 16)
    assert len(kernel.asked) == 2 and not kernel.ran
    assert asked == ["triton"], "a look at what is installed takes longer than a launch"


def test_who_wants_to_hear_of_launches_does(hooks):
    kernel, x = Kernel(), BUFFERS[torch.float32]
    run(kernel, x, 16)
    for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        hook.calls.append("a profiler")
        run(kernel, x, 16)
        hook.calls.clear()
    run(kernel, x, 16)
    assert kernel.ran == [*[("heard", (7, 1, 1), (x, 16, 32))] * 2, ((7, 1, 1), (x.data_ptr(), 16, 32))]


def test_a_triton_that_says_nothing_of_what_it_assumes_is_asked_every_time():
    kernel = Kernel()
    del kernel.compiled.src.attrs
    for _ in range(2):
        run(kernel, BUFFERS[torch.float32], 16)
    assert len(kernel.asked) == 2 and not kernel.ran


def test_a_tensor_on_another_device_is_of_another_kind():
    """And goes to Triton as it is, which looks its address up in the driver and says so if a GPU cannot read it."""
    x = BUFFERS[torch.float32]
    (here, there), values = zip(*(module._read((x, 5), device) for device in (HERE, 0)))
    assert here != there and values[0] == [x.data_ptr(), 5] and values[1][0] is x


def test_the_interpreter_is_called_as_it_is():
    kernel, x = Kernel(), BUFFERS[torch.float32]
    module.launch(kernel, (7, 2), x, 5, WIDTH=32)
    assert kernel.asked == [((7, 2), (x, 5), {"WIDTH": 32})] and not kernel.ran
