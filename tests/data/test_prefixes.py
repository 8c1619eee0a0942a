"""Samples that share their beginnings in one row: where each token is, and log-probabilities of
every sample from one forward.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_packfree import apply_patches
from hf_packfree.data import pack_prefixes
from hf_packfree.errors import BoundaryError
from tests.support import documents, errors, gradients, relative_rms, tiny, worst_gradient

SAMPLES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=9)


def group(prompt=40, answers=(5, 64, 1, 30), seed=3):
    """A prompt with some answers, and a sample that is the prompt alone."""
    start, *rest = documents((prompt, *answers), seed=seed)
    return [*(torch.cat([start, answer]) for answer in rest), start]


def turns():
    """Answers that go on, in two ways, and another prompt."""
    first, second, third, *_ = group()
    more = documents((33, 40), seed=9)
    return [
        first,
        *(torch.cat([second, turn]) for turn in more),
        third,
        documents((50,), seed=8)[0],
    ]


@settings(max_examples=200)
@given(samples=SAMPLES, shortest=st.integers(1, 5))
def test_every_token_of_every_sample_is_in_its_place(samples, shortest):
    row = pack_prefixes(samples, shortest=shortest)
    packed, tokens = row.packed_sequence, row.input_ids.shape[1]
    assert packed.num_tokens == tokens <= sum(map(len, samples))
    held = torch.zeros(tokens, dtype=torch.long)
    for sample, places in zip(samples, row.index, strict=True):
        assert row.input_ids[0, places].tolist() == sample
        assert packed.position_ids()[0, places].tolist() == list(range(len(sample)))
        assert row.before[0, places].tolist() == [-1, *places[:-1].tolist()]
        held[places] += 1
    assert row.counts.tolist() == [held.tolist()] and held.min() > 0
    # nothing predicts a sample's first token, and samples have theirs in one place where they agree
    firsts = row.before < 0
    assert torch.equal(row.labels, row.input_ids.masked_fill(firsts, -100))
    assert torch.equal(row.loss_weights, row.counts.masked_fill(firsts, 0).float())
    assert row.of_samples(row.input_ids)[-1].tolist() == samples[-1]


@given(samples=SAMPLES)
def test_all_that_is_shared_is_there_once(samples):
    row = pack_prefixes(samples, shortest=1)
    beginnings = {tuple(one[: end + 1]) for one in samples for end in range(len(one))}
    assert row.input_ids.shape[1] == len(beginnings)


def test_what_is_shared_by_chance_makes_no_level():
    prompt = list(range(50))
    samples = [[*prompt, 7, 7, 1], [*prompt, 7, 7, 2], [*prompt, 8]]
    assert pack_prefixes(samples).packed_sequence.lengths == [50, 3, 3, 1]
    assert pack_prefixes(samples, shortest=2).packed_sequence.lengths == [50, 2, 1, 1, 1]
    assert pack_prefixes(samples, shortest=53).packed_sequence.tree is None


def test_the_row_of_a_group_is_the_prompt_and_its_answers():
    packed = pack_prefixes(group()).packed_sequence
    assert packed.lengths == [40, 5, 64, 1, 30] and packed.tree.parents == (-1, 0, 0, 0, 0)


def alone(model, samples, temperature=1.0):
    """Every sample's log-probabilities but its first token's, each in a forward of its own."""
    found = []
    for sample in samples:
        logits = model(input_ids=sample[None], use_cache=False).logits[0, :-1] / temperature
        found.append(logits.log_softmax(-1).gather(1, sample[1:, None])[:, 0])
    return found


@pytest.mark.parametrize("make", [group, turns])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_log_probabilities_of_samples_and_their_gradients(family, make):
    samples, model, stock = make(), apply_patches(tiny(family)), tiny(family)
    row = pack_prefixes(samples)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(len(sample), generator=generator) for sample in samples]
    hidden = model.base_model(**row.inputs)[0]
    values = row.log_probs(hidden, model, temperature=0.7)
    found = row.of_samples(values.log_probs)
    assert all(one[0] == 0 for one in found), "nothing predicts a sample's first token"
    sum((one * weight).sum() for one, weight in zip(found, weights)).backward()
    wanted = alone(stock, samples, 0.7)
    sum((one * weight[1:]).sum() for one, weight in zip(wanted, weights)).backward()
    parts = [one[1:].detach() for one in found], [one.detach() for one in wanted]
    logits, worst = errors((parts[0], gradients(model)), (parts[1], gradients(stock)))
    assert logits <= 1e-5 and worst <= 1e-4


def test_a_loss_by_weights_of_the_row_is_that_of_the_samples():
    samples, model = group(), apply_patches(tiny())
    row = pack_prefixes(samples)
    weights = [torch.rand(len(sample)) for sample in samples]
    log_probs = row.log_probs(model.base_model(**row.inputs)[0], model).log_probs
    by_row = (log_probs * row.summed(weights)).sum()
    by_sample = sum((one * weight).sum() for one, weight in zip(row.of_samples(log_probs), weights))
    assert relative_rms(by_row, by_sample) <= 1e-6
    ones = row.summed([torch.ones(len(sample)) for sample in samples])
    assert torch.equal(ones, row.counts.float())


def test_labels_and_advantages_make_the_loss_of_the_samples_alone():
    """Values and gradients of a prompt's answers, whose prompt is untrained; of two samples that
    share a segment one trains it.
    """
    samples, model, stock = turns(), apply_patches(tiny()), tiny()
    starts, advantages = (40, 45, 40, 40, 1), [1.0, -0.5, 0.25, 2.0, -1.0]
    labels = [sample.clone() for sample in samples]
    for own, start in zip(labels, starts, strict=True):
        own[:start] = -100
    row = pack_prefixes(samples, labels=labels, loss_weights=advantages)
    assert (row.labels != -100).sum() < row.labels.numel() - 39
    hidden = model.base_model(**row.inputs)[0]
    log_probs = row.log_probs(hidden, model).log_probs
    assert not log_probs[row.labels == -100].any()
    found = (log_probs * row.loss_weights).sum()
    found.backward()
    wanted = sum(
        advantage * one[start - 1 :].sum()
        for advantage, one, start in zip(advantages, alone(stock, samples, 1.0), starts)
    )
    wanted.backward()
    values, worst = errors(
        ([found.detach()[None]], gradients(model)), ([wanted.detach()[None]], gradients(stock))
    )
    assert values <= 1e-5 and worst <= 1e-4


def test_parts_of_samples_by_their_own_masks_make_the_loss_of_the_samples_alone():
    """A loss that is no weighted sum, of samples that share tokens which one of them trains."""
    samples, model, stock = turns(), apply_patches(tiny()), tiny()
    starts = (40, 45, 40, 40, 1)
    masks = [torch.arange(len(one)) >= start for one, start in zip(samples, starts, strict=True)]
    row = pack_prefixes(
        samples, labels=[one.where(mask, -100) for one, mask in zip(samples, masks, strict=True)]
    )
    parts = row.of_samples(row.log_probs(model.base_model(**row.inputs)[0], model).log_probs)
    assert parts[1][40:45].all(), "another sample's labels have their values here, too"

    def train(found, masks):
        sum((one.square() * mask).sum() for one, mask in zip(found, masks, strict=True)).backward(
            retain_graph=True
        )

    train(parts, masks)
    train(alone(stock, samples), [mask[1:] for mask in masks])
    wanted = gradients(stock)
    assert worst_gradient(gradients(model), wanted) <= 1e-4
    model.zero_grad()
    train(parts, [torch.ones_like(mask) for mask in masks])
    assert worst_gradient(gradients(model), wanted) >= 1e-2, "the control trains no more"


def test_labels_of_one_sample_are_not_another_s():
    """A shared token counts with the weights of the samples that train it."""
    row = pack_prefixes(
        [[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 7]],
        labels=[[-100, 6, 7, 1], [-100, -100, 7, 2], [5, -100, -100]],
        loss_weights=[
            torch.tensor(2.0, requires_grad=True),
            torch.tensor([9.0, 9.0, 0.5, 1.0], dtype=torch.bfloat16),
            4,
        ],
        shortest=1,
    )
    assert row.input_ids.tolist() == [[5, 6, 7, 1, 2]]
    assert row.labels.tolist() == [[-100, 6, 7, 1, 2]]
    assert row.loss_weights.tolist() == [[0.0, 2.0, 2.5, 2.0, 1.0]]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"labels": [[1, 2]]}, "found labels of 1 samples; wanted those of 2"),
        ({"labels": [[1, 2], [3]]}, "found labels of sample 1 that are not its 2 tokens or -100"),
        ({"labels": [[2, -100], [3, 4]]}, "found labels of sample 0 that .* pass them unshifted"),
        ({"loss_weights": [1.0]}, "found loss weights of 1 samples; wanted those of 2"),
        ({"loss_weights": 1.0}, "found loss weights of no list of samples; .* pass a list"),
        ({"loss_weights": [1.0, [1.0]]}, r"loss weights of sample 1 of shape \(1,\)"),
    ],
)
def test_labels_and_weights_of_other_samples(more, says):
    with pytest.raises(BoundaryError, match=says):
        pack_prefixes([[1, 2], [3, 4]], **more)


def test_a_row_moves_as_a_whole():
    row = pack_prefixes(group()).to("meta")
    held = (row.input_ids, row.before, row.counts, row.packed_sequence.cu_seqlens, *row.index)
    held += (row.labels, row.loss_weights)
    assert all(one.is_meta for one in held)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([], "found no samples to pack"),
        ([[1, 2], []], r"found sample 1 of shape \(0,\)"),
        ([[1.5]], "found sample 0 of shape .* float64"),
        ([torch.zeros(2, 2, dtype=torch.long)], r"found sample 0 of shape \(2, 2\)"),
    ],
)
def test_what_is_no_sample(samples, says):
    with pytest.raises(BoundaryError, match=says):
        pack_prefixes(samples)
