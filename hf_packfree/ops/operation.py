"""The base of our autograd functions, whose calls take little of the host's time."""

from __future__ import annotations

from typing import Any

from torch.autograd import Function

from hf_packfree.packing.compiling import is_transformed


class Operation(Function):
    """A `torch.autograd.Function` whose `apply` takes its arguments as they are.

    Torch's own searches them for tensors that a finished transform of torch.func left behind, at every call, of which a step
    has hundreds: 3.5% of a step of 4,096 tokens on an H200 (docs/performance.md).  Such a tensor has no memory, so that here
    it raises where its memory is read.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """See `torch.autograd.Function.apply`."""
        if is_transformed():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(Function, cls).apply(*args)  # type: ignore[misc]
