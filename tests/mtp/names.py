"""The published names of the head's tensors, and the same tensors in either layout of experts."""

from __future__ import annotations

import re

import torch

LAYER, EXPERTS = "mtp.layers.0.", 4
SHARED = {
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    *(f"{LAYER}{norm}_layernorm.weight" for norm in ("input", "post_attention")),
    *(
        f"{LAYER}self_attn.{part}.weight"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    ),
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
DENSE = SHARED | {f"{LAYER}mlp.{part}.weight" for part in PROJECTIONS}
FUSED = SHARED | {
    f"{LAYER}mlp.gate.weight",
    f"{LAYER}mlp.shared_expert_gate.weight",
    f"{LAYER}mlp.experts.gate_up_proj",
    f"{LAYER}mlp.experts.down_proj",
    *(f"{LAYER}mlp.shared_expert.{part}.weight" for part in PROJECTIONS),
}
PER_EXPERT = {name for name in FUSED if ".experts." not in name} | {
    f"{LAYER}mlp.experts.{number}.{part}.weight"
    for number in range(EXPERTS)
    for part in PROJECTIONS
}


def of_head(found):
    return {name: part for name, part in found.items() if name.startswith("mtp.")}


def fused(found):
    """The same tensors with experts in one each."""
    experts = {name: re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name) for name in found}
    whole = {name: part for name, part in found.items() if not experts[name]}
    for place in {match[1] for match in experts.values() if match}:
        gate, up, down = (
            torch.stack([found[f"{place}.{number}.{part}.weight"] for number in range(EXPERTS)])
            for part in PROJECTIONS
        )
        whole |= {f"{place}.gate_up_proj": torch.cat([gate, up], 1), f"{place}.down_proj": down}
    return whole
