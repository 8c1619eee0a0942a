"""What differentiates in other ways than a backward pass, torch.export and torch.jit.trace: rows of
one document are upstream's, packed and padded ones are refused by name.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from hf_packfree import apply_patches
from hf_packfree.errors import UnsupportedInput
from tests.input_formats import row_batch
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


# torch 2.15 warns of what it calls itself when jvp is first used
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize("case", ["grad", "vmap", "jvp", "forward mode"])
@pytest.mark.parametrize("given", [packed_row, lambda: rows(1)], ids=["packed", "padded"])
def test_packed_and_padded_rows_are_refused(given, case):
    model, given = apply_patches(tiny(attention="eager")), given()
    embeds = model.get_input_embeddings()(given.pop("input_ids")).detach()

    def loss(embeds):
        return model(inputs_embeds=embeds, **given).loss

    def forward_mode():
        with forward_ad.dual_level():
            loss(forward_ad.make_dual(embeds, embeds))

    calls = {
        "grad": lambda: grad(loss)(embeds),
        "vmap": lambda: vmap(loss)(torch.stack((embeds, embeds))),
        "jvp": lambda: jvp(loss, (embeds,), (embeds,)),
        "forward mode": forward_mode,
    }
    with pytest.raises(UnsupportedInput, match="found a transform of torch.func"):
        calls[case]()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("wanted", ["embeddings", "a layer's weight"])
def test_second_derivatives_are_refused(family, wanted):
    model, given = apply_patches(tiny(family)), packed_row()
    embeds = model.get_input_embeddings()(given.pop("input_ids")).detach().requires_grad_()
    leaf = embeds if wanted == "embeddings" else model.model.layers[0].mlp.parameters().__next__()
    loss = model(inputs_embeds=embeds, **given).loss
    (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
    assert first.abs().max() > 0
    with pytest.raises(UnsupportedInput, match="found a second derivative"):
        first.pow(2).sum().backward()


class Exported(torch.nn.Module):
    """What a user exports: the logits of a model's tokens, and of more if there is."""

    def __init__(self, model, **more):
        super().__init__()
        self.model, self.more = model.eval(), more

    def forward(self, ids):
        """Return logits."""
        return self.model(input_ids=ids, use_cache=False, **self.more).logits


@pytest.mark.slow
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
        UnsupportedInput, match=f"torch.export or .* of a patched model with {next(iter(more))}"
    ):
        torch.export.export(
            Exported(apply_patches(tiny()), **more), (torch.arange(2, 12)[None],), strict=False
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("lengths", [(10,), (4, 6)], ids=str)
def test_what_may_hold_boundaries_is_not_traced(lengths):
    """A graph traced from one document would read from one into the next."""
    ids, positions = torch.arange(2, 12)[None], torch.cat([torch.arange(n) for n in lengths])[None]
    model = Exported(apply_patches(tiny()), position_ids=positions)
    with (
        torch.no_grad(),
        pytest.raises(
            UnsupportedInput, match="torch.jit.trace of a patched model with position_ids"
        ),
    ):
        torch.jit.trace(model, (ids,), check_trace=False)
