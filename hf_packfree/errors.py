"""Every error this package raises on purpose.

Each message says what was found, what is wanted and what to do. Each class derives from the builtin
error that a caller would already catch: `ValueError` for wrong arguments, `RuntimeError` for the
state of a model or machine.
"""

from __future__ import annotations


class PackFreeError(Exception):
    """Base of all errors of this package."""


class BoundaryError(PackFreeError, ValueError):
    """The packed input is malformed: offsets, masks or positions that describe no row of documents,
    or media that do not match the documents' placeholders.
    """


class BoundaryConflict(BoundaryError):
    """Two input formats put document boundaries in different places."""


class CacheConflict(PackFreeError, ValueError):
    """A packed row was passed together with a cache, whose tokens belong to no document of the
    row.
    """


class UnsupportedInput(PackFreeError, ValueError):
    """The input is valid, but no exact path for it exists (a packed row of images with text
    positions, say).
    """


class UnsupportedModel(PackFreeError, TypeError):
    """The model holds no module of a supported family, or a module that is not known to keep packed
    documents apart.

    Attributes:
        reason: why packed rows of this language model cannot be made exact; None for other causes.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class ContractError(PackFreeError, RuntimeError):
    """A module lacks a parameter that all checkpoints of its family have, or a size differs from
    its config's.
    """


class PatchConflict(PackFreeError, RuntimeError):
    """Other code has changed a part of the model that a patch needs."""


class MissingHead(PackFreeError, LookupError):
    """A checkpoint lacks tensors of the multi-token prediction head, or its tensors differ from its
    configuration.
    """


class BackendUnavailable(PackFreeError, RuntimeError):
    """A backend that the user named, or that a model was loaded with, cannot run."""


class RankLost(PackFreeError, RuntimeError):
    """A rank that shares rows with this rank does not answer: its process has ended, or takes no
    part in the exchange.
    """


class LeakDetected(PackFreeError, AssertionError):
    """Packed documents influence each other: a measured value is above its limit.

    Attributes:
        report: the `PackingReport` with all numbers.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class BlindMeasurement(PackFreeError, RuntimeError):
    """The control did not leak, so a measurement that finds no leak proves nothing."""


def in_short(error: BaseException) -> str:
    """Return an error of another package as part of a sentence: the name of its class and the first
    line of its message.
    """
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]


def ran_out(error: BaseException) -> bool:
    """Return whether an error says that memory ran out; judged by its text too, since only the GPU
    allocator's error has a class of its own.
    """
    texts = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return (
        isinstance(error, MemoryError)
        or isinstance(error, RuntimeError)
        and any(text in str(error) for text in texts)
    )
