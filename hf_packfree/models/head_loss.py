"""A head's last layer and its loss as one operation: logits are computed only if something reads
them.

Upstream's forward of a head calls the last layer and the loss as attributes of `self`. During one
call, `self` is a `HeadOfCall`, which has its own last layer and loss, and all other attributes of
the head. The model is never changed, so that hooks, other threads and copies see the head as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_packfree.graphs.by_layer import is_of_fsdp
from hf_packfree.models.linear_weights import autocast_dtype, has_hooks
from hf_packfree.models.plain_layers import all_are_hooked, forward_of, is_hooked
from hf_packfree.models.state import state_of
from hf_packfree.ops.loss import OP as LOSS
from hf_packfree.ops.loss import Targets, head_scales, lazy_logits, loss_of, scaled_from
from hf_packfree.packing.lazy import LazyTensor

_UPSTREAM = signature(ForCausalLMLoss)


class OfCall:
    """The `self` that upstream's forward of a head gets during one call: attributes in `vars` of
    this object come first; all others are read from the head and set on it.
    """

    def __init__(self, head: Any) -> None:
        vars(self)["_head"] = head

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_head"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_head"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The head's class, so that `isinstance` and `super()` work."""
        # torch.compile of torch 2.10 asks for it before `__init__` has run
        head = vars(self).get("_head")
        found: type = type(self) if head is None else head.__class__
        return found


class HeadOfCall(OfCall):
    """A head during one call, with its own loss, and its own last layer if logits are lazy.

    Args:
        head: the patched head.
        of_loss: keywords that the loss gets even if upstream's head does not pass them on.
    """

    def __init__(self, head: Any, of_loss: dict[str, Any]) -> None:
        super().__init__(head)
        vars(self)["loss_function"] = LossOfCall(head._loss(), of_loss)

    def defer_logits(self, row: dict[str, Any], ignored: int) -> None:
        """Make this call's logits lazy if that is possible: computed when something reads them.

        Args:
            row: the arguments of upstream's forward; with labels, the loss will be called with
                `shift_labels`.
            ignored: the label that means no loss.
        """
        head = vars(self)["_head"]
        name, layer = last_layer(head)
        if row.get("labels") is None:
            # reading lazy logits gathers sharded weights, which hangs if one rank reads alone
            sharded = isinstance(layer, FSDPModule) or isinstance(head, FSDPModule)
            if not sharded and _why_called(name, layer) is None:
                vars(self)[name] = DeferredLayer(head, name)
            return
        targets = row.get("shift_labels")
        if targets is None or targets.dtype != torch.int64:
            return
        if why_logits_are_made(head) is None:
            counted = Targets.of(targets.to(layer.weight.device), ignored)
            vars(self)[name] = deferred = DeferredLayer(head, name)
            self.loss_function.deferred, deferred.until_loss = deferred, True
            self.loss_function.targets = targets, ignored, counted


