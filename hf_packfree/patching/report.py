"""The report on a model: what is swapped and which backends run, as data and as the text that is
logged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_packfree._version import __version__
from hf_packfree.models.attention import attention_route
from hf_packfree.models.base import Replacement
from hf_packfree.models.head_loss import why_logits_are_made
from hf_packfree.models.linear_weights import compute_dtype, under_autocast
from hf_packfree.models.run_options import Padded, Unpacked
from hf_packfree.models.state import PatchState, find_state
from hf_packfree.models.trunk import changed_mixers
from hf_packfree.ops.backend import installed
from hf_packfree.ops.table import OPS
from hf_packfree.patching.called_projections import (
    called_in_words,
    called_projections,
    inside,
)
from hf_packfree.patching.family import Family
from hf_packfree.patching.invariance import MEDIA_ROUND, why_rounding
from hf_packfree.patching.plan import (
    is_bypassed,
    language_heads,
    op_sizes,
    ops_of,
    tower_attention_of,
    trunks,
    unpatched_heads,
)
from hf_packfree.patching.registry import FAMILIES, family_of
from hf_packfree.patching.sharding import is_fsdp1, policy_dtype, what_layers_read

MEASURED = "is in no table; its packed rows were measured on a tiny copy"
NOT_FUSED = "linear layers are transformers' own: none is fused, with LoRA or without"
_ATTENTION: dict[str | None, str] = {
    "sdpa": "torch",
    "eager": "torch",
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}


@dataclass(frozen=True)
class PatchReport:
    """The patches of one model, and the backends that run in it.

    Attributes:
        model: the model's class.
        family: the family of its text model, or None; a family that is not listed only if the model
            is patched.
        listed: whether the family is in the table; for others a tiny copy was measured before
            patching.
        patched: whether its text model is swapped.
        swaps: {class name: number of swapped modules}, without heads that another forward bypasses.
        implementations: {operation: backend that runs for packed rows where the model is now, under
            autocast if it is on, and in the dtype of FSDP's policy where it gathers the weights}.
        why: {operation, or "operation in float32": why a faster backend is not used on this
            machine's GPUs}.
        batch_invariant: the option of `apply_patches`; `rounding` says whether it is fulfilled.
        unpacked: "upstream" or "native", the option for rows of one document.
        padded: "lazy" or "upstream", the option for padded rows of one document.
        attention: the attention implementation the model was loaded with.
        cuda_graphs: how many rows ran in CUDA graphs, and why others did not; empty without graphs.
        context_parallel: how ranks share each row, and why in this way; empty without context
            parallelism.
        versions: {package: installed version, or None}.
        long_documents: {operation: how it runs long documents on the model's device}: exact, but
            the rounding depends on the row.
        left_alone: {class name of an unpatched head: what its loss then needs}; also of a text
            model in front of which a forward was set.
        refused: why packed rows are refused, since layers changed after patching; empty: they run.
        called: {reason: number of projections of decoder layers that run their own forward, exact
            but not fused}. Reasons are adapters, quantisation, hooks, sharding and torch.compile; a
            reason says so if the projection would be fused under autocast.
        autocast: how fused layers treat float32 weights under autocast, and what the rounded copies
            cost, once there are any; else empty if autocast is off, or no weight is read in
            float32.
        rounding: why, on the model's device, a document's results equal those of the document alone
            only up to rounding; None: bit for bit in the layers' forward pass, as `tests/gpu`
            checks.
    """

    model: str
    family: str | None
    listed: bool
    patched: bool = False
    swaps: dict[str, int] = field(default_factory=dict)
    implementations: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    batch_invariant: bool = False
    unpacked: Unpacked = "upstream"
    padded: Padded = "upstream"
    attention: str | None = None
    cuda_graphs: str = ""
    context_parallel: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    long_documents: dict[str, str] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    called: dict[str, int] = field(default_factory=dict)
    autocast: str = ""
    rounding: str | None = "it is not patched"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    def _with_version(self, op: str, name: str) -> str:
        """Return "triton 3.6.0", "fla (fla-core 0.6.0)", "varlen (FlashAttention of torch 2.15.0)"
        or "flash_attention_2 (the model's, flash-attn 2.8)".
        """
        backend = OPS[op].backends.get(name)
        package = (
            _package_of(name.removesuffix(" (the model's)")) if backend is None else backend.package
        )
        if package is None:
            return name
        found = f"{package} {self.versions.get(package) or 'of unknown version'}"
        if name == package:
            return found
        if backend is not None and backend.kernel:
            found = f"{backend.kernel} of {found}"
        return f"{name} ({found})" if backend is not None else f"{name.removesuffix(')')}, {found})"

    def __str__(self) -> str:
        if self.family is None:
            return f"{self.model} holds no text model of a supported family, and is not patched"
        if not self.patched:
            return f"{self.model} is not patched; packed rows leak between documents{self._when()}"
        swapped = ", ".join(f"{count} {name}" for name, count in self.swaps.items())
        more = {op: f" (long documents {what})" for op, what in self.long_documents.items()}
        runs = ", ".join(
            f"{op}: {self._with_version(op, name)}{more.get(op, '')}"
            for op, name in self.implementations.items()
        )
        rest = f"unpacked rows run {self.unpacked}, padded rows {self.padded}"
        said = (
            f"{self.model} is patched: swapped {swapped}; packed rows run {runs}; "
            f"{self.refused or self._exactness()}; {rest}"
        )
        further = [] if self.listed else [f"{self.family} {MEASURED}"]
        further += [f"{name}: {reason}" for name, reason in self.left_alone.items()]
        further += [self.context_parallel] if self.context_parallel else []
        further += [self.cuda_graphs] if self.cuda_graphs else []
        further += self._not_fused()
        further += [called_in_words(self.called)] if self.called else []
        further += [self.autocast] if self.autocast else []
        further += [f"on this machine's GPUs, {op}: {why}" for op, why in self.why.items()]
        return "\n  ".join((said, *further))

    def _not_fused(self) -> list[str]:
        """Return a sentence on the linear layers of the family that are never fused, if any."""
        row = next((row for row in FAMILIES if row.name == self.family), None)
        if row is None or not row.fused_parts:
            return [NOT_FUSED]
        of = ", ".join(row.fused_parts)
        others = f"linear layers but those of {of} are transformers' own, with LoRA or without"
        return [] if row.fuses_all else [others]

    def _when(self) -> str:
        """Return " with some forms of input" if only these leak: transformers masks attention for
        the others.
        """
        mixers = {op for row in FAMILIES if row.name == self.family for op in row.mixer_ops}
        leaking = [OPS[op] for op in mixers if OPS[op].leaks is not None]
        sometimes = leaking and all(op.leaks_sometimes for op in leaking)
        return " with some forms of input" if sometimes else ""

    def _exactness(self) -> str:
        if self.rounding is not None:
            return f"documents get what they get alone, up to rounding ({self.rounding})"
        where = "in the layers' forward pass (not under autocast or torch.compile)"
        runs = self.implementations.items()
        chosen = {name: OPS[op].backends.get(name) for op, name in runs}
        if tuned := [name for name, backend in chosen.items() if backend and backend.tuned]:
            where += (
                f" of one process, because {', '.join(tuned)} chooses the shapes of its kernels by "
                "timing them in each"
            )
        media = f"; {MEDIA_ROUND}" if any(OPS[op].where == "towers" for op, _ in runs) else ""
        return f"documents get the same bits alone and packed {where}{media}"


def patch_report(model: nn.Module) -> PatchReport:
    """Return the report on `model`, any module, patched or not. With FSDP pass the outermost
    wrapped model, which has the policies of all layers.
    """
    family, state = family_of(model), find_state(model)
    loaded = getattr(_config(model, family), "_attn_implementation", None)
    found = PatchReport(
        model=type(model).__name__,
        family=family.name if family else None,
        listed=family is not None and family.listed,
        attention=loaded,
        versions=_versions(state, loaded),
    )
    if family is None or state is None:
        return found
    heads = tuple(family.head_pairs().values())
    ours, trunk = {*family.pairs().values(), *heads}, family.trunk_class()
    swapped = [module for module in model.modules() if ours & set(type(module).__mro__)]
    # heads whose forward is bypassed are not counted
    run = (part for part in swapped if not (isinstance(part, heads) and is_bypassed(part)))
    x = what_layers_read(model, family)
    runs = _implementations(state, family, model, x)
    fused = family.fuses_linear_layers(runs)
    return replace(
        found,
        patched=any(isinstance(module, trunk) for module in swapped),
        swaps=dict(Counter(type(part).__name__ for part in run)),
        implementations=runs,
        why=state.why_of(ops_of(model, family)),
        batch_invariant=state.batch_invariant,
        unpacked=state.unpacked,
        padded=state.padded,
        cuda_graphs=_graphs_in_words(model, family, state, x),
        context_parallel=str(state.context_parallel or ""),
        long_documents={} if state.batch_invariant else _long_documents(model, family, runs, x),
        left_alone=unpatched_heads(model, family) | _bypassed_trunks(model, family),
        refused=_refused(model, family),
        called=called_projections(model, family, state, x),
        autocast=_autocast_in_words(model, family, state, x) if fused else "",
        rounding=why_rounding(model, family, runs, x)
        if state.batch_invariant
        else "batch_invariant is off",
    )


def _bypassed_trunks(model: nn.Module, family: Family) -> dict[str, str]:
    said = (
        "a forward that was set on the instance runs in front of ours: packed rows are exact only "
        "if it calls the forward that was there"
    )
    ours = (trunk for trunk in trunks(model, family) if isinstance(trunk, Replacement))
    return {type(trunk).__name__: said for trunk in ours if is_bypassed(trunk)}


def _refused(model: nn.Module, family: Family) -> str:
    # a text model that was built by our class itself has no state, and says so when it is called
    ours = (trunk for trunk in trunks(model, family) if "packfree" in vars(trunk))
    names = [name for trunk in ours for name, _ in changed_mixers(trunk)]
    changed = "changed since the model was patched (undo that, or call apply_patches(model))"
    return f"packed rows are refused, because {', '.join(names)} {changed}" if names else ""


def _graphs_in_words(model: nn.Module, family: Family, state: PatchState, x: torch.Tensor) -> str:
    """Return what ran in CUDA graphs, and which attention there where it is not the loaded one;
    empty without graphs.
    """
    if state.cuda_graphs == "never":
        return ""
    loaded = getattr(_config(model, family), "_attn_implementation", None) or ""
    said = state.graphs.in_words()
    if attention_route(loaded) == "flash" and state.graphs.replayed:
        kernels = state.kernels_for(x.device, compute_dtype(x)).bare()
        for op in (op for op in OPS.values() if op.loaded and op.where == "layers"):
            said += f"; in graphs {op.name} runs in {kernels[op.name]}, in other rows in {loaded}"
    return said


def _long_documents(
    model: nn.Module, family: Family, runs: dict[str, str], x: torch.Tensor
) -> dict[str, str]:
    device, sizes = x.device, op_sizes(model, family)
    ways = {
        op: OPS[op].backends[name].long for op, name in runs.items() if name in OPS[op].backends
    }
    return {op: way.how for op, way in ways.items() if way and way.takes(device, sizes)}


def _autocast_in_words(model: nn.Module, family: Family, state: PatchState, x: torch.Tensor) -> str:
    """Return a sentence on float32 weights, LoRA's too, if autocast rounds them in fused layers, or
    did so in training rows, else "".
    """
    if made := state.graphs.copies_in_words("once for each training row"):
        return made
    dtype, gathered_in = compute_dtype(x), policy_dtype(model, family)
    fused = {*model.modules()} - inside(model, is_fsdp1)
    weights = [
        part.weight
        for trunk in trunks(model, family)
        for part in trunk.modules()
        if type(part) is nn.Linear and part in fused
    ]
    is_wide = any(
        ((isinstance(weight, DTensor) and gathered_in) or weight.dtype) == torch.float32
        for weight in weights
    )
    if not is_wide or not under_autocast(x.device) or dtype == torch.float32:
        return ""
    said = (
        f"float32 weights are rounded to {dtype} where products read them, forward and backward; "
        "in training on GPUs once for each row, in copies that are kept"
    )
    return said.replace("torch.", "")


def _versions(state: PatchState | None, attention: str | None) -> dict[str, str | None]:
    names = {"torch", "transformers"}
    if state is not None:
        everywhere = (state.cuda_half, state.cuda_single, state.elsewhere)
        names |= {
            OPS[op].backend(name).package for kernels in everywhere for op, name in kernels.items()
        }
        names |= {"triton"} if torch.cuda.is_available() else set()
        names.add(_package_of(attention) or "torch")
    return {name: installed(name) for name in sorted(names)} | {"hf_packfree": __version__}


def _package_of(attention: str | None) -> str | None:
    """Return the distribution of an attention implementation of transformers, or None if
    unknown.
    """
    return "kernels" if attention is not None and "/" in attention else _ATTENTION.get(attention)


def _implementations(
    state: PatchState, family: Family, model: nn.Module, x: torch.Tensor
) -> dict[str, str]:
    # for the dtype of projections' outputs, by which mixers choose kernels
    kernels = state.kernels_for(x.device, compute_dtype(x)).bare()
    called = ops_of(model, family)
    runs = {op: kernels[op] for op in OPS if op in called}
    configs = {
        "layers": _config(model, family),
        "towers": getattr(tower_attention_of(model, family), "config", None),
    }
    for op in filter(lambda op: OPS[op].loaded, runs):
        loaded = getattr(configs[OPS[op].where], "_attn_implementation", None)
        if loaded not in family.attends_for:
            runs[op] = f"{loaded} (the model's)"
    made = (why_logits_are_made(head) for head in language_heads(model))
    if (why := next(filter(None, made), None)) is not None:
        of_head = (op for op in runs if OPS[op].where == "head" and runs[op] != "upstream")
        runs |= dict.fromkeys(of_head, f"upstream, because {why}")
    return runs


def _config(model: nn.Module, family: Family | None) -> Any:
    """Return the model's config; if it has none, such as DDP, that of a text model inside; else
    None.
    """
    found = getattr(model, "config", None)
    if found is not None or family is None:
        return found
    return next((trunk.config for trunk in trunks(model, family)), None)
