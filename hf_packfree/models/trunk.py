"""Patched text models: one record per forward, passed to every layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_packfree.errors import CacheConflict, PatchConflict, UnsupportedInput
from hf_packfree.models.attention import check_attention
from hf_packfree.models.base import Replacement, kinds_of_layers, part_at
from hf_packfree.models.call import Call
from hf_packfree.models.captured_layers import in_graph, without_graph
from hf_packfree.models.compat import CACHE, masks_the_layers_ignore
from hf_packfree.models.entry import enter
from hf_packfree.models.recompute import keep_patches_until_backward
from hf_packfree.models.rotary import check_longest_position, has_fixed_frequencies
from hf_packfree.models.row import as_requested, positions_for, restore_layers, row_positions
from hf_packfree.models.state import state_of
from hf_packfree.models.tree_checks import check_tree_layers
from hf_packfree.packing import PackedSequence, repad, unpad
from hf_packfree.parallel.collectives import gather_row

_OF_THE_BATCH = {"cache_position", "logits_to_keep"}
"""Arguments that count tokens of the batch, not of the row: transformers 5.2 and 5.3 read the
first; by the second, Gemma 4 drops tokens before its layers that share keys, as the head does after
them.
"""


class PackedTrunk(Replacement):
    """Put in front of a family's text model: reads boundaries, runs a packed batch as one row, and
    returns outputs in the caller's shape.

    Upstream's forward gets rows of one document without padding as they came. Padded rows become
    one row, unless the call needs something that only upstream has, see `enter`. Layers get the
    record as the keyword `packed_sequence`, because gradient checkpointing passes keywords again
    when it recomputes a layer.
    """

    endings = "TextModel", "Model"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run upstream's forward; every argument and output keeps upstream's meaning and shape.

        A packed row builds no cache: the output's cache is None even with `use_cache=True`.

        Raises:
            BoundaryError, BoundaryConflict, CacheConflict, UnsupportedInput: before anything runs.
        """
        arguments = self.by_name(args, kwargs)
        if arguments is None:
            return super().forward(*args, **kwargs)
        call = Call(self, arguments)
        if not call.has_batch or _is_paged(call.cache):
            return super().forward(*args, **kwargs)
        # a caller that computes the routers' loss knows which tokens are padding from a record or a
        # mask
        masked = (
            isinstance(call.get("packed_sequence"), PackedSequence)
            or call.attention_mask is not None
        )
        call = enter(call)
        packed = call.packed
        _check_sharded(self, packed)
        call = call.having(position_ids=positions_for(self, call.position_ids))
        del call.arguments["packed_sequence"]
        if self.training:
            for observe in state_of(self).observers:
                observe(
                    packed,
                    packed.batch_shape if packed is not None else call.batch.shape,
                    call.attention_mask,
                )
        if packed is not None:
            _check_packed_call(call, packed)
            return self._forward_packed(call, packed, count_all=masked)
        output = super().forward(**call.arguments)
        self._followed(call, output)
        return output

    def _followed(self, call: Call, output: Any) -> None:
        if self.training:
            for follow in state_of(self).followers:
                follow(call, output[0])

    def _forward_packed(self, call: Call, of_batch: PackedSequence, *, count_all: bool) -> Any:
        packed = of_batch.for_shape(call.batch.shape)
        row = {name: value for name, value in call.arguments.items() if name not in _OF_THE_BATCH}
        row |= {
            name: unpad(row[name], packed)
            for name in ("input_ids", "inputs_embeds", "per_layer_inputs")
            if row.get(name) is not None
        }
        row |= {
            "attention_mask": masks_the_layers_ignore(self.config, packed.seq_idx.device),
            "position_ids": row_positions(row["position_ids"], packed),
            "use_cache": False,
            "packed_sequence": packed,
            "return_dict": True,
        }
        if not has_fixed_frequencies(self.config):
            check_longest_position(self.config, packed, row["position_ids"])
        forward = super().forward
        output = in_graph(self, forward, row, packed) or without_graph(self, forward, row)
        keep_patches_until_backward(self, output)
        self._followed(Call(self, row, of_batch), output)
        output.last_hidden_state = repad(output.last_hidden_state, packed)
        restore_layers(output, packed, count_all=count_all)
        if output.get("router_logits") is not None:
            output.router_logits = tuple(
                gather_row(layer, packed) for layer in output.router_logits
            )
        return as_requested(output, call, self.config)


