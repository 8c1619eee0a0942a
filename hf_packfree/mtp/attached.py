"""The head as a child of the model, whose calls it follows while it is attached."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hf_packfree.models.state import find_state
from hf_packfree.mtp.checkpoint import HeadTensors, save_as_read
from hf_packfree.mtp.head import MTPHead
from hf_packfree.mtp.head_options import MTPOptions
from hf_packfree.mtp.training import MTPTraining
from hf_packfree.packing.marks import MTP_LAYERS, SAVE_PRETRAINED


class AttachedHead(MTPHead):
    """The head with its options and, where it is trained, the hooks that add its loss.

    Args:
        trunk, layers: see `MTPHead`.
        options: see `MTPOptions`.

    Attributes:
        per_expert: whether the checkpoint has tensors per expert, in which layout the head is saved
            again; None without a checkpoint, or without experts.
    """

    def __init__(self, trunk: Any, layers: int, options: MTPOptions) -> None:
        super().__init__(trunk, layers)
        self.options = options
        self.train(trunk.training)
        self.per_expert: bool | None = None
        self.training_calls = MTPTraining(options) if options.train else None
        self._hooks: list[Any] = []
        self._named_before = True

    def train(self, mode: bool = True) -> AttachedHead:
        """Set the mode; freezes a head that is only kept again, because transformers replaces
        parameters when it loads them.
        """
        super().train(mode)
        if not self.options.train:
            self.requires_grad_(False)
        return self

    def read_from(self, tensors: HeadTensors) -> None:
        """Remember the layout of a checkpoint's experts."""
        if any(".experts." in name for name in tensors.files):
            self.per_expert = tensors.per_expert

    def join(self, parent: Any) -> None:
        """Follow the parent's calls, and note the number of the head's layers in the parent's
        configuration.
        """
        config = parent.config.get_text_config()
        self._named_before = hasattr(config, MTP_LAYERS.name)
        if not self._named_before:
            MTP_LAYERS.put(config, len(self.layers))
        if self.per_expert is not None:
            SAVE_PRETRAINED.put(parent, partial(save_as_read, parent))
        if self.training_calls is not None:
            self._hooks = [
                parent.register_forward_pre_hook(self.training_calls.before, with_kwargs=True),
                parent.register_forward_hook(self.training_calls.after, always_call=True),
            ]
            if (state := find_state(parent)) is not None:
                state.followers.append(self.training_calls.follow)

    def leave(self, parent: Any) -> None:
        """Stop following the parent's calls, and restore its configuration and
        `save_pretrained`.
        """
        if not self._named_before:
            MTP_LAYERS.take(parent.config.get_text_config())
        SAVE_PRETRAINED.take(parent)
        while self._hooks:
            self._hooks.pop().remove()
        state, calls = find_state(parent), self.training_calls
        if state is not None and calls is not None and calls.follow in state.followers:
            state.followers.remove(calls.follow)


def training_facts(model: nn.Module | None) -> dict[str, float]:
    """Return mean loss and accuracy of every depth since the last call, for the trained heads in a
    model, over all processes.

    A collective: all processes call this, as the Trainer does to log.
    """
    heads = (
        ()
        if model is None
        else (module for module in model.modules() if isinstance(module, AttachedHead))
    )
    calls = ((head.training_calls, head.fc.weight.device) for head in heads)
    return {
        name: value
        for one, device in calls
        if one is not None
        for name, value in one.take(device).items()
    }
