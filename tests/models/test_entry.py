"""The batch is read in one place, once: by the outermost patched module; those below receive
what it found.
"""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_packfree import PackedSequence, apply_patches
from hf_packfree.errors import BoundaryConflict, BoundaryError
from hf_packfree.models import entry
from tests.models.padded import padded_batch
from tests.support import by_family, slow_decay, tiny

HEADS = [
    f"Qwen3_5For{kind}"
    for kind in (
        "ConditionalGeneration",
        "CausalLM",
        "SequenceClassification",
        "TokenClassification",
    )
]
IDS = torch.arange(2, 14)[None]
PACKED = {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]])}
PADDED = {name: padded_batch("right")[name] for name in ("input_ids", "attention_mask")}
BATCHES = {
    "packed": (PACKED, [5, 2, 5]),
    "padded": (PADDED, [40, 7, 21]),
    "one document": ({"input_ids": IDS}, None),
    "one document, padded to a square": (
        {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)},
        None,
    ),
    "embeddings": (
        {"inputs_embeds": torch.zeros(1, 12, 64), "position_ids": PACKED["position_ids"]},
        [5, 2, 5],
    ),
    "with a cache": ({"input_ids": IDS, "use_cache": True}, None),
}


def build(head):
    config = by_family["qwen3_5"].tiny_config()
    if head.endswith("ConditionalGeneration"):
        config = modeling_qwen3_5.Qwen3_5Config(
            text_config=config.to_dict(), vision_config={"depth": 1, "hidden_size": 32}
        )
    config.pad_token_id = config.get_text_config().pad_token_id = 0
    torch.manual_seed(0)
    return apply_patches(slow_decay(getattr(modeling_qwen3_5, head)(config)).train())


