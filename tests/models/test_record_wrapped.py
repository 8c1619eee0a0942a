"""The record where FSDP2 wraps the layers: each gets the one that the others get, and its plans."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_packfree import PackedSequence, apply_patches
from hf_packfree.packing import shard_row
from hf_packfree.packing.opaque import replaced
from tests.support import documents, tiny

RECORDS = {
    "documents": PackedSequence.from_lengths([40, 30, 29, 1]),
    "tree": PackedSequence.from_tree([40, 30, 29, 1], [None, 0, 0, None]),
}


@pytest.fixture
def made(monkeypatch):
    """The plans that have been made, of any record, by how often."""
    found, cached = Counter[str](), PackedSequence.cached

    def counted(packed, build, *args):
        known = {*packed._memo}
        plan = cached(packed, build, *args)
        found.update({*packed._memo} - known)
        return plan

    monkeypatch.setattr(PackedSequence, "cached", counted)
    return found


def step(model: torch.nn.Module, name: str) -> list[PackedSequence]:
    """Train on a record's row, and return what each layer got as its record."""
    record, found = replaced(RECORDS[name], _memo={}), list[PackedSequence]()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: found.append(kwargs["packed_sequence"]), with_kwargs=True
        )
    ids = torch.cat(documents(record.lengths))[None]
    model(input_ids=ids, packed_sequence=record).logits.float().pow(2).mean().backward()
    return found


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("grouped", [False, True], ids=["by layer", "in one group"])
def test_layers_share_one_record_and_its_plans(name, grouped, one_rank, made):
    """FSDP2 casts what is among a layer's arguments, and for that copies what it can look into."""
    step(apply_patches(tiny()), name)
    wanted = Counter(made)
    made.clear()
    model = apply_patches(tiny())
    layers = [*model.model.layers]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in ([layers] if grouped else layers) + [model]:
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    records = step(model, name)
    assert len(records) == len(layers) and all(one is records[0] for one in records)
    assert wanted and made == wanted


def test_a_record_with_other_fields_is_another():
    packed = PackedSequence.from_lengths([3, 5])
    shard = shard_row(packed, 1, 2)
    other = replaced(shard, batch_shape=(2, 2))
    assert type(other) is PackedSequence and other is not shard
    assert (other.batch_shape, shard.batch_shape) == ((2, 2), (1, 4))
    assert other.shard is shard.shard and other.cu_seqlens is shard.cu_seqlens
    with pytest.raises(TypeError, match="wrong"):
        replaced(packed, wrong=1)
