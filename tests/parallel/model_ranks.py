"""What two ranks measure of models with more than a text model and its head, in fp64 against one
process.
"""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_packfree import PackedSequence, apply_patches, verify_packing
from hf_packfree.errors import LeakDetected
from hf_packfree.models import context_parallel, vision_language
from hf_packfree.models.head_loss import LossOfCall
from hf_packfree.models.media_keywords import FEATURES
from hf_packfree.models.rope_index import rope_source
from hf_packfree.models.sharded_media import mark_kept
from hf_packfree.mtp import MTPOptions, training
from hf_packfree.mtp.attached import training_of
from hf_packfree.ops.attention import OP as ATTENTION
from hf_packfree.ops.attention.across_ranks import attend_by_heads
from hf_packfree.ops.op import Way
from hf_packfree.packing import pad_row, shard_row
from hf_packfree.packing.opaque import replaced
from hf_packfree.parallel import ContextParallel
from hf_packfree.verify.first_batch import first_batch_influence
from hf_packfree.verify.random_documents import media_source
from hf_packfree.verify.verify import LENGTHS
from tests import vision
from tests.models import omni
from tests.mtp.heads import WEIGHT, build
from tests.parallel.ranks import ROWS, batch_of, of_all_ranks, step, summed, widen_islands, worst
from tests.support import relative_rms, tiny, trunk_of

CALL = LossOfCall.__call__
# family: depth, detach
HEADS = {
    "qwen3_5": [(1, True), (2, False)],
    "qwen3_5_moe": [(2, False)],
    "qwen3_next": [(1, False), (2, True)],
}

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_omni_moe"]
TRAINED = [
    "gradients: padded",
    "logits: padded",
    "gradients: text alone",
    "gradients: a loss that is handed nothing, as before 5.17",
    "gradients: DDP",
    "gradients: towers alone",
    "gradients: towers alone, in evaluation",
    "gradients: pixels alone",
    "gradients: multi-token prediction",
    "gradients: FSDP2",
]
"""What `ways_of_training` measures, but its control."""
VERIFIED = {"text": (5, 64, 1, 40), "media": (70, 3, 90)}
"""{what is in the row that is verified: the documents' lengths}"""


def rows_with_head(family: str, depth: int) -> list[str]:
    """Return the names of the rows that a model with a multi-token prediction head is measured on."""
    return [*ROWS] if family == "qwen3_5" and depth == 2 else [*ROWS][:2]


def rows_with_media(family: str) -> list[str]:
    """Return the names of the rows with media that a family is measured on."""
    inside = "inside a sound" if "omni" in family else "inside an image"
    rows = ["every kind", inside]
    if family == "qwen3_5":
        rows += ["before an image", "behind an image", "inside a video", "all media on one rank"]
    return rows[:1] if family in ("qwen3_5_moe", "qwen3_vl_moe") else rows


def key_of(family: str, depth: int, detach: bool, row: str) -> str:
    """Return the name of a case with a multi-token prediction head."""
    return f"{family}, depth {depth}, detach {detach}, {row}"


def names() -> dict[str, list[str]]:
    """Return the name of every error that is measured, but controls, {what: its names}."""
    heads = [
        key_of(family, depth, detach, row)
        for family, ways in HEADS.items()
        for depth, detach in ways
        for row in rows_with_head(family, depth)
    ]
    rows = [f"{family}, {row}" for family in FAMILIES for row in rows_with_media(family)]
    return {
        "multi-token prediction": [
            f"{what}: {key}" for key in heads for what in ("loss", "gradients", "logged")
        ],
        "media": [f"{what}: {row}" for row in rows for what in ("loss", "gradients")] + TRAINED,
        "verification": [
            f"{what}: {row}"
            for row in VERIFIED
            for what in ("logits", "gradients", "influence", "first batch")
        ],
    }


def alone(x, packed, reach: int):
    """What a shard has behind it where nobody exchanges anything."""
    return pad_row(x[None], len(x) + reach)[0]


