"""What an implementation of an op is: the function, and why it cannot run somewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import torch
from packaging.version import Version
from torch import Tensor

from hf_packfree.errors import BackendUnavailable, in_short
from hf_packfree.versions import VERSIONS

HALF = (torch.bfloat16, torch.float16)
BATCH_INVARIANT = ", batch-invariant"
"""What a backend's name ends with where a document is to get the same bits in every row."""


class Fault(str):
    """Why a kernel cannot run, where the user can repair it: a package is broken, too old or
    switched off by a setting.
    """


@dataclass(frozen=True)
class Target:
    """Where an op would run.

    Attributes:
        device: "cuda", "cpu", "mps".
        capability: of the CUDA device, (9, 0) on Hopper; None elsewhere.
        dtype: of what the op reads.
        sizes: of the model, by name: key_heads, value_heads, key_size, value_size, taps, channels
            (of the convolution, where they are not those of q, k and v), head_size,
            tower_head_size; of attention, where it has them, window, softcap, sinks,
            other_value_size; and gathered_keys, 1 where ranks of a group gather each other's keys.
            One that is missing is not checked.
    """

    device: str
    capability: tuple[int, int] | None = None
    dtype: torch.dtype = torch.bfloat16
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def gpu(self) -> str:
        """The capability as it is written: "9.0"."""
        return ".".join(map(str, self.capability or ()))


B = TypeVar("B", bound="Backend")


def _always(target: Target) -> str | None:
    return None


@dataclass(frozen=True)
class LongDocuments:
    """Another way of a backend for long documents, which is exact, but rounds otherwise than where
    the rest of the row is another.

    Attributes:
        run: takes what `Backend.run` takes.
        how: what it does with them, in words: "in segments".
        takes: returns whether it does so on a device, for a model of these sizes (see `Target`).
    """

    run: Callable[..., Any]
    how: str
    takes: Callable[[torch.device, Mapping[str, int]], bool]


@dataclass(frozen=True)
class Backend:
    """One implementation of an op; what else implementations of one can do, they say as fields of a
    subclass in its folder.

    Attributes:
        run: the implementation; its module imports optional packages only when it is called. None
            where several functions share one choice, as those of `ops.fused` do.
        unusable: returns why it cannot run at a target, as half a sentence with what to do about
            it, or None.
        package: the distribution whose release decides what it computes, which the report names:
            the kernels', or what compiles our own.
        kernel: which of the package's kernels it asks for, where the package would choose.
        batch_invariant: whether a document gets the same bits alone and in a packed row, in a
            layer's forward pass, where `tests/gpu` ran.
        long: what it does with long documents where their bits may depend on the row.
        compiles: how long it compiles or tunes its kernels when they first run.
        tuned: whether it chooses their shapes by timing them, in each process anew.
        bounded: whether it runs rows with empty documents at their end and plans of a bound, as
            CUDA graphs have them, where `tests/gpu` ran; see `PackedSequence.bounded`. Or a
            function that says so of the installed release.
    """

    run: Callable[..., Any] | None = None
    unusable: Callable[[Target], str | None] = _always
    package: str = "torch"
    kernel: str = ""
    batch_invariant: bool = False
    long: LongDocuments | None = None
    compiles: Literal["seconds", "minutes"] | None = None
    tuned: bool = False
    bounded: bool | Callable[[], bool] = False

    @property
    def runs_bounded(self) -> bool:
        """What `bounded` says, here."""
        return self.bounded() if callable(self.bounded) else self.bounded

    @property
    def running(self) -> Callable[..., Any]:
        """The implementation, with its way for long documents."""
        run = self.run if self.long is None else self.long.run
        # an op of several functions has no call of its own
        assert run is not None
        return run

    def for_every_row(self: B) -> B:
        """Return the backend that gives a document the same bits in every row: this one without its
        way for long documents.
        """
        return self if self.long is None else replace(self, long=None)


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, or None.

    One that goes by another name, as torch's own builds of Triton do, or has none, is read from the
    imported module.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return getattr(sys.modules.get(package.replace("-", "_")), "__version__", None)


def too_old(package: str, found: str | None, reason: str) -> str | None:
    """Return that release `found` of a package is before the oldest that is taken, which rules it
    out for a reason, or None.

    One whose release is not known, run from its sources, is taken.
    """
    row = VERSIONS[package]
    if found is None or row.floor is None or Version(found) >= Version(row.floor):
        return None
    return Fault(f"{package} {found} is too old {reason}; {row.install}")


@cache
def broken(package: str, module: str) -> str | None:
    """Return why an installed distribution cannot run, if importing its module raises, or None.

    To be called last, where nothing else rules the kernel out: what is chosen is imported anyway.
    One answer per process.
    """
    try:
        import_module(module)
    except Exception as error:
        # a mismatched binary may raise anything
        return Fault(
            f"{package} {installed(package) or ''} is broken ({in_short(error)}); reinstall it"
        )
    return None


def needs_cuda(target: Target) -> str | None:
    """Return why a CUDA kernel cannot run there, or None."""
    return (
        None if target.device == "cuda" else f"it runs on CUDA devices, this is a {target.device}"
    )


def before_ampere(target: Target) -> str | None:
    """Return that a GPU is older than Ampere, or None."""
    if target.capability is None or target.capability >= (8, 0):
        return None
    return f"it needs an Ampere GPU or later (8.0), this is {target.gpu}"


def needs_triton(target: Target) -> str | None:
    """Return why a Triton kernel cannot run there, or None."""
    if (reason := needs_cuda(target)) is not None:
        return reason
    row = VERSIONS["triton"]
    if find_spec("triton") is None:
        return f"triton is not installed; {row.install}"
    if (reason := before_ampere(target)) is not None:
        return reason
    tested = f"(the kernels are tested with {' to '.join(row.cpu)})"
    return too_old("triton", installed("triton"), tested) or broken("triton", "triton")


def needs_half(target: Target) -> str | None:
    """Return why a kernel of half precision cannot run there, or None."""
    found = str(target.dtype).removeprefix("torch.")
    return None if target.dtype in HALF else f"it runs in bfloat16 and float16, this is {found}"


def refuse_wide(op: str, kernel: str, *inputs: Tensor) -> None:
    """Refuse inputs that a kernel of half precision cannot run.

    Raises:
        BackendUnavailable: they are not all bfloat16, or all float16.
    """
    found = {x.dtype for x in inputs}
    if len(found) > 1 or not found <= set(HALF):
        raise BackendUnavailable(
            f"found {' and '.join(sorted(map(str, found)))} for the {kernel} {op} kernels; wanted "
            f"bfloat16 or float16 "
            f"throughout; train in half precision or under autocast, or call apply_patches(model, "
            f"backend={{{op!r}: 'torch'}})"
        )


def on_hopper(device: torch.device) -> bool:
    """Return whether it is a GPU of compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device.index or 0) == (9, 0)


@cache
def block_width(size: int) -> int:
    """Return the channels of a Triton block that holds `size`: a power of two, as its ranges
    have to be.
    """
    return 1 << (size - 1).bit_length()


def uses_triton(operation: str, backend: str) -> bool:
    """Return whether an op of `ops.fused` runs its Triton kernels ("triton") or its PyTorch
    reference ("torch").

    Raises:
        BackendUnavailable: `backend` is neither.
    """
    name = backend.removesuffix(BATCH_INVARIANT)
    if name not in ("triton", "torch"):
        raise BackendUnavailable(
            f"found {operation} backend {backend!r}; wanted one of torch, triton; pass one of them"
        )
    return name == "triton"
