"""Masks that are more than 0 and 1: transformers' dicts, 4-D ones of one document, holes,
generation's; exact or refused.
"""

from __future__ import annotations

import copy

import pytest
import torch

from hf_packfree import apply_patches
from hf_packfree.errors import BoundaryConflict, BoundaryError, CacheConflict, UnsupportedInput
from hf_packfree.models.compat import CACHE
from tests.input_formats import INT32, additive, block_mask, padded_rows
from tests.support import (
    Batch,
    assert_patching_is_exact,
    gradients,
    tiny,
)

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
IDS = torch.arange(2, 12)[None]
HOLE = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 1, 1]])


def of_mask(rows, side, **make):
    """A batch of rows of documents whose numbers from 0 (padding below) are made into arguments."""
    batch, numbers, _ = padded_rows(rows, side, extra=2)
    return Batch(
        batch.documents,
        {**batch.inputs, **{name: one(numbers - 1) for name, one in make.items()}},
        batch.places,
    )


def two_d(numbers):
    return (numbers >= 0).long()


# transformers' dict
# ------------------------------------------------------------------------------------------------
DICTS = {
    "blocks and nothing": lambda numbers: {
        "full_attention": block_mask(numbers),
        "linear_attention": None,
    },
    "additive blocks": lambda numbers: {
        "full_attention": additive(block_mask(numbers)),
        "linear_attention": None,
    },
    "blocks and padding": lambda numbers: {
        "full_attention": block_mask(numbers),
        "linear_attention": two_d(numbers),
    },
    "indexed": lambda numbers: {"full_attention": None, "linear_attention": numbers + 1},
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3_5", kind) for kind in DICTS] + [(one, "indexed") for one in FAMILIES[1:]],
)
def test_a_dict_of_masks_is_read(family, kind):
    assert_patching_is_exact(
        tiny(family), of_mask([(5, 9), (3, 1, 4)], "left", attention_mask=DICTS[kind])
    )


@pytest.mark.parametrize("kind", DICTS)
@pytest.mark.parametrize("padded", ["lazy", "upstream"])
def test_a_dict_of_padded_rows_of_one_document_is_exact(kind, padded):
    """The indexed one numbers a single document: it is a padding mask, and says nothing to full
    attention.
    """
    batch = of_mask([(9,), (4,)], "left", attention_mask=DICTS[kind])
    assert_patching_is_exact(tiny(), batch, padded=padded)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_dict_of_nothing_is_causal_too(attention):
    """Where eager attention is given no mask it looks ahead."""
    masks = {"full_attention": None, "linear_attention": None}
    inputs = {"input_ids": IDS, "attention_mask": masks, "use_cache": False}
    assert_patching_is_exact(
        tiny(attention=attention), Batch([IDS[0]], inputs, [(0, torch.arange(10))])
    )


def test_a_dict_that_contradicts_itself_or_another_format():
    model = apply_patches(tiny())
    blocks = {
        "full_attention": block_mask(torch.tensor([[0] * 4 + [1] * 6])),
        "linear_attention": None,
    }
    with pytest.raises(BoundaryConflict, match=r"attention_mask\['full_attention'\]"):
        model(
            input_ids=IDS,
            attention_mask=blocks,
            seq_idx=torch.tensor([[0] * 5 + [1] * 5], dtype=INT32),
        )
    with pytest.raises(BoundaryConflict, match=r"attention_mask\['linear_attention'\]"):
        model(
            input_ids=IDS,
            attention_mask=blocks | {"linear_attention": torch.tensor([[1] * 3 + [2] * 7])},
        )


@pytest.mark.parametrize(
    "mask",
    [
        {"full_attention": torch.ones(1, 3)},
        {"linear_attention": torch.ones(1, 1, 10, 10)},
        {"full_attention": "causal"},
    ],
)
def test_a_dict_of_unknown_shapes_is_refused(mask):
    with pytest.raises(BoundaryError, match=r"attention_mask\['(full|linear)_attention'\]"):
        apply_patches(tiny())(input_ids=IDS, attention_mask=mask)


# generation
# --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cache", "side"), [("static", "left"), ("dynamic", "left"), (None, "right")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_from_padded_prompts_is_upstreams(family, cache, side):
    """Greedy tokens and their scores, bit for bit; static caches come with a dict of masks."""
    model = tiny(family).eval()
    model.generation_config.pad_token_id = 0
    mask = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
    mask = mask if side == "left" else mask.flip(1)
    arguments = {
        "input_ids": IDS.repeat(2, 1) * mask,
        "attention_mask": mask,
        "max_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        **({"use_cache": False} if cache is None else {"cache_implementation": cache}),
    }
    wanted = model.generate(**copy.deepcopy(arguments))
    found = apply_patches(model).generate(**arguments)
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(
        torch.equal(one, other) for one, other in zip(found.scores, wanted.scores, strict=True)
    )


