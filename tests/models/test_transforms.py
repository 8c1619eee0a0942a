"""torch.func around a patched model: what upstream can differentiate it still can, and the rest is refused in torch's words."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad

from hf_packfree import apply_patches
from tests.support import tiny


def gradients(model, mask):
    """Of the loss over two rows, by torch.func."""
    torch.manual_seed(0)
    tokens = torch.randint(5, 30, (2, 12))
    labels = tokens if mask is None else tokens.masked_fill(mask == 0, -100)
    given = {"input_ids": tokens, "labels": labels, "attention_mask": mask, "use_cache": False}
    parameters = dict(model.named_parameters())
    return grad(lambda weights: functional_call(model, weights, kwargs=given).loss)(parameters)


def rows(padded):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = 1 - padded
    return mask


@pytest.mark.parametrize("mask", [None, rows(0)], ids=["no mask", "nothing is padded"])
def test_rows_of_one_document_are_upstreams(mask):
    """numpy cannot read a tensor that a transform holds."""
    found, wanted = gradients(apply_patches(tiny(attention="eager")), mask), gradients(tiny(attention="eager"), mask)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_rows_without_their_padding_are_refused_in_torchs_words():
    with pytest.raises(RuntimeError, match="setup_context"):
        gradients(apply_patches(tiny(attention="eager")), rows(1))
