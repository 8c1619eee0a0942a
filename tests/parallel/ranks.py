"""What every process of a context-parallel group does for the tests here: tiny models in fp64
against one process.

python -m tests.parallel.ranks 3          # prints what it measured on so many ranks
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from hf_packfree import PackedSequence, apply_patches
from hf_packfree.models import context_parallel
from hf_packfree.ops.attention import OP as ATTENTION
from hf_packfree.ops.attention import attention
from hf_packfree.ops.conv_delta_rule import conv_delta_rule
from hf_packfree.ops.delta_rule import OP as DELTA_RULE
from hf_packfree.ops.delta_rule import across_ranks
from hf_packfree.ops.delta_rule.segments import Segments
from hf_packfree.packing import shard_row, without_row
from hf_packfree.packing.opaque import replaced
from hf_packfree.parallel import ContextParallel
from tests.ranks import on_ranks
from tests.support import documents, relative_rms, tiny, worst_gradient

ROWS = {
    "documents of many lengths": [37, 70, 3, 90, 8],
    "one document": [208],
    "edges at cuts": [52, 52, 52, 52],
    "one token before and behind the cuts": [103, 1, 1, 103],
    "one token before and behind the cuts of three": [69, 1, 1, 68, 1, 1, 69],
    "a tail": [10, 150, 47],
    "a rank of padding alone": [5, 1],
}

WAYS = {
    "qwen3_5": {"gdn": "state", "attention": "heads"},
    "qwen3_5_moe": {},
    "qwen3_next": {"gdn": "state", "attention": "gather"},
    "llama": {},
    "lfm2": {},
    "olmo_hybrid": {"gdn": "state"},
}
"""{family: how its whole models are shared}"""
KEY_HEADS = (1, 2, 4)
COUNTS = {"count": {"num_items_in_batch": torch.tensor(7)}, "mean": {}}
"""{how the loss is divided: what says so}"""


def in_way(local: PackedSequence, **ways: str) -> PackedSequence:
    """Return the record of a shard that ranks share in these ways, by operation."""
    shard = replace(local.shard, ways={"conv": "context", **ways})
    return replaced(local, shard=shard)


def rows_of(family: str) -> list[str]:
    """Return the names of the rows that a family's whole model is measured on."""
    return [*ROWS] if family == "qwen3_5_moe" else [*ROWS][:2]


def delta_ways(world: int) -> list[str]:
    """Return how 4 key heads' delta rule can be shared by so many ranks."""
    return ["state"] if 4 % world else [*DELTA_RULE.across_ranks.ways]


def attention_ways(world: int) -> list[str]:
    """Return how 4 heads' attention can be shared by so many ranks."""
    return ["gather"] if 4 % world else [*ATTENTION.across_ranks.ways]


def names_of_ops(world: int) -> list[str]:
    """Return the name of every error that `ops` measures, but controls."""
    ways = [*delta_ways(world), "state, documents in segments"]
    rules = [f"delta rule by {way}" for way in ways]
    attends = [
        f"attention by {way}, {keys} key heads"
        for keys in KEY_HEADS
        for way in attention_ways(world)
    ]
    return [f"{what}: {row}" for row in ROWS for what in (*rules, *attends)]


def names_of_models() -> list[str]:
    """Return the name of every error that `models` measures, but controls."""
    rows = [f"{family}, {row}" for family in WAYS for row in rows_of(family)]
    whats = ("loss", "gradients", "loss of an evaluation")
    counted = [f"{what}: {row}, {by}" for what in whats for row in rows for by in COUNTS]
    return counted + [f"logits: {row}" for row in rows]


@cache
def widen_islands() -> None:
    """Let upstream's norms, rotary embedding, gates and router compute in fp64, which otherwise
    are fp32 whatever the model.
    """
    to, zeros, softmax = torch.Tensor.to, torch.zeros, torch.nn.functional.softmax

    def wide(value):
        return torch.float64 if value is torch.float32 else value

    def named(options):
        return {name: wide(one) for name, one in options.items()}

    torch.Tensor.float = torch.Tensor.double
    torch.Tensor.to = lambda x, *args, **options: to(x, *map(wide, args), **named(options))
    torch.zeros = lambda *shape, **options: zeros(*shape, **named(options))
    torch.nn.functional.softmax = lambda x, *args, dtype=None, **kwargs: softmax(x, *args, **kwargs)