def _is_paged(cache: Any) -> bool:
    """Whether a cache is that of `generate_batch`, which holds many requests and keeps them apart
    itself: upstream runs its rows, boundaries included.
    """
    return cache is not None and not hasattr(cache, "get_seq_length")


def _check_packed_call(call: Call, packed: PackedSequence) -> None:
    trunk = call.module
    if call.cache is not None:
        raise CacheConflict(
            f"found a PackedSequence together with {CACHE}; wanted no cache, which can belong to "
            f"one document only; pass {CACHE}=None"
        )
    check_attention(trunk.config)
    _check_mixers(trunk)
    check_tree_layers(trunk, packed)
    if call.get("is_causal", getattr(trunk.config, "is_causal", True)) is False:
        raise UnsupportedInput(
            "found is_causal=False with a packed row; wanted causal attention, the only kind that "
            "packs exactly; pass the documents in rows of their own, padded"
        )
    by_config = getattr(trunk.config, "output_attentions", False)
    wants_weights = call.get("output_attentions", by_config)
    if wants_weights and (packed.indices is not None or packed.batch_shape[0] > 1):
        raise UnsupportedInput(
            f"found output_attentions=True for a packed batch of {packed.batch_shape[0]} rows; "
            "wanted one row without padding, because the weights of a flattened batch have no "
            "per-row shape; pass the rows one at a time"
        )


def _check_sharded(trunk: Any, packed: PackedSequence | None) -> None:
    """Under context parallelism, refuse a call of the text model whose record is not a shard's.

    Raises:
        UnsupportedInput: the text model was called without its head, or with a cache.
    """
    if state_of(trunk).context_parallel is None or packed is not None and packed.is_shard:
        return
    found = (
        "a cache, or what else upstream runs itself,"
        if packed is None
        else "a call of the text model without its head"
    )
    raise UnsupportedInput(
        f"found {found} under context parallelism; wanted a training step or an evaluation of the "
        f"whole model, with labels for "
        "its loss; generate and compute losses elsewhere after remove_patches(model)"
    )


def _check_mixers(trunk: Any) -> None:
    """Refuse a text model with a token mixer whose class is no longer ours, or with a forward on
    the instance, which bypasses the class.

    Wrappers that hold a patched mixer, and accelerate's hooks, which call the class's forward, are
    allowed.

    Raises:
        PatchConflict: there is such a token mixer.
    """
    for name, mixer in changed_mixers(trunk):
        raise PatchConflict(
            f"found {name} changed since the model was patched "
            f"({type(mixer).__name__}, or a forward of its own instance): it would read from "
            "one document into the next; wanted our class in force; undo the change, or call "
            "apply_patches(model) after a layer was replaced"
        )


def changed_mixers(trunk: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of the token mixers for which a text model refuses packed rows."""
    mixers = state_of(trunk).mixers
    kinds = kinds_of_layers(trunk.config)
    for number, (kind, layer) in enumerate(zip(kinds, trunk.layers, strict=False)):
        for name in mixers.get(kind, ()):
            mixer = part_at(layer, name)
            if mixer is not None and not _reads(mixer):
                yield f"layers.{number}.{name}", mixer


def check_model_of(head: Any) -> None:
    """Refuse a head whose text model is no longer patched: that model would ignore the record and
    read from one document into the next.

    Raises:
        PatchConflict: the model was replaced; a module that wraps the patched model is allowed.
    """
    model = head.base_model
    if not (isinstance(model, Replacement) or _holds_ours(model)):
        raise PatchConflict(
            f"found {head.base_model_prefix} changed since the model was patched "
            f"({type(model).__name__}, not patched): it would read from one document into the "
            "next; wanted our class in force; call apply_patches(model) once more"
        )


def _reads(mixer: Any) -> bool:
    if isinstance(mixer, Replacement):
        return "forward" not in vars(mixer) or hasattr(mixer, "_hf_hook")
    return _holds_ours(mixer)


def _holds_ours(module: Any) -> bool:
    return any(isinstance(part, Replacement) for part in module.modules())
