"""Apply and remove patches: a model is swapped as a whole or not at all, and restored exactly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import nn

from hf_packfree.errors import PatchConflict
from hf_packfree.models.context_parallel import resolve_ways
from hf_packfree.models.run_options import CudaGraphs, Padded, Unpacked
from hf_packfree.models.state import Kernels, PatchState, find_state
from hf_packfree.models.subclassed import users_class
from hf_packfree.mtp.head_options import Choice as MTPChoice
from hf_packfree.mtp.head_options import MTPOptions, mtp_options
from hf_packfree.parallel import context_parallel as ranks_of
from hf_packfree.parallel.accelerate import cut_rows_again
from hf_packfree.patching.announce import announce
from hf_packfree.patching.backends import Choice, choose_backends, forced_backends
from hf_packfree.patching.dropped import warn_of_dropped_tower
from hf_packfree.patching.mtp_head import plan_head, refuse_trained_head
from hf_packfree.patching.options import Options
from hf_packfree.patching.plan import op_sizes, plan_swaps, trunks
from hf_packfree.patching.registry import family_of
from hf_packfree.patching.selfcheck import check_release
from hf_packfree.patching.selfcheck_unlisted import check_unlisted
from hf_packfree.patching.steps import (
    Change,
    ClassSwap,
    additions,
    carry_out,
    lifted,
    own_forward,
    undo,
)

Model = TypeVar("Model", bound=nn.Module)
_one_at_a_time = threading.RLock()
"""Patching is serial, because a plan holds only while no other thread changes the model, and models
may share modules.
"""


def apply_patches(
    model: Model,
    *,
    backend: Choice = "auto",
    batch_invariant: bool = False,
    unpacked: Unpacked = "upstream",
    padded: Padded = "lazy",
    cuda_graphs: CudaGraphs = "never",
    mtp: MTPOptions | MTPChoice = None,
    context_parallel: Any = None,
) -> Model:
    """Make packed rows exact, in place, and return the same model; applying twice changes nothing
    more.

    Logs to "hf_packfree": at INFO which modules were swapped, which backends run and why no faster
    ones, and which kernels compile for seconds; at WARNING which operations run in PyTorch eager on
    a GPU, and, once per process, which compile for minutes. If no level is set for that logger, one
    line on stderr says which backends run; PACKFREE_QUIET=1 hides it.

    Args:
        model: a model of a family that `packfree models` lists, or anything that holds one (a
            classification head, a wrapper, DDP). Parameters, state_dict keys and config stay as
            they are. For other causal language models of plain attention, a tiny copy is measured
            first, once per process.
        backend: "auto": for every op the fastest backend that can run; or the name of a backend to
            force ("torch" runs everywhere, and every op has it), or {op: name} with ops conv,
            delta_rule, ssd, kda, attention, tower_attention, loss, and fused for all small ops.
        batch_invariant: give a document the same bits alone and in a packed row. Rows of one
            document then run through the patched layers too, and matrix products never choose
            split-K by the number of rows, which makes short rows slower. Where the same bits cannot
            be promised, a WARNING gives the reason; see `PatchReport.rounding`.
        unpacked: which layers run rows of one document: "upstream", bit for bit as unpatched, or
            "native", the patched layers, which take less time and memory and round differently.
            Calls with a cache, `use_cache=True` or `output_attentions=True` always run upstream's
            layers.
        padded: how padded rows of one document run: "lazy", real tokens only in the patched layers,
            and a training step's logits are padded to the caller's shape only when something reads
            them; "upstream", bit for bit as unpatched.
        cuda_graphs: "auto": training steps of few tokens (up to 16,384) replay CUDA graphs of the
            layers, so that they do not wait for the host. From the second row on, a row that no
            graph has room for is captured, and the graph's memory stays allocated. What cannot be
            captured (operations that run in PyTorch, hooks, offloaded activations, FSDP1), or would
            leave less than 1/8 of the GPU's memory free, runs without, and `patch_report` says why.
            A flash attention that the model was loaded with runs the rows without. "never": no
            graphs.
        mtp: the multi-token prediction head that Qwen3.5 and Qwen3-Next checkpoints carry and
            transformers drops: None leaves it dropped, "keep" reads it from the checkpoint that the
            model came from, frozen, so that `save_pretrained` writes it again, "train" trains it
            with the model, and `MTPOptions` has more options. The head becomes `model.mtp`, with
            parameters of the model: call this before an optimizer or a wrapper takes the
            parameters.
        context_parallel: a process group of torch.distributed, a mesh of one dimension, or
            `ContextParallel`: its ranks share each row, and all are given the same batches.

    Raises:
        UnsupportedModel, PatchConflict, ContractError, BackendUnavailable: the model cannot be
            patched; nothing was changed.
        MissingHead: with `mtp`, the checkpoint lacks tensors of the head; nothing was changed.
        LeakDetected: this transformers is newer than any tried, and the family's tiny model leaks
            on it.
        ValueError: an option has an unknown value, or `batch_invariant=True` comes with
            `padded="upstream"`.

    Examples:
        A tiny random model and a row of two documents, of three tokens and of two. Unpatched, the
        second reads the first:

        >>> import torch, transformers
        >>> from hf_packfree import apply_patches
        >>> from hf_packfree.models.qwen3_5 import tiny_config
        >>> model = transformers.Qwen3_5ForCausalLM(tiny_config())
        >>> ids, positions = torch.tensor([[5, 6, 7, 5, 6]]), torch.tensor([[0, 1, 2, 0, 1]])
        >>> def second_document():
        ...     return model(input_ids=ids, position_ids=positions).logits[:, 3:]
        >>> alone = model(input_ids=ids[:, 3:]).logits
        >>> torch.allclose(second_document(), alone, atol=1e-5)
        False

        Patched, it is what it is alone:

        >>> model = apply_patches(model)
        >>> torch.allclose(second_document(), alone, atol=1e-5)
        True
    """
    options = Options(
        backend=backend,
        batch_invariant=batch_invariant,
        unpacked=unpacked,
        padded=padded,
        cuda_graphs=cuda_graphs,
        mtp=mtp_options(mtp),
        context_parallel=ranks_of(context_parallel),
    )
    patch(model, options)
    return model


def patch(model: nn.Module, options: Options, autocast: torch.dtype | None = None) -> None:
    """Plan, choose backends, check, then change `model`; if it changed, announce which backends
    run, under autocast in `autocast` if given.
    """
    with _one_at_a_time:
        _patch(model, options, autocast)


def _patch(model: nn.Module, options: Options, autocast: torch.dtype | None) -> None:
    family, swaps = plan_swaps(model)
    options = check_unlisted(family, model, options)
    steps = [*swaps, *plan_head(model, family, options.mtp)]
    sizes, ranks = op_sizes(model, family), options.context_parallel
    if ranks is not None:
        forced, config = forced_backends(options.backend), next(trunks(model, family)).config
        ranks = resolve_ways(config, sizes, ranks, family.mixer_ops, forced)
        sizes["gathered_keys"] = int(ranks.attention == "gather")
    chosen = choose_backends(
        options.backend, sizes, family.ops, batch_invariant=options.batch_invariant
    )
    options = replace(options, context_parallel=ranks)
    wanted = replace(
        chosen,
        mixers=family.mixers_by_kind,
        attends_for=family.attends_for,
        **options.of_run(),
    )
    state = _state_in_force(model, wanted)
    if not steps:
        return
    check_release(family, replace(state, context_parallel=None))
    carry_out(steps, state)
    announce(model, state, autocast)
    warn_of_dropped_tower(model, family)


def remove_patches(model: Model) -> Model:
    """Restore a model exactly as it was before `apply_patches`; a model that is not patched is left
    alone.

    Raises:
        PatchConflict: something wraps a patched module since, or the model has a multi-token
            prediction head in training, whose weights would be lost; nothing was changed.
    """
    with _one_at_a_time:
        steps = _in_force(model)
        refuse_trained_head(steps)
        undo(steps)
        cut_rows_again()
    return model


@contextmanager
def patches_lifted(model: nn.Module) -> Iterator[None]:
    """Unpatch `model` for the block, for a control, and patch it again afterwards.

    Raises:
        PatchConflict: as `remove_patches`.
    """
    with lifted(_in_force(model)):
        yield


def _in_force(model: nn.Module) -> list[Change]:
    """Return the steps that the model was patched with, each checked to be undoable."""
    return [*_swaps_in_force(model), *additions(model)]


def _swaps_in_force(model: nn.Module) -> list[ClassSwap]:
    family = family_of(model)
    if family is None:
        return []
    heads = {after: before for before, after in family.head_pairs().items()}
    originals = {after: before for before, after in family.pairs().items()} | heads
    ours = tuple(originals)
    modules: list[tuple[str, nn.Module]] = [
        (name, m) for name, m in model.named_modules() if isinstance(m, ours)
    ]
    steps: list[ClassSwap] = []
    for name, module in modules:
        before = originals.get(type(module)) or users_class(type(module))
        # a wrapped head knows it was removed
        bypassed = own_forward(module) is not None and not isinstance(module, tuple(heads))
        if before is None or bypassed:
            raise PatchConflict(
                f"found {name or 'the model itself'} wrapped since it was patched "
                f"({type(module).__name__}, or a forward of its own instance); wanted our class on "
                "the outside; undo the wrapping first, or keep the patches, which change nothing "
                "for unpacked rows"
            )
        steps.append(ClassSwap(name, module, before, type(module)))
    return steps


def _state_in_force(model: nn.Module, wanted: PatchState) -> PatchState:
    """Return the state that modules of the model already carry, or else `wanted`."""
    found = find_state(model) or wanted
    if found != wanted:
        raise PatchConflict(
            f"found the model patched with {_apart(found, wanted)}; "
            f"wanted {_apart(wanted, found)}; call remove_patches(model) first, or pass the same "
            "options both times (to PackFreeCallback, too)"
        )
    return found


def _apart(state: PatchState, other: PatchState) -> str:
    """Name the options of one state that differ from another's, as `apply_patches` takes them."""
    mine, its = vars(state), vars(other)
    kernels = [name for name, value in mine.items() if isinstance(value, Kernels)]
    backend = {
        op: name
        for place in kernels
        for op, name in mine[place].bare().items()
        if name != its[place].bare()[op]
    }
    options = {
        field.name: mine[field.name]
        for field in fields(state)
        if field.compare and field.name not in kernels and mine[field.name] != its[field.name]
    }
    options |= {"backend": backend} if backend else {}
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
