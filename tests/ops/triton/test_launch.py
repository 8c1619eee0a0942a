"""The cached launcher against the installed Triton: the private call and the specialisation,
which a release may move.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_packfree.ops import launch as module

# what torch calls the CPU, in the GPU's place
CPU = -1
BUFFERS = {
    dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32)
}
DEVICE, STREAM = 3, "the stream of device 3"


class Kept(torch.Tensor):
    pass


class Size(IntEnum):
    SIXTEEN, SEVENTEEN = 16, 17


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver for Triton that knows the current device and its stream, and nothing else."""
    pytest.importorskip("triton")
    from triton.runtime import driver

    active = SimpleNamespace(
        get_current_device=lambda: DEVICE, get_current_stream={DEVICE: STREAM}.__getitem__
    )
    monkeypatch.setattr(driver, "_active", active)
    yield


@pytest.fixture
def compiled(driver: None) -> Iterator[Any]:
    """A kernel as Triton compiles it, loaded, whose launcher notes what it gets in `started`."""
    from triton.compiler.compiler import CompiledKernel

    kernel = object.__new__(CompiledKernel)
    kernel.started = []
    kernel.module, kernel._module_pid, kernel.function = "loaded", None, "function"
    kernel.packed_metadata, kernel.metadata, kernel.name = "packed metadata", None, "kernel"
    kernel.src = SimpleNamespace(fn=SimpleNamespace(launch_metadata=None, arg_names=[]))
    kernel._run = lambda *arguments: kernel.started.append(arguments)
    yield kernel
    # nothing to unload
    kernel.module = None


@pytest.mark.parametrize("grid", [(7,), (7, 5), (7, 5, 2)], ids=str)
def test_a_start_is_tritons_own_but_for_addresses_and_hooks(
    compiled: Any, grid: tuple[int, ...]
) -> None:
    x, rest = BUFFERS[torch.float32], (32, True)
    compiled[(*grid, 1, 1)[:3]](x, 5, None, 0.5, *rest)
    module._starter(compiled, DEVICE, rest)(grid, (x, 5, None, 0.5), [x.data_ptr(), 5, None, 0.5])
    theirs, ours = compiled.started
    at = theirs.index("packed metadata") + 1
    assert theirs[:at] == (*grid, 1, 1)[:3] + (STREAM, "function", "packed metadata") == ours[:at]
    assert len(theirs) == len(ours) and ours[at : at + 3] == (None,) * 3, (
        "metadata for hooks, and the two hooks"
    )
    assert theirs[at + 3] is x and theirs[at + 4 :] == (5, None, 0.5, *rest)
    assert ours[at + 3 :] == (x.data_ptr(), 5, None, 0.5, *rest)


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_that_is_added_later_gets_every_launch(compiled: Any, which: str) -> None:
    from triton import knobs

    start, hook, noted = module._starter(compiled, DEVICE, ()), getattr(knobs.runtime, which), []
    hook.add(noted.append)
    try:
        start((7,), (5,), [5])
        start_with_hooks = compiled.started.pop()
        for part in filter(callable, start_with_hooks):
            part(SimpleNamespace(get=dict))
        assert noted, "Triton's launcher gets its hooks, the added one among them"
    finally:
        hook.remove(noted.append)
    start((7,), (5,), [5])
    assert not any(map(callable, compiled.started[0])), "it gets none again"


tensors = st.builds(
    lambda dtype, offset, kind: BUFFERS[dtype][offset:].as_subclass(kind),
    st.sampled_from(list(BUFFERS)),
    st.integers(0, 16),
    st.sampled_from([torch.Tensor, Kept]),
)
edges = st.sampled_from([2**31 - 16, 2**31, -(2**31), -(2**31) - 16])
integers = st.one_of(st.integers(-5, 40), st.integers(-(2**40), 2**40), edges)
values = st.one_of(tensors, integers, st.floats(allow_nan=False), st.none(), st.booleans())


@given(pairs=st.lists(st.tuples(values, values), min_size=1, max_size=4))
@example(pairs=[(BUFFERS[torch.float32][1:], BUFFERS[torch.float32]), (1, 1)])
@example(pairs=[(1, 1.0)])
# equal for Python
@example(pairs=[(True, 1)])
@example(pairs=[(Size.SIXTEEN, Size.SEVENTEEN)])
def test_arguments_that_triton_compiles_differently_have_other_keys(
    pairs: list[tuple[Any, Any]],
) -> None:
    pytest.importorskip("triton")
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    def of_triton(argument: Any) -> Any:
        return native_specialize_impl(CUDABackend, argument, False, True, True)

    left, right = zip(*pairs)
    if list(map(of_triton, left)) != list(map(of_triton, right)):
        assert module._read(left, CPU)[0] != module._read(right, CPU)[0]


def test_triton_does_tell_them_apart() -> None:
    """So that the test above compares something."""
    pytest.importorskip("triton")
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    x = BUFFERS[torch.float32]
    cases = (1, 5, 16, 2**40, 2**40 + 1, 1.5, None, True, x, x[1:], x.bfloat16())
    found = [native_specialize_impl(CUDABackend, case, False, True, True) for case in cases]
    assert len(set(found)) == len(cases), found