class DeferredLayer:
    """Called in place of a head's last layer, once: returns lazy logits if the layer is a plain
    product.

    Attributes:
        made: the lazy logits, the product; None where the layer itself computed the logits.
        returned: the lazy logits as the caller got them: FSDP may have cast them.
        loss_backend: what computes the loss of the lazy logits.
        until_loss: whether a scale or a softcap of the logits is lazy, too, until the loss is
            called.
    """

    def __init__(self, head: Any, name: str) -> None:
        self._head, self._name = head, name
        self.made: LazyTensor | None = None
        self.returned: Tensor | None = None
        self.loss_backend: Any = None
        self.until_loss = False
        self._keeps_weights = False

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., D], lazy if they are a product with
        plain weights.
        """
        layer = self._layer
        # a hook of the text model may have changed the layer since
        if _why_called(self._name, layer) is None:
            with _InPlaceOfProduct(layer, self._multiplied), self._keep_weights():
                # FSDP's hooks around the layer's forward gather the weights
                self.returned = layer(hidden)
            # what the layer itself did with its product is no step of the head
            if self.made is not None:
                head_scales(self.made, self.until_loss)
            return self.returned
        logits: Tensor = layer(hidden)
        return logits

    @property
    def _layer(self) -> Any:
        return getattr(vars(self)["_head"], vars(self)["_name"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def _multiplied(self, hidden: Tensor) -> Tensor:
        layer = self._layer
        parts = as_multiplied(hidden, layer)
        kernels = (
            None
            if parts is None
            else state_of(self._head).kernels_for(hidden.device, parts[0].dtype)
        )
        if parts is None or kernels is None or kernels["loss"] == "upstream":
            return F.linear(hidden, layer.weight, layer.bias)
        self.loss_backend = LOSS.backend(kernels["loss"])
        self.made = lazy_logits(*parts, lambda: gathered(layer), kernels["loss"])
        return self.made

    @contextmanager
    def _keep_weights(self) -> Iterator[None]:
        """Let FSDP2 keep what it gathers in the block for the loss, until `leave`: other ranks may
        run their rows as upstream does, which gathers weights once in a forward pass.
        """
        layer = self._layer
        group = layer._get_fsdp_state()._fsdp_param_group if isinstance(layer, FSDPModule) else None
        if group is None or not self.until_loss or group.post_forward_mesh_info is None:
            yield
            return
        frees, group.post_forward_mesh_info = group.post_forward_mesh_info, None
        try:
            yield
        finally:
            group.post_forward_mesh_info = frees
        self._keeps_weights = True

    def leave(self) -> None:
        """End the call, once its loss is computed."""
        if self._keeps_weights:
            self._layer.reshard()
            self._keeps_weights = False


class _InPlaceOfProduct(TorchFunctionMode):
    """Within the block, the product in a linear layer's forward is replaced by `multiplied` of its
    input; the layer is not changed, and its hooks run.
    """

    def __init__(self, layer: Any, multiplied: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._layer, self._multiplied = layer, multiplied

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace `F.linear` with the layer's weight; run any other function unchanged."""
        if func is F.linear and args[1] is self._layer.weight:
            return self._multiplied(args[0])
        return func(*args, **(kwargs or {}))


