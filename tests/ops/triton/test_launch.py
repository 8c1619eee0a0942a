"""The cached launcher against the installed Triton: the private call and the specialisation,
which a release may move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_packfree.ops import launch as module
from hf_packfree.versions import LAUNCHED_TRITON, VERSIONS

# what torch calls the CPU, in the GPU's place
CPU = -1
BUFFERS = {
    dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32)
}
DEVICE, STREAM = 3, "the stream of device 3"


def _language() -> list[tuple[Any, dict[str, Any]]]:
    """Return what Triton's language is made of, with all members; nothing without Triton."""
    try:
        from triton import language
    except ImportError:
        return []
    owners = language, language.core, language.math, language.tensor
    return [(owner, dict(vars(owner))) for owner in owners]


# before any kernel runs in the interpreter
LANGUAGE = _language()
X = BUFFERS[torch.float32]


class Kept(torch.Tensor):
    pass


class Size(IntEnum):
    SIXTEEN, SEVENTEEN = 16, 17


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver for Triton that knows the current device, its kind and streams, and nothing else."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    active = SimpleNamespace(
        get_current_device=lambda: DEVICE,
        get_current_stream={DEVICE: STREAM, CPU: STREAM}.__getitem__,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
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


class Kernel:
    """A kernel that Triton compiles for an H100 and starts nowhere.

    Attributes:
        asked: the arguments of launches that went through Triton.
        started: of the others, what was compiled and what its launcher got.
    """

    arg_names = "x", "size", "WIDTH"

    def __init__(self, change: Callable[[Any], object] = lambda source: None) -> None:
        """Take what changes the source of all that is compiled."""
        from triton import language as tl
        from triton.runtime.jit import JITFunction

        def kernel(x, size, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
            at = tl.arange(0, WIDTH)
            tl.store(x + at, tl.load(x + at) + size)

        self.triton, self.change = JITFunction(kernel), change
        self.asked: list[Any] = []
        self.started: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.asked.append(arguments)
            return self.compiled(arguments, constants)

        return launch

    def compiled(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """Return what Triton compiles for these arguments, or has compiled, as if loaded."""
        # of which Triton 3.9 warns where it is left open
        constants = {"enable_fp_fusion": True, **constants}
        found = self.triton.warmup(*arguments, grid=(1,), **constants)
        found.module, found._module_pid, found.function = None, None, "function"
        found._run = lambda *got: self.started.append((found, got))
        self.change(found.src)
        return found

    def run(self, *arguments: Any, **constants: Any) -> bool:
        """Launch; return whether Triton was asked."""
        asked = len(self.asked)
        module._launch(self, (7,), CPU, arguments, {"WIDTH": 32, "num_warps": 4, **constants})
        return len(self.asked) > asked


@pytest.fixture
def language(monkeypatch: pytest.MonkeyPatch) -> None:
    """The language that Triton compiles: where an interpreted kernel calls a function of Triton's
    own, such as `tl.sum`, the interpreter leaves its members behind in `triton.language.core`.
    """
    for owner, members in LANGUAGE:
        for name, member in members.items():
            if vars(owner).get(name) is not member:
                monkeypatch.setattr(owner, name, member)


@pytest.fixture
def anew(driver: None, language: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was launched before, and the installed release is looked up again."""
    monkeypatch.setattr(module, "_compiled", {})
    module.is_known.cache_clear()
    yield
    module.is_known.cache_clear()


def test_what_is_started_is_what_triton_would_start(anew: None) -> None:
    kernel, other = Kernel(), Kernel()
    given = [(X, size) for size in (2048, 4096, 17, 33, 1, 2**31, 2**31 + 16, 2**31 + 1)]
    given += [(X[1:], 2048), (X[4:], 33), (X.bfloat16(), 2048), (X, 16.0)]
    options: tuple[dict[str, Any], ...] = (
        *({}, {"WIDTH": 16}, {"num_warps": 8}),
        # the same values by other names
        *({"num_stages": 32}, {"maxnreg": 32}),
    )
    for more in options:
        for arguments in given:
            kernel.run(*arguments, **more)
            assert not kernel.run(*arguments, **more), "it was compiled before"
            compiled, got = kernel.started.pop()
            constants = {"WIDTH": 32, "num_warps": 4, **more}
            assert compiled is kernel.compiled(arguments, constants)
            assert got[-3:] == (arguments[0].data_ptr(), arguments[1], constants["WIDTH"])
    found = [arguments[1] for arguments in kernel.asked[: len(kernel.asked) // len(options)]]
    # multiples of 16, others, 1; and where 32 bits do not hold them
    assert found[:5] == [2048, 17, 1, 2**31, 2**31 + 1]
    assert other.run(X, 2048), "another kernel with the same arguments"


@pytest.mark.parametrize(
    "change",
    [
        lambda source: source.attrs.update({(0,): [["tt.pointer_range", 32]]}),
        lambda source: source.constants.update({(1,): 16}),
        lambda source: vars(source).pop("attrs", None),
    ],
    ids=["an attribute", "a value", "attributes that are not where they were"],
)
def test_code_that_assumes_more_is_launched_by_triton(
    change: Callable[[Any], object], anew: None
) -> None:
    kernel = Kernel(change)
    assert kernel.run(X, 16) and kernel.run(X, 16) and not kernel.started


@pytest.mark.parametrize("release", ["3.5.1", "3.60.0", None])
def test_a_triton_that_is_not_known_launches_itself(
    release: str | None, anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(module, "installed", lambda package: looked.append(package) or release)
    kernel = Kernel()
    assert kernel.run(X, 16) and kernel.run(X, 16) and not kernel.started
    assert looked == ["triton"], "looking it up takes longer than a launch"


def test_the_releases_that_tests_run_with_are_launched() -> None:
    """So that a newer one is not left to Triton's own launcher without a word: run this file with
    it, and add it.
    """
    releases = VERSIONS["triton"].cpu
    assert releases and all(release.startswith(LAUNCHED_TRITON) for release in releases)


def test_a_tensor_on_another_device_is_of_another_kind() -> None:
    """It goes to Triton as it is, which looks its address up in the driver and raises if a GPU
    cannot read it.
    """
    (here, there), values = zip(*(module._read((X, 5), device) for device in (CPU, 0)))
    assert here != there and values[0] == [X.data_ptr(), 5] and values[1][0] is X


@pytest.mark.parametrize("grid", [(7,), (7, 5), (7, 5, 2)], ids=str)
def test_a_start_is_tritons_own_but_for_addresses_and_hooks(
    compiled: Any, grid: tuple[int, ...]
) -> None:
    x, rest = X, (32, True)
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
pointers = st.one_of(tensors, st.none())
numbers = st.one_of(integers, st.floats(allow_nan=False), st.none(), st.booleans())
values = st.one_of(tensors, numbers)
# tensors come first
pairs_of_arguments = st.builds(
    lambda *parts: [pair for part in parts for pair in part],
    st.lists(st.tuples(pointers, pointers), max_size=2),
    st.lists(st.tuples(values, values), min_size=1, max_size=1),
    st.lists(st.tuples(numbers, numbers), max_size=2),
)


@given(pairs=pairs_of_arguments)
@example(pairs=[(X[1:], X), (1, 1)])
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


def test_a_tensor_after_a_number_is_refused() -> None:
    """The kinds of numbers are remembered, and an address is no such thing."""
    for late in (X, Kept(X)):
        with pytest.raises(AssertionError, match="a tensor after a number"):
            module._read((X, 5, late), CPU)


def test_triton_does_tell_them_apart() -> None:
    """So that the test above compares something."""
    pytest.importorskip("triton")
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    x = X
    cases = (1, 5, 16, 2**40, 2**40 + 1, 1.5, None, True, x, x[1:], x.bfloat16())
    found = [native_specialize_impl(CUDABackend, case, False, True, True) for case in cases]
    assert len(set(found)) == len(cases), found
