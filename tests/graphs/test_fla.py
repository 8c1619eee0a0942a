"""Flash-linear-attention in the rows of CUDA graphs: nothing that it remembers of one row is of the
next, and nothing is planned on the host.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from hf_packfree.graphs.bucket import Bucket, in_bucket
from hf_packfree.graphs.captured_sequence import CapturedSequence
from hf_packfree.ops.delta_rule import fla as delta_rule
from hf_packfree.ops.kda import fla as kda
from hf_packfree.packing import PackedSequence

BUCKET = Bucket(48, 8, 32)
BACKENDS = {
    "delta rule": (delta_rule, delta_rule.gated_delta_rule),
    "delta rule with states": (
        delta_rule,
        lambda q, k, v, g, beta, packed, norm: delta_rule.with_states(
            q, k, v, g, beta, torch.zeros(1), packed, norm
        )[0],
    ),
    "KDA": (kda, kda.kda),
}


def row_of(*lengths: int) -> PackedSequence:
    return in_bucket(PackedSequence.from_lengths(lengths), BUCKET)


@pytest.mark.parametrize("name", BACKENDS)
def test_each_row_has_its_own_documents(name, monkeypatch):
    """FLA keeps what it computes of offsets, and knows them by the tensor."""
    module, run = BACKENDS[name]
    remembered, given = [], []

    def kernel(*inputs, cu_seqlens, **options):
        given.append(options)
        for tensor, lengths in remembered:
            if tensor is cu_seqlens:
                return lengths, None
        remembered.append((cu_seqlens, cu_seqlens.diff()))
        return remembered[-1][1], None

    monkeypatch.setattr(module, "_kernel", lambda: kernel)
    x = torch.zeros(1, 48, 1, 4)
    packed = CapturedSequence.of(row_of(3, 30))
    for lengths in ((3, 30), (20, 8, 2)):
        packed.become(row_of(*lengths))
        found = run(x, x, x, x, x[..., 0], packed, True)
        assert found.tolist() == row_of(*lengths).cu_seqlens.diff().tolist()
    # a captured record refuses to be read on the host: FLA plans KDA's chunks in the graph
    assert all("cu_seqlens_cpu" not in options for options in given)
    assert all(options.get("use_graph", False) == (name == "KDA") for options in given)


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_of_other_rows_share_what_is_remembered(name, monkeypatch):
    module, run = BACKENDS[name]
    given = []
    monkeypatch.setattr(module, "_kernel", lambda: lambda *_, **words: (given.append(words), None))
    x, packed = torch.zeros(1, 33, 1, 4), PackedSequence.from_lengths([3, 30])
    for _ in range(2):
        run(x, x, x, x, x[..., 0], packed, True)
    assert all(words["cu_seqlens"] is packed.cu_seqlens for words in given)
    assert not any(words.get("use_graph") for words in given)


def test_buffers_of_kda_are_made_anew_in_each_captured_row(monkeypatch):
    """As memory of the graph; FLA keeps them for each length, whoever drops the graph."""
    buffers = SimpleNamespace(_BUFFERS={"wy_dq": torch.zeros(3)})
    monkeypatch.setitem(sys.modules, "fla.ops.utils.graph", buffers)
    monkeypatch.setattr(kda, "_kernel", lambda: lambda *_, **__: (None, None))
    x = torch.zeros(1, 48, 1, 4)
    kda.kda(x, x, x, x, x[..., 0], PackedSequence.from_lengths([40, 8]), True)
    assert buffers._BUFFERS
    kda.kda(x, x, x, x, x[..., 0], row_of(3, 30), True)
    assert not buffers._BUFFERS
