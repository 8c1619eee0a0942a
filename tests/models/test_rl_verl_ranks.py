"""verl's fused forward where FSDP2 shards the model."""

from __future__ import annotations

import pytest

from hf_packfree import apply_patches
from tests.models.test_head_loss import packed_batch
from tests.models.test_head_loss_ranks import sharded
from tests.models.test_rl_verl import fused_text, named_as_verls
from tests.support import tiny


# FSDP2 warns of views that leave a model
@pytest.mark.filterwarnings("default")
def test_a_model_that_fsdp2_shards_keeps_the_forward(monkeypatch, one_rank):
    """verl assigns it before it shards the model, for which FSDP2 derives a class."""
    model = apply_patches(tiny())
    monkeypatch.setattr(type(model), "forward", named_as_verls(fused_text)[0])
    output = sharded(model)(**packed_batch(), return_dict=True)
    assert output.logits is None and output.log_probs is not None
