"""How frameworks of reinforcement learning call a model on a packed row: all are exact, unchanged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_packfree import apply_patches
from tests.support import CONTROL, GRADIENT_TOL, LOGIT_TOL, documents, gradients, relative_rms, tiny

LENGTHS = (7, 1, 70, 12)
DOCUMENTS = documents(LENGTHS, vocabulary=128)
ROW, TOKENS = torch.cat(DOCUMENTS)[None], sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
FLASH = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}
LONGEST = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
KEYWORDS = {
    "OpenRLHF, SkyRL": {},
    "verl": {"use_cache": False},
    "verl, offsets": {"cu_seqlens": OFFSETS.long(), "cu_seqlens_cpu": OFFSETS.long()},
    "AReaL": {"cu_seqlens": OFFSETS, "max_seqlen": max(LENGTHS), **FLASH, **LONGEST},
    "NeMo-RL": {
        "flash_attn_kwargs": SimpleNamespace(
            cu_seqlens_q=OFFSETS,
            cu_seqlens_k=OFFSETS,
            max_seqlen_q=max(LENGTHS),
            max_seqlen_k=max(LENGTHS),
        )
    },
    "prime-rl": {"seq_lens": torch.tensor(LENGTHS)},
    "prime-rl, temperatures": {"temperature": torch.ones(1, TOKENS), "labels": None},
    "verl, vision-language": {"position_ids": POSITIONS[None].expand(4, 1, -1)},
    "ms-swift": {
        "position_ids": POSITIONS[None].expand(3, 1, -1),
        "text_position_ids": POSITIONS,
        **FLASH,
        **{name: torch.tensor(longest) for name, longest in LONGEST.items()},
    },
}


@pytest.fixture(scope="module")
def wanted():
    stock = tiny().eval()
    with torch.no_grad():
        alone = [stock(input_ids=one[None]).logits for one in DOCUMENTS]
        leaks = stock(input_ids=ROW, position_ids=POSITIONS, use_cache=False).logits
    assert relative_rms(leaks, torch.cat(alone, 1)) >= CONTROL * LOGIT_TOL
    return torch.cat(alone, 1)


def patched():
    return apply_patches(tiny()).eval()


@pytest.mark.parametrize("name", KEYWORDS)
def test_the_call_is_exact(name, wanted):
    given = {"attention_mask": None, "position_ids": POSITIONS, **KEYWORDS[name]}
    with torch.no_grad():
        found = patched()(ROW, **given)["logits"]
    assert relative_rms(found, wanted) <= LOGIT_TOL


@pytest.mark.parametrize(
    ("tail", "positions"), [(0, range(6)), (2, [0] * 6)], ids=["verl", "NeMo-RL"]
)
def test_padding_at_the_end_of_the_row(tail, positions, wanted):
    """verl's counts on as one more document; NeMo-RL's are end tokens at position 0 each, beyond
    its offsets.
    """
    offsets = KEYWORDS["NeMo-RL"] if tail else {}
    ids = torch.cat([ROW, torch.full((1, 6), tail)], 1)
    positions = torch.cat([POSITIONS, torch.tensor([[*positions]])], 1)
    with torch.no_grad():
        found = patched()(ids, attention_mask=None, position_ids=positions, **offsets).logits
    assert relative_rms(found[:, :TOKENS], wanted) <= LOGIT_TOL


def test_trl_calls_text_model_and_head_apart(wanted):
    model = patched()
    with torch.no_grad():
        hidden = model.base_model(input_ids=ROW, position_ids=POSITIONS, use_cache=False)
        found = model.get_output_embeddings()(hidden.last_hidden_state)
    assert relative_rms(found, wanted) <= LOGIT_TOL


def test_left_padding_at_position_one(wanted):
    """As OpenRLHF and SkyRL fill it."""
    shape = len(LENGTHS), max(LENGTHS)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for row, document in enumerate(DOCUMENTS):
        ids[row, -len(document) :], mask[row, -len(document) :] = document, 1
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        found = patched()(ids, attention_mask=mask, position_ids=positions)["logits"]
    assert relative_rms(found[mask.bool()], wanted[0]) <= LOGIT_TOL


@pytest.mark.parametrize("training", [False, True])
def test_logits_are_divided_in_place_and_trained_on(training, wanted):
    """As OpenRLHF, SkyRL and verl do: assigned to the output, divided by a temperature a token."""
    temperature = torch.linspace(0.5, 2.0, TOKENS)[:, None]
    targets = ROW.roll(-1, 1)[0, :, None]
    stock = tiny().train(training)
    alone = torch.cat([stock(input_ids=one[None]).logits[0] for one in DOCUMENTS])
    exact = (alone / temperature).log_softmax(-1).gather(1, targets)
    model = patched().train(training)
    output = model(ROW, attention_mask=None, position_ids=POSITIONS)
    output["logits"] = output["logits"].to(torch.float32)
    found = output["logits"].squeeze(0).div_(temperature).log_softmax(-1).gather(1, targets)
    assert relative_rms(found, exact) <= LOGIT_TOL
    found.sum().backward(), exact.sum().backward()
    got, want = gradients(model), gradients(stock)
    assert max(relative_rms(got[name], want[name]) for name in want) <= GRADIENT_TOL


def test_outputs_cast_as_accelerate_casts_them_stay_unread(wanted):
    convert_outputs_to_fp32 = pytest.importorskip("accelerate").utils.convert_outputs_to_fp32
    labels = ROW.masked_fill(POSITIONS == 0, -100)
    model = patched().train()
    output = convert_outputs_to_fp32(model.forward)(
        input_ids=ROW, position_ids=POSITIONS, labels=labels
    )
    output.loss.backward()
    assert output.logits.source.values is None
    scores = wanted[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])
    assert relative_rms(output.loss, -scores[..., 0][labels[:, 1:] >= 0].mean()) <= LOGIT_TOL


def test_a_stock_model_of_the_same_class_in_one_process_stays_stock(wanted):
    """A reference model beside the actor."""
    stock, model = tiny().eval(), patched()
    call = {"input_ids": ROW, "attention_mask": None, "position_ids": POSITIONS}
    with torch.no_grad():
        before = stock(**call, use_cache=False).logits
        assert relative_rms(model(**call).logits, wanted) <= LOGIT_TOL
        assert torch.equal(stock(**call, use_cache=False).logits, before)


def entropy_from_logits(logits):
    """As verl and OpenRLHF compile it."""
    shares = torch.softmax(logits, -1)
    return torch.logsumexp(logits, -1) - (shares * logits).sum(-1)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_entropy_takes_ordinary_logits():
    """Logits that are divided in place, then a function that is compiled by itself."""
    compiled = torch.compile(entropy_from_logits, backend="aot_eager", dynamic=True)
    call = {"input_ids": ROW, "attention_mask": None, "position_ids": POSITIONS}
    stock, model = tiny().train(), apply_patches(tiny(), backend={"loss": "upstream"}).train()
    alone = torch.cat([stock(input_ids=one[None]).logits[0] for one in DOCUMENTS])
    exact = entropy_from_logits(alone / 0.7)
    found = compiled(model(**call).logits.squeeze(0).div_(0.7))
    assert relative_rms(found, exact) <= LOGIT_TOL
    found.sum().backward(), exact.sum().backward()
    got, want = gradients(model), gradients(stock)
    assert max(relative_rms(got[name], want[name]) for name in want) <= GRADIENT_TOL
    # lazy ones break the graph where they are read
    lazy = compiled(patched()(**call).logits)[0]
    assert relative_rms(lazy, entropy_from_logits(alone)) <= LOGIT_TOL


def test_entropy_in_chunks_that_are_computed_again():
    """As verl's `entropy_checkpointing` does it."""

    def entropy(logits):
        return torch.distributions.Categorical(logits=logits).entropy()

    model, stock = patched().train(), tiny().train()
    logits = model(ROW, attention_mask=None, position_ids=POSITIONS).logits[0]
    alone = torch.cat([stock(input_ids=one[None]).logits[0] for one in DOCUMENTS])
    chunks = [checkpoint(entropy, part, use_reentrant=False) for part in logits.split(32)]
    found, exact = torch.cat(chunks), entropy(alone)
    assert relative_rms(found, exact) <= LOGIT_TOL
    (found * torch.linspace(-1, 1, TOKENS)).sum().backward()
    (exact * torch.linspace(-1, 1, TOKENS)).sum().backward()
    got, want = gradients(model), gradients(stock)
    assert max(relative_rms(got[name], want[name]) for name in want) <= GRADIENT_TOL
