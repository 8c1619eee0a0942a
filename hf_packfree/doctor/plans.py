"""The devices on which models can run, the backends that would run, and the supported families."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_packfree.errors import UnsupportedModel, in_short
from hf_packfree.versions import VERSIONS

if TYPE_CHECKING:
    from hf_packfree.models.state import PatchState
    from hf_packfree.ops.op import Op, Way
    from hf_packfree.patching.family import Family


@dataclass(frozen=True)
class Device:
    """A device on which models can run: kind ("cuda", "mps", "cpu"), name, memory in GiB, CUDA
    capability.
    """

    kind: str
    name: str
    memory_gib: float | None = None
    capability: str | None = None


@dataclass(frozen=True)
class Plan:
    """The backends that would run for a family, or for one model.

    Attributes:
        packed: {operation: backend} for packed rows, in half precision on the GPU if there is one.
        unpacked: what upstream runs for rows of one document.
        why: {operation, or "operation in float32": why a faster backend would not run}.
        media: what packed rows may hold: "text", "images", "videos", "audio".
        shared: under context parallelism, what the ranks exchange and how; or why ranks cannot
            share rows.
        called: {kind of adapter: number of projections with it}, for adapters that are not fused,
            so that PEFT's forward runs; see `PatchReport`.
        linear: for one model, in which dtypes its linear layers are fused, and how to get them
            fused otherwise; and whether no kernel here fuses them.
    """

    name: str
    packed: dict[str, str]
    unpacked: str
    why: dict[str, str]
    media: tuple[str, ...]
    shared: str
    called: dict[str, int] = field(default_factory=dict)
    linear: str = ""


def find_devices() -> tuple[tuple[Device, ...], str, str | None]:
    """Find the devices on which models can run.

    Returns:
        The devices, the best first, always including the CPU; the version of CUDA that torch is
        built for, in words; and torch's message if it finds no CUDA device, or None.
    """
    import torch

    devices: list[Device] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            devices += _cuda_devices()
            fault = str(caught[0].message) if caught and not devices else None
        except Exception as error:
            # drivers raise errors of various classes
            fault = in_short(error)
    if torch.backends.mps.is_available():
        devices.append(Device("mps", "Apple GPU"))
    devices.append(Device("cpu", f"CPU (threads: {torch.get_num_threads()})"))
    return tuple(devices), torch.version.cuda or "none, it is built without", fault


def _cuda_devices() -> list[Device]:
    """Return the CUDA devices whose properties can be read."""
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        memory = round(facts.total_memory / 2**30, 1)
        found.append(Device("cuda", facts.name, memory, f"{facts.major}.{facts.minor}"))
    return found


def find_plans(model: str | None, unpacked: str) -> tuple[Plan, ...]:
    """Return the plan of every family, or of one model; `unpacked` describes what upstream runs for
    unpacked rows.

    Raises:
        UnsupportedModel: there is no config for `model`, or its family is not supported.
    """
    if model is not None:
        return (_plan_of(model, unpacked),)
    from hf_packfree.patching.backends import choose_backends
    from hf_packfree.patching.registry import FAMILIES

    # no sizes: every backend takes those of the published models
    chosen = ((row, choose_backends("auto", None, row.ops)) for row in FAMILIES)
    return tuple(
        _plan(row.name, state, row.ops, None, unpacked, _media_of_family(row))
        for row, state in chosen
    )


def _plan(
    name: str,
    state: PatchState,
    ops: tuple[str, ...],
    sizes: dict[str, int] | None,
    unpacked: str,
    media: tuple[str, ...],
) -> Plan:
    import torch

    kernels = state.cuda_half if torch.cuda.is_available() else state.elsewhere
    packed = {op: kernels[op] for op in ops}
    return Plan(name, packed, unpacked, state.why_of(ops), media, _shared(sizes, packed))


def _shared(sizes: dict[str, int] | None, packed: Mapping[str, str]) -> str:
    """Return `shared` of a plan: what ranks that share a row do on the backends `packed`."""
    import torch
    from torch import distributed

    from hf_packfree.ops.table import OPS

    whole = (OPS[op].needs_whole_rows(sizes or {}) for op in packed)
    if (found := next(filter(None, whole), None)) is not None:
        return f"are refused: {found} needs whole rows"
    over, there = "gloo", distributed.is_available() and distributed.is_gloo_available()
    if torch.cuda.is_available():
        over, there = "NCCL", distributed.is_available() and distributed.is_nccl_available()
    if not there:
        return f"have nothing here to exchange over: this torch has no {over}"
    shared = ((OPS[op], backend) for op, backend in packed.items() if OPS[op].across_ranks)
    said = (_exchanged(op, op.backend(backend), backend, sizes) for op, backend in shared)
    return f"exchange {'; '.join(filter(None, said))} ({over})"


def _exchanged(op: Op[Any], backend: Any, name: str, sizes: Mapping[str, int] | None) -> str:
    """Return what ranks exchange for an operation, such as "for attention heads on 2 ranks, else
    keys and values"; "" if no way of the operation names what is exchanged.
    """
    across = op.across_ranks
    assert across is not None
    lacks = {way.lacking(backend): None for way in across.ways.values()}
    # "auto" is decided in each row, so list the ways that it chooses from
    able = [way for key, way in across.ways.items() if key != "auto" and not way.lacking(backend)]
    either = ", or " if across.cheaper is not None else ", else "
    found = either.join(way.exchanges + _on_ranks(way, sizes) for way in able)
    why = "".join(f", which {lack} on {name}," for lack in lacks if lack is not None)
    without = f", but not with {', '.join(across.not_with.values())}" if not sizes else ""
    return f"for {op.title}{why} {found}{without if across.not_with else ''}" if found else ""


def _on_ranks(way: Way, sizes: Mapping[str, int] | None) -> str:
    if sizes is None or way.divides is None:
        return ""
    ranks = [
        str(n) for n in range(2, sizes.get(way.divides, 0) + 1) if way.why_not(sizes, n) is None
    ]
    return f" on {', '.join(ranks) or 'no number of'} ranks"


def _plan_of(model: str, unpacked: str) -> Plan:
    """Patch a model without weights, on torch's meta device, and return its plan."""
    import torch

    from hf_packfree.doctor.precision import linear_layers
    from hf_packfree.models.row_adapters import refuse_adapters_of_rows
    from hf_packfree.models.state import find_state
    from hf_packfree.patching import apply_patches, patch_report
    from hf_packfree.patching.plan import op_sizes, ops_of
    from hf_packfree.patching.registry import family_of
    from hf_packfree.verify.adapters import base_of_adapters, with_adapters
    from hf_packfree.verify.model_source import build_model

    base = base_of_adapters(model)
    config = _config_of(base or model)
    called: dict[str, int] = {}
    with torch.device("meta"):
        built = apply_patches(build_model(config))
        if base is not None:
            adapted = with_adapters(built, model, weights=False)
            refuse_adapters_of_rows(adapted)
            called = patch_report(adapted).called
    family, state = family_of(built), find_state(built)
    # otherwise apply_patches would have raised
    assert family is not None and state is not None
    media = _media_of(*(type(module) for module in built.modules()))
    plan = _plan(
        f"{model} ({type(built).__name__})",
        state,
        ops_of(built, family),
        op_sizes(built, family),
        unpacked,
        media,
    )
    linear = linear_layers(config, family)
    if family.fused_parts and not family.fuses_linear_layers(plan.packed):
        linear = f"linear layers are called as they are here, in PyTorch; with kernels {linear}"
    return replace(plan, called=called, linear=linear)


