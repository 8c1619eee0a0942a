"""The state that a captured graph depends on besides its inputs: addresses of parameters, settings
of modules and of torch; and which models and rows cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.graphs import checkpointing
from hf_packfree.ops.backend import qualified_name
from hf_packfree.packing import PackedSequence

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_hf_hook",
)
LONGEST = 16384
"""The most tokens of a captured row: with more, the GPU takes longer than the host anyway
(docs/performance.md).
"""
WEIGHTS = (Tensor, nn.Parameter)
_IN_4_BITS = "bitsandbytes.nn.modules", "Params4bit"
_ON_A_PARAMETER = "peft.tuners.lora.layer", "ParamWrapper"


class Settings:
    """The state of a model that captured code may have read; torch's is `switches_of`.

    It is compared in every step, and a model has thousands of modules. So the modules' attributes
    are compared as dictionaries, whose values are equal if they are the same object; containers
    among them are compared by their items.

    Args:
        own_weights: whether it matters where the model's weights are; otherwise, only which there
            are, and whether they are trained.
        further: returns what else is compared.
    """

    def __init__(
        self,
        module: nn.Module,
        own_weights: bool = True,
        further: Callable[[], Any] = lambda: None,
    ) -> None:
        self._further, self._found = further, further()
        self._modules = [part for _, part in _parts(module)]
        self._classes: list[Any] = [*map(type, self._modules)]
        # a class may be given another forward, too
        self._forwards = [(cls, cls.forward) for cls in {*self._classes}]
        found = [
            found
            for part in self._modules
            for found in chain((vars(part),), _containers(vars(part), own_weights))
        ]
        # most dictionaries are empty, such as those of hooks
        self._empty = [each for each in found if not each]
        self._attributes = [each for each in found if each]
        self._copies = [_copied(found) for found in self._attributes]
        self._recomputed = [
            (each, copy)
            for each, copy in zip(self._attributes, self._copies, strict=True)
            if isinstance(each, dict) and checkpointing.FUNCTION in each
        ]
        # kept apart, because `==` takes another one-element tensor of the same value for equal
        self._numbers = [
            (each, name, value)
            for each in self._attributes
            if isinstance(each, dict)
            for name, value in each.items()
            if isinstance(value, Tensor) and value.numel() == 1
        ]
        self._tensors = [*(_tensors(module) if own_weights else module.buffers())]
        self._gathered = [] if own_weights else [part._parameters for part in module.modules()]
        self._trained = self._are_trained()
        self._in_4_bits = [x for x in self._tensors if type(x) not in WEIGHTS]
        self._constants = _constants(self._in_4_bits)
        self._tensors += [x for x in self._constants if isinstance(x, Tensor)]
        self._addresses = _addresses(self._tensors)

    def keep_memory(self) -> bool:
        """Whether what a graph reads is where it was: a replay reads no memory that was freed."""
        return self._addresses == _addresses(self._tensors)

    def _are_trained(self) -> list[tuple[str, bool]]:
        found = (item for parameters in self._gathered for item in parameters.items())
        return [(name, weight.requires_grad) for name, weight in found if weight is not None]

    def hold(self) -> bool:
        """Whether the model is unchanged."""
        # TRL's trainers switch checkpointing off and on in each step, with an equal function
        for each, copy in self._recomputed:
            function = each.get(checkpointing.FUNCTION)
            if checkpointing.are_alike(function, copy[checkpointing.FUNCTION]):
                copy[checkpointing.FUNCTION] = function
        constants = _constants(self._in_4_bits)
        try:
            same = not any(self._empty) and self._attributes == self._copies
        # raised where a tensor was replaced by another one, since `==` then compares elements
        except (RuntimeError, ValueError):
            return False
        return (
            same
            and [*map(type, self._modules)] == self._classes
            and all(cls.forward == forward for cls, forward in self._forwards)
            and all(each[name] is value for each, name, value in self._numbers)
            and len(constants) == len(self._constants)
            and all(map(is_, constants, self._constants))
            and self._trained == self._are_trained()
            and self._found == self._further()
            and self.keep_memory()
        )


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with their names, without the embedding, which runs before the graph: each
    `gradient_checkpointing_enable` puts another hook on it.
    """
    embeddings = embedding_of(module)
    return ((name, part) for name, part in module.named_modules() if part is not embeddings)


def embedding_of(module: Any) -> nn.Module | None:
    """Return what embeds a text model's ids; None for other modules, and for a stage of a pipeline
    that begins behind it.
    """
    try:
        found: nn.Module | None = getattr(module, "get_input_embeddings", lambda: None)()
    # the second where a class names its own attribute, which a stage may have deleted
    except (NotImplementedError, AttributeError):
        return None
    return found


