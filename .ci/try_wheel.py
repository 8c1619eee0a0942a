"""What an installed wheel has to do: be found where it was installed, patch a tiny model,
measure no leak, come off again.
"""

import sys
from pathlib import Path

import torch

import hf_packfree
from hf_packfree import apply_patches, patch_report, remove_patches, verify_packing
from hf_packfree.verify.model_source import build_model

assert Path(sys.prefix).resolve() in Path(hf_packfree.__file__).resolve().parents, (
    hf_packfree.__file__
)
assert (Path(hf_packfree.__file__).parent / "py.typed").exists()
model = apply_patches(build_model("qwen3_5"))
assert patch_report(model).patched
positions = torch.tensor([[0, 1, 2, 0, 1]])
assert (
    model(input_ids=torch.tensor([[5, 6, 7, 8, 9]]), position_ids=positions).logits.isfinite().all()
)
remove_patches(model)
assert not patch_report(model).patched
print(verify_packing("qwen3_5", lengths=[5, 64, 1]))
