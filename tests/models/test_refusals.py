"""What cannot be exact is refused by name, before anything runs."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_packfree import apply_patches
from hf_packfree.errors import (
    BackendUnavailable,
    BoundaryConflict,
    BoundaryError,
    CacheConflict,
    PatchConflict,
    UnsupportedInput,
)
from hf_packfree.models.compat import CACHE
from tests.input_formats import one_row, row_batch
from tests.support import ROW, forbid_layers, tiny


@pytest.fixture
def model():
    return forbid_layers(apply_patches(tiny()))


def test_contradicting_forms(model):
    batch = row_batch("positions", ROW)
    with pytest.raises(BoundaryConflict, match="cu_seq_lens_q and position_ids"):
        model(**batch.inputs, cu_seq_lens_q=torch.tensor([0, 9, sum(ROW)], dtype=torch.int32))
    with pytest.raises(BoundaryConflict, match="cu_seq_lens_q and position_ids"):
        model(
            input_ids=batch.inputs["input_ids"],
            position_ids=torch.arange(sum(ROW))[None],
            cu_seq_lens_q=one_row(ROW)["cu_seqlens"],
        )


def test_malformed_offsets(model):
    with pytest.raises(BoundaryError, match="cu_seq_lens_k"):
        model(
            input_ids=torch.arange(9)[None],
            cu_seq_lens_k=torch.tensor([0, 4, 8], dtype=torch.int32),
        )


def test_a_mask_of_the_wrong_shape(model):
    with pytest.raises(BoundaryError, match="attention_mask"):
        model(input_ids=torch.arange(9)[None], attention_mask=torch.ones(1, 8))


def test_packed_rows_with_a_cache():
    model = apply_patches(tiny()).eval()
    cache = model(input_ids=torch.arange(2, 12)[None], use_cache=True)[CACHE]
    batch = row_batch("positions", ROW)
    for held in (cache, DynamicCache(config=model.config)):
        with pytest.raises(CacheConflict, match=CACHE):
            model(**{**batch.inputs, "use_cache": True, CACHE: held})


def test_prepared_masks_beside_packed_rows(model):
    with pytest.raises(BoundaryError, match="prepared attention_mask of type object"):
        model(**row_batch("positions", ROW).inputs, attention_mask=object())


@pytest.mark.parametrize("name", ["position_ids", "seq_idx"])
@pytest.mark.parametrize("kind", [list, tuple, np.asarray])
def test_what_is_no_tensor(model, name, kind):
    with pytest.raises(BoundaryError, match=f"found {name} as a"):
        model(input_ids=torch.arange(3)[None], **{name: kind([[0, 1, 2]])})


@pytest.mark.parametrize("part", ["head", "trunk"])
def test_a_tree_of_rollouts(model, part):
    """A prompt of five tokens with rollouts of four and of three, as TRL packs them."""
    call = model if part == "head" else model.model
    row = {
        "input_ids": torch.arange(12)[None],
        "position_ids": torch.tensor([[*range(9), 5, 6, 7]]),
    }
    with pytest.raises(BoundaryError, match="go back into the middle"):
        call(**row)
    tree = {"tree_kv_index": torch.arange(17), "tree_max_seqlen_q": 5}
    with pytest.raises(BoundaryError, match="found tree_kv_index and .* without the rest"):
        call(**row, **tree)
    with pytest.raises(UnsupportedInput, match="tree_of_life, which describes a tree in words"):
        call(**row, tree_of_life=5)


@pytest.mark.parametrize("part", ["head", "trunk"])
def test_words_of_other_libraries(model, part):
    call, batch = model if part == "head" else model.model, row_batch("positions", ROW)
    offsets = one_row(ROW)["cu_seqlens"]
    with pytest.raises(BoundaryError, match="found the keyword cu_seqlens; wanted cu_seq_lens_q"):
        call(input_ids=batch.inputs["input_ids"], cu_seqlens=offsets)
    with pytest.raises(BoundaryConflict, match="cu_seqlens and position_ids in disagreement"):
        call(**batch.inputs, cu_seqlens=torch.tensor([0, 9, sum(ROW)]))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_words_of_other_libraries_that_agree(family):
    """As AReaL and NeMo-RL call: bit for bit as without them."""
    model, batch = apply_patches(tiny(family)).eval(), row_batch("positions", ROW)
    offsets = one_row(ROW)["cu_seqlens"]
    words = {"cu_seqlens": offsets, "max_seqlen": max(ROW), "seq_lens": torch.tensor(ROW)}
    wanted = model(**batch.inputs).logits
    assert torch.equal(model(**batch.inputs, **words).logits, wanted)
    same = {"flash_attn_kwargs": {"cu_seqlens_q": offsets}}
    assert torch.equal(model(**batch.inputs, **same).logits, wanted)


def test_attention_that_looks_ahead(model):
    with pytest.raises(UnsupportedInput, match="is_causal"):
        model(**row_batch("positions", ROW).inputs, is_causal=False)


def test_attention_changed_after_patching(model):
    model.config._attn_implementation_internal = "somebodys_kernel"
    with pytest.raises(BackendUnavailable, match="somebodys_kernel"):
        model(**row_batch("positions", ROW).inputs)


def test_upstreams_own_refusals_stay():
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        apply_patches(tiny())(input_ids=None)


@pytest.mark.parametrize(
    "more", [{}, {"attention_mask": torch.ones(1, 9)}, {"use_cache": False}], ids=list
)
@pytest.mark.parametrize("ids", [torch.arange(9), list(range(9))], ids=["one dimension", "list"])
@pytest.mark.parametrize("part", ["head", "trunk"])
def test_tokens_that_are_no_batch_are_upstreams_error(part, ids, more):
    unpatched = tiny()
    with pytest.raises(Exception) as wanted:
        (unpatched if part == "head" else unpatched.model)(input_ids=ids, **more)
    model = apply_patches(unpatched)
    with pytest.raises(type(wanted.value), match=re.escape(str(wanted.value))):
        (model if part == "head" else model.model)(input_ids=ids, **more)


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_replaced_under_its_head(padded):
    """The new one would take the record for a keyword of no meaning, and leak."""
    model = apply_patches(tiny())
    model.model = tiny().model
    given = (
        {"attention_mask": torch.ones(2, 9).tril(7)}
        if padded
        else {"position_ids": torch.arange(9)[None] % 5}
    )
    with pytest.raises(PatchConflict, match="found model changed since the model was patched"):
        model(input_ids=torch.arange(9).repeat(1 + padded, 1), **given)
    apply_patches(model)(input_ids=torch.arange(9).repeat(1 + padded, 1), **given)


def test_a_model_wrapped_under_its_head_is_fine():
    model = apply_patches(tiny())
    given = {"input_ids": torch.arange(9)[None], "position_ids": torch.arange(9)[None] % 5}
    wanted = model(**given).logits
    model.model = torch.compile(model.model, backend="eager", disable=True)
    assert torch.equal(model(**given).logits, wanted)


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_an_attention_function_that_somebody_replaced(family, monkeypatch):
    """As DeepSpeed's Ulysses does, whose ranks hold parts of rows: our operation would attend
    within a part.
    """
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    model = apply_patches(tiny(family))
    replaced = {"sdpa": lambda *args, **named: own(*args, **named)}
    # what is set in the table itself would stay there, in front of transformers' own
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", replaced)
    with pytest.raises(BackendUnavailable, match="replaced by one of tests.models.test_refusals"):
        model(**row_batch("positions", (3, 4)).inputs)
