"""Log-probabilities of given tokens from hidden states and a head's last layer. The weights of a
plain linear layer are multiplied in chunks of tokens. Any other layer, such as one with adapters,
quantised or hooked, is called on chunks, and called again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.base import size_of_linear
from hf_packfree.models.head_loss import gathered, is_hooked_by_others
from hf_packfree.models.linear_weights import compute_dtype
from hf_packfree.models.plain_layers import forward_of, is_hooked
from hf_packfree.ops.backend import Target, needs_triton
from hf_packfree.ops.loss import Expected, Targets, TokenLogProbs, Wanted, linear_log_probs
from hf_packfree.ops.loss.chunked_loss import rows_of_a_chunk
from hf_packfree.ops.loss.logits import LazyLogits
from hf_packfree.ops.loss.misread import refuse_misread, refuse_values
from hf_packfree.ops.loss.statistics import measured


@dataclass(frozen=True)
class Question:
    """Which statistics of every token are computed, and from which logits.

    Attributes:
        temperature: see `linear_log_probs`.
        wanted: which statistics besides the log-probability.
        in_fp32: whether the logits are computed in fp32, under autocast too.
        expected: the gradients that the backward pass is expected to get.
        cap: the softcap of the logits, cap * tanh(logits / cap), or None.
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
    """Return the log-probability of given tokens, and other statistics of their distributions,
    without the logits of all tokens.

    From hidden states, this works for any causal language model, patched or not, with adapters on
    its head too; from a model's output, for a patched model.

    Args:
        hidden: [B, S, D], the text model's last hidden states, `model.base_model(...)[0]`; packed
            or padded. Or the output of a patched model, whose logits are lazy.
        targets: int64 [B, S], for every token the id whose log-probability is returned, as a rule
            that of the next token.
        head: the model, or its last layer; not needed with a model's output. If FSDP2 shards the
            last layer, every rank has to call: the weights are gathered, and get the mean gradient
            over the ranks.
        temperature: above 0, a number, or [B, 1] or [B, S]; divides the model's own logits, which
            some configs scale; gets no gradient.
        entropy: True for an entropy with a gradient; "detached" for one without, which is cheaper:
            two products the size of the logits instead of three where the head is frozen.
        top1: whether to return the most likely tokens, and whether these are the targets.
        ignore_index: the target of tokens for which nothing is computed; their log-probability is
            0.

    Raises:
        UnsupportedInput: the model's logits are not its last layer's output for the last hidden
            states; a model's output has no lazy logits, or they were read; hidden states come
            without a head; a last layer that FSDP2 shards has hooks, or is compiled; targets or a
            temperature of another shape; targets that are no integers; a temperature that is not
            above 0; on a CPU, also such a temperature in a tensor, and a target outside the
            vocabulary (on a GPU they give NaN, a temperature below 0 a number).
        ValueError: `entropy` has an unknown value.

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
    refuse_misread(hidden.shape[:-1], targets, temperature, entropy)
    layer = head.get_output_embeddings() if hasattr(head, "get_output_embeddings") else head
    refuse_values(targets, temperature, size_of_linear(layer)[0], ignore_index)
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
    """Return the lazy logits of a patched model's output.

    Raises:
        UnsupportedInput: the output has no lazy logits.
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
"""Fields of configs by which logits are not the last layer's output for the last hidden states:
{name: the value that changes nothing}.
"""
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1, "output_multiplier": 1}
"""Fields of configs that scale logits: {name: 1 for a factor, -1 for a divisor}."""
_MULTIPLIES = "hyperclovax"
"""The type of text model whose `logits_scaling` is a factor; for all others it is a divisor."""


def changed_logits(head: Any) -> str | None:
    """Return why a model's logits are not its last layer's output for the last hidden states,
    scaled or capped, in words, or None.
    """
    text = _text_config(head)
    for name, none in _CHANGES.items():
        value = getattr(text, name, none)
        if value is not None and value != none:
            return f"{name}={value} in the config"
    # no family has both, so their order is unknown
    if cap_of_logits(head) is not None and scale_of_logits(head) != 1:
        return "a cap and a scale of logits in the config"
    return None if text is None else _between(head)


def scale_of_logits(head: Any) -> float:
    """Return the factor by which a model multiplies its last layer's logits."""
    text = _text_config(head)
    multiplies = getattr(text, "model_type", None) == _MULTIPLIES
    powers = _SCALES | ({"logits_scaling": 1} if multiplies else {})
    values = {name: getattr(text, name, None) or 1.0 for name in powers}
    return math.prod(float(values[name]) ** power for name, power in powers.items())


def cap_of_logits(head: Any) -> float | None:
    """Return the softcap of a model's logits, or None."""
    text = _text_config(head)
    return next((float(cap) for name in _CAPS if (cap := getattr(text, name, None))), None)


