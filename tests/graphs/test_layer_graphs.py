"""Layers that FSDP2 shards, each in a graph of its own: with a stand-in that runs a layer again where
a GPU would replay a graph, and that ruins what later replays may overwrite.

The bits of real graphs are tested on GPUs (tests/gpu/test_layer_graphs.py).
"""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3_5ForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

from hf_packfree import PackedSequence, apply_patches, patch_report
from hf_packfree.graphs import captures, checkpointing, layer_graphs
from hf_packfree.graphs.captured_sequence import CapturedSequence
from hf_packfree.graphs.layer_calls import CallsOfLayers, forwards_of
from hf_packfree.graphs.settings import Settings
from hf_packfree.models.qwen3_5 import tiny_config
from hf_packfree.ops.seeds import Seeds
from tests.graphs import on_cpu
from tests.graphs.test_runner import ROWS, hidden, inputs_of
from tests.integrations.marks import needs
from tests.parallel.trainers import as_on_gpus
from tests.ranks import on_ranks
from tests.support import (
    GRADIENT_TOL,
    LOGIT_TOL,
    checkpoint_layers,
    relative_rms,
    runner_of,
    tiny,
    whole_gradients,
    wrap_layers,
)

WRAPPINGS = {
    "each layer": {},
    "kept": {"reshard": False},
    "two layers": {"size": 2},
    "as accelerate": {"embedding": True},
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    on_cpu.let_capture_whole_documents(monkeypatch)


def plain_model():
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(tiny_config()).train()


def shard(model, size=1, reshard=True, embedding=False, **options):
    """Shard the layers and the rest over all ranks; as accelerate does also the embedding by itself,
    and what comes after the layers.
    """
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if embedding:
        fully_shard(model.get_input_embeddings(), mesh=mesh, **options)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, **options)
    layers = [*model.base_model.layers]
    for start, end in pairwise([*range(0, len(layers), size), len(layers)]):
        fully_shard(layers[start:end], mesh=mesh, reshard_after_forward=reshard, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def sharded(size=1, reshard=True, prepare=None, **options):
    model = plain_model()
    if prepare is not None:
        prepare(model)
    return shard(apply_patches(model, cuda_graphs="auto"), size, reshard, **options)


def step(model, lengths, seed=0):
    """Run a row forward and backward; return its logits."""
    logits = model(**inputs_of(lengths, seed)).logits
    logits.float().square().mean().backward()
    return logits.detach()


def assert_trains_as(model, other, rows=ROWS * 2, bits=False):
    """Compare rows, and gradients that add up, with those of a model without graphs."""
    values, grads = (0, 0) if bits else (LOGIT_TOL, GRADIENT_TOL)
    for seed, lengths in enumerate(rows):
        assert relative_rms(step(model, lengths, seed), step(other, lengths, seed)) <= values
        assert_same_gradients(model, other, grads)


def assert_same_gradients(model, other, tol=GRADIENT_TOL):
    mine, its = whole_gradients(model), whole_gradients(other)
    assert mine.keys() == its.keys()
    for name, grad in mine.items():
        assert relative_rms(grad, its[name]) <= tol, name


@pytest.mark.parametrize("name", WRAPPINGS)
def test_a_sharded_model_trains_as_one_without_graphs(name, one_rank):
    model, other = sharded(**WRAPPINGS[name]), apply_patches(plain_model())
    assert_trains_as(model, other)
    # the first row is seen, the second notes how layers are called
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


# of checkpointing's newer name
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_recomputed(one_rank, reentrant):
    model, other = (
        sharded(prepare=lambda model: checkpoint_layers(model, reentrant=reentrant)),
        apply_patches(plain_model()),
    )
    assert_trains_as(model, other)
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


def sharded_and_wrapped(within, **options):
    """What the wrappers wrap is sharded, or as torchtitan does it, the wrappers."""
    model = apply_patches(plain_model(), cuda_graphs="auto")
    # which upstream's layers would write into twice
    model.config.use_cache = False
    if not within:
        wrap_layers(model, **options)
        return shard(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    wrap_layers(model, **options)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS = {
    "what it wraps": {"within": True, "preserve_rng_state": False},
    "as torchtitan": {"within": False},
    "reentrant": {"within": False, "checkpoint_impl": CheckpointImpl.REENTRANT},
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_layers_that_torch_s_wrapper_recomputes(name, one_rank):
    model, other = sharded_and_wrapped(**WRAPPERS[name]), apply_patches(plain_model())
    functions = [layer.checkpoint_fn for layer in model.base_model.layers]
    assert_trains_as(model, other)
    assert runner_of(model).replayed == 2 * len(ROWS) - 2
    assert functions == [layer.checkpoint_fn for layer in model.base_model.layers]


class Doubling(CheckpointWrapper):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


def test_a_wrapper_with_a_forward_of_its_own_is_not_passed_by(one_rank):
    model, other = sharded(), apply_patches(plain_model())
    for each in (model, other):
        each.config.use_cache = False
        each.base_model.layers[1] = Doubling(each.base_model.layers[1])
    assert_trains_as(model, other, ROWS[:3])
    why = "3 because layers.1._checkpoint_wrapped_module is sharded by itself"
    assert why in patch_report(model).cuda_graphs


def test_a_wrapper_with_another_module(one_rank):
    """What is set on a layer lands there."""
    model = sharded_and_wrapped(**WRAPPERS["what it wraps"])
    model.base_model.layers[0].tap = torch.nn.Identity()
    assert_trains_as(model, apply_patches(plain_model()))
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


class Interrupted(CheckpointWrapper):
    """Who interrupts does so where its function is set for the second time."""

    times = 0

    def __setattr__(self, name, value):
        if name == "checkpoint_fn":
            Interrupted.times += 1
            if Interrupted.times == 2:
                raise KeyboardInterrupt
        super().__setattr__(name, value)


def test_wrappers_are_left_as_they_were_however_a_capture_ends():
    layers = torch.nn.ModuleList(map(checkpoint_wrapper, [Pass(), Pass()]))
    layers.append(Interrupted(Pass()))
    functions = [layer.checkpoint_fn for layer in layers]
    captured = checkpointing.in_capture(layers, has_gradients=True, seeds=Seeds())
    with pytest.raises(KeyboardInterrupt), captured:
        pass
    assert [layer.checkpoint_fn for layer in layers] == functions


def test_what_has_no_room_leaves_no_memory(one_rank, monkeypatch):
    monkeypatch.setattr(captures, "free_memory", lambda device: 0.0)
    memory, made = [], layer_graphs.GatheredWeights.__init__

    def noted(self, *args):
        made(self, *args)
        memory.append(weakref.ref(self))

    monkeypatch.setattr(layer_graphs.GatheredWeights, "__init__", noted)
    model = sharded()
    for seed in range(4):
        step(model, ROWS[0], seed)
    gc.collect()
    assert "of the GPU's memory would be free" in patch_report(model).cuda_graphs
    assert memory and not any(each() is not None for each in memory)


LONGER = (70, 30), (50, 20, 30), (9, 90), (40, 40, 17)


def test_rows_of_another_length_are_known_from_those_before(one_rank):
    model, other = sharded(), apply_patches(plain_model())
    assert_trains_as(model, other, [*ROWS, *LONGER, *ROWS, *LONGER])
    # the first row of all is seen, the second notes how layers are called
    assert runner_of(model).replayed == 4 * len(ROWS) - 2


def test_sizes_that_do_not_tell_the_row_are_noted_once_more():
    layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])

    def noted(tokens):
        calls = CallsOfLayers(layers)
        with forwards_of(layers, lambda n, own: calls.noting(n, lambda x, *_, **__: own(x))):
            layers[0](torch.zeros(1, tokens, 8), (torch.ones(1, tokens, 16), torch.ones(3)))
        calls.end()
        return calls

    assert noted(16).resized(16, 32) is None
    (call,) = noted(32).resized(32, 48).calls
    (rotary, constant), *rest = call.arguments[0]
    assert rotary.shape == (1, 48, 16) and constant.shape == (3,) and not rest
    assert call.hidden.shape == (1, 48, 8)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8))

    def forward(self, hidden_states, scales, by, packed_sequence=None):
        return hidden_states + torch.sin(hidden_states * self.weight * scales["all"]) * by


