"""What the exactness tests share: tiny slow-decay models, batches and where their documents are,
documents run alone.
"""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import OfflineModeIsEnabled, StrictDataclassFieldValidationError
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from hf_packfree import apply_patches
from hf_packfree.graphs.runner import Runner
from hf_packfree.models.state import state_of
from hf_packfree.ops import conv_delta_rule
from hf_packfree.ops.loss import OP as LOSS
from hf_packfree.ops.loss import Targets, head_scales, lazy_logits, loss_of
from hf_packfree.packing import PackedSequence
from hf_packfree.patching.family import Family
from hf_packfree.patching.plan import trunks
from hf_packfree.patching.registry import FAMILIES, family_of

ROW = (5, 64, 1, 129, 3, 63, 2, 65)
"""Documents shorter than the convolution, around the 64-token chunk, and of one token."""

LOGIT_TOL, GRADIENT_TOL, CONTROL = 1e-5, 1e-4, 1e3
by_family = {family.name: family for family in FAMILIES}


def slow_decay(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Let states live long (A from 0.01 to 0.05) and weights be large enough for a leak to show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(
                    torch.empty_like(parameter).uniform_(0.01, 0.05, generator=generator).log()
                )
            elif parameter.ndim > 1 and "embed" not in name:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                )
            elif "embed" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for gate in model.modules():
            # -5 sigmoid(exp(A_log) (x + dt_bias)): half of the bound for small A
            if getattr(gate, "safe_gate", False):
                gate.A_log.zero_()
                gate.dt_bias.uniform_(-6, -4, generator=generator)
    return model


def loss_after(step, x, weight, targets, backend):
    """The summed loss of a head that does `step` with its logits, which nobody makes."""
    logits = lazy_logits(x, weight)
    head_scales(logits, True)
    return loss_of(step(logits), Targets.of(targets, -100), LOSS.backend(backend))


def tiny(
    family: str | Family = "qwen3_5", *, attention: str | None = None, head: str | None = None
) -> torch.nn.Module:
    """Return the family's tiny model in training mode, unpatched, fp32, slow decay; with sdpa, if it
    has that, or the attention that is named.
    """
    row = by_family[family] if isinstance(family, str) else family
    cls = getattr(import_module(row.upstream), head or row.causal_lm)
    config = _config_of(row, cls)
    # sdpa drops the cap of scores, which releases up to 5.19 do not say
    capped = row.name == "gemma2"
    config._attn_implementation = attention or (
        "sdpa" if cls._supports_sdpa and not capped else "eager"
    )
    torch.manual_seed(0)
    try:
        return slow_decay(cls(config)).train()
    except (OfflineModeIsEnabled, UserWarning) as error:
        # as Mamba-2 hybrids do in old releases, where the package `kernels` is installed, which
        # warns first from 0.15 on
        if "offline mode" not in str(error):
            raise
        pytest.skip(f"{cls.__name__} fetches kernels from the hub when it is built: {error}")


def double(family: str, attention: str = "sdpa") -> torch.nn.Module:
    """Return the same in fp64, whose experts are multiplied one by one."""
    row = by_family[family]
    config = row.tiny_config()
    # the grouped product has no fp64
    config._attn_implementation, config._experts_implementation = attention, "eager"
    torch.manual_seed(0)
    return slow_decay(getattr(import_module(row.upstream), row.causal_lm)(config)).double().train()


def _config_of(row: Family, cls: type) -> transformers.PretrainedConfig:
    """Return the tiny config; skip where upstream's own refuses its defaults, as OLMo's and
    Cohere's do in 5.4, whose fields have wrong types.
    """
    try:
        return row.tiny_config()
    except StrictDataclassFieldValidationError as error:
        try:
            cls.config_class()
        except StrictDataclassFieldValidationError:
            pytest.skip(f"{cls.config_class.__name__} refuses its own defaults: {error}")
        raise


def trunk_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the text model inside."""
    return next(trunks(model, family_of(model)))


def runner_of(model: torch.nn.Module) -> Runner:
    """Return what replays the CUDA graphs of the text model inside, which is patched."""
    trunk = trunk_of(model)
    return state_of(trunk).graphs.of(trunk)


def pairwise(first, second, third) -> list[tuple]:
    """Return triples in which any two values of different lists come together; the third is no
    longer than the others.
    """
    return [
        (a, b, third[(i + j) % len(third)])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def auto_class(family: str) -> type:
    """Return the class that `from_pretrained` of the family's tiny model is called on."""
    with_images = by_family[family].causal_lm.endswith("ForConditionalGeneration")
    return (
        transformers.AutoModelForImageTextToText
        if with_images
        else transformers.AutoModelForCausalLM
    )