def _config_of(model: str) -> Any:
    from transformers import AutoConfig

    from hf_packfree.patching.registry import FAMILIES
    from hf_packfree.verify.model_source import meant, refuse_missing_path, trusted

    tiny = {family.name: family for family in FAMILIES}
    if model in tiny and not Path(model).exists():
        return tiny[model].tiny_config()
    refuse_missing_path(model)
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:
        # transformers raises errors of various classes for wrong configs
        raise UnsupportedModel(
            f"found no config under {model!r} ({in_short(error)}); wanted a folder, a hub id, or a "
            f"name that packfree models lists{meant(model)}; check the name, and that the hub can "
            f"be reached{trusted(error)}"
        ) from error


@dataclass(frozen=True)
class Supported:
    """One supported family.

    Attributes:
        name: as in `packfree verify NAME`.
        transformers: the releases with this family, such as ">=5.2".
        swaps: {class that is replaced: why}.
        heads: transformers' classes around the text model that are patched, too.
        media: what rows of the family's vision-language classes may hold: "text", "images",
            "videos", "audio".
    """

    name: str
    transformers: str
    swaps: dict[str, str]
    heads: tuple[str, ...]
    media: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)


def supported_models() -> tuple[Supported, ...]:
    """Return every supported family, with the heads of the installed transformers."""
    from hf_packfree.patching.registry import FAMILIES

    return tuple(
        Supported(row.name, _since(row), dict(row.swaps), _heads(row), _media_of_family(row))
        for row in FAMILIES
    )


def _since(family: Family) -> str:
    from packaging.version import Version

    floors = VERSIONS["transformers"].floor or "", family.floor
    return f">={max(floors, key=Version)}"


def _heads(family: Family) -> tuple[str, ...]:
    return tuple(cls.__name__ for cls in family.head_pairs())


def _media_of_family(family: Family) -> tuple[str, ...]:
    names = filter(None, (family.vision_language, family.causal_lm))
    return _media_of(*(getattr(import_module(family.upstream), name) for name in names))


def _media_of(*classes: type) -> tuple[str, ...]:
    """Return the kinds of media that classes take, "text" for all, by their methods
    `get_*_features`.
    """
    kinds = {"image": "images", "video": "videos", "audio": "audio"}
    return (
        "text",
        *(
            name
            for kind, name in kinds.items()
            if any(hasattr(cls, f"get_{kind}_features") for cls in classes)
        ),
    )