GIVEN = {
    "the same": ([1, 1], [3, 3]),
    "a tensor each": ([1, 2], [3, 3]),
    "another number": ([1, 1], [3, 4]),
}


@pytest.mark.parametrize("given", GIVEN)
def test_what_layers_are_given_otherwise_is_seen(given):
    """In the first row both were given one tensor, and one number."""
    torch.manual_seed(0)
    layers, x = torch.nn.ModuleList([Scaled(), Scaled()]), torch.randn(1, 16, 8)
    row = PackedSequence.from_lengths([16])

    def run(scales, numbers):
        hidden = x.clone().requires_grad_()
        for layer, scale, by in zip(layers, scales, numbers, strict=True):
            hidden = layer(hidden, {"all": scale}, by, packed_sequence=row)
        return hidden

    def gradients_of(out):
        layers.zero_grad()
        out.exp().sum().backward()
        return [layer.weight.grad.clone() for layer in layers]

    calls, one = CallsOfLayers(layers), torch.ones(1, 16, 8)
    with forwards_of(layers, calls.noting):
        run([one, one], [3, 3])
    calls.end()
    pool = on_cpu.OnACPU(torch.device("cpu"), None, 16)
    graphs = layer_graphs.LayerGraphs(calls, CapturedSequence.of(row), pool, {}, None)
    scales, numbers = GIVEN[given]
    # equal scales are one tensor
    of_scale = {scale: one * scale for scale in scales}
    tensors = [of_scale[scale] for scale in scales]
    found = graphs.run(lambda: run(tensors, numbers), lambda: row)
    wanted = run(tensors, numbers)
    assert torch.equal(found, wanted) and graphs.is_stale == (given != "the same")
    pairs = zip(gradients_of(found), gradients_of(wanted), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_rows_are_what_their_documents_are_alone(one_rank):
    model, other = sharded(), plain_model().eval()
    for seed, lengths in enumerate(ROWS * 2):
        found = step(model, lengths, seed)
        parts = inputs_of(lengths, seed)["input_ids"].split(lengths, 1)
        with torch.no_grad():
            alone = torch.cat([other(input_ids=ids).logits for ids in parts], 1)
            together = other(input_ids=torch.cat(parts, 1)).logits
        assert relative_rms(found, alone) <= LOGIT_TOL
        assert len(lengths) == 1 or relative_rms(together, alone) > 1e-2, "the control leaks"
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


def test_the_precision_of_the_policy(one_rank):
    """fp32 shards, gathered in bf16: the bits of the same layers without graphs."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mp_policy=policy)
    other = shard(apply_patches(plain_model()), mp_policy=policy)
    assert_trains_as(model, other, bits=True)
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


def put_adapters(model):
    import peft

    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(model, config)


@needs("peft")
# what is deprecated is PEFT's to change
@pytest.mark.filterwarnings("default")
def test_adapters_and_what_they_adapt(one_rank):
    model, other = sharded(prepare=put_adapters), plain_model()
    put_adapters(other)
    other.load_state_dict(
        {name: x.full_tensor() for name, x in model.state_dict().items()}, assign=True
    )
    assert_trains_as(model, apply_patches(other))
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


@needs("peft")
@pytest.mark.filterwarnings("default")
def test_adapters_alone_that_are_gathered_all_at_once(one_rank):
    """With what is around the layers, at another address in each step."""
    model, other = plain_model(), plain_model()
    for each in (model, other):
        put_adapters(each)
    other.load_state_dict(model.state_dict())
    frozen = {one for one in model.parameters() if not one.requires_grad}
    apply_patches(model, cuda_graphs="auto")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), ignored_params=frozen)
    assert_trains_as(model, apply_patches(other))
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


def test_weights_that_change_are_read(one_rank):
    model, other = sharded(), apply_patches(plain_model())
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, other)]
    for seed, lengths in enumerate(ROWS * 2):
        assert relative_rms(step(model, lengths, seed), step(other, lengths, seed)) <= LOGIT_TOL
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


def test_gradients_that_are_not_reduced_yet(one_rank):
    model, other = sharded(), apply_patches(plain_model())
    for seed, lengths in enumerate(ROWS * 2):
        model.set_requires_gradient_sync(seed % 3 == 2)
        step(model, lengths, seed)
        step(other, lengths, seed)
        if seed % 3 == 2:
            assert_same_gradients(model, other)
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


def test_parts_that_are_frozen_later(one_rank):
    model, other = sharded(), apply_patches(plain_model())
    assert_trains_as(model, other, ROWS)
    for each in (model, other):
        each.base_model.layers[1].requires_grad_(False)
        each.zero_grad()
    before = runner_of(model).replayed
    assert_trains_as(model, other)
    # lengths that were seen stay known
    assert runner_of(model).replayed == before + 2 * len(ROWS) - 1


def test_a_row_before_the_backward_pass_of_the_last_runs_without(one_rank):
    model, other = sharded(), apply_patches(plain_model())
    for each in (model, other):
        for seed in range(3):
            step(each, ROWS[0], seed)
        losses = [each(**inputs_of(ROWS[1], seed)).logits.square().mean() for seed in (7, 8)]
        sum(losses).backward()
    assert_same_gradients(model, other)
    why = "1 because the backward pass of a row before is still to come"
    assert why in patch_report(model).cuda_graphs


def test_a_second_backward_pass_is_refused(one_rank):
    model = sharded()
    for _ in range(2):
        step(model, ROWS[0])
    loss = model(**inputs_of(ROWS[0])).logits.square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass"):
        loss.backward()


def test_an_evaluation_in_between(one_rank):
    model, other = sharded(), apply_patches(plain_model())
    for seed, lengths in enumerate(ROWS * 2):
        assert relative_rms(step(model, lengths, seed), step(other, lengths, seed)) <= LOGIT_TOL
        with torch.no_grad():
            found, wanted = (each.eval()(**inputs_of(ROWS[1])).logits for each in (model, other))
        assert relative_rms(found, wanted) <= LOGIT_TOL
        model.train(), other.train()
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


def test_a_layer_that_fails_leaves_the_layers_as_they_were(one_rank):
    model = sharded()
    layer = model.base_model.layers[1]
    for number in range(4):
        handle = layer.mlp.register_forward_pre_hook(lambda *_: 1 / 0) if number == 3 else None
        if handle is None:
            step(model, ROWS[0], number)
            continue
        with pytest.raises(ZeroDivisionError):
            step(model, ROWS[0])
        handle.remove()
    assert not any("forward" in vars(layer) for layer in model.base_model.layers)


def test_memory_that_a_layer_has_no_more(monkeypatch, one_rank):
    """Who captures on one rank alone gathers what the others gather."""

    def fail(self, d_out, pool):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(on_cpu.LayerAgain, "capture_backward", fail)
    model, other = sharded(), apply_patches(plain_model())
    assert_trains_as(model, other)
    assert runner_of(model).replayed == 0
    assert (
        "the capture failed: OutOfMemoryError: CUDA out of memory"
        in patch_report(model).cuda_graphs
    )


def by_itself(model):
    fully_shard(model.base_model.layers[1].mlp, mesh=init_device_mesh("cpu", (1,)))


def hooked(model):
    model.base_model.layers[1].register_forward_hook(lambda *_: None)


def other_checkpoint(model):
    checkpoint_layers(model)
    for layer in model.base_model.layers:
        layer._gradient_checkpointing_func = lambda function, *args: checkpoint(
            function, *args, use_reentrant=False
        )


def hooked_norm(model):
    model.base_model.norm.register_forward_hook(lambda *_: None)


def other_norm(model):
    norm = model.base_model.norm
    norm.forward = lambda x, forward=norm.forward: forward(x)


def noised(model):
    """As the Trainer does with `neftune_noise_alpha`."""
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = 5
    embedding.register_forward_hook(neftune_post_forward_hook)


def offloaded(model):
    layers = model.base_model.layers
    layers[1] = offload_wrapper(layers[1])


def compiled(model):
    """As `layer.compile()` does, without compiling."""
    layer = model.base_model.layers[2]
    layer._compiled_call_impl = layer._call_impl


WHY_NOT = {
    "layers.1.mlp is sharded by itself": by_itself,
    "layers.1 has hooks": hooked,
    "layers are recomputed by another function than torch's checkpoint": other_checkpoint,
    "activations are offloaded": offloaded,
    "norm has hooks, which would see padding": hooked_norm,
    "embed_tokens has hooks, which would see padding": noised,
    "norm has a forward of its own, which would see padding": other_norm,
    "layers.2 is compiled": compiled,
}


# of checkpointing's newer name
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("why", WHY_NOT)
def test_layers_that_are_called_in_another_way_run_without(why, one_rank):
    model, other = sharded(prepare=WHY_NOT[why]), plain_model()
    if WHY_NOT[why] is noised:
        noised(other)
    apply_patches(other)
    for seed, lengths in enumerate(ROWS[:2]):
        for each in (model, other):
            torch.manual_seed(seed)
            step(each, lengths, seed)
        assert_same_gradients(model, other)
    assert f"2 because {why}" in patch_report(model).cuda_graphs


def test_a_hook_that_comes_later(one_rank):
    model, other = sharded(), apply_patches(plain_model())
    assert_trains_as(model, other, ROWS)
    for each in (model, other):
        noised(each)
    replayed = runner_of(model).replayed
    for seed, lengths in enumerate(ROWS):
        for each in (model, other):
            torch.manual_seed(seed)
            step(each, lengths, seed)
        assert_same_gradients(model, other)
    assert runner_of(model).replayed == replayed


def test_hooks_that_let_embeddings_have_gradients(one_rank):
    """LoRA with checkpointing needs them; padding is nothing to them."""
    model, other = plain_model(), apply_patches(plain_model())
    model.enable_input_require_grads()
    shard(apply_patches(model, cuda_graphs="auto"))
    assert_trains_as(model, other)
    assert runner_of(model).replayed == 2 * len(ROWS) - 2


@pytest.mark.parametrize("shards", [True, False])
def test_embeddings_that_a_forward_multiplies(shards, one_rank):
    """Falcon-H1's does so with those of ids, and not with `inputs_embeds`."""
    model = apply_patches(tiny("falcon_h1").train(), cuda_graphs="auto")
    other = apply_patches(tiny("falcon_h1").train())
    other.load_state_dict(model.state_dict())
    assert_trains_as(shard(model) if shards else model, other, ROWS)
    assert "multiplies the embeddings of ids" in patch_report(model).cuda_graphs


def inputs_without_gradients(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    embeddings = torch.randn(1, sum(lengths), 64, generator=generator)
    return {"inputs_embeds": embeddings, "position_ids": positions}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("shards", [True, False])
def test_reentrant_checkpointing_of_inputs_without_gradients(shards, one_rank):
    """No layer gets any then, as torch warns."""
    model, other = (apply_patches(plain_model(), cuda_graphs=how) for how in ("auto", "never"))
    for each in (model, other):
        checkpoint_layers(each, reentrant=True)
    model = shard(model) if shards else model
    for seed, lengths in enumerate(ROWS):
        for each in (model, other):
            each(**inputs_without_gradients(lengths, seed)).logits.exp().mean().backward()
        assert_same_gradients(model, other)
    assert len(whole_gradients(model)) == 2
    assert "use_reentrant=True from inputs without gradients" in patch_report(model).cuda_graphs


class Pass(torch.nn.Module):
    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


def test_a_layer_without_weights(one_rank):
    models = apply_patches(plain_model(), cuda_graphs="auto"), apply_patches(plain_model())
    for model in models:
        model.base_model.layers[2] = Pass()
    assert_trains_as(shard(models[0]), models[1])
    assert runner_of(models[0]).replayed == 2 * len(ROWS) - 2


def give_a_bias(layer):
    layer.mlp.up_proj.bias = torch.nn.Parameter(torch.ones(layer.mlp.up_proj.out_features))


def take_the_bias(layer):
    layer.mlp.up_proj.bias = None


@pytest.mark.parametrize("change", [give_a_bias, take_the_bias])
def test_parameters_that_come_and_go(one_rank, change):
    """Of weights that FSDP2 leaves alone: what is around them is gathered at once."""
    models = plain_model(), plain_model()
    for model in models:
        for layer in model.base_model.layers:
            give_a_bias(layer)
        if change is give_a_bias:
            take_the_bias(model.base_model.layers[1])
        layers = {*model.base_model.layers.parameters()}
        for weight in layers:
            weight.requires_grad_(False)
    other, model = apply_patches(models[0]), apply_patches(models[1], cuda_graphs="auto")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), ignored_params=layers)
    assert_trains_as(model, other, ROWS)
    graphs, replayed = {*runner_of(model).captures.graphs.values()}, runner_of(model).replayed
    for each in (model, other):
        change(each.base_model.layers[1])
        each.base_model.layers[1].requires_grad_(False)
    assert_trains_as(model, other)
    assert runner_of(model).replayed > replayed
    assert not graphs & {*runner_of(model).captures.graphs.values()}


