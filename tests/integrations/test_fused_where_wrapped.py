"""Which projections are fused where a model is wrapped: asked inside its forward pass, where their
weights are what the wrapper makes of them.

Fused means that kernels hold the weights (`plain_layers`); the CPU's backend calls layers anyway,
so the question is put by hooks on what holds the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from hf_packfree import apply_patches, patch_report
from hf_packfree.models.plain_layers import plain_layers
from hf_packfree.models.state import Kernels, PatchState
from hf_packfree.ops.table import OPS
from tests.integrations.compare import in_steps, labelled, packed
from tests.integrations.marks import needs
from tests.models.kernels import on_kernels, watched
from tests.support import tiny

# what is deprecated is PEFT's and torch's to change
pytestmark = [needs("peft"), pytest.mark.filterwarnings("default")]
PROJECTIONS = 31
"""Of the tiny model: 8 in each of three Gated DeltaNet layers, 7 in the attention layer."""


def answers(model: nn.Module) -> dict[str, torch.dtype | None]:
    """Return what is to hold, of each projection, the dtype in which it is multiplied, or None
    where it is called; filled by the first forward pass, without whose hooks the report is of what
    there was.
    """
    found: dict[str, torch.dtype | None] = {}
    handles: dict[nn.Module, Any] = {}

    def ask(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            handles.pop(module).remove()
            x = (*args, *kwargs.values())[0]
            for part, layer in module.named_children():
                if part.endswith("_proj") or part.startswith("in_proj"):
                    # those that read something else are only as wide as what they read
                    given = x.new_zeros(1, 2, layer.in_features)
                    read = plain_layers(given, layer)
                    weight = getattr(read[0], "weight", read[0]) if read else None
                    found[f"{name}.{part}"] = None if weight is None else weight.dtype

        return hook

    for name, module in model.named_modules():
        if name.endswith((".mlp", ".linear_attn", ".self_attn")):
            handles[module] = module.register_forward_pre_hook(ask(name), with_kwargs=True)
    return found


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def layers_of(model: nn.Module) -> Any:
    return next(m for name, m in model.named_modules() if name.endswith("layers"))


def fsdp2(model: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> nn.Module:
    """In bf16, from weights in fp32, as the documentation of torch shards a transformer."""
    for part in (*layers_of(model), model):
        shard(part, dtype)
    return model


def shard(part: Any, dtype: torch.dtype | None = torch.bfloat16, **options: Any) -> Any:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    return fully_shard(part, mesh=mesh, mp_policy=policy, **options)


def fsdp2_in_fp32(model: nn.Module) -> nn.Module:
    return fsdp2(model, None)


def fsdp2_of_groups(model: nn.Module) -> nn.Module:
    """Two layers at a time."""
    layers = [*layers_of(model)]
    for start in range(0, len(layers), 2):
        shard(layers[start : start + 2])
    return shard(model)


def fsdp2_of_adapters(model: nn.Module) -> nn.Module:
    """One group without the base, in bf16, that every rank has, as docs/parallel.md does it."""
    frozen = {one for one in model.parameters() if not one.requires_grad}
    for one in frozen:
        one.data = one.data.bfloat16()
    return shard(model, ignored_params=frozen)


def fsdp1(model: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> nn.Module:
    kinds = {type(layer) for layer in layers_of(model)}
    return FSDP1(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=dtype),
        auto_wrap_policy=ModuleWrapPolicy(kinds),
    )


def step(model: nn.Module, autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**packed(in_steps(labelled())[0])).loss.backward()


@pytest.mark.parametrize("adapted", [as_it_is, with_lora])
@pytest.mark.parametrize(
    ("wrap", "autocast"), [(ddp, True), (ddp, False), (fsdp2, True), (fsdp2, False)]
)
def test_every_projection_is_fused(wrap, autocast, adapted, one_rank):
    """In the dtype of the run: autocast's, the policy's, or that of the weights; the report says
    so, too, between steps, when weights are sharded.
    """
    model = adapted(apply_patches(tiny()))
    found = answers(model)
    step(wrapped := wrap(model), autocast)
    computes = torch.bfloat16 if autocast or wrap is fsdp2 else torch.float32
    assert len(found) == PROJECTIONS and set(found.values()) == {computes}
    assert patch_report(wrapped).called == {}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("wrap", [as_it_is, ddp, fsdp2, fsdp2_in_fp32])
@pytest.mark.parametrize(("op", "place", "calls"), [("add_norm", 2, 8), ("swiglu_mlp", 1, 4)])
def test_layers_of_plain_attention_are_fused(
    wrap, autocast, op, place, calls, one_rank, monkeypatch
):
    weights = watched(monkeypatch, op, place)
    step(wrap(on_kernels(tiny("llama"))), autocast)
    assert len(weights) == calls


def test_adapters_sharded_beside_a_whole_base_are_fused(one_rank):
    model = with_lora(apply_patches(tiny()))
    found = answers(model)
    step(wrapped := fsdp2_of_adapters(model), False)
    assert len(found) == PROJECTIONS and set(found.values()) == {torch.bfloat16}
    assert patch_report(wrapped).called == {}


def test_biases_of_adapters_are_counted_where_weights_are_sharded(one_rank):
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True)
    model = get_peft_model(apply_patches(tiny()), options)
    found = answers(model)
    step(wrapped := fsdp2(model), False)
    (called,) = {name for name, dtype in found.items() if dtype is None}
    assert called.endswith("q_proj")
    beside = {"one beside them that is called": 2}
    assert patch_report(wrapped).called == {"LoRA with a bias": 1} | beside


def test_projections_that_fsdp1_keeps_in_flat_parameters_are_called_and_counted(one_rank):
    """In forward passes they read views, which no layer holds as its own."""
    model = apply_patches(tiny())
    found = answers(model)
    step(wrapped := fsdp1(model), False)
    assert len(found) == PROJECTIONS and set(found.values()) == {None}
    assert patch_report(wrapped).called == {"FSDP1's flat parameters": PROJECTIONS}


def asked_in(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> set[torch.dtype]:
    """Return the dtypes for which kernels are asked meanwhile."""
    asked, kernels_for = set[torch.dtype](), PatchState.kernels_for

    def ask(state: PatchState, device: torch.device, dtype: torch.dtype) -> Kernels:
        asked.add(dtype)
        return kernels_for(state, device, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(PatchState, "kernels_for", ask)
        run()
    return asked


def said(monkeypatch: pytest.MonkeyPatch, model: nn.Module, autocast: bool = False) -> Any:
    """Return the report of a machine whose kernels are named as the dtype they are for."""

    def named(state: PatchState, device: torch.device, dtype: torch.dtype) -> Kernels:
        return Kernels(dict.fromkeys(OPS, str(dtype)))

    with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        patch.setattr(PatchState, "kernels_for", named)
        return patch_report(model)


@pytest.mark.parametrize(
    ("wrap", "dtype"),
    [
        (ddp, torch.float32),
        (fsdp2, torch.bfloat16),
        (fsdp2_of_groups, torch.bfloat16),
        (fsdp2_in_fp32, torch.float32),
        (fsdp1, torch.bfloat16),
        (partial(fsdp1, dtype=None), torch.float32),
    ],
)
def test_the_report_names_the_kernels_of_the_dtype_that_layers_compute_in(
    wrap, dtype, monkeypatch, one_rank
):
    """Weights are fp32 in all of them, before the first row and after it."""
    model = apply_patches(tiny())
    # a row that runs before sharding says nothing of those after it
    step(model, False)
    wrapped = wrap(model)
    before = said(monkeypatch, wrapped)
    assert asked_in(monkeypatch, lambda: step(wrapped, False)) == {dtype}
    assert set(before.implementations.values()) == {str(dtype)}
    assert before.attention == model.config._attn_implementation
    assert said(monkeypatch, wrapped) == before
    assert set(said(monkeypatch, wrapped, True).implementations.values()) == {"torch.bfloat16"}


def test_each_model_goes_by_its_own_policy(monkeypatch, one_rank):
    """Of layers, too, where the rest of the model has another."""
    half, single, both = (apply_patches(tiny()) for _ in range(3))
    fsdp2(half), fsdp2_in_fp32(single)
    for layer in both.model.layers:
        shard(layer)
    shard(both, None)
    found = [said(monkeypatch, model) for model in (half, single, both)]
    assert [set(one.implementations.values()) for one in found] == [
        {"torch.bfloat16"},
        {"torch.float32"},
        {"torch.bfloat16"},
    ]


@pytest.mark.parametrize(
    ("wrap", "rounds"), [(ddp, True), (fsdp2_in_fp32, True), (fsdp2, False), (fsdp1, False)]
)
def test_weights_that_fsdp_gathers_in_half_precision_are_not_rounded_by_autocast(
    wrap, rounds, monkeypatch, one_rank
):
    found = said(monkeypatch, wrap(apply_patches(tiny())), autocast=True)
    assert bool(found.autocast) == rounds


@pytest.mark.parametrize(
    ("adapted", "kind"), [(as_it_is, "sharded weights"), (with_lora, "LoRA on sharded weights")]
)
def test_projections_that_stay_sharded_are_called_and_counted(adapted, kind, one_rank):
    """As tensor parallelism leaves them, in the forward pass, too."""
    model = adapted(apply_patches(tiny()))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for name, module in model.named_modules():
        if type(module) is nn.Linear and "lora_" not in name and "lm_head" not in name:
            module.weight = nn.Parameter(
                distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
            )
    assert patch_report(model).called == {kind: PROJECTIONS}


def test_every_projection_is_fused_in_bf16_whose_fp32_copy_an_optimizer_holds():
    """The model that DeepSpeed's bf16 engine runs, without DeepSpeed: the fp32 weights are the
    optimizer's, and copied back after its step.
    """
    model = apply_patches(tiny().to(torch.bfloat16))
    found = answers(model)
    masters = [one.detach().float() for one in model.parameters()]
    step(model, False)
    with torch.no_grad():
        for one, master in zip(model.parameters(), masters, strict=True):
            one.copy_(master - 0.1 * one.grad.float())
    step(model, False)
    assert len(found) == PROJECTIONS and set(found.values()) == {torch.bfloat16}


@pytest.mark.slow
def test_a_compiled_layer_calls_its_projections_and_the_others_are_fused():
    """A graph has joined what it can by itself."""
    torch.compiler.reset()
    model = apply_patches(tiny())
    found = answers(model)
    model.model.layers[0].compile(backend="eager")
    step(model, True)
    torch.compiler.reset()
    called = {name for name, dtype in found.items() if dtype is None}
    assert patch_report(model).called == {"torch.compile": len(called)}
    assert patch_report(torch.compile(model)).called == {"torch.compile": PROJECTIONS}
    assert len(found) == PROJECTIONS and len(called) == 8
    assert all(name.startswith("model.layers.0.") for name in called)
