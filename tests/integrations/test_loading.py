"""What a model is loaded with: a device map, hub kernels."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import Qwen3_5ForCausalLM
from transformers.utils.import_utils import is_kernels_available

from hf_packfree import apply_patches, patch_report, register_patches
from hf_packfree.errors import PatchConflict
from tests.integrations.compare import in_rows, in_steps, labelled, packed, per_document
from tests.integrations.marks import integration, needs
from tests.support import LOGIT_TOL, relative_rms, tiny

SPLIT = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.layers.2": "cpu",
    "model.layers.3": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.fixture
def checkpoint(tmp_path):
    tiny().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@integration("accelerate", '`device_map="auto"`, everything on one device')
def test_device_map_of_one_device(checkpoint, same_gradients):
    unpatched, model = (
        Qwen3_5ForCausalLM.from_pretrained(checkpoint, device_map="auto").train() for _ in range(2)
    )
    same_gradients(
        in_rows(apply_patches(model)),
        per_document(tiny(), in_steps(labelled())),
        in_rows(unpatched),
    )


class TestSplitModel:
    """Hooks call the forward that a module had when they were put there: a class swapped later
    would be bypassed.
    """

    WHAT = '`device_map="auto"`, split over devices or offloaded'
    SAYS = (
        "works if loaded under `register_patches()`; `apply_patches` afterwards is refused: "
        "`PatchConflict`"
    )

    @integration("accelerate", WHAT, SAYS)
    @pytest.mark.filterwarnings("default")
    def test_afterwards_is_refused(self, checkpoint, tmp_path):
        model = Qwen3_5ForCausalLM.from_pretrained(
            checkpoint, device_map=SPLIT, offload_folder=tmp_path
        )
        with pytest.raises(PatchConflict, match="register_patches"):
            apply_patches(model)

    @integration("accelerate", WHAT, SAYS)
    @pytest.mark.filterwarnings("default")
    def test_loaded_patched(self, checkpoint, tmp_path, record_property):
        """Offloaded weights cannot be trained, so this compares what the model says."""
        with register_patches():
            model = Qwen3_5ForCausalLM.from_pretrained(
                checkpoint, device_map=SPLIT, offload_folder=tmp_path
            )
        assert model.hf_device_map["model.layers.0"] == "disk" and patch_report(model).patched
        items = labelled()
        unpatched = tiny().eval()
        with torch.no_grad():
            found = model.eval()(**packed(items)).logits
            alone = torch.cat(
                [unpatched(input_ids=ids[None], use_cache=False).logits for ids, _ in items], 1
            )
        error = relative_rms(found, alone)
        record_property("error", error)
        assert error <= LOGIT_TOL


HUB = (
    "works with a `kernels` that transformers accepts (releases above; 5.23 needs 0.18.2), with "
    "any other transformers itself refuses: `ValueError`"
)


@integration("transformers", "`use_kernels=True` (kernels of the hub)", HUB)
@needs("kernels")
def test_hub_kernels(checkpoint, same_gradients):
    if not is_kernels_available():
        # with us as without us
        for registered in (nullcontext, register_patches):
            with registered(), pytest.raises(ValueError, match="Kernels are not available"):
                Qwen3_5ForCausalLM.from_pretrained(checkpoint, use_kernels=True)
        return
    model = Qwen3_5ForCausalLM.from_pretrained(checkpoint, use_kernels=True)
    apply_patches(model.train())
    same_gradients(in_rows(model), per_document(tiny(), in_steps(labelled())))
