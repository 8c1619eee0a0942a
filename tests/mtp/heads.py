"""What the tests of the multi-token prediction head share: tiny models with one, and a loop over
documents without packing.
"""

from __future__ import annotations

import math
from importlib import import_module

import torch
from torch.nn import functional as F

from hf_packfree import apply_patches
from hf_packfree.models.rotary import cos_and_sin
from hf_packfree.mtp import MTPOptions
from tests.support import by_family, documents, gradients, slow_decay, trunk_of

LENGTHS = (37, 1, 2, 3, 64, 5, 23)
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
WEIGHT = 0.3


def build(
    family="qwen3_5", *, hybrid=True, tie=False, dtype=torch.float32, patched=True, **options
):
    """Return a tiny model with a head that has random weights, in training mode."""
    row = by_family[family]
    config = row.tiny_config()
    # the grouped product has no fp64
    config.tie_word_embeddings, config._experts_implementation = tie, "eager"
    config._attn_implementation = "sdpa"
    if not hybrid:
        config.layer_types, config.num_hidden_layers = ["full_attention"] * 2, 2
    torch.manual_seed(0)
    model = getattr(import_module(row.upstream), row.causal_lm)(config).to(dtype).train()
    if patched:
        apply_patches(model, mtp=MTPOptions(**{"from_scratch": True, "weight": WEIGHT} | options))
    slow_decay(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, dtype=dtype))
    return model


def labelled(lengths=LENGTHS):
    """Documents and their labels, of which the first tokens are a prompt where the document is
    long enough.
    """
    found = []
    for ids in documents(lengths):
        labels = ids.clone()
        labels[: min(2, max(0, len(ids) - 3))] = -100
        found.append((ids, labels))
    return found


def packed(pairs):
    """One row of the documents, by positions that restart."""
    ids, labels = (torch.cat(parts)[None] for parts in zip(*pairs))
    positions = torch.cat([torch.arange(len(ids)) for ids, _ in pairs])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def targets_of(pairs):
    """How many targets the main loss has."""
    return sum(int((labels[1:] != -100).sum()) for _, labels in pairs)


def loop_over_documents(model, pairs, depth, detach=True):
    """Return main loss and the head's, each document in forwards of its own, of which step k
    sees only tokens with a target.
    """
    trunk, head, items = trunk_of(model), model.mtp, targets_of(pairs)
    table, unembed = trunk.embed_tokens.weight, model.lm_head.weight
    main = ahead = torch.zeros((), dtype=table.dtype)
    for ids, labels in pairs:
        positions = torch.arange(len(ids))[None]
        x = trunk(input_ids=ids[None], position_ids=positions, use_cache=False).last_hidden_state
        main = main + _sum(F.linear(x[0, :-1], unembed), labels[1:]) / items
        weights = (table.detach(), unembed.detach()) if detach else (table, unembed)
        x = x.detach() if detach else x
        for k in range(1, depth + 1):
            left = len(ids) - k - 1
            if left <= 0:
                break
            pair = (
                head.pre_fc_norm_embedding(weights[0][ids[None, k : k + left]]),
                head.pre_fc_norm_hidden(x[:, :left]),
            )
            z = head.fc(torch.cat(pair, -1))
            mask = torch.full((left, left), torch.finfo(z.dtype).min, dtype=z.dtype).triu(1)[
                None, None
            ]
            layer = head.layers[(k - 1) % len(head.layers)]
            z = layer(
                z,
                position_embeddings=cos_and_sin(trunk, z, positions[:, :left]),
                attention_mask=mask,
            )
            x = head.norm(z[0] if isinstance(z, tuple) else z)
            ahead = (
                ahead + WEIGHT / depth * _sum(F.linear(x[0], weights[1]), labels[k + 1 :]) / items
            )
    return main, ahead


def _sum(logits, targets):
    return (
        F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        if len(targets)
        else 0.0 * logits.sum()
    )


def worst_gradient(found, wanted):
    """The largest relative difference of a parameter's gradient, and nothing where none is
    wanted.
    """
    assert found.keys() == wanted.keys()
    worst = 0.0
    for name, one in wanted.items():
        size = float(one.norm())
        error = float((found[name] - one).norm()) / (size or 1.0)
        worst = math.inf if math.isnan(error) else max(worst, error)
    return worst


def of_head(found):
    return {name.split("mtp.")[1]: one for name, one in found.items() if "mtp." in name}


def gradients_in_loop(pairs, depth=2, *, detach=True):
    """All gradients of the loop over documents, which trains by itself what the head's own calls
    would warn of.
    """
    model = build(depth=depth, detach=detach)
    model.mtp.leave(model)
    sum(loop_over_documents(model, pairs, depth, detach)).backward()
    return gradients(model)


def wanted_of(pairs, depth=2):
    """The head's gradients of the loop over documents."""
    return of_head(gradients_in_loop(pairs, depth))


def in_peft(model):
    """The model with adapters and the head in `modules_to_save`, as the docs recommend."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(
        model,
        LoraConfig(
            r=4,
            target_modules=["q_proj", "in_proj_qkv"],
            modules_to_save=["mtp"],
            exclude_modules=r"mtp\..*",
        ),
    )
