"""Kimi Delta Attention and multi-head latent attention: what is theirs alone; `test_hybrids.py` runs
the rest.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree import PackedSequence, apply_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.ops.backend import Target
from hf_packfree.ops.table import OPS
from hf_packfree.patching.plan import op_sizes
from tests.input_formats import row_batch
from tests.models.forms import half_precision
from tests.models.test_hybrids import KDA as NAMES
from tests.support import by_family, errors, random_weights, relative_rms, run, run_alone, tiny

SHORT = (5, 33, 1, 70)
pytestmark = pytest.mark.skipif(not NAMES, reason="transformers has none of these families")


@pytest.mark.parametrize("family", NAMES)
def test_fp64_is_as_near_as_upstreams_fp32_parts(family):
    """Its norms, routers, gates and delta rule compute in fp32 whatever the model's dtype."""
    model, batch = tiny(family).double(), row_batch("positions", SHORT)
    # the product of all experts takes no float64
    model.set_experts_implementation("eager")
    weights = [weight.double() for weight in random_weights(batch, 128)]
    alone = run_alone(model, batch, weights)
    found = errors(run(apply_patches(model), batch, weights), alone)
    assert found[0] <= 1e-6 and found[1] <= 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("family", NAMES)
def test_half_precision_rounds_no_worse_than_upstream(family, autocast):
    rounded = in_bfloat16(tiny(family), autocast)
    model = apply_patches(in_bfloat16(tiny(family), autocast))
    batches = [row_batch("positions", SHORT, seed=seed) for seed in range(1, 7)]
    ours, upstreams = half_precision(tiny(family), rounded, model, batches, autocast)
    assert ours <= 1.5 * upstreams, (ours, upstreams)


def in_bfloat16(model, autocast):
    """As `from_pretrained(dtype=torch.bfloat16)` loads it; whole where autocast rounds."""
    if autocast:
        return model
    wide = model._keep_in_fp32_modules_strict
    for name, parameter in model.named_parameters():
        if not any(part in name for part in wide):
            parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.skipif("bailing_hybrid" not in by_family, reason="transformers has it from 5.20 on")
def test_a_convolution_and_gates_in_fp32_in_a_bfloat16_model():
    """A layer's output has upstream's dtype, and the convolution is one in fp32: rounding its weights
    would be seen.
    """
    model = in_bfloat16(tiny("bailing_hybrid"), False)
    mixer = model.model.layers[0].self_attn
    assert mixer.conv1d.weight.dtype == mixer.forget_gate.A_log.dtype == torch.float32
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    wanted = mixer(x)
    apply_patches(model)

    found = mixer(x, packed_sequence=PackedSequence.from_lengths([40]))
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert relative_rms(found, wanted) <= 2e-3
    mixer.conv1d.weight.data = mixer.conv1d.weight.data.bfloat16().float()
    rounded = mixer(x, packed_sequence=PackedSequence.from_lengths([40]))
    assert relative_rms(rounded, wanted) > 2e-3


def test_a_tree_of_shared_prefixes_is_refused():
    model = apply_patches(tiny(NAMES[0]))
    tree = PackedSequence.from_tree([4, 3, 2], [None, 0, 0])
    with pytest.raises(UnsupportedInput, match="tree of shared prefixes"):
        model(input_ids=torch.ones(1, 9, dtype=torch.long), packed_sequence=tree)


@pytest.mark.parametrize("family", NAMES)
def test_kernels_without_values_of_another_size_are_ruled_out(family):
    sizes = op_sizes(tiny(family), by_family[family])
    assert sizes["head_size"] == 24 and sizes["other_value_size"] == 16 == sizes["key_size"]
    target = Target("cuda", (9, 0), sizes=sizes)
    reasons = {name: one.unusable(target) for name, one in OPS["attention"].backends.items()}
    lacks = "its kernels lack values of another size than keys"
    assert reasons == {"triton": lacks, "varlen": None, "torch": None}
