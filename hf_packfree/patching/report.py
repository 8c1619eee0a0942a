"""What was swapped and what runs, as data and as one sentence."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from hf_packfree._version import __version__
from hf_packfree.models.state import PatchState
from hf_packfree.patching.registry import family_of


@dataclass(frozen=True)
class PatchReport:
    """The state of one model.

    Attributes:
        model: the model's class.
        family: the supported family it holds, or None.
        patched: whether its text model is swapped.
        swaps: {class name: how many modules of it are swapped}.
        implementations: {operation: backend that runs for packed rows}.
        unpacked: "upstream" or "native", what runs for rows of one document.
        attention: the attention implementation the model was loaded with.
        versions: {package: installed version, or None}.
    """

    model: str
    family: str | None
    patched: bool
    swaps: dict[str, int]
    implementations: dict[str, str]
    unpacked: str
    attention: str | None
    versions: dict[str, str | None]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.patched:
            return f"{self.model} is not patched; packed rows leak between documents"
        swapped = ", ".join(f"{count} {name}" for name, count in self.swaps.items())
        runs = ", ".join(f"{op}: {backend}" for op, backend in self.implementations.items())
        return f"{self.model} is patched: swapped {swapped}; packed rows run {runs}; unpacked rows run {self.unpacked}"


def patch_report(model: nn.Module) -> PatchReport:
    """Return what is swapped in `model` and what runs in it; works on any module, patched or not."""
    family = family_of(model)
    ours = set() if family is None else set(family.pairs().values())
    swapped = [module for module in model.modules() if ours & set(type(module).__mro__)]
    state = next((state for module in swapped if isinstance(state := module.packfree, PatchState)), None)
    patched = state is not None and any(type(module).__name__.endswith(family.trunk) for module in swapped if family)
    config = getattr(model, "config", None)
    return PatchReport(
        model=type(model).__name__,
        family=family.name if family else None,
        patched=patched,
        swaps=dict(Counter(type(module).__name__ for module in swapped)),
        implementations={} if state is None else _implementations(state, config),
        unpacked="upstream" if state is None else state.unpacked,
        attention=getattr(config, "_attn_implementation", None),
        versions={name: installed_version(name) for name in ("torch", "transformers")} | {"hf_packfree": __version__},
    )


def installed_version(package: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _implementations(state: PatchState, config: Any) -> dict[str, str]:
    loaded = getattr(config, "_attn_implementation", None)
    attention = state.attention if loaded == "sdpa" else f"{loaded} (the model's)"
    return {"conv": state.conv, "delta_rule": state.delta_rule, "attention": attention}
