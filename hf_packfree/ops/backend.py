"""One backend of an op: its function, what it needs to run, and what it promises."""

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
from hf_packfree.packing import PackedSequence, refuse_shard
from hf_packfree.versions import VERSIONS

HALF = (torch.bfloat16, torch.float16)
BATCH_INVARIANT = ", batch-invariant"
"""Suffix of a backend's name: run it such that a document gets the same bits in every row."""


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
        dtype: of the tensors that the op reads.
        sizes: of the model, by name: key_heads, value_heads, key_size, value_size, taps, channels
            (of the convolution, where they are not those of q, k and v), head_size,
            tower_head_size; of attention, where it has them, window, softcap, sinks,
            other_value_size; and gathered_keys, 1 where ranks of a group gather each other's keys.
            A size that is missing is not checked.
    """

    device: str
    capability: tuple[int, int] | None = None
    dtype: torch.dtype = torch.bfloat16
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def gpu(self) -> str:
        """The capability as NVIDIA writes it, such as "9.0"."""
        return ".".join(map(str, self.capability or ()))


B = TypeVar("B", bound="Backend")


def _always(target: Target) -> str | None:
    return None


@dataclass(frozen=True)
class LongDocuments:
    """A second implementation in a backend, for long documents: exact, but its rounding depends on
    the rest of the row.

    Attributes:
        run: takes what `Backend.run` takes.
        how: how long documents run, in words, such as "in segments".
        takes: returns whether long documents run so on a device, for a model of these sizes (see
            `Target`).
    """

    run: Callable[..., Any]
    how: str
    takes: Callable[[torch.device, Mapping[str, int]], bool]


@dataclass(frozen=True)
class Backend:
    """One implementation of an op. An op whose backends have further abilities has a subclass in
    its folder, with fields for them.

    Attributes:
        run: the implementation; its module imports optional packages only when it is called. None
            where several functions share one choice, as those of `ops.fused` do.
        unusable: returns why the backend cannot run at a target, as half a sentence with the
            remedy, or None.
        package: the distribution whose release decides what the backend computes, for the report:
            the one that holds the kernels, or that compiles ours.
        kernel: the kernel that the backend asks for, where the package would choose among several.
        batch_invariant: whether a document gets the same bits alone and in a packed row, in a
            layer's forward pass, where `tests/gpu` ran.
        long: the implementation for long documents whose bits may depend on the row, or None.
        compiles: how long the kernels compile or tune when they first run; None: not at all.
        tuned: whether every process chooses the kernels' launch sizes by timing them.
        bounded: whether the backend runs the rows of CUDA graphs, with empty documents at their end
            and plans of fixed size, see `PackedSequence.bounded`; as `tests/gpu` checks. Or a
            function that returns this for the installed release.
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
        """The value of `bounded`, for the installed release."""
        return self.bounded() if callable(self.bounded) else self.bounded

    def running(self, packed: PackedSequence) -> Callable[..., Any]:
        """Return what runs on a whole row: the implementation, with its way for long documents.

        Raises:
            UnsupportedInput: it is one rank's part of a row, see `Op.running`.
        """
        run = self.run if self.long is None else self.long.run
        # None for ops of several functions, which are called one by one
        assert run is not None
        if packed.is_shard:
            refuse_shard(packed, f"{getattr(run, '__name__', run)} alone")
        return run

    def for_every_row(self: B) -> B:
        """Return the backend that gives a document the same bits in every row: this one without
        `long`.
        """
        return self if self.long is None else replace(self, long=None)


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, or None.

    The version of a package without such a distribution, as of Triton in torch's own builds, is
    read from the imported module.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return getattr(sys.modules.get(package.replace("-", "_")), "__version__", None)


def qualified_name(thing: Any) -> tuple[str, str]:
    """Return (module, name) of an object's class, to recognise classes of optional packages without
    an import.
    """
    return type(thing).__module__, type(thing).__name__


def too_old(package: str, found: str | None, reason: str) -> str | None:
    """Return that release `found` of a package is older than the oldest supported one, and the
    `reason` for that limit, or None.

    A package of unknown release, run from its sources, counts as new enough.
    """
    row = VERSIONS[package]
    if found is None or row.floor is None or Version(found) >= Version(row.floor):
        return None
    return Fault(f"{package} {found} is too old {reason}; {row.install}")


@cache
def broken(package: str, module: str) -> str | None:
    """Return why an installed distribution cannot run, if importing its module raises, or None.

    Call this last, when nothing else rules the kernel out: the import takes time, and a kernel that
    is chosen needs it anyway. The answer is cached for the process.
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
    """Return why a CUDA kernel cannot run at `target`, or None."""
    return (
        None if target.device == "cuda" else f"it runs on CUDA devices, this is a {target.device}"
    )


def before_ampere(target: Target) -> str | None:
    """Return that the target's GPU is older than Ampere, or None."""
    if target.capability is None or target.capability >= (8, 0):
        return None
    return f"it needs an Ampere GPU or later (8.0), this is {target.gpu}"


def needs_triton(target: Target) -> str | None:
    """Return why a Triton kernel cannot run at `target`, or None."""
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
    """Return why a kernel of half precision cannot run at `target`, or None."""
    found = dtype_name(target.dtype)
    return None if target.dtype in HALF else f"it runs in bfloat16 and float16, this is {found}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def refuse_wide(kernel: str, *inputs: Tensor) -> None:
    """Refuse inputs that an attention kernel of half precision cannot run.

    Raises:
        BackendUnavailable: they are not all bfloat16, or all float16.
    """
    found = {x.dtype for x in inputs}
    if len(found) > 1 or not found <= set(HALF):
        raise BackendUnavailable(
            f"found {' and '.join(sorted(map(str, found)))} for the {kernel} attention kernels; "
            "wanted bfloat16 or float16 throughout; train in half precision or under autocast, or "
            "call apply_patches(model, "
            "backend={'attention': 'torch'})"
        )


def on_hopper(device: torch.device) -> bool:
    """Return whether the device is a GPU of compute capability 9.0."""
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