def batch_of(lengths, generator_seed: int):
    """One row of ids, restarting positions and labels; the first half of the row has few
    targets.
    """
    given = documents(lengths, seed=generator_seed)
    ids = torch.cat(given)[None]
    labels = ids.clone()
    labels[:, : sum(lengths) // 2] = -100
    labels[:, :2] = ids[:, :2]
    return {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(len(one)) for one in given])[None],
        "labels": labels,
    }


def step(model, batch):
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()
    return output, {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def summed(tensors):
    """The sum of every rank's, by name."""
    for tensor in tensors.values():
        dist.all_reduce(tensor)
    return tensors


def worst(found, wanted) -> float:
    return worst_gradient(found, wanted, floor=0, least=1e-8)


def models(results) -> None:
    """Loss, gathered logits and gradients of whole models against one process, by count and by
    mean; and two controls.
    """
    for family, way in WAYS.items():
        arguments = {"output_router_logits": True} if family == "qwen3_5_moe" else {}
        one, many = (tiny(family).double() for _ in range(2))
        for model in (one, many):
            model.config._experts_implementation = "eager"
        apply_patches(one, unpacked="native")
        apply_patches(many, context_parallel=ContextParallel(dist.group.WORLD, **way))
        for name in rows_of(family):
            batch = batch_of(ROWS[name], len(ROWS[name])) | arguments
            for by, count in COUNTS.items():
                given, share = batch | count, 1 if count else dist.get_world_size()
                wanted, wanted_gradients = step(one, given)
                loss, gradients = of_all_ranks(many, given, share)
                key = f"{family}, {name}, {by}"
                results[f"loss: {key}"] = relative_rms(loss, wanted.loss)
                results[f"gradients: {key}"] = worst(gradients, wanted_gradients)
                with torch.no_grad():
                    mine = many(**given).loss * (dist.get_world_size() if count else 1)
                # on every rank: of a last batch, the Trainer reads some ranks' losses alone
                results[f"loss of an evaluation: {key}"] = relative_rms(mine, wanted.loss)
            with torch.no_grad():
                results[f"logits: {family}, {name}"] = relative_rms(
                    many(**batch).logits, one(**batch).logits
                )
            if family == "qwen3_5":
                controls(results, name, one, many, batch, wanted_gradients)


def of_all_ranks(model, batch, share: int):
    """Loss and gradients summed over the ranks, divided by `share`."""
    output, gradients = step(model, batch)
    loss = summed({"loss": output.loss.detach()})["loss"] / share
    return loss, {name: gradient / share for name, gradient in summed(gradients).items()}


def controls(results, name, one, many, batch, wanted) -> None:
    """What is wrong: each rank's mean over its own targets; documents that start anew in each
    rank.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    targets = batch["labels"].chunk(world, 1)[rank]
    own = {"num_items_in_batch": (targets != -100).sum()}
    # which is refused by name otherwise
    with patch.object(context_parallel, "refuse_other_ranks"):
        results[f"control, means of means: {name}"] = worst(
            of_all_ranks(many, batch | own, world)[1], wanted
        )
    mine = {key: value.chunk(world, 1)[rank] for key, value in batch.items()}
    # of the first document here
    mine["position_ids"] = mine["position_ids"] - mine["position_ids"][:, :1]
    whole = {"num_items_in_batch": (batch["labels"][:, 1:] != -100).sum()}
    results[f"control, documents cut: {name}"] = worst(
        of_all_ranks(one, mine | whole, 1)[1], wanted
    )


def ops(results) -> None:
    """Values and gradients of what mixes tokens."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for name, lengths in ROWS.items():
        local = shard_row(
            PackedSequence.from_lengths(lengths),
            dist.get_rank(),
            dist.get_world_size(),
            dist.group.WORLD,
        )
        delta_rules(results, name, local, random)
        attentions(results, name, local, random)


def delta_rules(results, name, local, random) -> None:
    heads, sizes, row = (4, 8), (6, 10), local.shard.row
    channels = 2 * heads[0] * sizes[0] + heads[1] * sizes[1]
    x, weight, bias = random(1, row.num_tokens, channels), random(channels, 4), random(channels)
    g, beta = (
        -0.05 * random(1, row.num_tokens, heads[1]).abs(),
        random(1, row.num_tokens, heads[1]).sigmoid(),
    )
    for way in delta_ways(local.shard.world):

        def rule(x, g, beta, weight, bias, where):
            record = row if where is row else in_way(local, delta_rule=way)
            return conv_delta_rule(x, weight, g, beta, record, heads, sizes, bias=bias)

        results[f"delta rule by {way}: {name}"] = op_error(
            rule, [x, g, beta], [weight, bias], row, local.shard
        )
        if way == "state":
            with (
                patch.object(across_ranks, "_parallel_segments", lambda *_: 1),
                patch.object(across_ranks, "plan_segments", short_segments),
            ):
                key = f"delta rule by state, documents in segments: {name}"
                # which has no plan yet
                local = shard_row(row, local.shard.rank, local.shard.world, local.shard.group)
                results[key] = op_error(rule, [x, g, beta], [weight, bias], row, local.shard)


def short_segments(packed, parallel):
    """Cut every document behind each 16 tokens."""
    return Segments.of(
        packed, [[16] * ((n - 1) // 16) + [(n - 1) % 16 + 1] for n in packed.lengths]
    )


def attentions(results, name, local, random) -> None:
    row, shard = local.shard.row, local.shard
    for keys in KEY_HEADS:
        q, k, v = (random(1, row.num_tokens, heads, 8) for heads in (4, keys, keys))
        for way in attention_ways(shard.world):

            def attend(q, k, v, where):
                return attention(q, k, v, row if where is row else in_way(local, attention=way))

            results[f"attention by {way}, {keys} key heads: {name}"] = op_error(
                attend, [q, k, v], [], row, shard
            )

    def of_shards(q, k, v, where):
        return attention(q, k, v, row if where is row else without_row(local))

    if shard.is_cut:
        results[f"control, keys of this rank alone: {name}"] = op_error(
            of_shards, [q, k, v], [], row, shard
        )


def op_error(run, per_token, weights, row, shard) -> float:
    """The worst of values and gradients against the whole row in one process."""
    given = [x.clone().requires_grad_() for x in (*per_token, *weights)]
    wanted = run(*given, row)
    d_out = torch.randn(
        wanted.shape, generator=torch.Generator().manual_seed(1), dtype=wanted.dtype
    )
    wanted.backward(d_out)
    mine = [shard.cut(x).clone().requires_grad_() for x in per_token] + [
        x.clone().requires_grad_() for x in weights
    ]
    found = run(*mine, shard)
    found.backward(shard.cut(d_out))
    errors = [relative_rms(found, shard.cut(wanted))]
    for one, other in zip(mine[: len(per_token)], given):
        errors.append(relative_rms(one.grad, shard.cut(other.grad), floor=1e-8))
    for one, other in zip(mine[len(per_token) :], given[len(per_token) :]):
        dist.all_reduce(one.grad)
        errors.append(relative_rms(one.grad, other.grad, floor=1e-8))
    return max(errors)


def measure(rank: int, world_of_models: int) -> dict[str, float]:
    """Return this rank's errors by what was measured: operations in every group, whole models in
    groups of that size alone.
    """
    from tests.parallel.traps import traps

    results: dict[str, float] = {}
    ops(results)
    if dist.get_world_size() == world_of_models:
        widen_islands()
        models(results)
        traps(results)
    return results


def measured(
    worlds: Sequence[int], folder: Path, world_of_models: int = 2
) -> list[dict[str, float]]:
    """Start groups of these sizes and return, of each, {what: the worst error of all its ranks}."""
    ranks = iter(on_ranks(measure, [(world_of_models,)], folder, worlds)[0])
    groups = [[next(ranks) for _ in range(world)] for world in worlds]
    return [{name: max(one[name] for one in group) for name in group[0]} for group in groups]


if __name__ == "__main__":
    # under the name by which the processes find it, too
    from tests.parallel import ranks as found

    world = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        for what, error in found.measured([world], Path(folder), world)[0].items():
            print(f"{error:.1e}  {what}")
