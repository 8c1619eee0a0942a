"""Keep `output_hidden_states` and its kin working: transformers looks recorders up by the model's class."""

from __future__ import annotations

from torch import nn
from transformers.utils import output_capturing


def share_recorders(module: nn.Module, before: type[nn.Module]) -> None:
    """Register the recorders of `before`, upstream's class, for the class that `module` has now.

    Without it a swapped text model returns no hidden states and says nothing (transformers 5.23 keys its registry by
    the printed class).
    """
    recorders = getattr(before, "_can_record_outputs", None)
    registry = getattr(output_capturing, "_CAN_RECORD_REGISTRY", None)
    if recorders is not None and registry is not None and hasattr(module, "config"):
        key = module if type(registry) is not dict else str(type(module))
        registry[key] = recorders
