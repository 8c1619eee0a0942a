"""What our operations are to autograd: functions of their own, called with little of the host's time."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


class Operation(Function):
    """A `torch.autograd.Function` whose `apply` looks through its arguments only where that has a purpose.

    Torch's looks at each for what a transform of torch.func left behind, every time.  A step calls `apply` hundreds of times,
    and a short row waits for the host.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """See `torch.autograd.Function.apply`."""
        if _is_transformed():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(Function, cls).apply(*args)  # type: ignore[misc]


_is_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
