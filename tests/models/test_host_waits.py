"""What a GPU's host would wait for, looked for on a CPU: operations whose result's size, or value,
is on the device.

Planning is left out: it runs on host tensors.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from hf_packfree import PackFreeCallback, apply_patches
from hf_packfree.models import vision_attention, vision_language
from hf_packfree.packing import PackedSequence
from hf_packfree.patching.registry import FAMILIES
from hf_packfree.trainer import callback
from tests.input_formats import row_batch
from tests.support import ROW, tiny, trunk_of
from tests.vision import documents, packed_batch, padded_batch, tiny_vision

WAITS = {
    "nonzero",
    "masked_select",
    "masked_scatter_backward",
    "_local_scalar_dense",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "equal",
}
INDEXED = {"select_backward"}
"""The gradient of an index into the one row: a whole tensor is filled, and copied, in every
layer.
"""
BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""With boolean indices."""


FEW = 100
"""Elements; boolean indices of more are shared out among the host's threads."""


class Waits(TorchDispatchMode):
    """Lists operations that would wait, but for those of planning; of these the ones that wake
    the host's threads.
    """

    def __init__(self):
        super().__init__()
        self.found, self.threaded, self.planning = [], [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in BY_INDEX else ()
        marks = [
            index
            for index in indices
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        ]
        boolean, many = bool(marks), any(index.numel() > FEW for index in marks)
        sized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if not self.planning and (name in WAITS | INDEXED or boolean or sized):
            self.found.append(name)
        if self.planning and (many or sized and args[0].numel() > 1):
            self.threaded.append(name)
        return func(*args, **(kwargs or {}))

    def plans(self, function):
        def planned(*args, **kwargs):
            self.planning += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.planning -= 1

        return planned


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_vl", "qwen2_5_vl"])
def unpatched(request):
    return tiny_vision(request.param)


@pytest.fixture(scope="module")
def given(unpatched):
    """Documents with images; a row of images and videos waits in upstream's merge of both kinds'
    deepstack features.
    """
    return [one for one in documents(unpatched.model) if "video" not in one.pixels]


def batch_of(form, given, model):
    return (
        padded_batch("right", given) if form == "padded" else packed_batch(form, given, model.model)
    )


def waits_of(model, batch, patch):
    """Return the waits from the tower's first block to the text model's end, and in the whole
    backward pass.
    """
    waits = Waits()
    patch.setattr(
        vision_language, "packed_positions", waits.plans(vision_language.packed_positions)
    )
    patch.setattr(vision_attention, "segments_of", waits.plans(vision_attention.segments_of))
    patch.setattr(PackedSequence, "cached", waits.plans(PackedSequence.cached))
    first, last = model.model.visual.blocks[0], model.model.language_model
    handles = [
        first.register_forward_pre_hook(lambda *_: waits.__enter__() and None),
        last.register_forward_hook(lambda *_: waits.__exit__(None, None, None)),
    ]
    logits = batch.call(model).logits
    loss = (logits * torch.randn_like(logits)).sum()
    for handle in handles:
        handle.remove()
    forward, waits.found = waits.found, []
    with waits:
        loss.backward()
    return forward, waits.found


@pytest.mark.parametrize("form", ["4 rows", "offsets, types", "padded"])
def test_from_the_towers_blocks_to_the_text_models_end_and_back_nothing_waits(
    unpatched, given, form, monkeypatch
):
    model, batch = apply_patches(copy.deepcopy(unpatched)), batch_of(form, given, unpatched)
    assert waits_of(model, batch, monkeypatch) == ([], [])


@pytest.mark.parametrize("form", ["offsets, types", "padded"])
def test_planning_wakes_no_threads(unpatched, given, form, monkeypatch):
    """Where there are many of them, waking them takes milliseconds, before the tower and behind
    it.
    """
    model, batch, waits = (
        apply_patches(copy.deepcopy(unpatched)),
        batch_of(form, given, unpatched),
        Waits(),
    )
    for place, name in (
        (vision_language, "enter"),
        (vision_language, "packed_arguments"),
        (vision_language, "packed_positions"),
        (vision_attention, "_made_on_host"),
        (vision_attention, "segments_of"),
        (PackedSequence, "cached"),
    ):
        monkeypatch.setattr(place, name, waits.plans(getattr(place, name)))
    with waits:
        batch.call(model)
    assert waits.threaded == []


def test_control_upstream_waits_in_both_directions(unpatched, given, monkeypatch):
    forward, backward = waits_of(unpatched, padded_batch("right", given), monkeypatch)
    assert "_local_scalar_dense" in forward
    assert "masked_scatter_backward" in backward


@pytest.mark.parametrize("family", [row.name for row in FAMILIES if row.made_from_upstream])
def test_layers_of_other_families_never_wait(family, monkeypatch):
    """Lengths are read in front of them, once."""
    model, waits = apply_patches(tiny(family)), Waits()
    monkeypatch.setattr(PackedSequence, "cached", waits.plans(PackedSequence.cached))
    layers = trunk_of(model).layers
    inside = []
    layers[0].register_forward_pre_hook(lambda *_: inside.append(len(waits.found)))
    layers[-1].register_forward_hook(lambda *_: inside.append(len(waits.found)))
    with waits:
        logits = model(**row_batch("positions", ROW).inputs).logits
    first, last = inside
    assert 0 < first == last, waits.found
    waits.found.clear()
    with waits:
        (logits * torch.randn_like(logits)).sum().backward()
    # which a CPU's attention has in blocks of a window's keys
    assert not {*waits.found} - INDEXED, waits.found


@pytest.mark.parametrize("by", ["us", "the Trainer", "nobody"])
def test_between_steps_the_trainer_waits_for_nothing(by, tmp_path, monkeypatch):
    """What docs/fast.md says: by itself it waits for each loss, to filter it."""
    if by == "the Trainer":
        monkeypatch.setattr(callback, "filter_losses", lambda _: None)
    waits, between = Waits(), []

    class Counting(Trainer):
        def training_step(self, *args, **kwargs):
            between.append([*waits.found])
            loss = super().training_step(*args, **kwargs)
            waits.found.clear()
            return loss

    options = {"max_steps": 5, "per_device_train_batch_size": 2, "logging_steps": 100}
    options |= {"logging_nan_inf_filter": by != "nobody"}
    quiet = {"use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    trainer = Counting(
        tiny().train(),
        TrainingArguments(str(tmp_path), **options, **quiet),
        train_dataset=[{"input_ids": list(range(2, 22))} for _ in range(10)],
        data_collator=DataCollatorWithFlattening(),
        callbacks=[PackFreeCallback()],
    )
    with waits:
        trainer.train()
    # the first step is logged
    assert between[2:] == [["_local_scalar_dense"] * 2 * (by == "the Trainer")] * 3
