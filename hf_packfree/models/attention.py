"""Full attention over a packed row, in the attention implementation that the model was loaded
with.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_packfree.errors import BackendUnavailable, UnsupportedInput
from hf_packfree.models.base import Replacement, Sizes, size_of_linear, size_of_norm
from hf_packfree.models.plain_layers import adds_one, epsilon, plain_layers, project
from hf_packfree.models.recompute import linear_with_recompute
from hf_packfree.models.state import receive, state_of
from hf_packfree.ops.attention import attention
from hf_packfree.ops.fused import OP as FUSED
from hf_packfree.ops.fused import norm_rope, output_gate
from hf_packfree.packing import PackedSequence, to_hf_kwargs
from hf_packfree.packing.tree import refuse_tree
from hf_packfree.parallel.accelerate import refuse_cut_rows

_SDPA = "transformers.integrations.sdpa_attention"


def attention_route(implementation: str) -> str | None:
    """Return how an attention implementation runs a packed row: "varlen" (our operation), "mask"
    (eager, with a block mask), "flash" (upstream's, with cu_seqlens), or None if unknown.
    """
    if "flash" in implementation:
        return "flash"
    return {"sdpa": "varlen", "eager": "mask"}.get(implementation)


def attention_route_of(config: Any, packed: PackedSequence) -> str:
    """Return the `attention_route` of a packed row: a flash attention that the model was loaded
    with runs all but the rows of CUDA graphs, which our operation runs, as it does under sdpa.

    Raises:
        BackendUnavailable: the implementation has no route.
    """
    route = check_attention(config)
    return "varlen" if route == "flash" and packed.bounded else route


def additive_block_mask(
    packed: PackedSequence, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """Return the mask [1, 1, T, T] in `dtype` that eager attention adds to its scores: 0 where a
    query attends to a key, at most the last `window` keys, else the dtype's minimum.

    Raises:
        UnsupportedInput: the record has a tree, and there is a window.
    """
    number = packed.seq_idx[0]
    allowed = (number[:, None] == number[None, :]).tril()
    if packed.tree is not None:
        seen = packed.tree.sees().to(number.device, non_blocking=True)
        allowed = seen[number.long()][:, number.long()].tril()
    if window is not None:
        refuse_tree(packed, "with a sliding window")
        allowed = allowed.triu(1 - window)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=number.device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)[None, None]


def check_attention(config: Any) -> str:
    """Return the `attention_route` of the implementation in a model's config.

    Raises:
        BackendUnavailable: the implementation has no route, or runs a function that somebody put in
            the place of transformers' own, which our operation would bypass.
    """
    name = config._attn_implementation
    route = attention_route(name)
    if route == "varlen" and (owner := ALL_ATTENTION_FUNCTIONS[name].__module__) != _SDPA:
        raise BackendUnavailable(
            f"found the attention function {name!r} of transformers replaced by one of {owner} "
            "(DeepSpeed's Ulysses does that), which packed rows would bypass; wanted "
            "transformers' own; pass context_parallel to apply_patches to share rows among "
            "ranks, or undo the replacement"
        )
    if route is None:
        raise BackendUnavailable(
            f"found attn_implementation={config._attn_implementation!r}, which is not known to "
            "keep packed documents apart; wanted sdpa, eager or a flash attention; call "
            "model.set_attn_implementation('sdpa')"
        )
    return route


def drops_out(model: nn.Module) -> bool:
    """Whether a model's training steps attend with dropout, which no kernel has: attention then
    runs in PyTorch eager.
    """
    return any(getattr(module, "attention_dropout", 0) for module in model.modules())


def refuse_looking_ahead(layer: Any) -> None:
    """Refuse an attention layer with `is_causal=False`, which LLM2Vec sets on layers without
    changing the config.

    Raises:
        UnsupportedInput: the layer is not causal.
    """
    if not getattr(layer, "is_causal", True):
        raise UnsupportedInput(
            f"found a {type(layer).__name__} with is_causal=False and a packed row; wanted causal "
            "attention, the only kind that packs exactly; pass the documents in rows of their own, "
            "padded"
        )


def take_packed_call(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[PackedSequence, dict[str, Any]] | None:
    """Remove the record from the keywords of an attention layer's forward; return the record and
    the other arguments by name, or None where upstream's forward runs.

    Raises:
        PatchConflict: accelerate prepared the model to cut its rows.
        UnsupportedInput: the layer is not causal.
    """
    packed = receive(layer, kwargs)
    arguments = None if packed is None else layer.by_name(args, kwargs)
    if packed is None or arguments is None:
        return None
    refuse_cut_rows(layer)
    refuse_looking_ahead(layer)
    return packed, arguments


class RoutedAttention(Replacement):
    """Base of attention over a packed row: our operation where the model runs sdpa, and in CUDA
    graphs; otherwise upstream's forward with a block mask or cu_seqlens.
    """

    endings = ("Attention",)
    inputs = "q_proj", "k_proj", "v_proj"
    follows_trees = True

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within documents if the keywords hold a record; otherwise run upstream's forward.

        Args:
            hidden_states: [1, T, D_model] of a packed row.

        Raises:
            PatchConflict: accelerate prepared the model to cut its rows.
        """
        call = take_packed_call(self, (hidden_states, *args), kwargs)
        if call is None:
            return super().forward(hidden_states, *args, **kwargs)
        packed, arguments = call
        route = attention_route_of(self.config, packed)
        if route == "varlen":
            attended = self._attend_packed(
                hidden_states, arguments.get("position_embeddings"), packed
            )
            return packed.zero_left_pad(attended), None
        if route == "mask":
            arguments["attention_mask"] = packed.cached(additive_block_mask, hidden_states.dtype)
        else:
            arguments |= {"attention_mask": None, **to_hf_kwargs(packed)}
        out, weights = super().forward(**arguments)
        return packed.zero_left_pad(out), weights

    def _attend_packed(
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, packed: PackedSequence
    ) -> Tensor:
        """Return the module's output [1, T, D_model] for x [1, T, D_model]; `position_embeddings`
        are cos and sin [1, T, D_rotary], None for layers without positions.
        """
        raise NotImplementedError

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequence, backend: str
    ) -> Tensor:
        """Return [1, T, heads, D] of q, k and v [1, T, heads, D]."""
        dropout = self.attention_dropout if self.training else 0.0
        return attention(
            q,
            k,
            v,
            packed,
            scale=self.scaling,
            dropout=dropout,
            backend=backend,
        )

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the family's rotary embedding to q and k [1, heads, T, D]."""
        rotated: tuple[Tensor, Tensor] = self.upstream.apply_rotary_pos_emb(q, k, cos, sin)
        return rotated

    def _rotate_tokens(
        self, q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate q and k [1, T, heads, D]; without `position_embeddings`, return them unchanged."""
        if position_embeddings is None:
            return q, k
        q, k = self._rotate(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return the size of a head, and the number of query heads."""
        return {"head_size": layer.head_dim, "query_heads": layer.config.num_attention_heads}


class PackedAttention(RoutedAttention):
    """Put in front of a family's attention: projections, rotary embedding, output projection."""

    def _attend_packed(
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, packed: PackedSequence
    ) -> Tensor:
        state, heads = state_of(self), (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            part.view(heads)
            for part in project(x, self.q_proj, self.k_proj, self.v_proj, state=state)
        )
        # under autocast q's dtype is not x's
        kernels = state.kernels_for(q.device, q.dtype)
        q, k = self._rotate_tokens(q, k, position_embeddings)
        out = self._attend(q, k, v, packed, kernels["attention"])
        return project(out.flatten(2), self.o_proj, state=state)[0]

    def calls(self, name: str, part: nn.Module, x: Tensor) -> bool:
        """Whether the packed branch calls a projection instead of reading its weight: one with a
        bias, hooks or adapters, for instance.
        """
        return plain_layers(x, part, adapters=False) is None

    @staticmethod
    def checkpoint_sizes(layer: Any) -> Sizes:
        """Return the sizes of the projections, as found and as the config says."""
        config, head = layer.config, layer.head_dim
        queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
        return {
            "q_proj": (size_of_linear(layer.q_proj), (queries, config.hidden_size)),
            "k_proj": (size_of_linear(layer.k_proj), (keys, config.hidden_size)),
            "v_proj": (size_of_linear(layer.v_proj), (keys, config.hidden_size)),
            "o_proj": (size_of_linear(layer.o_proj), (config.hidden_size, queries)),
        }


class QKNormAttention(PackedAttention):
    """Put in front of attention that normalises each head of q and k before the rotary
    embedding.
    """

    def _rotate_tokens(
        self, q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Normalise and rotate q and k [1, T, heads, D]. The norm modules are called, so that any
        formula is right.
        """
        return super()._rotate_tokens(self.q_norm(q), self.k_norm(k), position_embeddings)

    @staticmethod
    def checkpoint_sizes(layer: Any) -> Sizes:
        """Add the sizes of the norms to those of `PackedAttention`."""
        return PackedAttention.checkpoint_sizes(layer) | {
            "q_norm": (size_of_norm(layer.q_norm), (layer.head_dim,)),
            "k_norm": (size_of_norm(layer.k_norm), (layer.head_dim,)),
        }


class GatedQKNormAttention(RoutedAttention):
    """Put in front of attention whose query projection also gives an output gate, and which
    normalises each head of q and k.
    """

    norm_offset = 1.0

    def _attend_packed(
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, packed: PackedSequence
    ) -> Tensor:
        state = state_of(self)
        q_and_gate, k, v = project(x, self.q_proj, self.k_proj, self.v_proj, state=state)
        q, gate = q_and_gate.view(*x.shape[:-1], -1, 2 * self.head_dim).chunk(2, dim=-1)
        heads = (*x.shape[:-1], -1, self.head_dim)
        # under autocast q's dtype is not x's
        kernels = state.kernels_for(q.device, q.dtype)
        q, k = self._norm_rotate(q, k.view(heads), position_embeddings, kernels["fused"])
        out = self._attend(q, k, v.view(heads), packed, kernels["attention"])
        backend = kernels["fused"]
        gated = partial(output_gate, out, gate, backend=backend)
        recompute = FUSED.backend(backend).recomputes
        return linear_with_recompute(
            gated, self.o_proj, out, backend=backend, recompute=recompute, state=state
        )

    def _norm_rotate(
        self, q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, backend: str
    ) -> tuple[Tensor, Tensor]:
        """Normalise and rotate q and k [1, T, heads, D]; with "torch", call the model's norm
        modules.
        """
        fused = backend != "torch" and adds_one(self.q_norm, self) and adds_one(self.k_norm, self)
        if position_embeddings is None or not fused:
            return self._rotate_tokens(self.q_norm(q), self.k_norm(k), position_embeddings)
        return (
            norm_rope(
                q, self.q_norm.weight, *position_embeddings, epsilon(self.q_norm), backend=backend
            ),
            norm_rope(
                k, self.k_norm.weight, *position_embeddings, epsilon(self.k_norm), backend=backend
            ),
        )

    def calls(self, name: str, part: nn.Module, x: Tensor) -> bool:
        """Whether the packed branch calls a norm or a projection instead of reading its weight: one
        with hooks or adapters, for instance, or a norm of another formula.
        """
        return (
            not adds_one(part, self)
            if name.endswith("norm")
            else plain_layers(x, part, adapters=False) is None
        )

    @staticmethod
    def checkpoint_sizes(layer: Any) -> Sizes:
        """Return the sizes of the projections and norms, as found and as the config says; the query
        projection also holds the gate.
        """
        config, head = layer.config, layer.head_dim
        return QKNormAttention.checkpoint_sizes(layer) | {
            "q_proj": (
                size_of_linear(layer.q_proj),
                (2 * config.num_attention_heads * head, config.hidden_size),
            ),
        }
