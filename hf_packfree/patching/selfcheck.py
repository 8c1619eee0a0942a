"""Checks on a release of transformers that was never tested: a warning, and a measurement before a
model is patched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

from hf_packfree.errors import LeakDetected
from hf_packfree.models import compat
from hf_packfree.models.base import Replacement
from hf_packfree.models.plain_layers import epsilon, norm_offset, swiglu_layers
from hf_packfree.models.slow_decay import slow_decays
from hf_packfree.models.state import PatchState
from hf_packfree.ops.fused import add_norm, swiglu_mlp
from hf_packfree.patching.family import Family
from hf_packfree.patching.plan import plan_swaps
from hf_packfree.patching.steps import carry_out

logger = logging.getLogger("hf_packfree")
LIMIT = 1e-5
"""Relative RMS: rounding of the tiny models is 1e-6, a leak 1e-1."""

_checked: set[tuple[str, str]] = set()


def check_release(family: Family, state: PatchState) -> None:
    """On a transformers newer than any this package was tried on, warn once and run the family's
    tiny model packed.

    Raises:
        LeakDetected: the packed row differs from its documents run one by one, or a norm or an MLP
            differs from the formula of its kernel.
    """
    if compat.RELEASE <= compat.NEWEST_TRIED or (family.name, str(state)) in _checked:
        return
    logger.warning(
        "found transformers %s; hf_packfree was tested up to %s; checking %s on a tiny model "
        "before patching",
        compat.RELEASE,
        compat.NEWEST_TRIED,
        family.name,
    )
    with as_if_nothing_were_loading():
        model = tiny(family)
        carry_out(plan_swaps(model)[1], state)
        error = _worst(
            [norms_against_formula(model), mlps_against_formula(model), packed_against_alone(model)]
        )
    if not error <= LIMIT:
        raise LeakDetected(
            f"found packed documents, norms or MLPs of a tiny {family.name} model off by "
            f"{error:.1e} relative RMS on transformers {compat.RELEASE}, allowed {LIMIT:.0e}; "
            f"wanted an exact release; install transformers {compat.NEWEST_TRIED} or earlier"
        )
    _checked.add((family.name, str(state)))


@contextmanager
def as_if_nothing_were_loading() -> Iterator[None]:
    """Build models on the CPU in float32 in the block, also while transformers loads another on
    meta, in the checkpoint's dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _worst(errors: list[float]) -> float:
    """Return the largest error, or NaN if any is NaN, which Python's `max` may drop."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


@torch.no_grad()
def tiny(family: Family, *, strength: float | None = None) -> Any:
    """Return the family's tiny model with random weights, in evaluation mode.

    Args:
        strength: standard deviation of weights times the square root of a layer's inputs; None:
            upstream's initialisation.
    """
    with torch.random.fork_rng(devices=[]):
        # not `torch.manual_seed`, which would seed GPUs, too
        torch.default_generator.manual_seed(0)
        model: Any = getattr(import_module(family.upstream), family.causal_lm)(
            family.tiny_config()
        ).eval()
        for parameter, decay in slow_decays(model).items():
            parameter.copy_(decay)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                # norm weights begin at zero or one, where different formulas give the same result
                parameter.normal_()
            elif strength is not None and parameter.ndim > 1:
                parameter.normal_(std=strength * parameter.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def norms_against_formula(model: nn.Module) -> float:
    """Return the largest relative RMS between a norm and the formula that kernels compute instead;
    runs on any device.

    Args:
        model: patched; its modules say which norms they compute by the formula.
    """
    errors = [0.0]
    for layer, norm in _parts(model):
        offset = norm_offset(norm, layer)
        if offset is not None:
            x = torch.linspace(-3, 2, 4 * norm.weight.numel()).view(4, -1)
            wanted = norm(x)
            found, _ = add_norm(x, None, norm.weight, epsilon(norm), offset=offset)
            errors.append(float((found - wanted).norm() / wanted.norm()))
    return _worst(errors)


@torch.no_grad()
def mlps_against_formula(model: nn.Module) -> float:
    """Return the largest relative RMS between an MLP and the formula that kernels compute instead;
    runs on any device.

    Args:
        model: patched; its modules say which MLPs they compute by the formula.
    """
    errors = [0.0]
    for layer, mlp in _parts(model):
        width = getattr(getattr(mlp, "gate_proj", None), "in_features", 1)
        # inputs so large that a clamp would show
        x = torch.linspace(-100, 70, 4 * width).view(4, -1)
        layers = swiglu_layers(mlp, layer, x)
        if layers is not None:
            wanted = mlp(x)
            errors.append(float((swiglu_mlp(x, *layers) - wanted).norm() / wanted.norm()))
    return _worst(errors)


def _parts(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield (patched module, child) for every child that the module does not call, but computes
    itself.
    """
    x = torch.empty(1, 1)
    for layer in model.modules():
        if isinstance(layer, Replacement):
            yield from (
                (layer, part)
                for name, part in layer.named_children()
                if not layer.calls(name, part, x)
            )


@torch.no_grad()
def packed_against_alone(model: Any) -> float:
    """Return the relative RMS between a packed row of a patched model and its documents run one by
    one.
    """
    lengths = (3, 65, 1)
    ids = torch.arange(sum(lengths))[None] * 37 % model.config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat(
        [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)], 1
    )
    return float((packed - alone).norm() / alone.norm())
