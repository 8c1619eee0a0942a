"""Log-probabilities of given tokens from hidden states and a head's last layer, whatever that
is: a plain linear layer multiplies in chunks without being called; any other one, with adapters,
quantised or hooked, is called on chunks, and again in the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.base import size_of_linear
from hf_packfree.models.head_loss import gathered
from hf_packfree.models.plain_layers import is_hooked
from hf_packfree.ops.backend import Target, needs_triton
from hf_packfree.ops.loss import Expected, Targets, TokenLogProbs, Wanted, linear_log_probs
from hf_packfree.ops.loss.chunked_loss import rows_of_a_chunk
from hf_packfree.ops.loss.logits import LazyLogits
from hf_packfree.ops.loss.statistics import measured


@dataclass(frozen=True)
class Question:
    """What is asked of every token.

    Attributes:
        temperature: see `linear_log_probs`.
        wanted: what besides the log-probability.
        in_fp32: the product is computed in fp32, under autocast, too.
        expected: which gradients will come.
        cap: to which tanh caps the logits, if any does.
    """

    temperature: float | Tensor = 1.0
    wanted: Wanted = Wanted()
    in_fp32: bool = False
    expected: Expected = field(default_factory=Expected)
    cap: float | None = None


def token_log_probs(
    hidden: Tensor | Any,
    targets: Tensor,
    head: Any = None,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool | Literal["detached"] = False,
    top1: bool = False,
    ignore_index: int = -100,
) -> TokenLogProbs:
    """Return the log-probability of given tokens, and more of the same distributions, without
    logits of all tokens.

    Of hidden states any causal language model will do, patched or not, with adapters on its head
    too; of an output a patched one.

    Args:
        hidden: [B, S, D], the text model's last hidden states, `model.base_model(...)[0]`; packed
            or padded. Or the output of a patched model, which has lazy logits.
        targets: int64 [B, S]: of every token the one that is asked about, as a rule the next.
        head: the model, or its last layer; an output needs none. Every rank calls where FSDP2
            shards it: its weights are gathered, and get the mean gradient over the ranks.
        temperature: of the model's own logits, which some configs scale; above 0; a number, or
            [B, 1] or [B, S]; without gradient.
        entropy: with a gradient, or "detached" for the log, which is cheaper: two products the
            size of the logits instead of three where the head is frozen.
        top1: the most likely tokens, and whether they are the targets.
        ignore_index: the target of tokens that are not asked about, and cost nothing.

    Raises:
        UnsupportedInput: the model's logits are not its last layer's of the last hidden states;
            an output has no lazy logits, or they were read; hidden states come without a head.

    Examples:
        >>> import torch
        >>> from hf_packfree import token_log_probs
        >>> head = torch.nn.Linear(2, 8, bias=False).requires_grad_(False)
        >>> hidden, targets = torch.zeros(1, 3, 2), torch.tensor([[3, 7, -100]])
        >>> found = token_log_probs(hidden, targets, head, entropy="detached")
        >>> found.log_probs, found.entropy
        (tensor([[-2.0794, -2.0794,  0.0000]]), tensor([[2.0794, 2.0794, 0.0000]]))
    """
    if not isinstance(hidden, Tensor):
        return _lazy_logits_of(hidden).log_probs(
            targets, temperature=temperature, entropy=entropy, top1=top1, ignore_index=ignore_index
        )
    if head is None:
        raise UnsupportedInput(
            "found hidden states without their head; wanted the model that they are of; pass it as "
            "head"
        )
    if (changed := changed_logits(head)) is not None:
        raise UnsupportedInput(
            f"found {changed} of a {type(head).__name__}; wanted logits as the model's last layer "
            "gives them of the last hidden states; take log_softmax of the model's own logits"
        )
    layer = head.get_output_embeddings() if hasattr(head, "get_output_embeddings") else head
    counted = Targets.of(targets.to(hidden.device), ignore_index)
    wanted, scale = Wanted(entropy=bool(entropy), top1=top1), scale_of_logits(head)
    expected = Expected(entropy=entropy is True)
    found = layer_log_probs(
        hidden,
        layer,
        counted,
        Question(temperature / scale, wanted, expected=expected, cap=cap_of_logits(head)),
    )
    return found.with_detached_entropy() if entropy == "detached" else found


def _lazy_logits_of(output: Any) -> LazyLogits:
    """Return a patched model's logits, which nobody has read.

    Raises:
        UnsupportedInput: the output has none.
    """
    logits = getattr(output, "logits", None)
    if isinstance(logits, LazyLogits):
        return logits
    raise UnsupportedInput(
        f"found a {type(output).__name__} without lazy logits; wanted a patched model's output of "
        "a packed row or a padded batch, or hidden states; pass model.base_model(...)[0] and the "
        "model"
    )


_CHANGES = {"logits_mup_width_multiplier": 1.0, "ngram": None}
"""What configs say of logits that are not the last layer's of the last hidden states: {name: the
value of none}.
"""
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1, "output_multiplier": 1}
"""What they are multiplied with: {name: to which power}."""
_MULTIPLIES = "hyperclovax"
"""The type of text model whose `logits_scaling` is a factor, where all others' is a divisor."""


