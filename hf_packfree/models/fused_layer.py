"""Decoder layers of the form norm, mixer, norm, MLP: each residual sum is fused with the norm after
it, and so is the MLP with its residual sum.

Only for speed: documents are kept apart by the mixers, with or without this fusion.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor, nn

from hf_packfree.models.base import Replacement, Sizes, size_of_norm
from hf_packfree.models.peft_lora import spare_columns_for
from hf_packfree.models.plain_layers import adds_one, dtype_read, epsilon, swiglu_layers
from hf_packfree.models.state import state_of
from hf_packfree.ops.fused import OP as FUSED
from hf_packfree.ops.fused import add_norm, swiglu_mlp

_MLP_INPUTS = "gate_proj", "up_proj"


class FusedDecoderLayer(Replacement):
    """Put in front of a family's decoder layer (norm, mixer, norm, MLP, with a residual around
    each pair).
    """

    endings = ("DecoderLayer",)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with fused kernels if the keywords hold a record, which the mixer gets;
        otherwise run upstream's forward.

        Args:
            hidden_states: [1, T, D_model] of a packed row.
        """
        if kwargs.get("packed_sequence") is None:
            return super().forward(hidden_states, *args, **kwargs)
        return self._forward_packed(hidden_states, *args, **kwargs)

    def _forward_packed(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        mixer = self._mixer()
        normed, x = self._add_norm(x, None, self.input_layernorm, mixer)
        mixed = mixer(
            hidden_states=normed,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **kwargs,
        )
        # attention may return its weights too
        mixed = mixed[0] if isinstance(mixed, tuple) else mixed
        normed, x = self._add_norm(x, mixed, self.post_attention_layernorm, self.mlp)
        return self._feed_forward(normed, x)

    def _mixer(self) -> Any:
        paths = chain.from_iterable(state_of(self).mixers.values())
        return next(getattr(self, path) for path in paths if hasattr(self, path))

    def _add_norm(
        self, x: Tensor, branch: Tensor | None, norm: Any, reader: Any
    ) -> tuple[Tensor, Tensor]:
        """Return norm(x + branch) and x + branch; on the backend "torch", call the norm module.

        The norm's output is allocated with spare columns for the LoRA adapters of the `reader`, the
        module that reads it.
        """
        backend = state_of(self).kernels_for(x.device, x.dtype)["fused"]
        if backend != "torch" and adds_one(norm, self):
            fused = FUSED.backend(backend)
            names = reader.inputs if isinstance(reader, Replacement) else _MLP_INPUTS
            readers = [reader._modules.get(name) for name in names]
            return add_norm(
                x,
                branch,
                norm.weight,
                epsilon(norm),
                dtype=dtype_read(x, readers),
                spare_columns=spare_columns_for(readers, x) if fused.adapters else 0,
                backend=backend,
            )
        total = x if branch is None else x + branch
        return norm(total), total

    def _feed_forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + MLP(x); on the backend "torch", call the MLP module."""
        backend = state_of(self).kernels_for(x.device, x.dtype)["fused"]
        adapters = FUSED.backend(backend).adapters
        layers = swiglu_layers(self.mlp, self, x, adapters=adapters) if backend != "torch" else None
        if layers is not None:
            return swiglu_mlp(x, *layers, residual=residual, backend=backend)
        out: Tensor | tuple[Tensor, ...] = self.mlp(x)
        # experts may return their router's logits too
        return residual + (out[0] if isinstance(out, tuple) else out)

    def calls(self, name: str, part: nn.Module, x: Tensor) -> bool:
        """Whether the packed branch calls an MLP or a norm instead of reading its weights: one with
        hooks or adapters, for instance, or of another formula.
        """
        if name == "mlp":
            return swiglu_layers(part, self, x, adapters=False) is None
        return name.endswith("norm") and not adds_one(part, self)

    @staticmethod
    def checkpoint_sizes(layer: Any) -> Sizes:
        """Return the sizes of the norms, as found and as the layer's width says, and whether the
        MLP is a module.
        """
        return {
            "input_layernorm": (size_of_norm(layer.input_layernorm), (layer.hidden_size,)),
            "post_attention_layernorm": (
                size_of_norm(layer.post_attention_layernorm),
                (layer.hidden_size,),
            ),
            "mlp": (isinstance(layer.mlp, nn.Module), True),
        }