def _text_config(head: Any) -> Any:
    config: Any = getattr(head, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def _between(head: Any) -> str | None:
    """Return which module a model calls between its text model and its last layer, in words, or
    None.
    """
    layer = head.get_output_embeddings() if hasattr(head, "get_output_embeddings") else None
    owners = (one for one in head.modules() if any(part is layer for part in one.children()))
    owner = next(owners, None)
    text = owner.base_model if isinstance(owner, PreTrainedModel) else None
    # in a few classes, `base_model` is the model itself
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
    """Return the log-probabilities of targets, and the other statistics that `question` asks for.

    Args:
        hidden: [..., D].
        layer: computes logits [..., V] from hidden states.
        targets: those of every token.
        backend: for a plain linear layer, see `linear_log_probs`; None or "upstream", which has no
            implementation: the fastest backend that runs on the device.
    """
    plain = None if question.cap is not None else _plain(layer)
    compute = partial(_log_probs, layer, plain, targets, question, backend)
    if not isinstance(layer, FSDPModule):
        return compute(layer, hidden)
    _refuse_calls_by_others(layer)
    return _in_one_call(layer, hidden, compute, in_fp32=question.in_fp32)


def _refuse_calls_by_others(layer: Any) -> None:
    if is_hooked_by_others(layer) or getattr(layer, "_compiled_call_impl", None) is not None:
        raise UnsupportedInput(
            "found hooks on a last layer that FSDP2 shards, or one that is compiled; wanted its "
            "forward alone, since it is called once, and by all ranks; remove them, or take "
            "log_softmax of the model's own logits"
        )


def _in_one_call(
    layer: Any, hidden: Tensor, compute: Callable[..., TokenLogProbs], in_fp32: bool
) -> TokenLogProbs:
    """Compute in the place of a sharded layer's forward: FSDP2 gathers weights around that, and
    again for the backward pass of what it returns. Around chunks, the backward pass of one would
    free the weights with which the next one is computed again.
    """
    own, before = layer.forward, vars(layer).get("forward")
    state = layer._get_fsdp_state()
    found: list[TokenLogProbs] = []

    def forward(given: Tensor) -> tuple[Tensor | None, ...]:
        def on_chunk(x: Tensor) -> Tensor:
            logits: Tensor = own(x.to(given.dtype))
            return logits

        # of layers that are sharded together, FSDP2 waits for the last: after the model's forward
        # nobody else is to come
        state._modules_to_run_forward.intersection_update({layer})
        # FSDP2 has cast what is given
        x = given if is_alone else hidden.to(given.dtype)
        found.append(compute(on_chunk, hidden if in_fp32 else x))
        return tuple(vars(found[0]).values())

    # else their gradients would be reduced before those of the layers before are there
    is_alone = len(state._modules) == 1
    layer.forward = forward
    try:
        layer(hidden if is_alone else hidden.detach())
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before
    return found[0]


def _log_probs(
    layer: Any,
    plain: nn.Linear | None,
    targets: Targets,
    question: Question,
    backend: str | None,
    call: Callable[[Tensor], Tensor],
    hidden: Tensor,
) -> TokenLogProbs:
    """Return log-probabilities from the weights of a `plain` layer, or from logits, which `call`
    computes of chunks.
    """
    if plain is None:
        return _called(hidden, size_of_linear(layer)[0], call, targets, question)
    weight, bias = gathered(plain)
    return linear_log_probs(
        hidden.to(weight.device),
        weight,
        targets,
        bias=bias,
        temperature=question.temperature,
        wanted=question.wanted,
        expected=question.expected,
        dtype=torch.float32 if question.in_fp32 else compute_dtype(hidden, weight),
        backend=backend if backend and backend != "upstream" else _fastest(hidden),
    )


def _plain(layer: Any) -> nn.Linear | None:
    """Return the linear layer whose product is all that a call of `layer` computes, or None."""
    # of PEFT's `modules_to_save`, the trained copy of the layer, or the layer itself if adapters
    # are disabled
    if type(layer).__name__ == "ModulesToSaveWrapper" and not is_hooked(layer):
        active = None if layer.disable_adapters else next(iter(layer.active_adapters), None)
        trained = layer.modules_to_save
        layer = trained[active] if active in trained else layer.original_module
    # in the forward that FSDP2 gathers weights around
    sharded = isinstance(layer, FSDPModule) and forward_of(layer) is nn.Linear.forward
    hooked = is_hooked_by_others(layer) if sharded else is_hooked(layer)
    plain = (type(layer) is nn.Linear or sharded) and not hooked and "forward" not in vars(layer)
    kinds = {type(one) for one in (layer.weight, layer.bias)} if plain else {None}
    return layer if kinds <= {nn.Parameter, Tensor, DTensor, type(None)} else None


def _fastest(hidden: Tensor) -> str:
    capability = torch.cuda.get_device_capability(hidden.device) if hidden.is_cuda else None
    target = Target(hidden.device.type, capability, hidden.dtype)
    return "triton" if needs_triton(target) is None else "torch"


def _called(
    hidden: Tensor,
    words: int,
    call: Callable[[Tensor], Tensor],
    targets: Targets,
    question: Question,
) -> TokenLogProbs:
    """Return log-probabilities from logits [..., words], computed by calls on chunks of tokens."""
    shape, flat = hidden.shape[:-1], hidden.flatten(0, -2)
    chosen = targets.chosen()
    chosen = (targets.flat >= 0).nonzero()[:, 0] if chosen is None else chosen
    x, wanted = flat.index_select(0, chosen), targets.flat[chosen]
    wide = torch.promote_types(x.dtype, torch.float32)
    temperature = torch.as_tensor(question.temperature, dtype=wide, device=x.device).expand(shape)
    inverse = temperature.reshape(-1)[chosen].reciprocal()
    rows = rows_of_a_chunk(len(x), words, x.device.type)
    parts = [
        _of_chunk(call, question, x[part], wanted[part], inverse[part])
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
    call: Callable[[Tensor], Tensor],
    question: Question,
    x: Tensor,
    targets: Tensor,
    inverse: Tensor,
) -> tuple[Tensor | None, ...]:
    def run(x: Tensor) -> tuple[Tensor | None, ...]:
        kind = x.device.type
        if question.in_fp32:
            with torch.autocast(kind, enabled=False):
                logits = call(x.float())
        else:
            logits = call(x)
        if question.cap is not None:
            logits = (logits / question.cap).tanh() * question.cap
        found = measured(logits, targets, inverse, question.wanted)
        return tuple(vars(found).values())

    if not torch.is_grad_enabled():
        return run(x)
    outputs: tuple[Tensor | None, ...] = checkpoint(run, x, use_reentrant=False)
    return outputs
