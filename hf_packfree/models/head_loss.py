"""A head's last layer and its loss as one operation: in training, logits are made only where
something reads them.

Upstream's forward calls both, one after the other. For that call something that returns lazy logits
stands in for the layer, and the loss that finds them unread computes what transformers' would, from
the tokens that have targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_packfree.models.fusable import is_hooked
from hf_packfree.models.state import PatchState, state_of
from hf_packfree.ops.loss import SOFTMAX_GRADIENTS, LazyLogits, Targets, lazy_logits, loss_of
from hf_packfree.packing import PackedSequence, repad, unpad
from hf_packfree.packing.lazy import LazyTensor

_UPSTREAM = signature(ForCausalLMLoss)
PADDED = "packfree_padded"
"""The attribute of a row's logits that holds them padded, where the loss was computed by way of
these.
"""


@contextmanager
def logits_on_demand(head: Any, loss: dict[str, Any], ignored: int) -> Iterator[None]:
    """Let the last layer of `head` return lazy logits while the block runs, where nothing speaks
    against it.

    Args:
        head: patched, in training.
        loss: what its loss is called with.
        ignored: the label that means no loss.
    """
    targets = loss.get("shift_labels")
    if targets is None or targets.dtype != torch.int64 or why_logits_are_made(head) is not None:
        yield
        return
    name, layer = _last_layer(head)
    vars(head)[name] = _Deferred(
        layer,
        state_of(head),
        targets,
        ignored,
        Targets.of(targets.to(layer.weight.device), ignored),
    )
    try:
        yield
    finally:
        del vars(head)[name]


def why_logits_are_made(head: Any) -> str | None:
    """Return why a head's logits are made in training although its loss needs none, as half a
    sentence, or None.
    """
    name, layer = _last_layer(head)
    loss = head._loss()
    if state_of(head).padded == "full":
        return "padded='full' makes logits always"
    if loss is not ForCausalLMLoss:
        return f"its loss is {getattr(loss, '__qualname__', type(loss).__name__)}"
    # Liger's, for instance
    if F.cross_entropy.__module__ != F.__name__:
        return f"torch's cross entropy is replaced by {F.cross_entropy.__module__}"
    if type(layer) is not nn.Linear:
        return f"{name} is a {type(layer).__name__}"
    if is_hooked(layer) or "forward" in vars(layer):
        return f"{name} has hooks or a forward of its own"
    return None


def _last_layer(head: Any) -> tuple[str, Any]:
    """Return the child of a head that makes its logits, with its name; adapters may be around
    it.
    """
    layer = head.get_output_embeddings()
    return next(
        ((name, child) for name, child in head.named_children() if child is layer),
        ("its last layer", None),
    )


@dataclass(frozen=True, eq=False)
class _Deferred:
    """Called in place of a head's last layer.

    Attributes:
        layer: it.
        state: of the head.
        given: what its loss will be called with as `shift_labels`, int64 of any shape.
        ignored: the label that means no loss.
        targets: made of `given`.
    """

    layer: nn.Linear
    state: PatchState
    given: Tensor
    ignored: int
    targets: Targets

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., D], lazy where they are a product
        with plain weights.
        """
        parts = as_multiplied(hidden, self.layer)
        backend = (
            self.state.kernels_for(hidden.device, parts[0].dtype).loss
            if parts is not None
            else "upstream"
        )
        if parts is None or backend == "upstream":
            logits: Tensor = self.layer(hidden)
            return logits
        logits = lazy_logits(*parts, self._reload)
        vars(logits)["packfree_deferred"] = self, SOFTMAX_GRADIENTS[backend]
        return logits

    def _reload(self) -> tuple[Tensor, Tensor | None]:
        """The layer's weights, from all ranks where FSDP has sharded them."""
        parts = (
            getattr(one, "full_tensor", lambda one=one: one)()
            for one in (self.layer.weight, self.layer.bias)
        )
        weight, bias = parts
        return weight, bias


def as_multiplied(hidden: Tensor, layer: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return hidden states, weight and bias in the dtype of their product; None where only the
    layer itself knows that.
    """
    weight: Tensor = layer.weight
    bias: Tensor | None = layer.bias
    if (
        not {type(weight), type(bias)} <= {nn.Parameter, Tensor, type(None)}
        or weight.device != hidden.device
    ):
        return None
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (hidden.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = (
            hidden.to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
        )
    return (hidden, weight, bias) if weight.dtype == hidden.dtype else None


def _deferred_loss(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return what transformers' `ForCausalLMLoss` does with these arguments, or None where
    somebody has to read the logits.
    """
    given = _UPSTREAM.bind(*args, **kwargs).arguments
    logits, items = given["logits"], given.get("num_items_in_batch")
    known = (
        vars(logits).get("packfree_deferred")
        if isinstance(logits, LazyLogits) and logits.before_any_change()
        else None
    )
    if known is None or given["vocab_size"] != logits.shape[-1]:
        return None
    deferred, softmax_gradient = known
    ignored, shifted = given.get("ignore_index", -100), given.get("shift_labels")
    # some releases' heads with a vision tower hand on nothing else
    if shifted is None:
        shifted = F.pad(given["labels"], (0, 1), value=ignored)[..., 1:]
    if shifted.numel() * logits.shape[-1] != logits.numel():
        return None
    # a rank of several has targets of its own
    counted = shifted is deferred.given and ignored == deferred.ignored
    targets = deferred.targets if counted else Targets.of(shifted.to(logits.device), ignored)
    if not logits.is_cuda and bool((targets.flat >= logits.shape[-1]).any()):
        # transformers' loss raises; on a GPU the loss is NaN
        return None
    total = loss_of(logits, targets, softmax_gradient)
    # a mean over nothing is zero here, and so are its gradients
    if items is None:
        items = (targets.flat >= 0).sum().clamp(min=1)
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def call_loss(
    function: Any, full: bool, *args: Any, packed_sequence: Any = None, **kwargs: Any
) -> Any:
    """Call a loss with the row's logits, and, where they will be padded anyway, by way of the
    padded ones.

    Whoever keeps the padded logits then sees the gradient of the loss, as transformers' have it.
    """
    logits = args[0] if args else kwargs["logits"]
    if isinstance(logits, LazyTensor) and (loss := _deferred_loss(*args, **kwargs)) is not None:
        return loss
    if (
        full
        and isinstance(packed_sequence, PackedSequence)
        and logits.shape[:2] == (1, packed_sequence.num_tokens)
    ):
        padded = repad(logits, packed_sequence)
        if padded is not logits:
            setattr(logits, PADDED, padded)
            logits = unpad(padded, packed_sequence)
    return (
        function(logits, *args[1:], **kwargs) if args else function(**kwargs | {"logits": logits})
    )


def taken_by(loss: Any) -> Callable[[str], bool]:
    """Return whether a loss takes a keyword; one that takes few reads a row's targets from
    `labels`.
    """
    taken = signature(loss).parameters
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values())
    return lambda name: takes_all or name in taken
