"""Every error this package raises on purpose.

Each says what was found, what is wanted and how to mend it, and subclasses the builtin that a
caller would already catch: `ValueError` for what was passed in, `RuntimeError` for what a model or
machine is.
"""

from __future__ import annotations


class PackFreeError(Exception):
    """Base of all errors of this package."""


class BoundaryError(PackFreeError, ValueError):
    """The packed input is malformed: offsets, masks or positions that describe no row of
    documents, or media not theirs.
    """


class BoundaryConflict(BoundaryError):
    """Two input formats put document boundaries in different places."""


class CacheConflict(PackFreeError, ValueError):
    """A packed row came together with a cache: the tokens before the row belong to no document
    in it.
    """


class UnsupportedInput(PackFreeError, ValueError):
    """The input is valid, but no exact path for it exists (a packed row of images with text
    positions, say).
    """


class UnsupportedModel(PackFreeError, TypeError):
    """The model holds no module of a supported family, or one whose documents nothing is known
    to keep apart.

    Attributes:
        reason: why packed rows of this language model cannot be made exact; None for other faults.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class ContractError(PackFreeError, RuntimeError):
    """A module lacks a parameter or size that its family's checkpoints always have."""


class PatchConflict(PackFreeError, RuntimeError):
    """Something else already changed a part of the model that a patch needs."""


class MissingHead(PackFreeError, LookupError):
    """A checkpoint lacks tensors of the multi-token prediction head, or has others than its
    configuration says.
    """


class BackendUnavailable(PackFreeError, RuntimeError):
    """A backend that was named cannot run here."""


class RankLost(PackFreeError, RuntimeError):
    """A rank that shares rows with this one does not answer: it has ended, or takes no part."""


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
    """Return somebody else's error as part of a sentence: its kind and first line."""
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
