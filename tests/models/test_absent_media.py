"""Two processes, one of which has no images, no video or no audio: nobody waits, the gradient is
the mean of both alone.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_packfree import apply_patches
from hf_packfree.models.rope_index import rope_source
from tests.models import omni
from tests.ranks import two_ranks
from tests.support import GRADIENT_TOL, gradients, worst_gradient
from tests.vision import document, image, packed_batch, tiny_vision, video

ROWS = {
    "text": [document(9, seed=1), document(14, seed=2)],
    "images": [document(5, image(4, 4), 3, seed=3), document(8, seed=4)],
    "all": [document(3, image(4, 6), 2, video(2, 4, 4), 3, seed=5), document(4, seed=6)],
}
OMNI_ROWS = {
    "audio": [omni.Document().text(5).audio(60).text(3), omni.Document().text(8)],
    "images": [omni.Document().text(4), omni.Document().text(2).image(4, 6).text(3)],
}
CASES = [
    ("qwen3_5", "DDP", "images text", "trained"),
    ("qwen3_5", "FSDP2", "images text", "trained"),
    ("qwen3_5", "FSDP2", "all images", "trained"),
    ("qwen3_5", "FSDP2", "text all", "frozen"),
    ("qwen3_omni_moe", "DDP", "audio images", "trained"),
    ("qwen3_omni_moe", "FSDP2", "audio images", "trained"),
]


def towers(model) -> list[torch.nn.Module]:
    """Return the towers of images and of audio."""
    return [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ("visual", "audio_tower")
    ]


def step(model, rows: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a fixed functional of a row's logits."""
    inner = getattr(model, "module", model)
    model.zero_grad(set_to_none=True)
    if hasattr(inner.config, "audio_config"):
        given = OMNI_ROWS[rows]
        media = omni.arguments(
            given, {kind: [x.detach() for x in xs] for kind, xs in omni.leaves_of(given).items()}
        )
        logits = model(**omni.row(given, "offsets", None)[0], **media, use_cache=False).logits
    else:
        batch = packed_batch("4 rows", ROWS[rows], rope_source(inner.config))
        batch.pixels = [
            {kind: pixels.detach() for kind, pixels in own.items()} for own in batch.pixels
        ]
        logits = batch.call(model).logits
    logits.pow(2).mean().backward()
    # softmax ignores the keys' bias in the audio tower: its gradient is noise
    return {
        name: grad for name, grad in gradients(model).items() if not name.endswith("k_proj.bias")
    }


def patched(family: str, tower: str) -> torch.nn.Module:
    model = apply_patches(tiny_vision(family))
    for one in towers(model):
        one.requires_grad_(tower == "trained")
    return model


def gradients_of(
    rank: int, family: str, wrapper: str, rows: str, tower: str
) -> dict[str, torch.Tensor]:
    """What a rank finds in the second of two steps, on rows of its own."""
    model = patched(family, tower)
    if wrapper == "FSDP2":
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        layers = [
            module
            for name, module in model.named_modules()
            if name.split(".")[-2:-1] in (["layers"], ["blocks"])
        ]
        for part in (*layers, model.get_input_embeddings(), model):
            fully_shard(part, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    for _ in range(2):
        grads = step(model, rows.split()[rank])
    whole = {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in grads.items()
    }
    return {name.removeprefix("module."): grad for name, grad in whole.items()}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The gradients that two ranks have, {case: each rank's}."""
    return dict(zip(CASES, two_ranks(gradients_of, CASES, tmp_path_factory.mktemp("ranks"))))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_a_rank_without_media_stays_in_step(ran, case):
    family, _, rows, tower = case
    each = [step(patched(family, tower), row) for row in rows.split()]
    names = each[0].keys() | each[1].keys()
    wanted = {name: sum(grads[name] for grads in each if name in grads) / 2 for name in names}
    for found in ran[case]:
        assert worst_gradient(found, wanted) <= GRADIENT_TOL


def test_one_process_runs_no_tower_on_zeros():
    model = apply_patches(tiny_vision("qwen3_5"))
    assert not any("visual" in name for name in step(model, "text"))
