"""The head of a model that is patched while it is loaded: transformers reads and writes its
tensors itself.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_packfree import MTPOptions, register_patches
from hf_packfree.errors import MissingHead, UnsupportedInput
from tests.mtp.heads import build, labelled, packed
from tests.mtp.test_checkpoint import checkpoint, same_files, tensors
from tests.support import tiny


def load(folder, mtp, **options):
    with register_patches(mtp=mtp):
        return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_5", None),
        ("qwen3_5_moe", "fused"),
        ("qwen3_5_moe", "per expert"),
        ("qwen3_5_moe", "fused head"),
        ("qwen3_next", "per expert"),
    ],
)
@pytest.mark.compat
def test_kept_and_written_again_byte_for_byte(family, layout, tmp_path, caplog):
    before = tensors(checkpoint(tmp_path / "before", family, layout))
    model = load(tmp_path / "before", "keep", dtype="auto")
    model.save_pretrained(tmp_path / "after")
    assert same_files(tensors(tmp_path / "after"), before)
    assert not any(parameter.requires_grad for parameter in model.mtp.parameters())
    assert not [record for record in caplog.records if "mtp" in record.getMessage()], (
        "transformers says nothing of it"
    )


def test_trained_as_one_that_is_added_later(tmp_path):
    wanted = build(depth=2)
    wanted.save_pretrained(tmp_path)
    model = load(tmp_path, MTPOptions(depth=2, weight=0.3)).train()
    assert torch.equal(model(**packed(labelled())).loss, wanted(**packed(labelled())).loss)


def test_from_scratch(tmp_path):
    tiny().save_pretrained(tmp_path)
    model = load(tmp_path, MTPOptions(from_scratch=True)).train()
    model(**packed(labelled())).loss.backward()
    assert all(float(p.grad.abs().max()) < 1e9 for p in model.mtp.parameters())
    assert (
        model.mtp.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
        and model.mtp.norm.weight.abs().max().item() == 0
    )


def test_a_checkpoint_without_it_is_refused(tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(MissingHead, match="found 0 tensors"):
        load(tmp_path, "train")
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path), "mtp"), (
        "nothing is left behind"
    )


def test_another_checkpoint_is_refused():
    with pytest.raises(UnsupportedInput, match="found checkpoint='base' in mtp"):
        register_patches(mtp=MTPOptions(checkpoint="base"))
