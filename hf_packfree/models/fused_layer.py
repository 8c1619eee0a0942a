"""Decoder layers of the form norm, mixer, norm, MLP: each residual sum is fused with the norm after
it, and so is the MLP with its residual sum.

Only for speed: documents are kept apart by the mixers, with or without this fusion.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_packfree.models import compat
from hf_packfree.models.base import (
    Replacement,
    Sizes,
    is_transformers_own,
    size_of_norm,
    upstream_of,
)
from hf_packfree.models.linear_weights import has_hooks, under_autocast
from hf_packfree.models.peft_lora import spare_columns_for
from hf_packfree.models.plain_layers import (
    OTHER_FORMULA,
    dtype_read,
    epsilon,
    norm_offset,
    swiglu_layers,
    why_mlp_is_called,
)
from hf_packfree.models.state import state_of
from hf_packfree.ops.fused import OP as FUSED
from hf_packfree.ops.fused import add_norm, swiglu_mlp

_MLP_INPUTS = "gate_proj", "up_proj"


class FusedDecoderLayer(Replacement):
    """Put in front of a family's decoder layer (norm, mixer, norm, MLP, with a residual around
    each pair).
    """

    endings = ("DecoderLayer",)
    norm_offset = 1.0
    passes_record: ClassVar[bool] = not compat.LAYERS_DROP_KEYWORDS
    """Whether upstream's own forward passes the record on to the mixer."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with fused kernels if the keywords hold a record, which the mixer gets;
        otherwise run upstream's forward.

        Args:
            hidden_states: [1, T, D_model] of a packed row.
        """
        packed = kwargs.get("packed_sequence") is not None
        # a forward that somebody put into the class does something else, or more
        if packed and self.passes_record:
            packed = is_transformers_own(upstream_of(type(self)).forward)
        arguments = self.by_name((hidden_states, *args), kwargs) if packed else None
        if arguments is None:
            return super().forward(hidden_states, *args, **kwargs)
        return self._forward_packed(**arguments)

    def _forward_packed(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        mixer = self._mixer()
        ours = isinstance(mixer, Replacement)
        # a wrapper, or hooks, read the norm in their own way: under autocast it is rounded for
        # linear layers alone; asking for hooks would break a compiled graph
        asks = under_autocast(hidden_states.device) and not torch.compiler.is_compiling()
        reads = ours and not (asks and has_hooks(vars(mixer)))
        readers = _parts(mixer, mixer.inputs) if reads else [mixer]
        normed, x = self._add_norm(
            hidden_states, None, self.input_layernorm, readers, joined=ours and mixer.joins_inputs
        )
        mixed = mixer(hidden_states=normed, **arguments)
        # attention may return its weights too
        mixed = mixed[0] if isinstance(mixed, tuple) else mixed
        reads = not asks or why_mlp_is_called(self.mlp, self) in (None, OTHER_FORMULA)
        readers = _parts(self.mlp, _MLP_INPUTS) if reads else [self.mlp]
        normed, x = self._add_norm(x, mixed, self.post_attention_layernorm, readers)
        return self._feed_forward(normed, x)

    def _mixer(self) -> Any:
        paths = chain.from_iterable(state_of(self).mixers.values())
        return next(getattr(self, path) for path in paths if hasattr(self, path))

    def _add_norm(
        self,
        x: Tensor,
        branch: Tensor | None,
        norm: Any,
        readers: list[Any],
        joined: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return norm(x + branch) and x + branch; on the backend "torch", call the norm module.

        Args:
            readers: the linear layers that read the norm.
            joined: whether they are one product; then the norm's output is allocated with spare
                columns for their LoRA adapters.
        """
        backend = state_of(self).kernels_for(x.device, x.dtype)["fused"]
        offset = norm_offset(norm, self) if backend != "torch" else None
        dtype = None if offset is None else dtype_read(x, readers)
        if offset is None or (dtype is None and _widens(norm, offset, x)):
            total = x if branch is None else x + branch
            return norm(total), total
        spare = joined and FUSED.backend(backend).adapters
        return add_norm(
            x,
            branch,
            norm.weight,
            epsilon(norm),
            offset=offset,
            dtype=dtype,
            spare_columns=spare_columns_for(readers, x) if spare else 0,
            backend=backend,
        )

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
        return name.endswith("norm") and norm_offset(part, self) is None

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


def _parts(module: Any, names: tuple[str, ...]) -> list[Any]:
    return [module._modules.get(name) for name in names]


def _widens(norm: Any, offset: float, x: Tensor) -> bool:
    """Whether the norm may return a wider dtype than x's: Llama's multiplies the rounded x by the
    weight as it is. gpt-oss's, of the same offset, never does, and is called there all the same.
    """
    wide = torch.promote_types(x.dtype, norm.weight.dtype)
    return offset == 0.0 and wide != x.dtype


class PlainDecoderLayer(FusedDecoderLayer):
    """Put in front of a decoder layer whose norms multiply by their weight alone, as Llama's do."""

    norm_offset = 0.0
    passes_record = True