def measured(rank: int) -> dict[str, dict[str, float]]:
    """Return {what: {case: error}}; of a control how wrong it is."""
    widen_islands()
    return {
        "multi-token prediction": multi_token(),
        "media": media(),
        "verification": verification(),
    }


def multi_token() -> dict[str, float]:
    """Loss, gradients of trunk and head, and what is logged, by count and by mean; and a
    control.
    """
    results: dict[str, float] = {}
    for family, ways in HEADS.items():
        for depth, detach in ways:
            one = build(family, dtype=torch.float64, depth=depth, detach=detach)
            many = build(family, dtype=torch.float64, patched=False)
            options = MTPOptions(from_scratch=True, weight=WEIGHT, depth=depth, detach=detach)
            apply_patches(
                many, mtp=options, context_parallel=ContextParallel(dist.group.WORLD, gdn="state")
            )
            many.load_state_dict(one.state_dict())
            arguments = {"output_router_logits": True} if family == "qwen3_5_moe" else {}
            for number, name in enumerate(rows_with_head(family, depth)):
                given = (
                    batch_of(ROWS[name], 3)
                    | arguments
                    | ({"num_items_in_batch": 7} if number % 2 else {})
                )
                key = key_of(family, depth, detach, name)
                share = 1 if number % 2 else dist.get_world_size()
                wanted, wanted_gradients = step(one, given)
                loss, gradients = of_all_ranks(many, given, share)
                results[f"loss: {key}"] = relative_rms(loss, wanted.loss)
                results[f"gradients: {key}"] = worst(gradients, wanted_gradients)
                found, facts = (training_of(model).take() for model in (many, one))
                results[f"logged: {key}"] = max(
                    abs(found[one] - facts[one]) for one in facts if "loss" in one
                )
                if family == "qwen3_5" and number == 0:
                    with patch.object(training, "with_right_context", alone):
                        gradients = of_all_ranks(many, given, share)[1]
                    training_of(many).take()
                    results[f"control, each rank's own next tokens: {key}"] = worst(
                        gradients, wanted_gradients
                    )
    return results


def media() -> dict[str, float]:
    """Loss and gradients of text, towers, pixels and sounds, by count and by mean."""
    results: dict[str, float] = {}
    for family in FAMILIES:
        one, many = (vision.tiny_vision(family).double() for _ in range(2))
        for config in (one.config.get_text_config(), many.config.get_text_config()):
            config._experts_implementation = "eager"
        balanced = {"output_router_logits": True} if "moe" in family else {}
        apply_patches(one, unpacked="native")
        apply_patches(many, context_parallel=ContextParallel(dist.group.WORLD, gdn="state"))
        rows = (
            omni_rows(one)
            if hasattr(one.config, "audio_config")
            else vision_rows(one, every=family == "qwen3_5")
        )
        for number, name in enumerate(rows_with_media(family)):
            given = rows[name] | balanced | ({"num_items_in_batch": 7} if number % 2 else {})
            wanted, wanted_gradients = step_with_media(one, given)
            loss, gradients = of_all(many, given, 1 if number % 2 else dist.get_world_size())
            results[f"loss: {family}, {name}"] = relative_rms(loss, wanted)
            results[f"gradients: {family}, {name}"] = worst(gradients, wanted_gradients)
        if family == "qwen3_5":
            ways_of_training(results, one, many, rows)
    return results


