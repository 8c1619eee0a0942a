"""A made-up family's modeling file, as transformers would have it, of another shape than Qwen's.

Two decoder-layer classes with norms after the branch; a short convolution and a gated delta rule,
both under the attribute `token_mix`, and plain attention under `attend`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["BrookForCausalLM", "BrookModel", "BrookPreTrainedModel"]


class BrookConfig(PretrainedConfig):
    model_type = "brook"

    def __init__(
        self,
        layer_types=("conv", "linear_attention", "full_attention", "linear_attention"),
        **kwargs,
    ):
        self.vocab_size, self.hidden_size, self.width, self.num_hidden_layers = (
            128,
            32,
            3,
            len(layer_types),
        )
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = 4, 2, 8
        self.layer_types = list(layer_types)
        super().__init__(**kwargs)


class BrookRMSNorm(nn.Module):
    """Of plain weights; Qwen3.5's adds one to them."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class BrookShortConv(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.conv = nn.Conv1d(
            config.hidden_size,
            config.hidden_size,
            config.width,
            groups=config.hidden_size,
            bias=True,
        )
        self.gates_in = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, **kwargs):
        before, after, x = self.gates_in(x).chunk(3, -1)
        x = F.pad((before * x).transpose(1, 2), (self.conv.kernel_size[0] - 1, 0))
        return self.out(after * self.conv(x).transpose(1, 2))


class BrookDelta(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads, self.size = config.num_attention_heads, config.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * self.num_heads * self.size, bias=False)
        self.decay, self.write = (
            nn.Linear(config.hidden_size, self.num_heads, bias=False) for _ in range(2)
        )
        self.A_log = nn.Parameter(torch.zeros(self.num_heads))
        self.out = nn.Linear(self.num_heads * self.size, config.hidden_size, bias=False)

    def project(self, x):
        q, k, v = (
            part.unflatten(-1, (self.num_heads, self.size)) for part in self.qkv(x).chunk(3, -1)
        )
        return q, k, v, -self.A_log.exp() * F.softplus(self.decay(x)), self.write(x).sigmoid()

    def forward(self, x, **kwargs):
        q, k, v, g, beta = self.project(x)
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        state, out = x.new_zeros(x.shape[0], self.num_heads, self.size, self.size), []
        for t in range(x.shape[1]):
            state = state * g[:, t, :, None, None].exp()
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] * self.size**-0.5))
        return self.out(torch.stack(out, 1).flatten(2))


class BrookLeakySum(nn.Module):
    """Each channel remembers: h <- decay h + x. No layer of the default config has it."""

    def __init__(self, config):
        super().__init__()
        self.decay_logit = nn.Parameter(torch.full((config.hidden_size,), 3.0))
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, **kwargs):
        decay, h, sums = self.decay_logit.sigmoid(), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = decay * h + x[:, t]
            sums.append(h)
        return self.out(torch.stack(sums, 1))


def rotate(q, k, cos, sin):
    """Rotary embedding of q and k [B, heads, T, D]."""
    cos, sin = cos[:, None], sin[:, None]
    turned = (
        torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1) for x in (q, k)
    )
    return tuple(x * cos + other * sin for x, other in zip((q, k), turned, strict=True))


def eager_attention_forward(module, q, k, v, mask, scaling, dropout=0.0, **kwargs):
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    weights = (q @ k.transpose(2, 3) * scaling + (0 if mask is None else mask)).softmax(-1)
    return (F.dropout(weights, dropout, module.training) @ v).transpose(1, 2), weights


class BrookAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.head_dim, self.is_causal = config, config.head_dim, True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.attention_dropout = self.head_dim**-0.5, 0.0
        queries, keys = (
            config.num_attention_heads * self.head_dim,
            config.num_key_value_heads * self.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj, self.v_proj = (
            nn.Linear(config.hidden_size, keys, bias=False) for _ in range(2)
        )
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states,
        position_embeddings,
        attention_mask=None,
        past_key_values=None,
        **kwargs,
    ):
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            part(hidden_states).view(heads).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, k, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attend(
            self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.o_proj(out.flatten(2)), weights


class BrookStreamLayer(GradientCheckpointingLayer):
    """Norm after the branch, and no MLP."""

    def __init__(self, config, kind):
        super().__init__()
        mixers = {"conv": BrookShortConv, "hybrid": BrookLeakySum}
        self.token_mix = mixers.get(kind, BrookDelta)(config)
        self.after = BrookRMSNorm(config.hidden_size)

    def forward(self, x, position_embeddings, attention_mask=None, **kwargs):
        return x + self.after(self.token_mix(x, **kwargs))


class BrookPoolLayer(GradientCheckpointingLayer):
    def __init__(self, config, kind):
        super().__init__()
        self.attend = BrookAttention(config)
        self.after, self.last = BrookRMSNorm(config.hidden_size), BrookRMSNorm(config.hidden_size)
        self.feed = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, position_embeddings, attention_mask=None, **kwargs):
        mixed, _ = self.attend(
            x, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
        )
        x = x + self.after(mixed)
        return x + self.last(F.gelu(self.feed(x)))


class BrookPreTrainedModel(PreTrainedModel):
    config_class, base_model_prefix = BrookConfig, "model"
    supports_gradient_checkpointing, _supports_sdpa, _supports_flash_attn = True, True, True


class BrookModel(BrookPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        kinds = {"full_attention": BrookPoolLayer}
        self.layers = nn.ModuleList(
            kinds.get(kind, BrookStreamLayer)(config, kind) for kind in config.layer_types
        )
        self.post_init()

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
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        if not isinstance(attention_mask, dict):
            mask = create_causal_mask(
                self.config, x, attention_mask, past_key_values, position_ids=position_ids
            )
            attention_mask = {"full_attention": mask}
        half = self.config.head_dim // 2
        angles = position_ids[..., None] * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
        turns = torch.cat([angles, angles], -1)
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            x = layer(
                x,
                position_embeddings=(turns.cos(), turns.sin()),
                attention_mask=attention_mask.get(kind),
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=x)


class BrookForCausalLM(BrookPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model, self.lm_head = (
            BrookModel(config),
            nn.Linear(config.hidden_size, config.vocab_size, bias=False),
        )
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
        out = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            **kwargs,
        )
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        loss = (
            None
            if labels is None
            else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        )
        return CausalLMOutputWithPast(loss=loss, logits=logits)
