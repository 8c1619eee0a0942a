"""How frameworks of reinforcement learning call a model on a packed row: all are exact, unchanged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_packfree import apply_patches
from tests.support import CONTROL, LOGIT_TOL, documents, relative_rms, tiny

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


@pytest.mark.parametrize("name", KEYWORDS)
def test_the_call_is_exact(name, wanted):
    model = apply_patches(tiny()).eval()
    given = {"attention_mask": None, "position_ids": POSITIONS, **KEYWORDS[name]}
    with torch.no_grad():
        found = model(ROW, **given)["logits"]
    assert relative_rms(found, wanted) <= LOGIT_TOL