RIGHT = {
    "input_ids": IDS,
    "attention_mask": HOLE,
    "position_ids": torch.tensor([[0, 1, 2, 3, 0, 0, 0, 1, 2, 3]]),
    "use_cache": False,
}
"""What a step of generation without a cache gets that began with four tokens and three of
padding.
"""


@pytest.mark.parametrize("weights", [False, True])
def test_a_step_of_generation_without_a_cache_is_upstreams_with_attention_weights_too(weights):
    model = tiny(attention="eager").eval()
    wanted = model(**RIGHT, logits_to_keep=1, output_attentions=weights)
    found = apply_patches(model)(**RIGHT, logits_to_keep=1, output_attentions=weights)
    assert torch.equal(found.logits, wanted.logits)
    if weights:
        assert all(
            torch.equal(one, other)
            for one, other in zip(found.attentions, wanted.attentions, strict=True)
        )


@pytest.mark.parametrize("call", [{"labels": IDS}, {}, {"labels": IDS, "logits_to_keep": 1}])
@pytest.mark.parametrize("train", [False, True])
def test_positions_that_restart_above_zero_behind_a_hole_are_refused_elsewhere(call, train):
    with pytest.raises(
        BoundaryError, match="restart after padding, but not at 0, at row 0, token 7"
    ):
        apply_patches(tiny().train(train))(**RIGHT, **call)


def test_another_format_decides_what_positions_behind_a_hole_leave_open():
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 0, 5, 6, 7]])
    inputs = {"input_ids": IDS, "attention_mask": HOLE, "position_ids": positions}
    model = apply_patches(tiny()).eval()
    apart = model(
        **inputs, seq_idx=torch.tensor([[0] * 4 + [-1] * 3 + [1] * 3], dtype=INT32)
    ).logits[0, 7:]
    alone = model(input_ids=IDS[:, 7:], position_ids=positions[:, 7:]).logits[0]
    assert torch.allclose(apart, alone, atol=1e-5)


def test_documents_beside_a_cache_are_refused_in_a_dict_too():
    model = apply_patches(tiny()).eval()
    cache = model(input_ids=IDS, use_cache=True)[CACHE]
    positions = torch.tensor([[10, 11, 12, 13, 14, 0, 1, 2, 3, 4]])
    with pytest.raises(CacheConflict):
        masks = {"full_attention": None, "linear_attention": None}
        model(input_ids=IDS, position_ids=positions, attention_mask=masks, **{CACHE: cache})


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("family", ["qwen3_5", "llama", "gpt_oss"])
def test_prompts_that_fill_a_static_cache_in_chunks_are_upstreams(family, padding):
    """A chunk may begin inside the padding, which only the columns of its own tokens show; without
    padding, masks may be None in a dict.
    """
    model = tiny(family).eval()
    mask = torch.tensor([[1] * 10, [0] * padding + [1] * (10 - padding)])
    arguments = {
        "input_ids": IDS.repeat(2, 1) * mask,
        "attention_mask": mask,
        "max_new_tokens": 3,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "cache_implementation": "static",
        "disable_compile": True,
        "prefill_chunk_size": 4,
        "pad_token_id": 0,
    }
    wanted = model.generate(**copy.deepcopy(arguments))
    found = apply_patches(model).generate(**arguments)
    assert torch.equal(torch.stack(found.logits), torch.stack(wanted.logits))


@pytest.mark.parametrize("with_2d", [False, True])
@pytest.mark.parametrize("room", [0, 4])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granitemoehybrid"])
def test_blocks_behind_a_cache_are_refused(family, room, with_2d):
    """Both documents see what the cache holds, as attention could have it; the linear layers would
    read from the first one into the second.
    """
    model = apply_patches(tiny(family)).eval()
    cache = model(input_ids=IDS[:, :4], use_cache=True)[CACHE]
    new = block_mask(torch.tensor([[0, 0, 0, 1, 1, 1]]))
    mask = torch.nn.functional.pad(torch.nn.functional.pad(new, (4, 0), value=True), (0, room))
    if with_2d:
        kind = "conv" if family == "lfm2" else "linear_attention"
        mask = {"full_attention": mask, kind: torch.ones(1, 10, dtype=torch.long)}
    with pytest.raises(CacheConflict, match="found a row of 2 documents together with"):
        model(input_ids=IDS[:, 4:], attention_mask=mask, **{CACHE: cache})