def checkpoint_layers(model: torch.nn.Module, reentrant: bool | None = None) -> None:
    """Turn gradient checkpointing on, by the name that the installed release has for it."""
    how = None if reentrant is None else {"use_reentrant": reentrant}
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(how)


def wrap_layers(model: torch.nn.Module, **options: Any) -> None:
    """Let torch's wrapper recompute the layers, as accelerate does where FSDP shards them."""
    layers = model.base_model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer, **options)


def put_upstream_in_torch(monkeypatch) -> None:
    """Let upstream's Qwen3.5 run its own torch functions, on any device, instead of the kernels
    it finds.
    """
    upstream = import_module(by_family["qwen3_5"].upstream)
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        plain = inspect.unwrap(getattr(upstream, name))
        assert plain is not getattr(upstream, name), f"{name} hides no torch function any more"
        monkeypatch.setattr(upstream, name, plain)


def leak_in_the_convolution(monkeypatch) -> None:
    """Let the convolution's window cross the edges of documents."""
    whole = conv_delta_rule.qkv_conv

    def leaky(x, weight, packed, *sizes, **options):
        return whole(x, weight, PackedSequence.from_lengths([packed.num_tokens]), *sizes, **options)

    monkeypatch.setattr(conv_delta_rule, "qkv_conv", leaky)


@dataclass(frozen=True)
class Batch:
    """Documents, what to call the model with, and where each document's tokens are in the
    caller's shape.
    """

    documents: list[torch.Tensor]
    inputs: dict[str, object]
    places: list[tuple[int, torch.Tensor]]

    def cut(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Return each document's part [n, ...] of an output [B, S, ...]."""
        return [output[row, tokens] for row, tokens in self.places]


def documents(lengths, vocabulary: int = 120, seed: int = 1) -> list[torch.Tensor]:
    """Random token documents of these lengths; ids from 120 on stand for media in the tiny
    models.
    """
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocabulary, (length,), generator=generator) for length in lengths]


def relative_rms(found: torch.Tensor, wanted: torch.Tensor, floor: float = 1e-300) -> float:
    """Root mean square of the difference over that of `wanted`, which counts as `floor` at least.

    NaN anywhere is infinite: Python's `max` over several would drop it.
    """
    found, wanted = found.detach().double(), wanted.detach().double()
    error = float(
        (found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt().clamp_min(floor)
    )
    return math.inf if math.isnan(error) else error


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest absolute difference; NaN anywhere, in both too, is infinite as in `relative_rms`."""
    error = (found.detach() - wanted.detach()).abs().max().item()
    return math.inf if math.isnan(error) else error


def run(model, batch: Batch, weights: list[torch.Tensor], output=lambda out: out.logits):
    """Return per-document outputs and the gradients of a fixed random functional of them."""
    model.zero_grad(set_to_none=True)
    parts = batch.cut(output(model(**batch.inputs)))
    sum((part * weight).sum() for part, weight in zip(parts, weights)).backward()
    return [part.detach() for part in parts], gradients(model)


def run_alone(model, batch: Batch, weights: list[torch.Tensor], output=lambda out: out.logits):
    """The same, each document in a forward of its own."""
    model.zero_grad(set_to_none=True)
    parts = []
    for document, weight in zip(batch.documents, weights):
        part = output(model(input_ids=document[None], use_cache=False))[0]
        (part * weight).sum().backward()
        parts.append(part.detach())
    return parts, gradients(model)


@cache
def documents_alone(family: str, lengths: tuple[int, ...], attention: str | None = None):
    """Return what an unpatched tiny model gives documents of these lengths, one by one: outputs, and
    gradients of the functional `random_weights`.
    """
    batch = Batch(documents(lengths), {}, [])
    return run_alone(tiny(family, attention=attention), batch, random_weights(batch, 128))


def gradients(model) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter's gradient."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def whole_gradients(model) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter's gradient, those of sharded ones from all ranks, by the
    names that parameters have without wrappers that recompute layers.
    """
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (
            grad.full_tensor() if isinstance(grad, DTensor) else grad
        )
        for name, grad in gradients(model).items()
    }


