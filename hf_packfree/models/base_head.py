"""The base of patched heads: a forward with upstream's signature that turns the batch into a
row.
"""

from __future__ import annotations

import contextlib
import functools
from inspect import signature
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import FSDPModule

from hf_packfree.models.base import Replacement, upstream_of
from hf_packfree.models.call import Call
from hf_packfree.models.entry import enter, replays
from hf_packfree.models.head_loss import LossOfCall, last_layer
from hf_packfree.models.state import state_of
from hf_packfree.models.trunk import check_model_of


class Head(Replacement):
    """Base of patched heads; each subclass's forward has upstream's signature, by which trainers
    choose the arguments that they pass.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        upstream: Any = upstream_of(cls)
        # a mixin, which has no upstream class yet
        if upstream is nn.Module:
            return

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            now: Any = type(self)
            # a wrapper holds this bound method, and the patches were removed since
            if not issubclass(now, cls):
                return now.forward(self, *args, **kwargs)
            arguments = self.by_name(args, kwargs)
            # upstream raises its own error
            if arguments is None:
                return upstream.forward(self, *args, **kwargs)
            return self._forward_as_row(upstream.forward, Call(self, arguments))

        functools.update_wrapper(forward, upstream.forward)
        # accelerate's unwrap_model follows `__wrapped__` to the end, and would find upstream's
        vars(forward)["__signature__"] = signature(vars(forward).pop("__wrapped__"))
        # names in annotations are upstream's; what a type checker alone reads may be anything
        with contextlib.suppress(Exception):
            forward.__annotations__ = get_type_hints(upstream.forward)
        replaced: Any = cls
        # a class that FSDP2 derives inherits verl's forward, which assigning ours would forget; see
        # `HeadType`
        type.__setattr__(cls, "forward", forward)
        # torch.compile cannot read a property by super()
        loss: Any = upstream.loss_function
        replaced._upstream_loss = staticmethod(getattr(loss, "fget", None) or loss.__get__)

    @property
    def loss_function(self) -> Any:
        """The loss function, upstream's or one that the caller set; see `LossOfCall`."""
        return LossOfCall(self._loss(), {})

    @loss_function.setter
    def loss_function(self, function: Any) -> None:
        upstream: Any = super(Head, type(self))
        if isinstance(upstream.loss_function, property):
            upstream.loss_function.__set__(self, function)
        else:
            # the user's class has a method of that name, which the instance's attribute overrides
            self.__dict__["loss_function"] = function

    def _loss(self) -> Any:
        return self.__dict__.get("loss_function") or self._upstream_loss(self)

    def _enter(self, call: Call, *, drop_padding: bool = True) -> Call:
        call = enter(call, drop_padding=drop_padding)
        if call.packed is not None:
            check_model_of(self)
        return call

    def _with_padding(self, call: Call) -> Call:
        """Return the call that leaves padded rows to upstream, after `_enter` has read them."""
        if replays(self):
            state_of(self).graphs.leave()
        return call.with_padding()

    def _forward_as_row(self, upstream: Any, call: Call) -> Any:
        raise NotImplementedError


def forget_losses(output: Any) -> None:
    """Set the losses of an output without targets to 0 instead of NaN, in place; their gradients
    are zeros.
    """
    for name in ("loss", "aux_loss"):
        if output.get(name) is not None:
            # the mean over no target is NaN
            output[name] = output[name].nan_to_num() * 0.0


def separate_logits(head: Any, output: Any) -> None:
    """Where FSDP2 shards a head's last layer by itself, replace the output's logits, in place, by a
    tensor that is not the layer's own output.

    FSDP2 gathers weights again by hooks on what modules return. On one tensor of the layer and the
    model, the layer's come first; on padded logits, which another rank may have, the model's do.
    """
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or not logits.requires_grad or torch.compiler.is_compiling():
        return
    if isinstance(last_layer(head)[1], FSDPModule):
        output.logits = _Alias.apply(logits)


class _Alias(Function):
    """Another tensor of the same memory, and no view, of which FSDP2 warns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