# holes
# -------------------------------------------------------------------------------------------------------------
ROWS = torch.cat((IDS, IDS + 20))
HOLES = {
    "in a packed row": {
        "input_ids": IDS,
        "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 2, 2, 2, 2, 2]]),
    },
    "by seq_idx alone": {
        "input_ids": IDS,
        "seq_idx": torch.tensor([[0, 0, -1, 0, 0, 0, 0, 0, 0, 0]], dtype=INT32),
    },
    "beside a packed row": {
        "input_ids": ROWS,
        "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10]),
        "position_ids": torch.tensor([[*range(10)], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]),
    },
    "in a 4-D mask": {
        "input_ids": IDS,
        "attention_mask": block_mask(torch.tensor([[0, 0, -1, 0, 0, 0, 0, 0, 0, 0]])),
    },
}


@pytest.mark.parametrize("kind", HOLES)
@pytest.mark.parametrize("train", [False, True])
def test_holes_inside_documents_of_a_packed_batch_are_refused(kind, train):
    with pytest.raises(
        UnsupportedInput, match="padding inside a document of a packed batch, after row 0, token 1"
    ):
        apply_patches(tiny().train(train))(**HOLES[kind])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hole_in_a_document_alone_is_upstreams(family):
    model = tiny(family)
    wanted = model(input_ids=IDS, attention_mask=HOLE).logits
    assert torch.equal(apply_patches(model)(input_ids=IDS, attention_mask=HOLE).logits, wanted)


# 4-D masks
# ---------------------------------------------------------------------------------------------------------
def shifted(allowed, blocked):
    return lambda numbers: torch.full(
        (*numbers.shape[:1], 1, *numbers.shape[1:] * 2), blocked
    ).masked_fill(block_mask(numbers), allowed)


