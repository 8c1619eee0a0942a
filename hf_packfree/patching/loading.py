"""Load-time patching: of models that are about to be loaded, through transformers' own class
mapping (5.3 and later).

While a model is built, transformers puts the registered classes in the place of its own. Layers
become ours at once; the trunk, once complete, goes through the same plan and checks as
`apply_patches`, so both ways have one table. The head, whose class the caller chose before, is
swapped when it takes the trunk in.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, Literal

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from hf_packfree.errors import PatchConflict, UnsupportedInput, UnsupportedModel
from hf_packfree.mtp.options import Choice as MTPChoice
from hf_packfree.mtp.options import MTPOptions, mtp_options
from hf_packfree.patching.apply import Options, patch
from hf_packfree.patching.backends import Choice
from hf_packfree.patching.mtp import add_while_loading
from hf_packfree.patching.plan import head_swap, heads_left_alone
from hf_packfree.patching.registry import FAMILIES
from hf_packfree.patching.report import warn_of_heads
from hf_packfree.patching.steps import ClassSwap, carry_out
from hf_packfree.versions import CLASS_MAPPING_SINCE

try:
    from transformers import monkey_patching
except ImportError:
    # transformers 5.2; ends when 5.3 is the oldest supported release
    monkey_patching = None  # type: ignore[assignment]

logger = logging.getLogger("hf_packfree")


class Registration:
    """A mapping that transformers holds; leaving it as a context manager, or `remove()`, takes
    it back.
    """

    def __init__(self, mapping: dict[str, type[nn.Module]], mtp: MTPOptions | None = None) -> None:
        self._mapping = mapping
        self._watch = register_module_module_registration_hook(partial(_swap_around, mtp=mtp))
        self._aliases = LenientAliases()

    def remove(self) -> None:
        """Take the mapping back; models already built stay patched. Doing it twice changes
        nothing more.
        """
        self._watch.remove()
        held = monkey_patching.get_patch_mapping()
        monkey_patching.unregister_patch_mapping(
            [key for key, cls in self._mapping.items() if held.get(key) is cls]
        )
        self._aliases.restore()

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()
        if error is not None:
            _restore_upstream_names(self._mapping)


def register_patches(
    *,
    backend: Choice = "auto",
    batch_invariant: bool = False,
    unpacked: Literal["upstream", "native"] = "upstream",
    padded: Literal["lazy", "upstream"] = "lazy",
    mtp: MTPChoice | MTPOptions = None,
) -> Registration:
    """Patch every supported model that `from_pretrained` or `from_config` builds from now on.

    The result also works as a context manager: `with register_patches(): model =
    AutoModelForCausalLM.from_pretrained(...)`. A text model loaded as such (`AutoModel`, no head
    around it) is out of this mapping's reach: its first forward raises, and `apply_patches(model)`
    mends it.

    Args:
        backend, batch_invariant, unpacked, padded, mtp: as for `apply_patches`; the multi-token
            prediction head is read from the checkpoint that is loaded, and loading raises
            `MissingHead` where that lacks it.

    Raises:
        UnsupportedInput: `mtp` names a checkpoint.
        UnsupportedModel: this transformers has no class mapping (5.2).
        PatchConflict: a mapping for one of the classes is registered already.
    """
    if monkey_patching is None:
        raise UnsupportedModel(
            f"found a transformers without monkey_patching; wanted {CLASS_MAPPING_SINCE} or later "
            f"for patching at load time; "
            "call apply_patches(model) on the loaded model instead, or upgrade transformers"
        )
    # refused now, not when a model is loaded
    options = Options(backend, batch_invariant, unpacked, padded)
    wanted = mtp_options(mtp)
    if wanted is not None and wanted.checkpoint is not None:
        raise UnsupportedInput(
            f"found checkpoint={wanted.checkpoint!r} in mtp; wanted none, because the head is "
            f"loaded with the model, from the "
            "same files; call apply_patches(model, mtp=...) on the loaded model"
        )
    mapping = _mapping(partial(patch, options=options))
    taken = sorted(mapping.keys() & monkey_patching.get_patch_mapping().keys())
    if taken:
        raise PatchConflict(
            f"found a class mapping for {taken[0]} registered already; wanted none; call remove() "
            f"on the earlier one"
        )
    monkey_patching.register_patch_mapping(mapping)
    return Registration(mapping, wanted)


def _mapping(patch: Callable[[nn.Module], None]) -> dict[str, type[nn.Module]]:
    mapping: dict[str, type[nn.Module]] = {}
    for family in FAMILIES:
        towers = family.tower_pairs(family.towers)
        for before, after in family.pairs().items():
            # built before the text model whose settings they take
            if before in towers:
                continue
            if before.__name__ == family.trunk:
                mapping[_exactly(before)] = _trunk_loader(before, patch, mapping)
            elif not _is_recorded(before, family.trunk_class()):
                mapping[_exactly(before)] = after
    return mapping


def _exactly(cls: type[nn.Module]) -> str:
    """A pattern for this name alone: transformers searches, and Qwen3_5Model is part of
    Qwen3_5ModelOutputWithPast.
    """
    return f"^{cls.__name__}$"


def _is_recorded(cls: type[nn.Module], trunk: type[nn.Module]) -> bool:
    """Whether transformers records outputs by this class: mapping it would change the class for
    all models for good.
    """
    recorders = (getattr(trunk, "_can_record_outputs", None) or {}).values()
    return any(getattr(recorder, "target_class", recorder) is cls for recorder in recorders)


def _trunk_loader(
    before: type[nn.Module], patch: Callable[[nn.Module], None], mapping: dict[str, type[nn.Module]]
) -> type[nn.Module]:
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        try:
            before.__init__(self, *args, **kwargs)
            self.__class__ = before
            patch(self)
        except BaseException:
            _restore_upstream_names(mapping)
            raise

    names = {
        "__init__": __init__,
        "__module__": before.__module__,
        "__qualname__": before.__qualname__,
    }
    return type(before.__name__, (before,), names)


def _swap_around(
    module: nn.Module, name: str, submodule: nn.Module | None, *, mtp: MTPOptions | None = None
) -> None:
    """Called by torch whenever a module takes in another: swap what is around a patched text model
    that it takes in.

    That is the module, if it is a head that `head_swap` takes or a vision-language model of its own
    class, and the towers that it took in before.
    """
    homes = {base.__module__ for base in type(module).__mro__}
    family = next((row for row in FAMILIES if row.upstream in homes), None)
    if family is None or submodule is None:
        return
    states = [vars(part)["packfree"] for part in submodule.modules() if "packfree" in vars(part)]
    if states:
        towers, head = family.tower_pairs(family.towers), head_swap(module, family)
        after = {part: towers[type(part)] for part in module.modules() if type(part) in towers}
        around = next(
            (cls for cls in family.pairs() if cls.__name__ == family.vision_language), None
        )
        after |= (
            {module: family.pairs()[around]}
            if around is not None and type(module) is around
            else {}
        )
        after |= {} if head is None else {module: head}
        carry_out(
            [ClassSwap(name, part, type(part), cls) for part, cls in after.items()], states[0]
        )
        warn_of_heads(heads_left_alone(module, family))
        if mtp is not None:
            add_while_loading(module, submodule, family, mtp, states[0])


def _restore_upstream_names(mapping: dict[str, type[nn.Module]]) -> None:
    """Put upstream's classes back where an exception left ours: transformers does so only when
    all goes well.
    """
    originals = {before.__name__: before for family in FAMILIES for before in family.pairs()}
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith("transformers"):
            continue
        for name, before in originals.items():
            if vars(module).get(name) is mapping.get(f"^{name}$", before):
                if vars(module).get(name) is not None:
                    setattr(module, name, before)


class LenientAliases:
    """Until `restore()`, an alias of transformers whose target cannot be imported lists as empty
    instead of raising.

    transformers 5.13 to 5.20 alias image processors that need torchvision, and list all modules
    while a model is built under a class mapping. Aliases have no classes of ours, so an empty list
    loses nothing.
    """

    def __init__(self) -> None:
        self._listings: dict[ModuleType, Callable[[], list[str]]] = {
            module: vars(module)["__dir__"]
            for name, module in list(sys.modules.items())
            if name.startswith("transformers.")
            and isinstance(module, ModuleType)
            and "__dir__" in vars(module)
        }
        for module, listing in self._listings.items():
            vars(module)["__dir__"] = partial(_names_if_importable, listing)

    def restore(self) -> None:
        """Give every alias its own listing back; doing it twice changes nothing more."""
        while self._listings:
            module, listing = self._listings.popitem()
            vars(module)["__dir__"] = listing


def _names_if_importable(listing: Callable[[], list[str]]) -> list[str]:
    try:
        return listing()
    except ImportError:
        return []