def random_weights(batch: Batch, width: int, seed: int = 2) -> list[torch.Tensor]:
    """One fixed random functional per document."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(document), width, generator=generator) for document in batch.documents]


def recorded(record, found: tuple[float, float], model, documents: str) -> tuple[float, float]:
    """Return the errors of logits and gradients, kept in pytest's report for the table of releases
    (tests/compat).

    Args:
        record: pytest's `record_property`.
        documents: "text" or "media".
    """
    facts = {
        "family": family_of(model).name,
        "documents": documents,
        "attention": model.config._attn_implementation,
    }
    for name, value in {**facts, "logits": found[0], "gradients": found[1]}.items():
        record(name, value)
    return found


def errors(found, wanted, floor: float = 1e-2) -> tuple[float, float]:
    """Return the relative RMS of all logits, and the worst parameter gradient's.

    A gradient that is small by cancellation (a decay's, a sum over all tokens) or zero but for
    rounding (queries of one-token documents) is measured against `floor` times the median
    parameter's.
    """
    (parts, grads), (alone, alone_grads) = found, wanted
    values = relative_rms(torch.cat(parts), torch.cat(alone))
    return values, worst_gradient(grads, alone_grads, floor)


def worst_gradient(found, wanted, floor: float = 1e-2, least: float = 1e-300) -> float:
    """Return the relative RMS of the worst parameter's gradient.

    Args:
        floor: of the median parameter's: a smaller one counts as that large.
        least: the same, as a number.
    """
    assert found.keys() == wanted.keys()
    sizes = sorted(float(grad.double().pow(2).mean().sqrt()) for grad in wanted.values())
    least = max(floor * sizes[len(sizes) // 2], least)
    return max(relative_rms(found[name], wanted[name], least) for name in wanted)


def assert_rounding(found: tuple[float, float]) -> None:
    """Assert that errors of logits and gradients, see `errors`, are rounding in fp32."""
    logits, grads = found
    assert logits <= LOGIT_TOL, f"logits differ by {logits:.1e} relative RMS"
    assert grads <= GRADIENT_TOL, f"gradients differ by {grads:.1e} relative RMS"


def assert_exact(model, batch: Batch, wanted=None, *, width=128, floor=1e-2, **how) -> None:
    """Assert that a row's documents get what they get alone, logits and gradients.

    Args:
        model: a patched one.
        wanted: what `run_alone` returns for other models than `model`; None: for this one.
        width: of its logits.
        floor: see `errors`.
        how: see `run`.
    """
    weights = random_weights(batch, width)
    wanted = wanted or run_alone(model, batch, weights, **how)
    assert_rounding(errors(run(model, batch, weights, **how), wanted, floor))


def assert_patching_is_exact(model, batch: Batch, wanted=None, **options) -> None:
    """The same of a model that is patched with `options` here; alone, documents run before."""
    wanted = wanted or run_alone(model, batch, random_weights(batch, 128))
    assert_exact(apply_patches(model, **options), batch, wanted)


def step(model, batch, **more):
    """Return the output and the gradients of its loss."""
    model.zero_grad(set_to_none=True)
    output = model(**{"use_cache": False, **batch, **more})
    output.loss.backward()
    return output, gradients(model)


def values_and_gradients(op, inputs) -> list[torch.Tensor]:
    """Return an op's outputs, and the gradients that its inputs get from fixed random ones of the
    outputs.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = op(*leaves)
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    d_outputs = [
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
        for out in outputs
    ]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, d_outputs)]


def forbid_layers(model):
    """Return the model; the test fails if one of its layers runs."""
    trunk_of(model).layers[0].register_forward_pre_hook(
        lambda *_: pytest.fail("a layer ran before the refusal")
    )
    return model


def widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in fp64 what transformers computes in fp32 whatever the weights: norms, rotary
    tables, the delta rule, the router.
    """
    to, cast, softmax = torch.Tensor.to, torch.Tensor.type, torch.nn.functional.softmax
    zeros, zeros_like = torch.zeros, torch.zeros_like

    def wide(value):
        return torch.float64 if value is torch.float32 else value

    def named(options):
        return {name: wide(one) for name, one in options.items()}

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *args, **options: to(x, *map(wide, args), **named(options))
    )
    monkeypatch.setattr(torch.Tensor, "type", lambda x, *args: cast(x, *map(wide, args)))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **options: zeros(*sizes, **named(options)))
    monkeypatch.setattr(torch, "zeros_like", lambda x, **options: zeros_like(x, **named(options)))
    monkeypatch.setattr(
        torch.nn.functional,
        "softmax",
        lambda x, *args, dtype=None, **more: softmax(x, *args, **more),
    )


def nudged(model, seed: int):
    """Return a copy of the model, each weight moved by its last bit, up or down."""
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in moved.parameters():
            up = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.nextafter(weight, torch.where(up, math.inf, -math.inf)))
    return moved
