"""torch.func around a patched model: first derivatives, packed or not, are the backward pass's;
the rest is refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from hf_packfree import apply_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.state import Kernels
from tests.input_formats import row_batch
from tests.models.padded import padded_batch, step, worst_gradient
from tests.models.test_padded import FAMILIES, GRADIENT_TOL
from tests.support import tiny

LENGTHS = (5, 17, 1, 9)


def by_transform(model, given):
    """The gradients of the loss, by torch.func."""
    parameters = dict(model.named_parameters())
    return grad(
        lambda weights: functional_call(model, weights, kwargs={"use_cache": False, **given}).loss
    )(parameters)


def rows(padded):
    torch.manual_seed(0)
    tokens, mask = torch.randint(5, 30, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = 1 - padded
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }


def packed_row(input_format="positions"):
    inputs = row_batch(input_format, LENGTHS).inputs
    return inputs | {"labels": inputs["input_ids"]}


@pytest.mark.parametrize("mask", [True, False], ids=["nothing is padded", "no mask"])
def test_rows_of_one_document_are_upstreams(mask):
    """numpy cannot read a tensor that a transform holds."""
    given = (
        rows(0)
        if mask
        else {name: value for name, value in rows(0).items() if name != "attention_mask"}
    )
    found, wanted = (
        by_transform(apply_patches(tiny(attention="eager")), given),
        by_transform(tiny(attention="eager"), given),
    )
    assert found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


BATCHES = {
    "packed": packed_row,
    "packed, by offsets": lambda: packed_row("cu_seq_lens"),
    "padded": lambda: rows(1),
    "left-padded": lambda: padded_batch("left"),
    "kept logits": lambda: (
        packed_row() | {"labels": packed_row()["labels"][:, -20:], "logits_to_keep": 20}
    ),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_gradients_of_a_backward_pass(family, batch):
    model, given = apply_patches(tiny(family)), BATCHES[batch]()
    wanted = step(model, given)[1]
    found = by_transform(model, given)
    # a tower without images
    idle = {name: found.pop(name) for name in found.keys() - wanted.keys()}
    assert not any(gradient.any() for gradient in idle.values())
    assert worst_gradient(found, wanted) <= GRADIENT_TOL
    assert worst_gradient(step(model, given)[1], wanted) == 0, "the next step is as before"


@pytest.mark.parametrize("case", ["vmap", "jvp", "second derivative"])
def test_what_the_backward_pass_cannot_do_is_refused(case):
    # torch's own attention has one derivative
    model, given = apply_patches(tiny(attention="eager")), packed_row()
    embeds = model.get_input_embeddings()(given.pop("input_ids")).detach()

    def loss(embeds):
        return model(inputs_embeds=embeds, **given).loss

    calls = {
        "vmap": lambda: vmap(loss)(torch.stack((embeds, embeds))),
        "jvp": lambda: jvp(loss, (embeds,), (embeds,)),
        "second derivative": lambda: grad(lambda x: grad(loss)(x).square().sum())(embeds),
    }
    said = {
        "vmap": "found torch.vmap around",
        "jvp": "found forward-mode",
        "second derivative": "found a second derivative",
    }
    with pytest.raises(UnsupportedInput, match=said[case]):
        calls[case]()


def test_kernels_that_torch_cannot_transform_are_refused():
    model = apply_patches(tiny())
    state = replace(model.model.packfree, elsewhere=Kernels(conv="triton", delta_rule="fla"))
    model.model.packfree = state
    with pytest.raises(
        UnsupportedInput, match="that runs on conv: triton, delta_rule: fla, .*backend='torch'"
    ):
        by_transform(model, packed_row())


class Exported(torch.nn.Module):
    """What a user exports: the logits of a model's tokens, and of more if there is."""

    def __init__(self, model, **more):
        super().__init__()
        self.model, self.more = model.eval(), more

    def forward(self, ids):
        """Return logits."""
        return self.model(input_ids=ids, use_cache=False, **self.more).logits


def test_tokens_alone_are_exported_as_upstreams():
    ids, model = torch.arange(2, 12)[None], tiny()
    wanted = model.eval()(input_ids=ids, use_cache=False).logits
    found = torch.export.export(Exported(apply_patches(model)), (ids,), strict=False).module()(ids)
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [{"attention_mask": torch.ones(1, 10)}, {"position_ids": torch.arange(10)[None]}],
    ids=list,
)
def test_what_may_hold_boundaries_is_not_exported(more):
    """The documents of one example would be in the graph."""
    with pytest.raises(
        UnsupportedInput, match=f"found torch.export of a patched model with {next(iter(more))}"
    ):
        torch.export.export(
            Exported(apply_patches(tiny()), **more), (torch.arange(2, 12)[None],), strict=False
        )
