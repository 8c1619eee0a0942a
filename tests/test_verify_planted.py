"""verify_packing finds leaks that are planted at one edge alone, of any document, in any dtype, of
values or of gradients only.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from hf_packfree import apply_patches, verify_packing
from hf_packfree.errors import BlindMeasurement, LeakDetected
from hf_packfree.verify import build_model
from tests.support import tiny, trunk_of

LENGTHS = (5, 9, 1, 7, 33)
STARTS = (0, 5, 14, 15, 22)
TREE = {"lengths": (9, 5, 8, 1, 6, 3), "tree": (None, 0, 0, 0, 1, 1)}
"""Leaves are the segments 2, 3, 4 and 5."""
BRANCHES = {"from a sibling": (14, 22), "back to a sibling": (22, 14), "cousins": (14, 23)}

pytestmark = pytest.mark.compat(kernels=False)


def planted(model, source, target, *, factor=1e-2, gradient_only=False):
    """Let a layer add a little of one token's state to another's in the packed row."""
    tokens = sum(LENGTHS), sum(TREE["lengths"]), 33 + 64

    def leak(module, args, output):
        states = output[0] if isinstance(output, tuple) else output
        if states.shape[1] not in tokens:
            return output
        more = states[:, source] * factor
        more = more - more.detach() if gradient_only else more
        at = torch.zeros(states.shape[1], 1, dtype=states.dtype)
        at[target] = 1
        states = states + at * more[:, None]
        return (states, *output[1:]) if isinstance(output, tuple) else states

    return trunk_of(model).layers[1].register_forward_hook(leak)


@pytest.mark.parametrize("edge", range(1, len(LENGTHS)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"])
@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_a_leak_at_one_edge_is_found_in_half_precision(family, dtype, edge):
    """These passed: values are within rounding, and not every document's were asked."""
    model = tiny(family) if dtype == "autocast" else tiny(family).to(dtype)
    apply_patches(model)
    under = torch.autocast("cpu", torch.bfloat16) if dtype == "autocast" else nullcontext()
    with under:
        report = verify_packing(model, lengths=LENGTHS, control=False)
        assert report.patched.influence == report.patched.cross_gradient == 0
        planted(model, STARTS[edge] - 1, STARTS[edge])
        with pytest.raises(LeakDetected, match="a gradient reaches another document"):
            verify_packing(model, lengths=LENGTHS, control=False)


@pytest.mark.parametrize("edge", range(1, len(LENGTHS)))
def test_tokens_reach_no_other_document_whatever_its_number(edge):
    """Without gradients, too: even documents read odd ones, and odd ones even ones."""
    model = apply_patches(tiny())
    planted(model, STARTS[edge] - 1, STARTS[edge], factor=1.0)
    with pytest.raises(LeakDetected, match="documents react to each other's tokens"):
        verify_packing(model, lengths=LENGTHS, gradients=False, control=False)


@pytest.mark.parametrize("edge", range(1, len(LENGTHS)))
def test_a_gradient_alone_is_found_at_any_edge(edge):
    model = apply_patches(tiny())
    planted(model, STARTS[edge] - 1, STARTS[edge], factor=1e-6, gradient_only=True)
    with pytest.raises(LeakDetected, match="a gradient reaches another document") as leak:
        verify_packing(model, lengths=LENGTHS, control=False)
    assert leak.value.report.patched.influence == 0


def test_a_fast_decay_is_no_leak_and_excuses_none():
    """Upstream's gradient of A_log or dt_bias is up to 2.9e-3 off there, in fp32, by its own rounding."""
    torch.manual_seed(0)
    model = apply_patches(build_model("qwen3_5"))
    options = {"lengths": (33, 64), "slow_decay": False, "control": False}
    found = r"found the gradient of .*A_log .* off .*, and no document that reaches another"
    with pytest.raises(BlindMeasurement, match=f"{found}.*pass slow_decay=True"):
        verify_packing(model, **options)
    assert verify_packing(model, lengths=(33, 64)).patched.gradients < 1e-5
    for tokens, more, what in (
        ((32, 33), {"gradient_only": True}, "a gradient reaches another document"),
        ((40, 42), {}, "logits differ from a forward per document"),
    ):
        leak = planted(model, *tokens, **more)
        with pytest.raises(LeakDetected, match=what):
            verify_packing(model, **options)
        leak.remove()


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
@pytest.mark.parametrize("tokens", BRANCHES.values(), ids=BRANCHES)
def test_a_gradient_alone_is_found_between_branches(family, tokens):
    model = apply_patches(tiny(family))
    assert verify_packing(model, **TREE, control=False).patched.cross_gradient == 0
    planted(model, *tokens, factor=1e-6, gradient_only=True)
    with pytest.raises(LeakDetected, match="a gradient reaches another document"):
        verify_packing(model, **TREE, control=False)


@pytest.mark.parametrize("tokens", [(13, 29), (29, 14)], ids=["from it", "into one of it"])
def test_a_gradient_alone_is_found_from_a_prefix_of_others(tokens):
    """Three samples share segment 1, with tokens 9 to 13; the last one goes on from the root."""
    tree = {"lengths": TREE["lengths"], "tree": (None, 0, 1, 1, 1, 0)}
    model = apply_patches(tiny())
    assert verify_packing(model, **tree, control=False).patched.cross_gradient == 0
    planted(model, *tokens, factor=1e-6, gradient_only=True)
    with pytest.raises(LeakDetected, match="a gradient reaches another document"):
        verify_packing(model, **tree, control=False)