@pytest.fixture
def reads(monkeypatch):
    """What the batch was read as, once for every time it was read."""
    found, read = [], entry.resolve_boundaries

    def counting(*arguments, **options):
        found.append(read(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(entry, "resolve_boundaries", counting)
    return found


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("head", HEADS)
def test_one_forward_reads_once_and_every_layer_receives_what_was_read(reads, head, batch):
    model, records = build(head), []
    for layer in model.get_submodule("model").modules():
        if type(layer).__name__ == "Qwen3_5DecoderLayer":
            hook = lambda layer, args, kwargs: records.append(kwargs.get("packed_sequence", "none"))  # noqa: E731
            layer.register_forward_pre_hook(hook, with_kwargs=True)
    inputs, lengths = BATCHES[batch]
    model(**inputs)
    assert len(reads) == 1 and len(records) == 4
    if lengths is None:
        assert reads == [None] and records == ["none"] * 4, "upstream's layers see no word of ours"
    else:
        assert reads[0].lengths == lengths and all(
            record.cu_seqlens is reads[0].cu_seqlens for record in records
        )


def test_a_trunk_or_vision_language_model_called_by_itself_reads(reads):
    model = build(HEADS[0])
    for part in (model.model, model.model.language_model):
        part(**PACKED, use_cache=False)
    assert [found.lengths for found in reads] == [[5, 2, 5]] * 2


def test_a_record_that_is_given_is_not_read_again(reads):
    model, packed = build(HEADS[0]), PackedSequence.from_lengths([5, 2, 5])
    wanted = model(**PACKED).logits
    reads.clear()
    assert torch.equal(model(input_ids=IDS, packed_sequence=packed).logits, wanted) and not reads


WRONG_RECORDS = {
    "too short": (PackedSequence.from_lengths([5, 6]), (1, 12)),
    "too long": (PackedSequence.from_lengths([5, 8]), (1, 12)),
    "of a row": (PackedSequence.from_lengths([6, 6]), (2, 6)),
    "lengths": ([5, 7], (1, 12)),
}


@pytest.mark.parametrize("case", WRONG_RECORDS)
@pytest.mark.parametrize("part", ["head", "text model"])
def test_a_record_of_another_batch_is_refused(part, case):
    head, (record, shape) = apply_patches(tiny()), WRONG_RECORDS[case]
    model = head if part == "head" else head.base_model
    with pytest.raises(BoundaryError, match="found packed_sequence of .* wanted .* build it by"):
        model(input_ids=IDS.view(shape), packed_sequence=record)


def test_a_record_and_other_keywords_have_to_agree():
    model, offsets = apply_patches(tiny()), torch.tensor([0, 5, 7, 12], dtype=torch.int32)
    batch = {"input_ids": IDS, "cu_seq_lens_q": offsets}
    record = PackedSequence.from_lengths([5, 2, 5])
    wanted = model(**batch).logits
    assert torch.equal(model(**batch, packed_sequence=record).logits, wanted)
    for lengths in ([5, 7], [12], [5, 2, 4, 1]):
        with pytest.raises(BoundaryConflict, match="packed_sequence and cu_seq_lens_q in disag"):
            model(**batch, packed_sequence=PackedSequence.from_lengths(lengths))


@pytest.mark.parametrize("word", ["segment_ids", "text_position_ids"])
def test_other_libraries_words_beside_a_record_are_compared_with_positions(word):
    lengths = [5, 2, 5]
    positions = torch.cat([torch.arange(one) for one in lengths])[None]
    numbers = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    given = {"position_ids": positions, word: positions if "pos" in word else numbers}
    model, record = apply_patches(tiny()), PackedSequence.from_lengths(lengths)
    wanted = model(input_ids=IDS, **given).logits
    assert torch.equal(model(input_ids=IDS, **given, packed_sequence=record).logits, wanted)
    with pytest.raises(BoundaryConflict, match=f"packed_sequence and .*{word} in disag"):
        model(input_ids=IDS, **given, packed_sequence=PackedSequence.from_lengths([5, 7]))


def test_a_record_without_padding_that_offsets_have():
    """The mask says that it is padding."""
    mask = torch.tensor([[1] * 9 + [0] * 3])
    offsets = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    batch = {"input_ids": IDS, "attention_mask": mask, "cu_seq_lens_q": offsets}
    record = PackedSequence.from_lengths([5, 4], batch_shape=(1, 12), indices=torch.arange(9))
    model = apply_patches(tiny())
    wanted = model(**batch).logits
    assert torch.equal(model(**batch, packed_sequence=record).logits, wanted)


def test_none_for_a_record_is_no_record(reads):
    model = build(HEADS[0])
    wanted = model(**PACKED).logits
    assert torch.equal(model(**PACKED, packed_sequence=None).logits, wanted) and len(reads) == 2


def test_a_head_that_another_library_replaced_leaves_the_reading_to_the_model_below(reads):
    model = build(HEADS[0])
    wanted = model(**PACKED).logits
    reads.clear()
    model.forward = MethodType(modeling_qwen3_5.Qwen3_5ForConditionalGeneration.forward, model)
    assert torch.allclose(model(**PACKED).logits, wanted, atol=1e-5) and len(reads) == 1


@pytest.mark.parametrize(
    "kind", ["QuestionAnswering", "SequenceClassification", "TokenClassification"]
)
@pytest.mark.parametrize("padded", [False, True])
def test_classifiers_keep_padding_only_where_there_is_some(kind, padded):
    """Of a model that runs rows of one document in the patched layers: upstream's softmax over
    spans reads padding.
    """
    model, records = tiny("qwen3_next", head=f"Qwen3NextFor{kind}"), []
    model.config.pad_token_id = 0
    apply_patches(model, unpacked="native")
    layer = next(
        module for module in model.modules() if type(module).__name__ == "Qwen3NextDecoderLayer"
    )
    layer.register_forward_pre_hook(
        lambda layer, args, kwargs: records.append(kwargs.get("packed_sequence")), with_kwargs=True
    )
    model(**PADDED) if padded else model(input_ids=IDS)
    assert (records[0] is None) == (padded and kind == "QuestionAnswering")
