"""Upstream's tensor parallel plan in two processes; pipelines."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import Qwen3_5ForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_packfree import apply_patches, patch_report, remove_patches
from hf_packfree.errors import PatchConflict, UnsupportedInput
from tests.input_formats import row_batch
from tests.integrations.compare import (
    RATE,
    descend,
    in_steps,
    labelled,
    packed,
    per_document,
    worst,
)
from tests.integrations.marks import integration
from tests.ranks import two_ranks
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    ROW,
    assert_exact,
    checkpoint_layers,
    errors,
    random_weights,
    run,
    run_alone,
    tiny,
    wrap_layers,
)


def check(error: float, control: float, record_property) -> None:
    record_property("error", error)
    record_property("control", control)
    assert error <= GRADIENT_TOL and control >= CONTROL * GRADIENT_TOL


def tensor_parallel(rank: int, folder: str, patched: bool) -> list[dict[str, torch.Tensor]]:
    """Load with upstream's plan, patch, and train: every rank sees the same row."""
    from transformers.distributed import DistributedConfig

    model = Qwen3_5ForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto")
    ).train()
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    assert any("linear_attn" in name for name in sharded) and any(
        "self_attn" in name for name in sharded
    )
    if patched:
        apply_patches(model)
    kept = []
    for step in in_steps(labelled()):
        model.zero_grad(set_to_none=True)
        model(**packed(step)).loss.backward()
        kept.append(
            {
                name: _whole(p.grad).clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )
        descend(model, RATE)
    assert patch_report(model).patched == patched
    return kept


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@integration(
    "transformers",
    'tensor parallel, `tp_plan="auto"`',
    "works if patched after loading; ranks repeat the delta rule",
)
def test_tensor_parallel(tmp_path, record_property):
    tiny().save_pretrained(tmp_path / "checkpoint")
    cases = [(str(tmp_path / "checkpoint"), patched) for patched in (True, False)]
    wanted = per_document(tiny(), in_steps(labelled()))
    check(
        *(worst(first, wanted) for first, _ in two_ranks(tensor_parallel, cases, tmp_path)),
        record_property,
    )


def inside_fsdp1(rank: int, orig: bool) -> str | None:
    """Wrap, then patch: return what it is refused with."""
    model = tiny()
    policy = ModuleWrapPolicy({type(layer) for layer in model.model.layers})
    cpu = torch.device("cpu")
    wrapped = FSDP1(model, device_id=cpu, use_orig_params=orig, auto_wrap_policy=policy)
    try:
        apply_patches(wrapped)
    except PatchConflict as error:
        return str(error)
    return None


def test_parameters_that_fsdp1_cut_are_refused_by_its_name(tmp_path):
    """Of every layer each rank has another part, or nothing."""
    cut, whole = two_ranks(inside_fsdp1, [(True,), (False,)], tmp_path)
    for found in cut:
        assert "FullyShardedDataParallel" in found and "call apply_patches(model) first" in found
    assert whole == (None, None), "what is hidden while it is cut is as it was"


def patches_removed_in_fsdp1(rank: int, reentrant: bool | None) -> str | None:
    """Remove patches between forward and backward of layers that transformers recomputes, or, for
    None, torch's wrapper: return the refusal.
    """
    model = apply_patches(tiny("gemma2"))
    if reentrant is None:
        wrap_layers(model, checkpoint_impl=CheckpointImpl.REENTRANT)
    else:
        checkpoint_layers(model, reentrant)
    policy = ModuleWrapPolicy({type(layer) for layer in model.model.layers})
    wrapped = FSDP1(
        model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy
    )
    loss = wrapped(**row_batch("positions", ROW).inputs).logits.square().mean()
    remove_patches(model)
    try:
        loss.backward()
    except PatchConflict as error:
        return str(error)
    return None


def test_layers_in_fsdp1_that_lost_their_patches_are_not_computed_again(tmp_path):
    """Recomputed with `use_reentrant=True` they would read each other's documents in silence."""
    for found in two_ranks(patches_removed_in_fsdp1, [(True,), (False,), (None,)], tmp_path):
        for said in found:
            assert said is not None and "found patches removed between the forward pass" in said


# one rank shards nothing, of which FSDP1 warns
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("backend", ["auto", {"loss": "upstream"}])
def test_logits_whose_weight_fsdp1_freed_are_refused_or_made(backend, one_rank):
    """In half precision it frees its copies behind the forward pass, and gathers none on demand."""
    model = apply_patches(tiny(), backend=backend)
    half = MixedPrecision(param_dtype=torch.bfloat16)
    cpu = torch.device("cpu")
    wrapped = FSDP1(model, device_id=cpu, use_orig_params=False, mixed_precision=half)
    inputs = packed(in_steps(labelled())[0])
    output = wrapped(**inputs)
    if backend == "auto":
        with pytest.raises(UnsupportedInput, match="FSDP1 after it freed .*'loss': 'upstream'"):
            output.logits.sum()
        return
    of_rows = ForCausalLMLoss(output.logits, inputs["labels"], output.logits.shape[-1])
    assert torch.allclose(of_rows, output.loss)


@integration(
    "torch",
    "pipeline parallel, traced (`torch.distributed.pipelining`)",
    "refused by torch with `RuntimeError`: where boundaries are read cannot be traced",
)
@pytest.mark.filterwarnings("default")
def test_a_traced_pipeline_is_refused():
    from torch.distributed.pipelining import SplitPoint, pipeline

    inputs, split = row_batch("positions", ROW).inputs, {"model.layers.2": SplitPoint.BEGINNING}
    with pytest.raises(RuntimeError, match="full graph"):
        pipeline(apply_patches(tiny().eval()), mb_args=(), mb_kwargs=inputs, split_spec=split)
    assert not torch.distributed.is_initialized()


SPANS = slice(0, 2), slice(2, 4)


class Stages(torch.nn.Module):
    """A pipeline cut by hand, whose stages run the text model's forward on their own layers: the
    first has no norm and no head, the second no embeddings.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(copy.deepcopy(model) for _ in SPANS)
        for part, span in zip(self.parts, SPANS):
            part.config.layer_types = part.config.layer_types[span]
            part.config.num_hidden_layers = len(part.config.layer_types)
            part.model.layers = part.model.layers[span]
        self.parts[0].model.norm = self.parts[0].lm_head = torch.nn.Identity()
        self.parts[1].model.embed_tokens = None

    def forward(self, input_ids, **more):
        hidden = self.parts[0](input_ids=input_ids, **more).logits
        return self.parts[1](inputs_embeds=hidden, **more)


@pytest.mark.parametrize("when", ["before", "after"])
def test_stages_of_a_pipeline_keep_documents_apart(when):
    batch, alone = row_batch("positions", ROW), Stages(tiny())
    weights = random_weights(batch, 128)
    wanted = run_alone(alone, batch, weights)
    assert min(errors(run(alone, batch, weights), wanted)) >= CONTROL * GRADIENT_TOL
    stages = Stages(apply_patches(tiny()) if when == "before" else tiny())
    for part in stages.parts:
        # without embeddings, which reports and graphs ask for
        assert patch_report(apply_patches(part)).patched
    assert_exact(stages, batch, wanted)