def ways_of_training(results, one, many, rows) -> None:
    """Padded, evaluated, under DDP, with towers or pixels alone in training, and in evaluation
    mode; and a control.
    """
    padded = vision.padded_batch("left", vision.documents(one.base_model)[1:4])
    padded.pixels = [
        {kind: pixels.double().detach() for kind, pixels in own.items()} for own in padded.pixels
    ]
    batch = with_labels(padded.inputs | vision.media_arguments(padded.documents, padded.pixels))
    batch["labels"][batch["attention_mask"] == 0] = -100
    results["gradients: padded"] = difference(one, many, batch)
    with torch.no_grad():
        real = batch["attention_mask"].bool()
        results["logits: padded"] = relative_rms(
            many(**batch).logits[real], one(**batch).logits[real]
        )
    results["gradients: text alone"] = difference(one, many, batch_of([30, 20], 1))
    with patch.object(LossOfCall, "__call__", handed_nothing):
        found = of_all(many, batch, dist.get_world_size())[1]
    results["gradients: a loss that is handed nothing, as before 5.17"] = worst(
        found, step_with_media(one, batch)[1]
    )
    uneven = rows["all media on one rank"]
    wanted = step(one, uneven)[1]
    found = step(DistributedDataParallel(many), uneven)[1]
    results["gradients: DDP"] = worst(
        {name.removeprefix("module."): one for name, one in found.items()}, wanted
    )
    with patch.object(
        vision_language, "mark_kept", lambda x, kept: mark_kept(x, slice(0, kept.stop - kept.start))
    ):
        results["control, the first features of an image"] = difference(
            one, many, rows["inside an image"]
        )
    for model in (one, many):
        model.requires_grad_(False).base_model.visual.requires_grad_(True)
    results["gradients: towers alone"] = difference(one, many, uneven)
    for model in (one, many):
        model.eval()
    results["gradients: towers alone, in evaluation"] = difference(one, many, uneven)
    for model in (one, many):
        model.requires_grad_(False)
    results["gradients: pixels alone"] = difference(one, many, uneven)
    one, many = (vision.tiny_vision("qwen3_5").double() for _ in range(2))
    options = MTPOptions(from_scratch=True, weight=WEIGHT, depth=2, detach=False)
    apply_patches(one, unpacked="native", mtp=options)
    apply_patches(many, mtp=options, context_parallel=dist.group.WORLD)
    many.load_state_dict(one.state_dict())
    results["gradients: multi-token prediction"] = difference(one, many, rows["inside an image"])
    wanted = step(one, uneven)[1]
    for part in (
        *many.model.language_model.layers,
        many.model.visual,
        *many.mtp.layers,
        many.mtp,
        many,
    ):
        fully_shard(part)
    found = step(many, uneven)[1]
    results["gradients: FSDP2"] = worst(
        {name: one.full_tensor() for name, one in found.items()}, wanted
    )


def handed_nothing(loss, logits, labels, vocab_size, **dropped):
    """A head's loss without the keywords that later releases call it with."""
    return CALL(loss, logits=logits, labels=labels, vocab_size=vocab_size)


def difference(one, many, row) -> float:
    """The worst gradient's, of the mean of all ranks."""
    return worst(of_all(many, row, dist.get_world_size())[1], step_with_media(one, row)[1])


def vision_rows(model, every: bool):
    """Rows whose middle is inside an image, inside a video, at an image's edges, and one with
    all media on the first rank.
    """
    document, image, video, style = (
        vision.document,
        vision.image,
        vision.video,
        vision.style_of(model.base_model),
    )
    found = {"every kind": vision.documents(model.base_model)}
    # 16 placeholders behind four tokens
    middle = document(3, image(8, 8), 2, seed=1)
    found["inside an image"] = [document(20, seed=2), middle, document(20, seed=3)]
    if every:
        found |= {
            "before an image": [document(20, seed=2), middle, document(5, seed=3)],
            "behind an image": [document(5, seed=2), middle, document(22, seed=3)],
            "inside a video": [
                document(42, seed=2),
                document(9, video(4, 8, 4), 9, seed=4, style=style),
            ],
            "all media on one rank": [middle, document(30, seed=6)],
        }
    return {
        name: vision_row(model, one, by_offsets=number % 2)
        for number, (name, one) in enumerate(found.items())
    }


def vision_row(model, documents, by_offsets: bool):
    batch = vision.packed_batch(
        "offsets, types" if by_offsets else "4 rows", documents, rope_source(model.config)
    )
    batch.pixels = [
        {kind: pixels.double().detach() for kind, pixels in own.items()} for own in batch.pixels
    ]
    return with_labels(batch.inputs | vision.media_arguments(documents, batch.pixels))