def gathered(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the layer's weight and bias, each by `whole`."""
    return whole(layer.weight), None if layer.bias is None else whole(layer.bias)


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter; if FSDP2 has sharded the parameter, gathered from all ranks, with the
    mean gradient over the ranks, as FSDP2 computes.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    placements = [Partial("avg")] * parameter.device_mesh.ndim
    # in no_grad torch 2.10 takes the gradient away from what it made, which DTensors do not allow
    sharded: Any = parameter if torch.is_grad_enabled() else parameter.detach()
    found: Tensor = sharded.full_tensor(grad_placements=placements)
    return found


class LossOfCall:
    """A head's loss function during one call: drops the record, which upstream's heads pass on with
    all other keywords, and computes the loss from lazy logits if that is possible.

    Attributes:
        deferred: the layer that returned lazy logits; None: the logits are computed.
        targets: the `shift_labels` with which upstream is expected to call the loss, the label that
            means no loss, and the `Targets` of both.
    """

    def __init__(self, function: Any, keywords: dict[str, Any]) -> None:
        self._function, self._keywords = function, keywords
        self.deferred: DeferredLayer | None = None
        self.targets: tuple[Tensor, int, Targets] | None = None

    def __call__(self, *args: Any, packed_sequence: Any = None, **kwargs: Any) -> Any:
        """Return the loss; lazy logits stay unread if the loss can be computed without them."""
        kwargs |= self._keywords
        lazy = None if self.deferred is None else self.deferred.made
        try:
            if lazy is not None:
                head_scales(lazy, False)
                given = _UPSTREAM.bind(*args, **kwargs).arguments
                loss = self._without_logits(lazy, given)
                if loss is not None:
                    return loss
            return self._function(*args, **kwargs)
        finally:
            if self.deferred is not None:
                self.deferred.leave()

    def _without_logits(self, logits: Any, given: dict[str, Any]) -> Tensor | None:
        """Return the result of transformers' `ForCausalLMLoss` for these arguments, or None if that
        needs the logits.
        """
        assert self.targets is not None and self.deferred is not None
        logits = _unread(given["logits"], self.deferred.returned, logits)
        if logits is None or given["vocab_size"] != logits.shape[-1]:
            return None
        expected, of_expected, targets = self.targets
        ignored, shifted = given.get("ignore_index", -100), given.get("shift_labels")
        # in some releases, heads with a vision tower pass on `labels` only
        if shifted is None:
            shifted = F.pad(given["labels"], (0, 1), value=ignored)[..., 1:]
        if shifted.numel() * logits.shape[-1] != logits.numel():
            return None
        # under context parallelism, each rank has targets of its own
        if shifted is not expected or ignored != of_expected:
            targets = Targets.of(shifted.to(logits.device), ignored)
        if not logits.is_cuda and bool((targets.flat >= logits.shape[-1]).any()):
            # transformers' loss raises on a CPU; on a GPU the loss is NaN
            return None
        total = loss_of(logits, targets, self.deferred.loss_backend)
        items = given.get("num_items_in_batch")
        # without targets, the mean is zero here, and so are its gradients
        if items is None:
            items = (targets.flat >= 0).sum().clamp(min=1)
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def _unread(given: Any, returned: Tensor | None, made: LazyTensor) -> Any:
    """Return the lazy logits from which a loss can be computed without reading them: the last
    layer's product, or the head's scaled or capped product; None if `given` are other logits.
    """
    if not _holds(returned, made):
        return None
    if given is returned:
        return made
    return given if scaled_from(given, made) else None


def _holds(returned: Tensor | None, made: LazyTensor) -> bool:
    """Whether a last layer returned its lazy logits unread or unchanged, in the same or a wider
    dtype.
    """
    if not isinstance(returned, LazyTensor) or made.source.changed or returned.source.changed:
        return False
    return torch.promote_types(made.dtype, returned.dtype) == returned.dtype


def why_logits_are_made(head: Any) -> str | None:
    """Return why a head's logits are computed in training although a loss without logits exists, as
    half a sentence, or None.
    """
    loss = head._loss()
    if loss is not ForCausalLMLoss:
        return f"its loss is {getattr(loss, '__qualname__', type(loss).__name__)}"
    # by Liger, for instance
    if F.cross_entropy.__module__ != F.__name__:
        return f"torch's cross entropy is replaced by {F.cross_entropy.__module__}"
    return _why_called(*last_layer(head))


def _why_called(name: str, layer: Any) -> str | None:
    """Return why a last layer is called instead of reading its weight, in words, or None."""
    # FSDP2 changes the layer's class, and gathers its weights by hooks
    sharded = isinstance(layer, FSDPModule) and forward_of(layer) is nn.Linear.forward
    if type(layer) is not nn.Linear and not sharded:
        return f"{name} is a {type(layer).__name__}"
    if (is_hooked_by_others if sharded else is_hooked)(layer) or "forward" in vars(layer):
        return f"{name} has hooks or a forward of its own"
    return None


def is_hooked_by_others(layer: FSDPModule) -> bool:
    """Whether a sharded layer has other hooks than FSDP's."""
    fields = dict(vars(layer))
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        fields[kind] = [hook for hook in fields[kind].values() if not is_of_fsdp(hook)]
    return has_hooks(fields) or all_are_hooked()


def last_layer(head: Any) -> tuple[str, Any]:
    """Return the name and the child of a head that computes its logits; PEFT may have wrapped the
    layer.
    """
    layer = head.get_output_embeddings()
    return next(
        ((name, child) for name, child in head.named_children() if child is layer),
        ("its last layer", None),
    )


def is_left_to_fused(called: Any) -> bool:
    """Whether a batch is run by the fused forward of TRL or verl: it is no row, and FSDP2 does not
    shard the last layer by itself, whose weights ranks with packed rows gather otherwise.

    Args:
        called: the `self` of the forward: a `HeadOfCall` for a row, else the head.
    """
    return type(called) is not HeadOfCall and not isinstance(last_layer(called)[1], FSDPModule)


def as_multiplied(hidden: Tensor, layer: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return hidden states, weight and bias in the dtype of their product; None if the product can
    only be computed by calling the layer.
    """
    weight: Tensor = layer.weight
    bias: Tensor | None = layer.bias
    if (
        not {type(weight), type(bias)} <= {nn.Parameter, Tensor, type(None)}
        or weight.device != hidden.device
    ):
        return None
    dtype = autocast_dtype(hidden.device)
    if dtype is not None and torch.float64 not in (hidden.dtype, weight.dtype):
        hidden, weight, bias = (
            hidden.to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
        )
    return (hidden, weight, bias) if weight.dtype == hidden.dtype else None


def taken_by(loss: Any) -> Callable[[str], bool]:
    """Return a function that tells whether a loss function takes a keyword. A loss that does not
    take `shift_labels` gets the row's targets from `labels`.
    """
    taken = signature(loss).parameters
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values())
    return lambda name: takes_all or name in taken
