"""Generation is transformers', bit for bit: every way of choosing tokens, every cache,
everything it can return.
"""

from __future__ import annotations

import copy

import pytest
import torch

from hf_packfree import apply_patches
from hf_packfree.models.compat import CACHE
from tests.support import tiny

pytestmark = pytest.mark.compat
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
IDS = torch.randint(2, 128, (2, 12), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[1] * 12, [0] * 5 + [1] * 7])

WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}


def everything(model, **arguments) -> list[torch.Tensor]:
    """Return the tokens, scores, attention weights and hidden states of one call to generate."""
    torch.manual_seed(0)
    model.generation_config.pad_token_id = 0
    returned = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_attentions": True,
        "output_hidden_states": True,
    }
    given = {"max_new_tokens": 3, "do_sample": False, **returned, **copy.deepcopy(arguments)}
    return list(tensors(dict(model.generate(**given), **{CACHE: None})))


def tensors(value):
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_choosing_tokens(family, way):
    # which alone returns attention weights
    model = tiny(family, attention="eager").eval()
    for prompt in ({"input_ids": IDS}, {"input_ids": IDS * LEFT, "attention_mask": LEFT}):
        try:
            wanted = everything(model, **prompt, **WAYS[way])
        except KeyError as error:
            # transformers 5.8 prepares no mask of linear layers for static caches
            pytest.skip(f"unpatched, this transformers raises KeyError: {error}")
        found = everything(apply_patches(copy.deepcopy(model)), **prompt, **WAYS[way])
        assert len(wanted) > 10 and len(found) == len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_embeddings_and_of_a_cache(family):
    """A prompt's embeddings instead of its ids, and a chat that goes on from its cache with
    several tokens at once.
    """
    model = tiny(family).eval()

    def run(model):
        torch.manual_seed(0)
        settings = {
            "max_new_tokens": 4,
            "do_sample": False,
            "pad_token_id": 0,
            "return_dict_in_generate": True,
        }
        embedded = model.generate(
            inputs_embeds=model.get_input_embeddings()(IDS), attention_mask=LEFT, **settings
        )
        first = model.generate(input_ids=IDS[:1], **settings)
        longer = torch.cat([first.sequences, IDS[1:, :3]], dim=1)
        second = model.generate(
            input_ids=longer, output_logits=True, **settings, **{CACHE: first[CACHE]}
        )
        return [embedded.sequences, first.sequences, second.sequences, *second.logits]

    wanted = run(model)
    found = run(apply_patches(model))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("rows", ["right padded", "one row of nothing"])
@pytest.mark.parametrize("options", [{"unpacked": "native"}, {"batch_invariant": True}], ids=str)
def test_prompts_that_end_in_padding_without_a_cache_whatever_the_options(options, rows):
    """The next token is chosen from logits at padding, of which only transformers makes
    something.
    """
    model = tiny().eval()
    mask = LEFT.flip(1) if rows == "right padded" else LEFT * torch.tensor([[1], [0]])
    prompt = {
        "input_ids": IDS * mask,
        "attention_mask": mask,
        "use_cache": False,
        "max_new_tokens": 3,
        "do_sample": False,
    }
    wanted = model.generate(**prompt, pad_token_id=0)
    assert torch.equal(apply_patches(model, **options).generate(**prompt, pad_token_id=0), wanted)
