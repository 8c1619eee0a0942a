"""Where FLA's differences between a document in a row and the document without boundaries come
from: from what is tuned.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.checks import LONG, TRIAL, gpu, record_of, spans
from tests.gpu.op import as_leaves, cut
from tests.gpu.op_table import OPS
from tests.support import relative_rms

pytestmark = [*gpu, pytest.mark.skipif(TRIAL, reason="FLA's kernels run on GPUs")]
OP = OPS["delta rule"]
NOISE = 5e-3


def fla(leaves, cu_seqlens=None):
    """FLA's own function, its dispatcher left out: {"values": ..., leaf: gradient} of the
    values' sum of squares.
    """
    from inspect import unwrap

    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _ = unwrap(chunk_gated_delta_rule)(
        *leaves.values(), use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens
    )
    out.float().square().sum().backward()
    return {"values": out.detach()} | {
        f"gradient of {name}": leaf.grad for name, leaf in leaves.items()
    }


def leaves_of():
    torch.manual_seed(0)
    return as_leaves(OP.leaves(sum(LONG)), torch.bfloat16)


def alone(boundaries):
    """Document by document, with `cu_seqlens` [0, n] or without."""
    leaves = leaves_of()
    parts = [
        fla(
            cut(OP, leaves, begin, end), record_of([end - begin]).cu_seqlens if boundaries else None
        )
        for begin, end in spans(LONG)
    ]
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def test_fla_with_every_kernel_in_one_shape(record, pin):
    """bf16, slow decay, documents of 1 to 2,000 tokens: other shapes of the kernels give other
    bits, boundaries do not.

    So where documents differ from documents without `cu_seqlens`, it is because those are tuned by
    themselves, and may get other shapes. In packed rows a document alone has `cu_seqlens` too, and
    what is tuned does not go by the length of a row (test_sync.py): one choice for all documents.
    """
    rows = {}
    for name in ("smallest", "largest"):
        pin(name)
        rows[name] = fla(leaves_of(), record_of(LONG).cu_seqlens)
        for words, boundaries in {"cu_seqlens [0, n]": True, "no cu_seqlens": False}.items():
            found = alone(boundaries)
            for what, wanted in rows[name].items():
                record(
                    f"FLA, {name} shapes, {words}: {what}, packed against alone",
                    relative_rms(found[what], wanted),
                    0.0,
                )
    for what, wanted in rows["smallest"].items():
        record(
            f"FLA, largest shapes against smallest: {what}",
            relative_rms(rows["largest"][what], wanted),
            NOISE,
        )
    assert not torch.equal(rows["largest"]["values"], rows["smallest"]["values"]), (
        "shapes make no difference any more"
    )