def changed_logits(head: Any) -> str | None:
    """Return why a model's logits are not its last layer's of the last hidden states, but for a
    scale and a cap, in words, or None.
    """
    text = _text_config(head)
    for name, none in _CHANGES.items():
        value = getattr(text, name, none)
        if value is not None and value != none:
            return f"{name}={value} in the config"
    # no family has both, and which comes first is nowhere said
    if cap_of_logits(head) is not None and scale_of_logits(head) != 1:
        return "a cap and a scale of logits in the config"
    return None if text is None else _between(head)


def scale_of_logits(head: Any) -> float:
    """Return what a model multiplies its last layer's logits with."""
    text = _text_config(head)
    multiplies = getattr(text, "model_type", None) == _MULTIPLIES
    powers = _SCALES | ({"logits_scaling": 1} if multiplies else {})
    values = {name: getattr(text, name, None) or 1.0 for name in powers}
    return math.prod(float(values[name]) ** power for name, power in powers.items())


def cap_of_logits(head: Any) -> float | None:
    """Return to what a model caps its logits, or None."""
    text = _text_config(head)
    return next((float(cap) for name in _CAPS if (cap := getattr(text, name, None))), None)


def _text_config(head: Any) -> Any:
    config: Any = getattr(head, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def _between(head: Any) -> str | None:
    """Return what a model calls between its text model and its last layer, in words, or None."""
    layer = head.get_output_embeddings() if hasattr(head, "get_output_embeddings") else None
    owners = (one for one in head.modules() if any(part is layer for part in one.children()))
    owner = next(owners, None)
    text = owner.base_model if isinstance(owner, PreTrainedModel) else None
    # a few classes do not say which of their parts is the text model
    if owner is None or text is owner:
        return None
    found: list[str] = []
    for part in owner.children():
        if part is layer:
            break
        # towers come before the text model
        names = [] if part is text else [*found, type(part).__name__]
        found = names if any(True for _ in part.parameters()) else found
    return f"a {found[0]} in front of the last layer" if found else None


def layer_log_probs(
    hidden: Tensor, layer: Any, targets: Targets, question: Question, backend: str | None = None
) -> TokenLogProbs:
    """Return the log-probabilities of targets, and what else is asked.

    Args:
        hidden: [..., D].
        layer: makes logits [..., V] of these.
        targets: of every token.
        backend: of a plain layer, see `linear_log_probs`; None, or "upstream", which has none: the
            fastest that runs there.
    """
    plain = _plain(layer)
    if plain is None or question.cap is not None:
        return _called(hidden, layer, targets, question)
    weight, bias = gathered(plain)
    return linear_log_probs(
        hidden.to(weight.device),
        weight,
        targets,
        bias=bias,
        temperature=question.temperature,
        wanted=question.wanted,
        expected=question.expected,
        dtype=torch.float32 if question.in_fp32 else _dtype(hidden, weight),
        backend=backend if backend and backend != "upstream" else _fastest(hidden),
    )


def _plain(layer: Any) -> nn.Linear | None:
    """Return the linear layer that a call of this one runs and nothing else, or None."""
    # PEFT's copy of a layer that is trained whole, or the layer itself
    if type(layer).__name__ == "ModulesToSaveWrapper" and not is_hooked(layer):
        active = None if layer.disable_adapters else next(iter(layer.active_adapters), None)
        trained = layer.modules_to_save
        layer = trained[active] if active in trained else layer.original_module
    plain = type(layer) is nn.Linear and not is_hooked(layer) and "forward" not in vars(layer)
    kinds = {type(one) for one in (layer.weight, layer.bias)} if plain else {None}
    return layer if kinds <= {nn.Parameter, Tensor, DTensor, type(None)} else None


def _dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which autocast multiplies, or that of the hidden states."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _fastest(hidden: Tensor) -> str:
    capability = torch.cuda.get_device_capability(hidden.device) if hidden.is_cuda else None
    target = Target(hidden.device.type, capability, hidden.dtype)
    return "triton" if needs_triton(target) is None else "torch"


def _called(hidden: Tensor, layer: Any, targets: Targets, question: Question) -> TokenLogProbs:
    """Return log-probabilities from the layer's own forward, called on chunks of tokens."""
    shape, flat = hidden.shape[:-1], hidden.flatten(0, -2)
    chosen = targets.chosen()
    chosen = (targets.flat >= 0).nonzero()[:, 0] if chosen is None else chosen
    x, wanted = flat.index_select(0, chosen), targets.flat[chosen]
    wide = torch.promote_types(x.dtype, torch.float32)
    temperature = torch.as_tensor(question.temperature, dtype=wide, device=x.device).expand(shape)
    inverse = temperature.reshape(-1)[chosen].reciprocal()
    rows = rows_of_a_chunk(len(x), size_of_linear(layer)[0], x.device.type)
    parts = [
        _of_chunk(layer, question, x[part], wanted[part], inverse[part])
        for part in (slice(begin, begin + rows) for begin in range(0, max(len(x), 1), rows))
    ]
    values: Any = (
        None
        if column[0] is None
        else column[0].new_zeros(len(flat)).index_copy(0, chosen, torch.cat(column)).view(shape)
        for column in zip(*parts, strict=True)
    )
    _, log_probs, entropy, top1, squares, means = values
    hit = (
        None
        if top1 is None
        else (top1 == targets.flat.view(shape)) & (targets.flat >= 0).view(shape)
    )
    return TokenLogProbs(log_probs, entropy, top1, hit, squares, means)


def _of_chunk(
    layer: Any, question: Question, x: Tensor, targets: Tensor, inverse: Tensor
) -> tuple[Tensor | None, ...]:
    def run(x: Tensor) -> tuple[Tensor | None, ...]:
        kind = x.device.type
        if question.in_fp32:
            with torch.autocast(kind, enabled=False):
                logits = layer(x.float())
        else:
            logits = layer(x)
        if question.cap is not None:
            logits = (logits / question.cap).tanh() * question.cap
        found = measured(logits, targets, inverse, question.wanted)
        return tuple(vars(found).values())

    if not torch.is_grad_enabled():
        return run(x)
    outputs: tuple[Tensor | None, ...] = checkpoint(run, x, use_reentrant=False)
    return outputs


__all__ = [
    "Question",
    "cap_of_logits",
    "changed_logits",
    "layer_log_probs",
    "scale_of_logits",
    "token_log_probs",
]
