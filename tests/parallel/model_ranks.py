"""What two ranks measure of models with more than a text model and its head, in fp64 against one process."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist

from hf_packfree import apply_patches
from hf_packfree.mtp import MTPOptions, training
from hf_packfree.packing import pad_row
from hf_packfree.parallel import ContextParallel
from tests.mtp.heads import WEIGHT, build
from tests.parallel.ranks import ROWS, batch_of, of_all_ranks, step, widen_islands, worst
from tests.support import relative_rms

HEADS = {  # family: depth, detach
    "qwen3_5": [(1, True), (2, False)],
    "qwen3_5_moe": [(2, False)],
    "qwen3_next": [(1, False), (2, True)],
}


def alone(x, shard, reach: int):
    """What a shard has behind it where nobody exchanges anything."""
    return pad_row(x[None], len(x) + reach)[0]


def multi_token(rank: int) -> dict[str, float]:
    """Loss, gradients of trunk and head, and what is logged, by count and by mean; and a control."""
    widen_islands()
    results: dict[str, float] = {}
    for family, ways in HEADS.items():
        for depth, detach in ways:
            one = build(family, dtype=torch.float64, depth=depth, detach=detach)
            many = build(family, dtype=torch.float64, patched=False)
            options = MTPOptions(from_scratch=True, weight=WEIGHT, depth=depth, detach=detach)
            apply_patches(many, mtp=options, context_parallel=ContextParallel(dist.group.WORLD, gdn="state"))
            many.load_state_dict(one.state_dict())
            arguments = {"output_router_logits": True} if family == "qwen3_5_moe" else {}
            for number, name in enumerate(ROWS if family == "qwen3_5" and depth == 2 else [*ROWS][:2]):
                given = batch_of(ROWS[name], 3) | arguments | ({"num_items_in_batch": 7} if number % 2 else {})
                key, share = f"{family}, depth {depth}, detach {detach}, {name}", 1 if number % 2 else dist.get_world_size()
                wanted, wanted_gradients = step(one, given)
                loss, gradients = of_all_ranks(many, given, share)
                results[f"loss: {key}"] = relative_rms(loss, wanted.loss)
                results[f"gradients: {key}"] = worst(gradients, wanted_gradients)
                found, facts = (model.mtp.training_calls.take() for model in (many, one))
                results[f"logged: {key}"] = max(abs(found[one] - facts[one]) for one in facts if "loss" in one)
                if family == "qwen3_5" and number == 0:
                    with patch.object(training, "with_right_context", alone):
                        gradients = of_all_ranks(many, given, share)[1]
                    many.mtp.training_calls.take()
                    results[f"control, each rank's own next tokens: {key}"] = worst(gradients, wanted_gradients)
    return results
