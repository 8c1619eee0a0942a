"""Batch invariance: whether a document gets the same bits alone and in a packed row, or why not."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_packfree.models.attention import drops_out
from hf_packfree.models.base import Replacement, size_of_linear
from hf_packfree.models.rotary import has_fixed_frequencies
from hf_packfree.models.unfused import is_compiled
from hf_packfree.ops.backend import dtype_name, installed
from hf_packfree.ops.fused.linear import COMPARED, NARROW
from hf_packfree.ops.table import OPS
from hf_packfree.patching.family import Family
from hf_packfree.patching.plan import trunks
from hf_packfree.patching.sharding import is_fsdp
from hf_packfree.versions import VERSIONS

logger = logging.getLogger("hf_packfree")
_CAPABILITY = (9, 0)
_DTYPE = torch.bfloat16
_TORCH = VERSIONS["torch"].batch_invariant or ""
"""The releases of torch for which tests/gpu found the same bits: kernels and torch's matrix library
may differ in others.
"""
_RELEASES = {
    row.name: row.batch_invariant
    for row in VERSIONS.values()
    if row.batch_invariant and row.name != "torch"
}
"""{package: prefix of the releases for which tests/gpu found the same bits}."""

MEDIA_ROUND = "those with images, videos or audio agree up to rounding"
"""Matrix products in towers are over all patches of a call."""


def why_rounding(
    model: nn.Module, family: Family, implementations: Mapping[str, str], x: Any
) -> str | None:
    """Return why batch invariance of the layers' forward pass is not promised, as half a sentence,
    or None.

    Args:
        model: patched, with `batch_invariant=True`.
        implementations: {operation: backend that runs}.
        x: a parameter, for its device and dtype.
    """
    return (
        _machine(x)
        or _operations(implementations)
        or _model(model)
        or _layers(model, family, x)
        or _widths(model, family)
    )


def warn_of_rounding(reason: str | None, implementations: Mapping[str, str]) -> None:
    """Warn, for `batch_invariant=True`, why batch invariance is not promised, or for which
    documents it is not.
    """
    if reason is not None:
        logger.warning("batch_invariant=True is not promised here: %s", reason)
    elif any(OPS[op].where == "towers" for op in implementations):
        logger.warning("batch_invariant=True holds for documents of text; %s", MEDIA_ROUND)


def _machine(x: Any) -> str | None:
    if x.device.type != "cuda":
        return f"batch invariance is tested on GPUs, this is a {x.device.type}"
    if torch.is_autocast_enabled("cuda"):
        return "batch invariance is not promised under autocast"
    if x.dtype != _DTYPE:
        return f"batch invariance is tested in bfloat16, this is {dtype_name(x.dtype)}"
    if (found := torch.cuda.get_device_capability(x.device.index or 0)) != _CAPABILITY:
        return (
            f"batch invariance is tested on compute capability 9.0, this is {found[0]}.{found[1]}"
        )
    if not torch.__version__.startswith(_TORCH):
        tested = _TORCH.rstrip(".")
        return (
            f"batch invariance is tested with torch {tested}, whose matrix library decides too; "
            f"this is {torch.__version__}"
        )
    return None


def _operations(implementations: Mapping[str, str]) -> str | None:
    # without the head: layers do not depend on it, and its loss is a sum over all documents of a
    # row
    runs = {
        op: OPS[op].backends.get(name)
        for op, name in implementations.items()
        if OPS[op].where != "head"
    }
    rounding = [op for op, backend in runs.items() if not (backend and backend.batch_invariant)]
    if rounding:
        return f"batch invariance is not promised of what runs {', '.join(rounding)}"
    packages = {backend.package for backend in runs.values() if backend}
    for package in sorted(packages & _RELEASES.keys()):
        if not (found := installed(package) or "").startswith(_RELEASES[package]):
            tested = _RELEASES[package].rstrip(".")
            return (
                f"batch invariance is tested with {package} {tested}, this is "
                f"{found or 'of unknown version'}"
            )
    return None


def _model(model: nn.Module) -> str | None:
    if any(map(is_compiled, model.modules())):
        return "batch invariance is not promised in compiled graphs"
    if any(map(is_fsdp, model.modules())):
        return "batch invariance is not tested where FSDP gathers the weights"
    if drops_out(model):
        return "attention with dropout runs in PyTorch eager while training"
    return None


def _layers(model: nn.Module, family: Family, x: Any) -> str | None:
    """Return why the decoder layers prevent batch invariance, or None: only our functions pad
    products of few rows, and fuse norms.
    """
    if not all(has_fixed_frequencies(trunk.config) for trunk in trunks(model, family)):
        return (
            "rows of one document run as transformers runs them, because of the model's rope_type"
        )
    found = (name for trunk in trunks(model, family) for name in _called(trunk, x))
    name = next(found, None)
    return (
        None
        if name is None
        else f"batch invariance is not promised where layers are called as they are: {name}"
    )


def _widths(model: nn.Module, family: Family) -> str | None:
    """Return a product whose bits may depend on the number of rows, in a half sentence, or None.
    Products of few outputs run in our kernel and are not among them.
    """
    for trunk in trunks(model, family):
        layers: Any = trunk.layers
        for name, layer in layers.named_modules(prefix="layers"):
            size = size_of_linear(layer) if isinstance(layer, nn.Linear) else (0, 0)
            if size[0] >= NARROW and size not in COMPARED:
                return (
                    f"batch invariance was not tested for products of {size[1]} inputs and "
                    f"{size[0]} outputs: {name}"
                )
    return None


def _called(trunk: Any, x: Any) -> Iterator[str]:
    """Yield the names of modules that run their own forward: unfused layers, and parts that patched
    modules call.
    """
    for index, layer in enumerate(trunk.layers):
        if not isinstance(layer, Replacement):
            yield f"layers.{index}"
        for name, module in layer.named_modules(prefix=f"layers.{index}"):
            if isinstance(module, Replacement):
                yield from (
                    f"{name}.{part}"
                    for part, child in module.named_children()
                    if module.calls(part, child, x)
                )
