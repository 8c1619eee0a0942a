"""Load-time patching of models while they are built, by any loader.

While a registration is in force, a family's text model goes through the same plan and checks as
under `apply_patches` as soon as its own `__init__` has built it, so both ways share one table. The
modules around it (head, vision-language model, towers) are swapped when the text model becomes
their child.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from hf_packfree.errors import PatchConflict, UnsupportedInput
from hf_packfree.models.attention_interface import is_more_than_text, looks_ahead
from hf_packfree.models.run_options import CudaGraphs, Padded, Unpacked
from hf_packfree.models.state import find_state
from hf_packfree.mtp.head_options import Choice as MTPChoice
from hf_packfree.mtp.head_options import MTPOptions, mtp_options
from hf_packfree.patching.announce import warn_of_heads, warn_once
from hf_packfree.patching.apply import patch, remove_patches
from hf_packfree.patching.backends import Choice
from hf_packfree.patching.mtp_head import add_while_loading
from hf_packfree.patching.options import Options
from hf_packfree.patching.plan import head_swap, refuse_lost_boundaries, unpatched_heads
from hf_packfree.patching.registry import FAMILIES, family_of
from hf_packfree.patching.steps import ClassSwap, carry_out

_in_force: list[Registration] = []
_changing = threading.Lock()


class Registration:
    """Patches models while they are built, until `remove()`, or the end of its `with` block.

    A registration is in force in every thread.
    """

    def __init__(self, options: Options) -> None:
        # without `mtp`: the head is added with the modules around the text model, see
        # `_swap_around`
        self._options, self._patching = replace(options, mtp=None), threading.local()
        trunks: list[Any] = [family.trunk_class() for family in FAMILIES]
        with _changing:
            if _in_force:
                raise PatchConflict(
                    "found register_patches() in force already; wanted one registration at a time; "
                    "call remove() on the earlier one, or leave its block"
                )
            _in_force.append(self)
            self._inits = {cls: (cls.__init__, self._then_patch(cls)) for cls in trunks}
            for cls, (_, ours) in self._inits.items():
                cls.__init__ = ours
            around = partial(_swap_around, mtp=options.mtp)
            self._watch = register_module_module_registration_hook(around)

    def remove(self) -> None:
        """End the registration: later models are built unpatched, earlier ones stay patched.
        Calling it twice does no more.

        A model that another thread is building meanwhile may be patched or not.
        """
        with _changing:
            if self not in _in_force:
                return
            _in_force.remove(self)
            self._watch.remove()
            for cls, (before, ours) in self._inits.items():
                # if other code wraps our `__init__`, ours stays and does nothing any more
                if cls.__init__ is ours:
                    cls.__init__ = before

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _then_patch(self, cls: Any) -> Callable[..., None]:
        """Return an `__init__` for the text model `cls` that patches the model after building
        it.
        """
        init = cls.__init__

        @functools.wraps(init)
        def __init__(model: nn.Module, *args: Any, **kwargs: Any) -> None:
            init(model, *args, **kwargs)
            # not for models that the package itself builds while it patches one
            if self not in _in_force or vars(self._patching):
                return
            if type(model) is not cls:
                warn_once(
                    f"{type(model).__name__} is left alone by register_patches(): it is a class "
                    f"on top of {cls.__name__}, whose forward may be another"
                )
                return
            if looks_ahead(model):
                warn_once(
                    f"{type(model).__name__} is left alone by register_patches(): its config says "
                    "use_bidirectional_attention, and no row of documents is one of each alone"
                )
                return
            self._patching.model = model
            try:
                patch(model, self._options)
            finally:
                vars(self._patching).clear()

        return __init__


def register_patches(
    *,
    backend: Choice = "auto",
    batch_invariant: bool = False,
    unpacked: Unpacked = "upstream",
    padded: Padded = "lazy",
    cuda_graphs: CudaGraphs = "never",
    mtp: MTPOptions | MTPChoice = None,
) -> Registration:
    """Patch every supported model that is built from now on, by `from_pretrained`, `from_config`
    or its class, in any thread.

    The registration is also a context manager: `with register_patches(): model =
    AutoModelForCausalLM.from_pretrained(...)`.

    Args:
        backend, batch_invariant, unpacked, padded, cuda_graphs: as for `apply_patches`.
        mtp: as for `apply_patches`; the multi-token prediction head is read from the checkpoint
            that is loaded, and loading raises `MissingHead` if the checkpoint lacks the head.

    Raises:
        UnsupportedInput: `mtp` names a checkpoint.
        PatchConflict: an earlier registration is in force.
    """
    # checked now, not when a model is loaded
    options = Options(
        backend=backend,
        batch_invariant=batch_invariant,
        unpacked=unpacked,
        padded=padded,
        cuda_graphs=cuda_graphs,
        mtp=mtp_options(mtp),
    )
    if options.mtp is not None and options.mtp.checkpoint is not None:
        raise UnsupportedInput(
            f"found checkpoint={options.mtp.checkpoint!r} in mtp; wanted none, because the head is "
            "loaded with the model, from the "
            "same files; call apply_patches(model, mtp=...) on the loaded model"
        )
    return Registration(options)


def _swap_around(
    module: nn.Module, name: str, submodule: nn.Module | None, *, mtp: MTPOptions | None
) -> None:
    """Swap the modules around a patched text model; torch calls this whenever a module gets a
    child.

    If the child is a patched text model, the parent is swapped if it is a head that `head_swap`
    accepts, or the family's vision-language model, and so are the towers that the parent already
    has.
    """
    if is_more_than_text(module) and isinstance(submodule, PreTrainedModel):
        _leave_alone(module, submodule)
    homes = {base.__module__ for base in type(module).__mro__}
    family = next((row for row in FAMILIES if row.upstream in homes), None)
    if family is None or submodule is None:
        return
    if (state := find_state(submodule)) is not None:
        refuse_lost_boundaries(module, family)
        towers, head = family.tower_pairs(), head_swap(module, family.head_pairs())
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
        carry_out([ClassSwap(name, part, type(part), cls) for part, cls in after.items()], state)
        warn_of_heads(unpatched_heads(module, family))
        if mtp is not None:
            add_while_loading(module, submodule, family, mtp, state)


def _leave_alone(module: nn.Module, submodule: nn.Module) -> None:
    """Unpatch a text model whose parent turns out to be a model that `apply_patches` refuses."""
    family = family_of(submodule)
    if find_state(submodule) and family is not None and family.made_from_upstream:
        remove_patches(submodule)
        warn_once(
            f"{type(module).__name__} is left alone by register_patches(): it is more than the "
            f"language model {type(submodule).__name__}"
        )
