"""Documents with images, videos and text in packed rows: the Trainer's and TRL's steps against
each document alone.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer

from hf_packfree import PackFreeCallback, patch_report
from hf_packfree.data import PackedDataset, PackedIterableDataset, PackedVisionCollator
from hf_packfree.errors import BoundaryError
from tests.data.processors import example, image_part, picture, video_part, vision_processor
from tests.integrations.compare import (
    RATE,
    KeepGradients,
    arguments,
    descend,
    in_steps,
    targets,
    token_loss,
)
from tests.integrations.marks import integration, needs
from tests.support import gradients
from tests.vision import tiny_vision

pytestmark = pytest.mark.filterwarnings("default", "ignore:'pin_memory'")
SIZE, STEPS = 3, 3
EXAMPLES = [
    example("a b", image_part(16, 24, seed=1), "c"),
    example("a b c d e f"),
    example(image_part(8, 8, seed=2), image_part(24, 8, seed=3), "x", answer="y z"),
    # a step of text alone
    example("a"),
    example("b c"),
    example("d e f"),
    example("v", video_part(seed=4), answer="i j k"),
    example("k", image_part(24, 24, seed=5), answer="l"),
    example("m n o"),
]


def one_by_one(collator, steps):
    """Train with every document in a forward of its own, unpatched, and return the gradients of
    every step.
    """
    model, kept = tiny_vision("qwen3_5"), []
    for step in steps:
        model.zero_grad(set_to_none=True)
        documents = [collator.document(one) for one in step]
        count = sum(targets(document.labels) for document in documents)
        for document in documents:
            row = PackedVisionCollator(collator.processor)([document])
            own = {name: row[name] for name in ("input_ids", "mm_token_type_ids", *document.media)}
            logits = model(
                **own, attention_mask=torch.ones_like(own["input_ids"]), use_cache=False
            ).logits[0]
            (token_loss(logits, document.labels) / count).backward()
        kept.append(gradients(model))
        descend(model, RATE)
    return kept


class Streamed(torch.utils.data.IterableDataset):
    """Examples that come one after the other."""

    def __iter__(self):
        return iter(EXAMPLES)


def train(folder, dataset, collator, *, patch=True, **settings):
    """Train, and return every step's gradients."""
    keep = KeepGradients()
    settings = {
        "max_steps": STEPS,
        "remove_unused_columns": False,
        "per_device_train_batch_size": SIZE,
    } | settings
    trainer = Trainer(
        model=tiny_vision("qwen3_5"),
        args=arguments(folder, **settings),
        train_dataset=dataset,
        data_collator=collator,
        callbacks=[keep, *([PackFreeCallback(verify_first_batch=True)] if patch else [])],
    )
    trainer.train()
    assert patch_report(trainer.model).patched or not patch
    return keep.steps


@integration("Trainer", "`PackedVisionCollator`: images, videos, text alone in between")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tail", [None, 16])
def test_documents_with_media(workers, tail, same_gradients, tmp_path):
    collator = PackedVisionCollator(vision_processor(), pad_to_multiple_of=tail)
    found = train(tmp_path, EXAMPLES, collator, dataloader_num_workers=workers)
    steps = in_steps(EXAMPLES, SIZE)
    whole = [[joined(collator, step)] for step in steps]
    same_gradients(found, one_by_one(collator, steps), one_by_one(collator, whole))


def joined(collator, step):
    """The documents of a step as if they were one."""
    row = collator(step)
    return {
        name: value
        for name, value in row.items()
        if name == "labels" or not name.startswith(("cu_", "max_", "pos"))
    }


STREAM = (
    'works with `accelerator_config={"dispatch_batches": False}`; accelerate would cut the row\'s '
    "offsets otherwise: refused"
)


@integration("Trainer", "`PackedVisionCollator`: a stream", STREAM)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream(workers, same_gradients, tmp_path):
    collator, settings = (
        PackedVisionCollator(vision_processor()),
        {"accelerator_config": {"dispatch_batches": False}},
    )
    found = train(tmp_path, Streamed(), collator, dataloader_num_workers=workers, **settings)
    same_gradients(found, one_by_one(collator, in_steps(EXAMPLES, SIZE)))


@integration("Trainer", "`PackedVisionCollator`: a stream", STREAM)
def test_a_stream_cut_by_accelerate_is_refused(tmp_path):
    with pytest.raises(
        BoundaryError,
        match="found cu_seq_lens_q=\\[0\\].*accelerator_config={'dispatch_batches': False}",
    ):
        train(tmp_path, Streamed(), PackedVisionCollator(vision_processor()))


@integration("Trainer", "`PackedDataset`, `PackedIterableDataset`: packs of whole documents")
@pytest.mark.parametrize("streaming", [False, True], ids=["dataset", "stream"])
def test_packs(streaming, same_gradients, tmp_path):
    collator = PackedVisionCollator(vision_processor(), max_length=60)
    settings = {"per_device_train_batch_size": 1}
    if streaming:
        packs = PackedIterableDataset(EXAMPLES, collator)
        steps = list(packs)
        settings["accelerator_config"] = {"dispatch_batches": False}
    else:
        packs = PackedDataset(
            EXAMPLES, [len(collator.document(one)) for one in EXAMPLES], max_length=60
        )
        steps = [packs[number] for number in range(len(packs))]
    assert len(steps) >= STEPS and sum(map(len, steps)) == len(EXAMPLES)
    same_gradients(
        train(tmp_path, packs, collator, **settings), one_by_one(collator, steps[:STEPS])
    )


@integration(
    "TRL SFTTrainer",
    "`PackedVisionCollator`, images",
    "works with `data_collator=PackedVisionCollator(processor)` and `padding_free=False`; TRL logs "
    "`num_tokens` as 1 per row",
)
@needs("trl", "datasets")
def test_sft(same_gradients, tmp_path):
    from datasets import Dataset
    from PIL import Image
    from trl import SFTConfig, SFTTrainer

    drawn = [
        Image.fromarray(picture(8 * (1 + number % 3), 16, seed=number))
        for number in range(SIZE * STEPS)
    ]
    # a step of text alone
    counts = [1, 2, 1, 0, 0, 0, 2, 1, 0]
    columns = {
        "messages": [with_places(count) for count in counts],
        "images": [[one] * count for one, count in zip(drawn, counts, strict=True)],
    }
    processor, keep = vision_processor(), KeepGradients()
    collator = PackedVisionCollator(processor)
    settings = {"max_steps": STEPS, "per_device_train_batch_size": SIZE, "max_length": None}
    trainer = SFTTrainer(
        model=tiny_vision("qwen3_5"),
        args=arguments(tmp_path, SFTConfig, gradient_checkpointing=False, **settings),
        train_dataset=Dataset.from_dict(columns),
        processing_class=processor,
        data_collator=collator,
        callbacks=[keep, PackFreeCallback()],
    )
    trainer.train()
    assert [log["num_tokens"] for log in trainer.state.log_history if "num_tokens" in log][
        -1
    ] == STEPS
    examples = [
        {name: column[number] for name, column in columns.items()} for number in range(SIZE * STEPS)
    ]
    same_gradients(keep.steps, one_by_one(collator, in_steps(examples, SIZE)))


def with_places(images):
    """Messages with places for so many images, which stand in a column of their own."""
    content = [
        {"type": "text", "text": "a b"},
        *[{"type": "image", "text": None}] * images,
        {"type": "text", "text": "c"},
    ]
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "d e"}]},
    ]
