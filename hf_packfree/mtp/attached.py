"""The head as a child of the model, whose calls it follows while it is attached."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hf_packfree.mtp.checkpoint import HeadTensors, save_as_read
from hf_packfree.mtp.head import MTPHead
from hf_packfree.mtp.head_options import MTPOptions
from hf_packfree.mtp.training import MTPTraining
from hf_packfree.packing.marks import MTP_LAYERS, SAVE_PRETRAINED


class AttachedHead(MTPHead):
    """The head with its options; where it is trained, its parent has hooks that add its loss.

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
        if self.options.train:
            MTPTraining(self.options).join(parent)

    def leave(self, parent: Any) -> None:
        """Stop following the parent's calls, and restore its configuration and
        `save_pretrained`.
        """
        if not self._named_before:
            MTP_LAYERS.take(parent.config.get_text_config())
        SAVE_PRETRAINED.take(parent)
        if (calls := training_of(parent)) is not None:
            calls.leave(parent)


def training_of(parent: nn.Module) -> MTPTraining | None:
    """Return what follows the calls of a trained head's parent; None for any other module.

    The parent's hooks hold it, not the head: PEFT copies the head alone, and any of its copies may
    be the one that is left.
    """
    owners = (getattr(hook, "__self__", None) for hook in parent._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, MTPTraining)), None)


def training_facts(model: nn.Module | None) -> dict[str, float]:
    """Return mean loss and accuracy of every depth since the last call, for the trained heads in a
    model, over all processes.

    A collective: all processes call this, as the Trainer does to log.
    """
    parents: Any = () if model is None else model.modules()
    return {
        name: value
        for parent in parents
        if (calls := training_of(parent)) is not None
        for name, value in calls.take(next(parent.mtp.parameters()).device).items()
    }
