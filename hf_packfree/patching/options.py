"""The options of `apply_patches`, as one object."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hf_packfree.models.run_options import RunOptions
from hf_packfree.mtp.head_options import MTPOptions
from hf_packfree.patching.backends import Choice, forced_backends


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """How models are patched; see `apply_patches` for values and errors.

    Attributes:
        backend: the choice of backends.
        mtp: the multi-token prediction head to add, or None.
    """

    backend: Choice = "auto"
    mtp: MTPOptions | None = None

    def __post_init__(self) -> None:
        """Check the options that do not depend on the model."""
        forced_backends(self.backend)
        super().__post_init__()

    def of_run(self) -> dict[str, Any]:
        """Return {name: value} of the fields of `RunOptions`, which patched modules keep."""
        return {field.name: getattr(self, field.name) for field in fields(RunOptions)}