def test_rows_without_a_graph_are_all_counted(one_rank, monkeypatch):
    model, rows = sharded(), 0
    for number in range(8):
        model.base_model.layers[1].requires_grad_(number % 2 == 0)
        for seed in range(3):
            step(model, ROWS[0], seed)
        rows += 3
    # a change that nobody compares turns up in the row
    monkeypatch.setattr(Settings, "hold", lambda self: True)
    first, second, *rest = model.base_model.layers
    model.base_model.layers = torch.nn.ModuleList([second, first, *rest])
    step(model, ROWS[0])
    runner = runner_of(model)
    assert runner.replayed + sum(runner.reasons.values()) == rows + 1
    assert "had to be seen first" in patch_report(model).cuda_graphs
    assert "1 because a layer was called with other" in patch_report(model).cuda_graphs


def test_ids_that_layers_are_given_something_of(one_rank):
    """Gemma 4 looks ids up in a second embedding, and searches for them if it has embeddings; what
    it finds there has gradients.
    """
    model, other = tiny("gemma4_text").train(), tiny("gemma4_text").train()
    other.load_state_dict(model.state_dict())
    apply_patches(model, cuda_graphs="auto"), apply_patches(other)
    for part in (*model.model.layers, model.model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    for seed, lengths in enumerate(ROWS):
        found, wanted = (hidden(each, lengths, seed) for each in (model, other))
        for each in (found, wanted):
            # of squares the last norm makes a constant
            each.exp().mean().backward()
        assert relative_rms(found, wanted) <= LOGIT_TOL
        assert_same_gradients(model, other)
    assert "more than one tensor with gradients" in patch_report(model).cuda_graphs


@pytest.mark.parametrize("compared", [True, False])
def test_other_layers(compared, one_rank, monkeypatch):
    """The layer that runs second has its input where the first's graph wrote its output. What
    nobody compared is seen in the row, which runs on without graphs.
    """
    model, other = sharded(), apply_patches(plain_model())
    assert_trains_as(model, other)
    if not compared:
        monkeypatch.setattr(Settings, "hold", lambda self: True)
    for each in (model, other):
        first, second, *rest = each.base_model.layers
        each.base_model.layers = torch.nn.ModuleList([second, first, *rest])
        each.zero_grad()
    before = runner_of(model).replayed
    assert_trains_as(model, other)
    assert runner_of(model).replayed == before + 2 * len(ROWS) - (1 if compared else 2)


def embed_on_a_rank(rank):
    import peft

    patch = pytest.MonkeyPatch()
    on_cpu.let_capture_whole_documents(patch)
    model, counted = plain_model(), []
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["embed_tokens", "up_proj"]))
    frozen = {x for x in model.parameters() if not x.requires_grad}
    apply_patches(model, cuda_graphs="auto")
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.get_input_embeddings(), *model.base_model.layers, model):
        fully_shard(part, mesh=mesh, ignored_params=frozen)
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: counted.append(0))
    # one document alone runs as it came
    model(**inputs_of((40,) if rank else (30, 20)))
    patch.undo()
    return len(counted)


