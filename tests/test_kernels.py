"""Models whose layers the `kernels` package replaces: exact before and after, and on every train()
and eval().

Runs where transformers accepts the installed `kernels`: in the second half of what
tests/compat/run.py does.
"""

from __future__ import annotations

import inspect

import pytest
import transformers
from torch import nn
from transformers.utils.import_utils import is_kernels_available

from hf_packfree import apply_patches, register_patches, remove_patches
from hf_packfree.errors import PatchConflict
from tests.input_formats import row_batch
from tests.support import CONTROL, GRADIENT_TOL, LOGIT_TOL, ROW, tiny
from tests.test_exactness import measure

if not is_kernels_available():
    pytest.skip("no `kernels` that this transformers accepts", allow_module_level=True)

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore:\\s*No kernel mapping found")]
FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
BATCH = row_batch("positions", ROW)


UPSTREAM_FAILS = {
    "apply_rotary_pos_emb": "5.8.1 and 5.9.0",
    "Unknown device type: cpu": "5.3.0 with `kernels` 0.10",
}
"""What upstream raises by itself where it cannot kernelize these families, patched or not, and
where that was seen.
"""


def kernelized(model):
    """The model after what `from_pretrained(use_kernels=True)` does, where upstream manages it."""
    try:
        model.set_use_kernels(True)
    except (AttributeError, ValueError) as error:
        known = [releases for words, releases in UPSTREAM_FAILS.items() if words in str(error)]
        if not known:
            raise
        pytest.skip(
            f"transformers cannot kernelize this family, patched or not (seen on {known[0]})"
        )
    return model


def assert_exact_through_flips(model):
    for flip in ("train", "eval", "train"):
        getattr(model, flip)()
        logits, grads = measure(model, BATCH)
        assert logits <= LOGIT_TOL and grads <= GRADIENT_TOL, (
            f"after {flip}(): {logits:.1e} and {grads:.1e}"
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", ["patch", "kernelize"])
def test_both_orders_stay_exact_and_come_apart(family, first):
    both = (apply_patches, kernelized) if first == "patch" else (kernelized, apply_patches)
    model = both[1](both[0](tiny(family)))
    assert_exact_through_flips(model)
    assert measure(remove_patches(model).eval(), BATCH)[0] > LOGIT_TOL * CONTROL


def test_loaded_patched_and_kernelized(tmp_path):
    kernelized(tiny()).save_pretrained(tmp_path)
    with register_patches():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True)
    assert_exact_through_flips(model)


class Repository:
    """A kernel of the hub that would be used, were it not a trap."""

    def __init__(self, layer: type[nn.Module]) -> None:
        def forward(self, *args, **kwargs):
            raise ZeroDivisionError("the hub's layer ran")

        forward.__signature__ = inspect.signature(layer.forward)
        self.layer_name, self.layer = (
            layer.__name__,
            type(layer.__name__, (nn.Module,), {"forward": forward}),
        )

    def load(self):
        """The layer to use."""
        return self.layer


def test_a_layer_of_the_hub_replaces_no_patched_one():
    import kernels

    model = tiny()
    layer = type(model.model.layers[0].linear_attn)
    if not hasattr(layer, "kernel_layer_name"):
        pytest.skip("upstream offers the layer to the hub since 5.13")
    with kernels.use_kernel_mapping({layer.kernel_layer_name: {"cpu": Repository(layer)}}):
        assert_exact_through_flips(kernelized(apply_patches(model)))
        replaced = kernelized(tiny())
    with pytest.raises(ZeroDivisionError, match="the hub's layer ran"):
        replaced(**BATCH.inputs)
    with pytest.raises(PatchConflict, match="forward of its own instance"):
        apply_patches(replaced)
