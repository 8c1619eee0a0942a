"""What our operations are to autograd: functions of their own, called with little of the host's time."""

from __future__ import annotations

from typing import Any

from torch.autograd import Function

from hf_packfree.packing.compiling import is_transformed


class Operation(Function):
    """A `torch.autograd.Function` whose `apply` takes its arguments as they are.

    Torch's looks through them for tensors that a finished transform of torch.func left behind, at every call, of which a step
    has hundreds; and a short row waits for the host.  Such tensors have no memory: here they raise where it is read.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """See `torch.autograd.Function.apply`."""
        if is_transformed():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(Function, cls).apply(*args)  # type: ignore[misc]