@pytest.mark.slow
@needs("peft")
def test_ranks_embed_as_often_as_each_other(tmp_path):
    assert on_ranks(embed_on_a_rank, [()], tmp_path) == [(1, 1)]


def by_accelerate(recomputes):
    """As the Trainer's `fsdp_config` lets it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    model = apply_patches(plain_model(), cuda_graphs="auto")
    model.config.use_cache = False
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3_5DecoderLayer"],
        activation_checkpointing=recomputes,
    )
    with as_on_gpus():
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]


RANKS = {
    "the rest": sharded,
    "by accelerate": partial(by_accelerate, False),
    "recomputed by accelerate": partial(by_accelerate, True),
    "recomputed as torchtitan does": partial(sharded_and_wrapped, **WRAPPERS["as torchtitan"]),
}


def on_a_rank(rank, fails, how):
    """Return how far the gradients of rows of which each rank has others are from those without
    graphs, and how many were replayed; graphs are captured at other steps, and by one rank, if it
    `fails`, not at all.
    """
    patch = pytest.MonkeyPatch()
    on_cpu.let_capture_whole_documents(patch)
    if fails and rank:
        patch.setattr(layer_graphs.LayerGraphs, "_capture", _out_of_memory)
    model, other = RANKS[how](), apply_patches(plain_model())
    rows = ROWS * 2 if rank == 0 else ((50, 20), (50, 20), *ROWS, (30, 20), (7,))
    for seed, lengths in enumerate(rows):
        step(model, lengths, seed + 100 * rank)
        step(other, lengths, seed + 100 * rank)
    patch.undo()
    grads = {name: x.grad.clone() for name, x in other.named_parameters()}
    for grad in grads.values():
        torch.distributed.all_reduce(grad)
        grad /= 2
    found = whole_gradients(model)
    worst = max(relative_rms(found[name], grad) for name, grad in grads.items())
    return worst, runner_of(model).replayed


def _out_of_memory(*args):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.slow
def test_ranks_whose_rows_differ_gather_the_same_weights(tmp_path):
    cases = [(fails, how) for fails in (False, True) for how in RANKS]
    found = dict(zip(cases, on_ranks(on_a_rank, cases, tmp_path), strict=True))
    assert all(worst <= GRADIENT_TOL for ranks in found.values() for worst, _ in ranks)
    for (fails, _), ((_, first), (_, second)) in found.items():
        assert first == 6 and (second == 0 if fails else second >= 3)


def test_a_copy_of_the_model_has_no_graphs(one_rank):
    model = apply_patches(plain_model(), cuda_graphs="auto")
    other = copy.deepcopy(model)
    shard(model)
    for each in (model, other):
        for seed in range(4):
            step(each, ROWS[0], seed)
        assert runner_of(each).replayed >= 2
