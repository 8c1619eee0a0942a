"""The head: parameters with the published names, built from the text model's own layer and norm
classes.

Step k at token t (Qwen3-Next's and DeepSeek-V3's multi-token prediction):

    z_t   = fc [norm_e(embedding of x_{t+k}), norm_h(h^{k-1}_t)]
    h^k_t = norm(layer(z)_t)
    h^0   = the text model's output

and h^k_t predicts x_{t+k+1} through the model's own language modelling head.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_packfree.models.base import upstream_of
from hf_packfree.packing import PackedSequence, pad_row
from hf_packfree.packing.tree import refuse_tree


class MTPHead(nn.Module):
    """The module `model.mtp`.

    Args:
        trunk: the text model, whose layer and norm classes, sizes and settings the head takes.
        layers: how many layers; step k runs layer (k - 1) modulo this number.
    """

    def __init__(self, trunk: Any, layers: int = 1) -> None:
        super().__init__()
        config, layer, norm = (
            trunk.config,
            upstream_of(type(trunk.layers[0])),
            upstream_of(type(trunk.norm)),
        )
        alike = _of_full_attention(config, layers)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = norm(width, eps=eps)
        self.pre_fc_norm_hidden = norm(width, eps=eps)
        self.layers = nn.ModuleList(layer(alike, number) for number in range(layers))
        self.norm = norm(width, eps=eps)
        # which attention runs is the text model's setting, now and later
        for module in self.modules():
            if getattr(module, "config", None) is alike:
                module.config = config
        self._checkpoint_like(trunk)

    def _checkpoint_like(self, trunk: Any) -> None:
        """Switch gradient checkpointing on in the head's layers if it is on in the text model."""
        for layer in self.layers:
            for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
                if hasattr(trunk.layers[0], name):
                    setattr(layer, name, getattr(trunk.layers[0], name))

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor,
        packed: PackedSequence,
        depth: int = 1,
        **of_layers: Any,
    ) -> tuple[Tensor, ...]:
        """Run `depth` steps on a row; embeddings past the end of a document are zeros.

        Args:
            hidden: [1, T, D_model], the text model's output after its final norm.
            embeddings: [1, T, D_model], the text model's input embeddings, features of images
                included; under context parallelism [1, T + depth, D_model], with the tokens that
                follow this rank's.
            packed: where documents start and end.
            depth: number of steps.
            of_layers: a decoder layer's other arguments, such as `position_embeddings`.

        Returns:
            `depth` tensors [1, T, D_model], the states h^1 to h^depth.
        """
        states: list[Tensor] = []
        for step in range(1, depth + 1):
            both = (
                self.pre_fc_norm_embedding(ahead(embeddings, packed, step, 0)),
                self.pre_fc_norm_hidden(hidden),
            )
            block = self.layers[(step - 1) % len(self.layers)]
            out = block(self.fc(torch.cat(both, -1)), packed_sequence=packed, **of_layers)
            hidden = self.norm(out[0] if isinstance(out, tuple) else out)
            states.append(hidden)
        return tuple(states)


def shapes_of(head: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the head's parameters."""
    return {name: tuple(parameter.shape) for name, parameter in head.named_parameters()}


def ahead(row: Tensor, packed: PackedSequence, by: int, fill: float) -> Tensor:
    """Return the row [1, T, ...] with every token's value replaced by that of the token `by`
    further in the same document.

    Tokens whose document ends before that get `fill`. Under context parallelism, `row` also has at
    least the `by` tokens that follow this rank's.
    """
    same = packed.cached(_goes_on, by).to(row.device).view(1, -1, *[1] * (row.ndim - 2))
    return pad_row(row[:, by:][:, : packed.num_tokens], packed.num_tokens, fill).masked_fill(
        ~same, fill
    )


def predicts(packed: PackedSequence, by: int) -> Tensor:
    """Return bool [T]: the real tokens at which step `by` predicts: their document has a token `by`
    further, to embed, and one after that, to predict.
    """
    return packed.cached(_goes_on, by + 1) & packed.is_real()[0]


def _goes_on(packed: PackedSequence, by: int) -> Tensor:
    """Return bool [T]: whether the token `by` further is in the same document."""
    refuse_tree(packed, "for a multi-token prediction head")
    number = packed.whole_row.seq_idx[0]
    same = F.pad(number[by:] == number[:-by], (0, min(by, len(number))), value=False)
    return packed.cut(same, 0)


def _of_full_attention(config: Any, layers: int) -> Any:
    """Return a copy of the text model's configuration in which all layers have full attention, and
    experts if any layer has.
    """
    alike = copy.deepcopy(config)
    alike.layer_types, alike.num_hidden_layers = ["full_attention"] * layers, layers
    if getattr(config, "num_experts", 0):
        alike.mlp_only_layers, alike.decoder_sparse_step = [], 1
    return alike