GAPS = {
    "1 and -1e9": shifted(1.0, -1e9),
    "1e-6 and -1e9": shifted(1e-6, -1e9),
    "-3 and -1e5": shifted(-3.0, -1e5),
    "0 and -1e4": shifted(0.0, -1e4),
    "0 and -inf": shifted(0.0, -torch.inf),
    "bool": block_mask,
    "integers": lambda numbers: block_mask(numbers).long(),
}


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize(
    ("rows", "attention"),
    [([(5, 9, 2)], "sdpa"), ([(7,), (16,)], "eager")],
    ids=["packed", "one document per row"],
)
def test_4d_masks_mean_the_same_in_rows_of_several_documents_and_of_one(gap, rows, attention):
    """Left padding of a single document was read by the linear layers; bool masks let eager
    attention look ahead.
    """
    assert_patching_is_exact(
        tiny(attention=attention), of_mask(rows, "left", attention_mask=GAPS[gap])
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_4d_mask_of_padded_rows_of_one_document(family, side):
    assert_patching_is_exact(tiny(family), of_mask([(7,), (16,)], side, attention_mask=block_mask))


def test_an_additive_mask_of_one_document_without_padding_is_upstreams_with_its_bias():
    model = tiny()
    distance = torch.arange(10.0)[:, None] - torch.arange(10.0)
    mask = torch.where(distance < 0, -1e9, -0.5 * distance)[None, None]
    wanted = model(input_ids=IDS, attention_mask=mask).logits
    assert torch.equal(apply_patches(model)(input_ids=IDS, attention_mask=mask).logits, wanted)


CAUSAL = torch.ones(1, 1, 10, 10, dtype=torch.bool).tril()
REFUSED = {
    "not causal": (additive(torch.ones_like(CAUSAL)), "sees later ones"),
    "not causal, bool": (torch.ones_like(CAUSAL), "not block-diagonal and causal"),
    "a window, bool": (CAUSAL.triu(-3), "not block-diagonal and causal"),
    "biased and padded": (
        additive(block_mask(torch.tensor([[-1] + [0] * 9]))) - torch.tensor([0, 0, 0.5] + [0] * 7),
        "is not block-diagonal",
    ),
    "a weak gap": (
        -100.0 * (~block_mask(torch.tensor([[0] * 4 + [1] * 6]))).float() - 1e9 * (~CAUSAL),
        "neither let through",
    ),
    "inverted": (~CAUSAL, "is seen but does not see itself, at row 0, token 1"),
    "strictly causal": (CAUSAL.tril(-1), "is seen but does not see itself"),
    "strictly causal, additive": (additive(CAUSAL.tril(-1)), "is seen but does not see itself"),
    "infinity": (additive(CAUSAL).masked_fill(torch.eye(10).bool(), torch.inf), "infinity"),
    "integers": (CAUSAL.long() - 1, "other integers"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_4d_masks_that_cannot_be_honoured_are_refused(kind):
    mask, why = REFUSED[kind]
    with pytest.raises(BoundaryError, match=why):
        apply_patches(tiny())(input_ids=IDS, attention_mask=mask)


# nothing but padding
# -----------------------------------------------------------------------------------------------
NUMBERS = torch.full((2, 5), -1)
NOTHING = {
    "2-D": {"attention_mask": two_d(NUMBERS)},
    "seq_idx": {"seq_idx": NUMBERS.to(INT32)},
    "bool blocks": {"attention_mask": block_mask(NUMBERS)},
    "additive blocks": {"attention_mask": additive(block_mask(NUMBERS))},
    "a dict of both": {
        "attention_mask": {
            "full_attention": block_mask(NUMBERS),
            "linear_attention": two_d(NUMBERS),
        }
    },
    "a dict of one": {
        "attention_mask": {"full_attention": None, "linear_attention": two_d(NUMBERS)}
    },
}


@pytest.mark.parametrize(
    ("family", "way"),
    [("qwen3_5", way) for way in NOTHING] + [(one, "seq_idx") for one in FAMILIES[1:]],
)
def test_nothing_but_padding_is_loss_0_and_zero_gradients_however_it_is_said(family, way):
    model = apply_patches(tiny(family))
    ids = torch.full((2, 5), 3)
    output = model(input_ids=ids, labels=ids, use_cache=False, **NOTHING[way])
    output.loss.backward()
    grads = gradients(model)
    assert output.loss == 0
    assert grads.keys() == dict(model.named_parameters()).keys() and not any(
        bool(grad.any()) for grad in grads.values()
    )


@pytest.mark.parametrize("labels", ["as tokens", "of another shape"])
@pytest.mark.parametrize("way", ["2-D", "seq_idx", "a dict of both"])
@pytest.mark.parametrize("keep", [0, 1])
def test_nothing_but_padding_is_loss_0_whatever_runs_padded_rows(way, keep, labels):
    """transformers' mean over nothing is NaN, and so are its gradients: one such batch ends a
    training run.
    """
    model, ids = apply_patches(tiny(), padded="upstream"), torch.full((2, 5), 3)
    targets = ids if labels == "as tokens" else ids[None]
    output = model(
        input_ids=ids, labels=targets, use_cache=False, logits_to_keep=keep, **NOTHING[way]
    )
    output.loss.backward()
    assert output.loss == 0 and not any(bool(grad.any()) for grad in gradients(model).values())


@pytest.mark.parametrize("keep", [0, 5, torch.tensor([0, 3])])
@pytest.mark.parametrize("options", [{}, {"unpacked": "native"}], ids=str)
def test_nothing_but_padding_has_zeros_for_logits_and_states(options, keep):
    model, ids = apply_patches(tiny(), **options), torch.full((2, 5), 3)
    output = model(
        input_ids=ids,
        labels=ids[:, :2] if torch.is_tensor(keep) else ids,
        logits_to_keep=keep,
        output_hidden_states=True,
        **NOTHING["seq_idx"],
    )
    assert output.logits.shape == (2, 2 if torch.is_tensor(keep) else 5, 128)
    assert not output.logits.any() and not any(states.any() for states in output.hidden_states)
    assert not model.model(input_ids=ids, **NOTHING["seq_idx"]).last_hidden_state.any()


# positions
# ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("lengths", [(10,), (4, 6)])
def test_a_stack_of_equal_positions_is_one_row_where_the_model_has_no_mrope(count, lengths):
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    model = apply_patches(tiny("qwen3_next")).eval()
    wanted = model(input_ids=IDS, position_ids=positions).logits
    stack = positions[None].expand(count, -1, -1) if count > 1 else positions[0]
    assert torch.equal(model(input_ids=IDS, position_ids=stack).logits, wanted)


def test_a_stack_of_positions_that_differ_is_refused_where_the_model_has_no_mrope():
    stack = torch.arange(10).expand(3, 1, -1).clone()
    stack[2] += 1
    with pytest.raises(
        UnsupportedInput, match="3 rows of position_ids that differ for Qwen3NextModel"
    ):
        apply_patches(tiny("qwen3_next"))(input_ids=IDS, position_ids=stack)
