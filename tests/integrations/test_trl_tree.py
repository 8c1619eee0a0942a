"""TRL's tree packing (`TreeRow`) on patched models, called as AsyncGRPOTrainer calls: the
log-probabilities and entropies of every sample's trained tokens, against the sample alone.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from hf_packfree import apply_patches
from hf_packfree.errors import UnsupportedInput
from tests.integrations.marks import integration, needs
from tests.integrations.test_trl_fused_head import with_head
from tests.support import GRADIENT_TOL, LOGIT_TOL, documents, errors, gradients, tiny

# its dependencies deprecate things
pytestmark = [needs("trl"), pytest.mark.filterwarnings("default")]

TEMPERATURE = 0.8


def samples():
    """Two groups: a prompt with three answers, one of which goes on in two ways; and another with
    two, the second of which is the first one's beginning.
    """
    prompt, first, second, third, more, other, last = documents((40, 5, 64, 1, 30, 33, 20))
    tokens = [
        torch.cat([prompt, first]),
        torch.cat([prompt, second]),
        torch.cat([prompt, second, more]),
        torch.cat([prompt, second, third, third]),
        torch.cat([other, last]),
        torch.cat([other, last[:7]]),
    ]
    return [
        {
            "input_ids": one,
            "completion_mask": (torch.arange(len(one)) >= (33 if one[0] == other[0] else 40)).int(),
            "old_log_probs": torch.zeros(len(one)),
            "advantage": 1.0,
            "group_id": int(one[0]),
        }
        for one in tokens
    ]


def trl_row():
    from trl.experimental.async_grpo.packing import TreeRow

    row = TreeRow()
    for sample in samples():
        row.add(sample)
    return row.pack()


def call(model, row, fused_lm_head=True, **more):
    """As AsyncGRPOTrainer.compute_loss calls, with what a row has for labels."""
    tree = {name: row[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    tree["tree_max_seqlen_q"], tree["tree_max_seqlen_k"] = row["tree_max_seqlens"].tolist()
    names = {"input_ids", "position_ids", "shift_labels", "labels"} & row.keys()
    inputs = {name: row[name][None] for name in names}
    return model(**inputs, fused_lm_head=fused_lm_head, **tree, **more)


def alone(model):
    """Log-probabilities and entropies of all trained tokens, sample by sample."""
    found = []
    for sample in samples():
        ids = sample["input_ids"]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
        scores = logits.log_softmax(-1)
        of_tokens = torch.stack(
            [scores.gather(1, ids[1:, None])[:, 0], -(scores.exp() * scores).sum(1)], 1
        )
        found.append(of_tokens[sample["completion_mask"][1:].bool()])
    return torch.cat(found)


@integration("TRL trainers", "tree packing: `TreeRow`'s rows and keywords, as AsyncGRPO calls")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_every_trained_token_gets_what_it_gets_alone(family, record_property):
    row, settings = trl_row(), {"outputs": ("log_probs", "entropy"), "temperature": TEMPERATURE}
    assert len(row["input_ids"]) < 0.7 * sum(len(one["input_ids"]) for one in samples())
    model, stock = apply_patches(with_head(tiny(family), **settings)), tiny(family)
    output = call(model, row)
    of_row = torch.stack([output.log_probs.flatten(), output.entropy.flatten()], 1)
    found, wanted = of_row[row["token_index"]], alone(stock)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    values, worst = errors(
        ([found.detach()], gradients(model)), ([wanted.detach()], gradients(stock))
    )
    record_property("error", max(values, worst))
    assert values <= LOGIT_TOL and worst <= GRADIENT_TOL


@pytest.mark.parametrize("more", [{}, {"logits_to_keep": 9}], ids=["ours", "trls_own"])
def test_labels_that_nobody_has_shifted_are_refused(more):
    """Whoever computes: some calls are left to TRL's forward, which shifts by one token."""
    row = trl_row()
    row["labels"] = row.pop("shift_labels")
    model = apply_patches(with_head(tiny()))
    with pytest.raises(UnsupportedInput, match="found labels for a tree"):
        call(model, row, **more)


def test_the_routers_loss_counts_a_shared_token_once():
    row = trl_row()
    settings = {"outputs": ("log_probs", "entropy"), "temperature": 1.0}
    model = apply_patches(with_head(tiny("qwen3_5_moe"), **settings))
    found = call(model, row, output_router_logits=True)
    asked = {name: one for name, one in row.items() if "labels" not in name}
    layers = call(model, asked, False, output_router_logits=True).router_logits
    assert {len(layer) for layer in layers} == {len(row["input_ids"])}
    config = model.config.get_text_config()
    wanted = load_balancing_loss_func(layers, config.num_experts, config.num_experts_per_tok)
    assert abs(found.aux_loss - wanted) <= 1e-6 * wanted
    # a prefix as often as samples have it
    often = [layer[row["tree_kv_index"]] for layer in layers]
    other = load_balancing_loss_func(often, config.num_experts, config.num_experts_per_tok)
    assert abs(found.aux_loss - other) > 1e-4 * other