def _containers(attributes: dict[str, Any], own_weights: bool) -> Iterator[Any]:
    return (
        value
        for name, value in attributes.items()
        if isinstance(value, (dict, list, set)) and (own_weights or name != "_parameters")
    )


def _copied(found: Any) -> Any:
    """Return a copy of a container; of a dictionary a plain one, since the class that DeepSpeed's
    ZeRO-3 keeps parameters in cannot be copied.
    """
    return dict(found.items()) if isinstance(found, dict) else found.copy()


Places = list[tuple[dict[str, Any], str]]
"""Where modules keep their parameters, and under which names."""


def places_of(module: nn.Module) -> Places:
    """Return where a module's parameters are kept."""
    return [
        (part._parameters, name)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]


def weights_at(places: Places) -> list[Tensor]:
    """Return the parameters that are there at present."""
    return [parameters[name] for parameters, name in places]


def read_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a text model's graph may read."""
    return [own[name] for own, name in read_places(module)]


def read_places(module: nn.Module) -> Places:
    """Return where a text model's parameters are kept: all but the embedding's."""
    return [
        (part._parameters, name)
        for _, part in _parts(module)
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]


def put_back(module: nn.Module) -> list[Tensor]:
    """Return the weights of which torch counts a new version in every forward pass, without another
    value: PEFT adds adapters of parameters (`target_parameters`) to them, and then puts them back.
    """
    parts: list[Any] = [
        part for part in module.modules() if qualified_name(part) == _ON_A_PARAMETER
    ]
    added = (part for part in parts if not (part.disable_adapters or part.merged))
    return [part.get_param() for part in added if {*part.active_adapters} & {*part.lora_A}]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _addresses(tensors: list[Tensor]) -> list[tuple[int, bool]]:
    return [(x.data_ptr(), x.requires_grad) for x in tensors]


def _constants(tensors: list[Tensor]) -> list[Any]:
    """Return the objects that weights in 4 bits are dequantised with: bitsandbytes keeps them in an
    attribute of each weight, and replaces them there when the weight moves.
    """
    states = (getattr(x, "quant_state", None) for x in tensors)
    nested = ((state, getattr(state, "state2", None)) for state in states if state is not None)
    found = (state for states in nested for state in states if state is not None)
    return [value for state in found for value in (state, *vars(state).values())]


def switches_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the settings of torch, and of a model's configuration, by which layers run."""
    return (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        # not `get_float32_matmul_precision`, which raises after `TrainingArguments(tf32=True)`
        torch.backends.cuda.matmul.fp32_precision,
        *(
            getattr(getattr(module, "config", None), name, None)
            for name in ("_attn_implementation", "_experts_implementation", "num_hidden_layers")
        ),
    )


def why_not(module: nn.Module) -> str | None:
    """Return why a model cannot be captured, or None."""
    if any(hasattr(parameter, "ds_shape") for parameter in module.parameters()):
        return "DeepSpeed's ZeRO-3 gathers its weights"
    parts = [*_parts(module)]
    for name, part in parts:
        why = _why_not_part(name, part) or checkpointing.why_not(part)
        if why is not None:
            return why
    devices = set()
    for name, part in parts:
        own = chain(part._parameters.values(), part._buffers.values())
        for x in (x for x in own if x is not None):
            if type(x) not in WEIGHTS and qualified_name(x) != _IN_4_BITS:
                return f"{name} holds a {type(x).__name__}"
            devices.add(x.device)
    if len(devices) > 1 or any(device.type != "cuda" for device in devices):
        return f"its weights are on {', '.join(sorted(map(str, devices)))}"
    return None


def why_not_row(packed: PackedSequence) -> str | None:
    """Return why a row cannot be captured, or None."""
    if packed.num_tokens > LONGEST:
        return f"it has more than {LONGEST:,} tokens, for which a graph does not pay"
    if packed.is_shard:
        return "ranks share it"
    if packed.left_pad_segments:
        return "labels are predicted from its padding"
    return None


def _why_not_part(name: str, part: nn.Module) -> str | None:
    # FSDP1 has no hooks, and puts other tensors in the place of parameters in each forward pass
    if getattr(part, "_is_fsdp_managed_module", False):
        return "FSDP shards its weights"
    if any(vars(part).get(hook) for hook in HOOKS):
        return f"{name or 'the text model'} has hooks"
    return None
