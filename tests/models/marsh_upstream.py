"""A made-up family's modeling file, as transformers would have it, of the shapes of Falcon-H1 and
Nemotron-H.

Some layers hold two mixers, whose outputs are added; others hold one, or an MLP, under one attribute
whatever its class; norms come before the branch, embeddings are called `embeddings`, and masks are
looked up by names that are no kinds of layers.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from tests.models import brook_upstream as brook

__all__ = ["MarshForCausalLM", "MarshModel", "MarshPreTrainedModel"]


class MarshConfig(PretrainedConfig):
    model_type = "marsh"

    def __init__(self, layer_types=("hybrid", "moe", "conv", "full_attention", "moe"), **kwargs):
        self.vocab_size, self.hidden_size, self.width = 128, 32, 3
        self.num_hidden_layers = len(layer_types)
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = 4, 2, 8
        self.layer_types = list(layer_types)
        super().__init__(**kwargs)


class MarshShortConv(brook.BrookShortConv):
    pass


class MarshAttention(brook.BrookAttention):
    pass


class MarshMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, **kwargs):
        return self.down(F.relu(self.up(x)).square())


class MarshLayer(GradientCheckpointingLayer):
    def __init__(self, config, kind):
        super().__init__()
        mixers = {"full_attention": MarshAttention, "moe": MarshMLP}
        self.kind, self.norm = kind, brook.BrookRMSNorm(config.hidden_size)
        self.mixer = mixers.get(kind, MarshShortConv)(config)
        if kind == "hybrid":
            self.attend = MarshAttention(config)

    def forward(self, x, position_embeddings, attention_mask=None, **kwargs):
        normed = self.norm(x)
        calls = [self.mixer, self.attend] if self.kind == "hybrid" else [self.mixer]
        for call in calls:
            mask = attention_mask if isinstance(call, brook.BrookAttention) else None
            out = call(
                normed, position_embeddings=position_embeddings, attention_mask=mask, **kwargs
            )
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x


class MarshPreTrainedModel(brook.BrookPreTrainedModel):
    config_class = MarshConfig


class MarshModel(MarshPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MarshLayer(config, kind) for kind in config.layer_types)
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        if not isinstance(masks := attention_mask, dict):
            mask = create_causal_mask(
                self.config, x, attention_mask, past_key_values, position_ids=position_ids
            )
            masks = {"full_attention": mask, "linear_attention": attention_mask}
        half = self.config.head_dim // 2
        angles = position_ids[..., None] * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
        turns = torch.cat([angles, angles], -1)
        embeddings, mask = (turns.cos(), turns.sin()), masks["full_attention"]
        for layer in self.layers:
            x = layer(x, position_embeddings=embeddings, attention_mask=mask, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=x)


class MarshForCausalLM(MarshPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = MarshModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        batch = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        hidden = self.model(*batch, **kwargs).last_hidden_state
        logits, loss = self.lm_head(hidden[:, -logits_to_keep:]), None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