def omni_rows(model):
    """Rows of everything, and one whose middle is inside a sound."""
    found = {}
    cut = [
        omni.Document().text(30),
        omni.Document().text(3).audio(330).text(4),
        omni.Document().text(9).image(4, 6).text(9),
    ]
    for name, given in (("every kind", omni.documents()), ("inside a sound", cut)):
        leaves = {
            kind: [x.detach().double() for x in xs] for kind, xs in omni.leaves_of(given).items()
        }
        found[name] = with_labels(
            omni.row(given, "offsets", model)[0] | omni.arguments(given, leaves)
        )
    return found


def with_labels(row):
    labels = row["input_ids"].clone()
    labels[:, 5 : labels.shape[1] // 3] = -100
    return row | {"labels": labels}


def step_with_media(model, row):
    """Loss and gradients of parameters, pixels and sounds."""
    leaves = {name: row[name].clone().requires_grad_() for name in FEATURES.values() if name in row}
    output, gradients = step(model, row | leaves)
    # which softmax ignores
    gradients = {name: one for name, one in gradients.items() if not name.endswith("k_proj.bias")}
    return output.loss.detach(), gradients | {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }


def of_all(model, row, share: int):
    loss, gradients = step_with_media(model, row)
    return summed({"loss": loss})["loss"] / share, {
        name: one / share for name, one in summed(gradients).items()
    }


def verification() -> dict[str, float]:
    """What `verify_packing` measures, of a shared row of text and of one with media; and where
    the ranks see one document.
    """
    results: dict[str, float] = {}
    for name, lengths in VERIFIED.items():
        model = (tiny() if name == "text" else vision.tiny_vision("qwen3_5")).double()
        apply_patches(model, context_parallel=ContextParallel(dist.group.WORLD, gdn="state"))
        report = verify_packing(model, lengths=lengths)
        found = report.patched
        results[f"logits: {name}"] = found.logits
        results[f"gradients: {name}"] = found.gradients
        results[f"influence: {name}"] = max(found.influence, found.cross_gradient)
        results[f"control, unpatched: {name}"] = min(
            report.unpatched.logits, report.unpatched.gradients
        )
        results[f"first batch: {name}"] = first_batch(model)
        with (
            patch.object(context_parallel, "shard_row", as_one_document),
            pytest.raises(LeakDetected) as raised,
        ):
            verify_packing(model, lengths=lengths)
        reacting = pytest.raises(
            LeakDetected, match="documents of the first batch reacting to each other's tokens"
        )
        ways = {"auto": Way(over_the_row, "heads")}
        with patch.dict(ATTENTION.across_ranks.ways, ways), reacting:
            first_batch(model)
        leak = raised.value.report.patched
        results[f"control, one document: {name}"] = min(
            leak.logits, leak.gradients, leak.influence, leak.cross_gradient
        )
    return results


def over_the_row(backend, q, k, v, packed, **options):
    """Attention that heeds no documents."""
    shard = dataclasses.replace(
        packed.shard, row=PackedSequence.from_lengths([packed.shard.row.num_tokens])
    )
    return attend_by_heads(backend, q, k, v, replaced(packed, shard=shard), **options)


def first_batch(model) -> float:
    """What the callback's check finds in a first batch, with media where the model takes them."""
    source, found = media_source(model), []

    def check(module, args, kwargs) -> None:
        found.append(first_batch_influence(module, args, kwargs))

    takes_media = source is not None
    row = (
        vision_rows(model, every=False)["inside an image"] if takes_media else batch_of(LENGTHS, 2)
    )
    handle = (source if takes_media else trunk_of(model)).register_forward_pre_hook(
        check, with_kwargs=True
    )
    try:
        model.train()(**row)
    finally:
        handle.remove()
    (influence,) = found
    return influence


def as_one_document(packed, *ranks):
    return shard_row(PackedSequence.from_lengths([packed.num_tokens]), *ranks)
