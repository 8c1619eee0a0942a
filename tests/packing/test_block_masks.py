"""4-D masks that are more than blocks of documents: refused, since each would leak without a
warning.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.errors import BoundaryError
from hf_packfree.packing.masks import parse_masks
from tests.input_formats import additive

SHAPE = (1, 6)
CAUSAL = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
BLOCKS = CAUSAL.clone()
BLOCKS[..., 3:, :3] = False


def test_controls_are_read():
    for mask in (BLOCKS, additive(BLOCKS), BLOCKS.long(), BLOCKS.expand(1, 4, 6, 6)):
        assert parse_masks(mask, SHAPE)[0].values.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert not parse_masks(CAUSAL.expand(1, 4, 6, 6), SHAPE)[0].values.any()


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize(
    "heads", [(CAUSAL, BLOCKS), (BLOCKS, CAUSAL), (BLOCKS, BLOCKS, CAUSAL)], ids=len
)
def test_heads_that_see_different_documents_are_refused(heads, kind):
    mask = torch.cat(heads, 1)
    with pytest.raises(BoundaryError, match="heads see different documents"):
        parse_masks(mask if kind == torch.bool else additive(mask), SHAPE)


def test_a_head_that_looks_further_back_is_refused():
    leaking = BLOCKS.clone()
    leaking[..., 4, 0] = True
    with pytest.raises(BoundaryError, match="not block-diagonal and causal"):
        parse_masks(torch.cat((BLOCKS, leaking), 1), SHAPE)


@pytest.mark.parametrize("mask", [BLOCKS.float(), BLOCKS.half(), CAUSAL.float()])
def test_floats_of_zero_and_one_are_refused(mask):
    with pytest.raises(BoundaryError, match="with zeros and ones; wanted bool, or an additive one"):
        parse_masks(mask, SHAPE)


def test_one_token_that_sees_itself_is_a_document_in_any_form():
    for value in (0.0, 1.0, -3.0, True, 1):
        assert parse_masks(torch.full((2, 1, 1, 1), value), (2, 1))[0].real.all()


def test_nan_is_refused():
    mask = additive(BLOCKS)
    mask[0, 0, 5, 0] = torch.nan
    with pytest.raises(BoundaryError, match="with NaN"):
        parse_masks(mask, SHAPE)
