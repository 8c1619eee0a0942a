"""Which rows are replayed: with a stand-in that runs the layers again where a GPU would replay a
graph.

The bits of real graphs are tested on GPUs (tests/gpu/test_graphs.py).
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import Qwen3_5ForCausalLM

from hf_packfree import PackedSequence, apply_patches, patch_report, remove_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.graphs import (
    bucket,
    bucketing,
    captured_sequence,
    captures,
    runner,
    settings,
    whole,
)
from hf_packfree.graphs.parts import nodes_of
from hf_packfree.graphs.settings import Settings, why_not
from hf_packfree.models import captured_layers
from hf_packfree.models.qwen3_5 import tiny_config
from hf_packfree.models.same_batch import setup_of
from hf_packfree.models.state import Kernels, state_of
from hf_packfree.ops.delta_rule import flash_qla
from hf_packfree.parallel import ContextParallel
from tests.graphs import on_cpu
from tests.integrations.marks import needs
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    checkpoint_layers,
    gradients,
    relative_rms,
    runner_of,
    tiny,
    wrap_layers,
)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    on_cpu.let_capture_whole_documents(monkeypatch)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return apply_patches(Qwen3_5ForCausalLM(tiny_config()).train(), cuda_graphs="auto")


UNBOUNDED = captured_layers._unbounded
ROWS = (30, 20, 7), (9, 9, 9, 9, 21), (56, 1), (3, 50)


def derive(module):
    """As libraries do that swap classes."""
    module.__class__ = type("Derived", (type(module),), {})


def inputs_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, 100, (1, sum(lengths)), generator=generator),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }


def hidden(model, lengths, seed=0, **more):
    return model.base_model(**inputs_of(lengths, seed), **more).last_hidden_state


def _recompute_nothing(model):
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()


def test_a_capture_meets_no_node_that_somebody_keeps(model):
    """DDP, or a loss of the step before, keeps nodes of another stream, on which a capture fails."""
    kept, parameters = [], [*model.base_model.parameters()]
    for seed in range(3):
        kept.append(hidden(model, ROWS[0], seed).sum())
        kept[-1].backward()
    graph = next(iter(runner_of(model).captures.graphs.values())).graph
    held = {torch.autograd.graph.get_gradient_edge(one).node for one in parameters}
    assert held & nodes_of(kept[0]), "the control: the loss keeps them"
    assert graph.nodes and not held & graph.nodes
    assert all(map(lambda one, its: one is its, parameters, model.base_model.parameters()))
    assert graph.parameters == tuple(parameters)


def _reads_its_own(mlp, weight):
    """Let an MLP read a weight that its forward holds."""
    mlp.forward = lambda x: torch.nn.functional.linear(
        mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), weight
    )


@pytest.mark.parametrize("outside", [False, True])
def test_a_parameter_that_a_forward_holds_by_itself_keeps_its_gradients(model, outside):
    mlp = model.base_model.layers[0].mlp
    weight = torch.nn.Parameter(torch.ones(64, 96) / 96) if outside else mlp.down_proj.weight
    _reads_its_own(mlp, weight)
    found = []
    for _ in range(3):
        weight.grad = None
        hidden(model, ROWS[0]).square().sum().backward()
        found.append(weight.grad)
    assert all(torch.equal(found[0], grad) for grad in found[1:])
    assert runner_of(model).replayed == 0
    reasons = " ".join(runner_of(model).reasons)
    assert "a parameter of (64, 96) from elsewhere than its module" in reasons


def test_rows_of_one_bucket_are_what_their_documents_are_alone(model):
    for seed, lengths in enumerate(ROWS * 3):
        found = hidden(model, lengths, seed)
        parts = inputs_of(lengths, seed)["input_ids"].split(lengths, 1)
        model.eval()
        with torch.no_grad():
            alone = [model.base_model(input_ids=ids).last_hidden_state for ids in parts]
            plain = model.base_model(input_ids=torch.cat(parts, 1)).last_hidden_state
        model.train()
        assert (found - torch.cat(alone, 1)).abs().max() < LOGIT_TOL
        assert (plain - torch.cat(alone, 1)).abs().max() > CONTROL * LOGIT_TOL
        found.sum().backward()
    assert runner_of(model).replayed >= 2 * len(ROWS)


@pytest.mark.parametrize(
    ("rows", "captured"),
    [
        # 1,008 is the next multiple of 16
        (((600, 400), (990, 10), (300, 700)), [1008]),
        # buckets of 32 tokens: nothing says that one of these comes again
        (((600, 400), (600, 410), (600, 395)), [1024]),
    ],
)
def test_rows_of_one_length_have_a_graph_with_hardly_any_padding(model, rows, captured):
    for seed, lengths in enumerate(rows):
        hidden(model, lengths, seed).sum().backward()
    assert [key[0].tokens for key in runner_of(model).captures.graphs] == captured
    assert runner_of(model).replayed == len(rows) - 1


def test_offsets_of_the_row_before_would_be_seen(model, monkeypatch):
    """The control: the row's own tokens on the record that the graph was captured with."""
    monkeypatch.setattr(captured_sequence.CapturedSequence, "become", lambda self, packed: None)
    captured, other = (30, 20, 7), (9, 27, 21)
    for _ in range(2):
        hidden(model, captured).sum().backward()
    found = hidden(model, other)
    assert runner_of(model).replayed == 2
    model.eval()
    with torch.no_grad():
        parts = inputs_of(other)["input_ids"].split(other, 1)
        alone = [model.base_model(input_ids=ids).last_hidden_state for ids in parts]
    assert (found - torch.cat(alone, 1)).abs().max() > CONTROL * LOGIT_TOL


def test_gradients_are_those_without_graphs(model):
    other = apply_patches(copy.deepcopy(remove_patches(model)))
    apply_patches(model, cuda_graphs="auto")
    for seed, lengths in enumerate(ROWS * 2):
        for each in (model, other):
            each(
                **inputs_of(lengths, seed), labels=inputs_of(lengths, seed)["input_ids"]
            ).loss.backward()
        for (name, mine), its in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.allclose(mine.grad, its.grad, atol=1e-5), name
    assert runner_of(model).replayed >= len(ROWS)


def test_a_row_waits_for_the_backward_of_the_one_before(model):
    for _ in range(2):
        hidden(model, ROWS[0]).sum().backward()
    first = hidden(model, ROWS[0])
    replayed = runner_of(model).replayed
    second = hidden(model, ROWS[0])
    assert runner_of(model).replayed == replayed
    assert "still to come" in patch_report(model).cuda_graphs
    assert torch.allclose(first, second, atol=1e-6)
    first.sum().backward()
    third = hidden(model, ROWS[0])
    assert runner_of(model).replayed == replayed + 1
    third.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        third.sum().backward()
    # one that nobody will go back through is not waited for
    hidden(model, ROWS[0])
    hidden(model, ROWS[0])
    assert runner_of(model).replayed == replayed + 3


def test_a_row_is_embedded_once_by_a_graph_or_without(model):
    """As hooks of the embedding have it, and noise that is added there."""
    embedded = []
    model.get_input_embeddings().register_forward_hook(lambda *args: embedded.append(args[2].shape))
    graphs = state_of(model.base_model).graphs
    graphs.wait = True
    for number, lengths in enumerate((ROWS[0], ROWS[0], ROWS[1], ROWS[0])):
        hidden(model, lengths).sum().backward()
        graphs.wait = number == 0
    assert [shape[1] for shape in embedded] == [*map(sum, (ROWS[0], ROWS[0], ROWS[1], ROWS[0]))]
    said = patch_report(model).cuda_graphs
    assert runner_of(model).replayed and "the optimizer has made no step yet" in said


def in_place(weight):
    weight.mul_(2)


def by_other_memory(weight):
    weight.data = weight.data.clone()


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("change", [in_place, by_other_memory])
def test_a_weight_that_changed_before_the_backward_pass_is_refused(model, change, frozen):
    """As by autograd, which does not see what a graph reads. The embedding's is not read again."""
    weight = model.model.layers[1].mlp.up_proj.weight.requires_grad_(not frozen)
    for _ in range(2):
        hidden(model, ROWS[0]).sum().backward()
    replayed = runner_of(model).replayed
    out, embedding = hidden(model, ROWS[0]), model.get_input_embeddings().weight
    with torch.no_grad():
        change(embedding)
    out.sum().backward()
    out = hidden(model, ROWS[0])
    assert runner_of(model).replayed == replayed + 2
    with torch.no_grad():
        change(weight)
    with pytest.raises(RuntimeError, match=r"found a weight of shape .* that was changed between"):
        out.sum().backward()


@needs("peft")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("changes", [False, True])
def test_weights_that_experts_adapters_put_back_did_not_change(changes):
    """In every forward pass, such as an evaluation before the backward pass; others may change."""
    from peft import LoraConfig, get_peft_model

    def adapted(cuda_graphs):
        torch.manual_seed(0)
        model = apply_patches(tiny("qwen3_5_moe"), cuda_graphs=cuda_graphs)
        config = LoraConfig(
            r=2,
            target_modules=["o_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            init_lora_weights=False,
        )
        return model, get_peft_model(model, config)

    found = []
    for model, peft in (adapted("auto"), adapted("never")):
        for _ in range(3):
            peft.zero_grad()
            out = hidden(model, ROWS[0])[..., ::3].square().sum()
            with torch.no_grad():
                hidden(model, ROWS[1])
            if changes and runner_of(model).replayed:
                with torch.no_grad():
                    model.model.layers[3].self_attn.k_proj.weight.mul_(2)
                with pytest.raises(RuntimeError, match=r"weight of shape \(32, 64\) that was"):
                    out.backward()
                return
            out.backward()
        found.append(gradients(model))
        assert runner_of(model).replayed == (2 if len(found) == 1 else 0)
    assert all(relative_rms(found[0][name], found[1][name]) < GRADIENT_TOL for name in found[1])


def test_a_row_on_another_stream_waits_for_the_one_before(model, monkeypatch):
    """Whose graph may still run there, in memory that is about to be written."""
    for _ in range(3):
        hidden(model, ROWS[0]).sum().backward()
    first, other = torch.cuda.current_stream(), on_cpu.Stream()
    assert first.waited == []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: other)
    for _ in range(2):
        hidden(model, ROWS[0]).sum().backward()
    assert other.waited == [first]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: first)
    hidden(model, ROWS[0]).sum().backward()
    assert first.waited == [other] and runner_of(model).replayed == 5


@pytest.mark.parametrize("power", [1, 2])
def test_a_second_derivative_is_refused(model, power):
    """As of layers without a graph: gradients that forgot what they were made of would be wrong."""
    for _ in range(3):
        hidden(model, ROWS[0]).sum().backward()
    replayed = runner_of(model).replayed
    loss = hidden(model, ROWS[0]).pow(power).sum()
    assert runner_of(model).replayed == replayed + 1
    parameters = [*model.base_model.layers.parameters()]
    found = torch.autograd.grad(loss, parameters, create_graph=True)
    with pytest.raises(UnsupportedInput, match="found a second derivative"):
        sum(grad.pow(2).sum() for grad in found).backward()


def test_gradients_lie_in_the_graph_s_memory_and_outlive_the_next_row(model):
    """A list of them, as `torch.autograd.grad` returns, keeps the next row out of the graph."""
    parameters = [*model.base_model.layers.parameters()]
    for _ in range(3):
        hidden(model, ROWS[0]).sum().backward()
    captured = next(iter(runner_of(model).captures.graphs.values())).graph
    places = {written.data_ptr() for written in captured.written if written is not None}
    model.zero_grad()
    hidden(model, ROWS[0]).sum().backward()
    assert {parameter.grad.data_ptr() for parameter in parameters} <= places
    model.zero_grad()
    kept = torch.autograd.grad(hidden(model, ROWS[0]).sum(), parameters)
    copies, replayed = [grad.clone() for grad in kept], runner_of(model).replayed
    hidden(model, ROWS[1]).sum().backward()
    assert runner_of(model).replayed == replayed
    assert "kept elsewhere than in .grad" in patch_report(model).cuda_graphs
    assert all(map(torch.equal, kept, copies))
    del kept
    hidden(model, ROWS[1]).sum().backward()
    assert runner_of(model).replayed == replayed + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.base_model.layers[0].requires_grad_(False),
        lambda model: setattr(model.lm_head, "nothing", 1) or model.base_model.norm.half(),
        lambda model: model.base_model.layers[0].register_forward_hook(lambda *_: None),
        lambda model: setattr(model.base_model.layers[0], "scaling", 2.0),
        lambda model: model.base_model.layers[0].eval(),
        lambda model: setattr(model.base_model.norm, "weight", torch.nn.Parameter(torch.ones(64))),
        lambda model: derive(model.base_model.layers[0].mlp),
    ],
    ids=["frozen", "dtype", "hook", "setting", "mode", "weight", "class"],
)
def test_what_a_graph_depends_on(model, change):
    settings = Settings(model.base_model)
    assert settings.hold()
    change(model)
    assert not settings.hold()
    assert Settings(model.base_model).hold()


def test_another_forward_of_a_class_counts(model, monkeypatch):
    """As libraries replace it for all models at once."""
    settings, mlp = Settings(model.base_model), type(model.base_model.layers[0].mlp)
    before = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda *args: before(*args))
    assert not settings.hold()
    monkeypatch.undo()
    assert settings.hold()


def test_hooks_of_parameters_run_once(model):
    """A capture's backward pass calls them too: what leaves its graph would be scaled twice."""
    weight = model.base_model.layers[0].mlp.up_proj.weight
    hidden(model, ROWS[0]).sum().backward()
    wanted = 2 * weight.grad
    hook = weight.register_hook(lambda grad: grad * 2)
    for _ in range(3):
        model.zero_grad()
        hidden(model, ROWS[0]).sum().backward()
        assert torch.allclose(weight.grad, wanted)
    assert runner_of(model).replayed == 0
    assert "3 because parameters have hooks" in patch_report(model).cuda_graphs
    hook.remove()
    hidden(model, ROWS[0]).sum().backward()
    assert runner_of(model).replayed == 1


def test_another_tensor_with_the_same_number_counts(model):
    """The graph reads the old one, which no optimizer steps any more."""
    layer = model.base_model.layers[0]
    layer.scalar = torch.nn.Parameter(torch.ones(1))
    settings = Settings(model.base_model)
    assert settings.hold()
    layer.scalar = torch.nn.Parameter(torch.ones(1))
    assert not settings.hold()


def test_settings_inside_containers_count(model):
    model.base_model.layers[0].scaling = {"default": 1.0}
    settings = Settings(model.base_model)
    model.base_model.layers[0].scaling["default"] = 2.0
    assert not settings.hold()


@needs("peft")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "change",
    [
        lambda peft, more: peft.add_adapter("third", more),
        lambda peft, more: peft.set_adapter("second"),
        lambda peft, more: peft.base_model.set_adapter(["default", "second"]),
        lambda peft, more: peft.base_model.disable_adapter_layers(),
        lambda peft, more: peft.merge_adapter(),
        lambda peft, more: peft.delete_adapter("second"),
    ],
    ids=["added", "switched", "two", "disabled", "merged", "deleted"],
)
def test_adapters_that_change_count(model, change):
    """A graph reads those that were active when it was captured."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["up_proj", "q_proj"])
    peft, trunk = get_peft_model(model, config), model.base_model
    peft.add_adapter("second", config)
    settings = Settings(trunk)
    assert settings.hold()
    change(peft, config)
    assert not settings.hold() and Settings(trunk).hold()


@needs("peft")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_reference_that_is_the_model_without_adapters_drops_no_graph(
    model, monkeypatch, recomputed
):
    """Nor does one in which nothing is recomputed: a step of TRL's DPOTrainer has both."""
    from peft import LoraConfig, get_peft_model

    captures = []
    monkeypatch.setattr(whole, "Graph", lambda *args: captures.append(args) or on_cpu.Again(*args))
    monkeypatch.setattr(captured_layers, "_is_training_step", lambda *_: torch.is_grad_enabled())
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["up_proj", "q_proj"]))
    with torch.no_grad():
        for name, x in peft.named_parameters():
            if "lora_B" in name:
                x.fill_(0.1)
    found = []
    for _ in range(5):
        if recomputed:
            checkpoint_layers(model)
        policy = peft(**inputs_of(ROWS[0])).logits
        if recomputed:
            _recompute_nothing(model)
        with torch.no_grad(), peft.disable_adapter():
            reference = peft(**inputs_of(ROWS[0])).logits
        if recomputed:
            checkpoint_layers(model)
        policy.sum().backward()
        found.append((policy.detach(), reference))
    assert (found[0][0] - found[0][1]).abs().max() > CONTROL * LOGIT_TOL, "the adapters count"
    for policy, reference in found[1:]:
        assert (policy - found[0][0]).abs().max() < LOGIT_TOL
        assert torch.equal(reference, found[0][1])
    assert runner_of(model).replayed == 4 and len(captures) == 1


def test_checkpointing_counts_and_its_function_by_its_keywords(model):
    checkpoint_layers(model, reentrant=False)
    settings = Settings(model.base_model)
    checkpoint_layers(model, reentrant=False)
    assert settings.hold()
    checkpoint_layers(model, reentrant=True)
    assert not settings.hold()
    settings = Settings(model.base_model)
    for layer in model.base_model.layers:
        layer._gradient_checkpointing_func = lambda function, *args: function(*args)
    assert not settings.hold()
    checkpoint_layers(model, reentrant=True)
    assert settings.hold()
    _recompute_nothing(model)
    assert not settings.hold()


def test_an_error_in_the_middle_leaves_nothing_behind(model):
    """Before the layers' backward pass, and behind it; the rows after it are replayed, and right."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d_out):
            raise ZeroDivisionError

    for _ in range(3):
        model.zero_grad()
        hidden(model, ROWS[0]).sum().backward()
    wanted = [x.grad.clone() for x in model.base_model.parameters()]
    replayed = runner_of(model).replayed
    with pytest.raises(ZeroDivisionError):
        Fails.apply(hidden(model, ROWS[1])).sum().backward()
    inputs = inputs_of(ROWS[0])
    embeddings = Fails.apply(model.get_input_embeddings()(inputs.pop("input_ids")))
    with pytest.raises(ZeroDivisionError):
        model.base_model(inputs_embeds=embeddings, **inputs).last_hidden_state.sum().backward()
    assert runner_of(model).replayed == replayed + 2
    for _ in range(2):
        model.zero_grad()
        hidden(model, ROWS[0]).sum().backward()
        for found, right in zip(model.base_model.parameters(), wanted, strict=True):
            assert torch.allclose(found.grad, right, atol=1e-6)
    assert runner_of(model).replayed == replayed + 4


def test_models_in_turns_have_graphs_of_their_own(model):
    """And patches that are taken away take theirs along."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for x in other.parameters():
            x.mul_(1.1)
    for seed, lengths in enumerate((ROWS[0], ROWS[0], ROWS[1])):
        for each in (model, other):
            found = hidden(each, lengths, seed)
            each.eval()
            assert (found - hidden(each, lengths, seed)).abs().max() < LOGIT_TOL
            each.train()
            found.sum().backward()
    assert runner_of(model).replayed == runner_of(other).replayed == 2
    assert runner_of(model) is not runner_of(other)
    remove_patches(model)
    apply_patches(model, cuda_graphs="auto")
    assert runner_of(model).replayed == 0 and not runner_of(model).captures.graphs


def test_an_optimizer_s_step_changes_no_setting(model):
    settings, optimizer = Settings(model.base_model), torch.optim.AdamW(model.parameters())
    model(**inputs_of(ROWS[0]), labels=inputs_of(ROWS[0])["input_ids"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert settings.hold()


def test_a_longer_row_is_captured_at_once_and_shorter_ones_again(model):
    """Memory of a shorter row's graph serves no longer one, which would need its own beside it."""
    short, long, between = (20, 9), (90, 30), (50, 20)
    for lengths in (short, short):
        hidden(model, lengths).sum().backward()
    graphs, pool = runner_of(model), runner_of(model).captures.pool
    assert [key[0].tokens for key in graphs.captures.graphs] == [32] and graphs.replayed == 1
    hidden(model, long).sum().backward()
    assert [key[0].tokens for key in graphs.captures.graphs] == [
        128
    ] and graphs.captures.pool is not pool
    pool = graphs.captures.pool
    # in the longer one's graph, until the padding there took as long as a capture
    for _ in range(3):
        hidden(model, short).sum().backward()
    hidden(model, between).sum().backward()
    assert [key[0].tokens for key in graphs.captures.graphs] == [
        32,
        128,
    ] and graphs.captures.pool is pool
    assert (graphs.replayed, graphs.replayed_in_longer) == (6, 3)
    assert (
        "6 rows were replayed, 3 in graphs of longer rows (of up" in patch_report(model).cuda_graphs
    )


@pytest.mark.parametrize(
    ("long", "lengths"),
    [((90, 30), (30, 20, 7)), ((40, 40, 40), (9, 9)), ((64, 50), (3, 1, 1)), ((99, 6), (69, 1))],
    ids=["", "more padding than the longest document", "little but padding", "long"],
)
def test_rows_in_a_longer_row_s_graph(model, long, lengths, monkeypatch):
    """Documents stay apart, and values and gradients are those without graphs."""
    monkeypatch.setattr(bucketing, "CAPTURE", 99)
    plain = apply_patches(remove_patches(copy.deepcopy(model)))
    for seed in range(2):
        hidden(model, long, seed).sum().backward()
    for seed in range(3):
        found = []
        for each in (model, plain):
            each.zero_grad()
            state = hidden(each, lengths, seed)
            weights = torch.randn(state.shape, generator=torch.Generator().manual_seed(seed))
            (state * weights).sum().backward()
            found.append((state, *(x.grad for x in each.base_model.parameters())))
        errors = [relative_rms(one, its) for one, its in zip(*found, strict=True)]
        assert errors[0] < LOGIT_TOL and max(errors) < GRADIENT_TOL
        assert (
            runner_of(model).replayed_in_longer == 1 + seed
            and runner_of(model).replayed == 2 + seed
        )
    assert runner_of(plain).replayed == 0


def test_a_row_that_no_graph_takes_is_captured_at_once(model):
    """Of more documents, or of longer ones, than the graphs have room for."""
    for _ in range(2):
        hidden(model, (30, 30, 30, 30)).sum().backward()
    pool = runner_of(model).captures.pool
    for lengths in ((2,) * 20, (33, 20)):
        hidden(model, lengths).sum().backward()
    graphs = runner_of(model)
    assert [key[0].tokens for key in graphs.captures.graphs] == [
        128,
        48,
        64,
    ] and graphs.captures.pool is pool
    assert (graphs.replayed, graphs.replayed_in_longer) == (3, 0)


def test_the_longest_row_s_memory_stays_when_its_graph_goes(model, monkeypatch):
    """It serves that row once more, and the graphs of shorter ones stay."""
    monkeypatch.setattr(bucketing, "CAPTURE", 0)
    for module in (captures, bucketing):
        monkeypatch.setattr(module, "MOST", 2)
    # every replay pays for a capture
    monkeypatch.setattr(bucketing, "REPLAYS", 1)
    for lengths in ((90, 30), (20, 9), (50, 20)):
        for _ in range(2):
            hidden(model, lengths).sum().backward()
    graphs, pool = runner_of(model), runner_of(model).captures.pool
    assert [key[0].tokens for key in graphs.captures.graphs] == [32, 80]
    hidden(model, (90, 30)).sum().backward()
    assert [key[0].tokens for key in graphs.captures.graphs] == [
        80,
        128,
    ] and graphs.captures.pool is pool


def test_captures_are_paid_for_by_replays(model, monkeypatch):
    """Rows of more sizes than there are graphs: each would take the place of one that is wanted
    next.
    """
    for module in (captures, bucketing):
        monkeypatch.setattr(module, "MOST", 2)
    monkeypatch.setattr(bucketing, "REPLAYS", 4)
    monkeypatch.setattr(bucketing, "CAPTURE", 0)
    counts = []
    monkeypatch.setattr(whole, "Graph", lambda *args: counts.append(args) or on_cpu.Again(*args))
    sizes = (90, 30), (20, 9), (50, 20)
    for _ in range(8):
        for lengths in sizes:
            hidden(model, lengths).sum().backward()
    graphs = runner_of(model)
    assert len(counts) <= 2 + graphs.replayed // 4 and graphs.replayed >= 10
    assert "of more sizes than graphs pay for" in patch_report(model).cuda_graphs
    # other weights need other graphs
    model.base_model.layers[0].requires_grad_(False)
    before = len(counts)
    for _ in range(2):
        hidden(model, sizes[0]).sum().backward()
    assert len(counts) == before + 1


def test_what_cannot_be_captured_is_named(model):
    trunk = model.base_model
    assert why_not(trunk) == "its weights are on cpu"
    checkpoint_layers(model)
    assert why_not(trunk) == "its weights are on cpu"
    for layer in trunk.layers:
        layer._gradient_checkpointing_func = lambda function, *args: function(*args)
    assert why_not(trunk) == "layers are recomputed by another function than torch's checkpoint"
    trunk.layers[2].mlp.register_forward_pre_hook(lambda *_: None)
    trunk.get_input_embeddings().register_forward_hook(lambda *_: None)
    _recompute_nothing(model)
    assert why_not(trunk) == "layers.2.mlp has hooks"


def another_function(function, *args, **kwargs):
    return function(*args, **kwargs)


def test_wrapped_layers_that_cannot_be_captured_are_named(model):
    trunk = model.base_model
    wrap_layers(model)
    assert why_not(trunk) == "its weights are on cpu"
    layer = trunk.layers[1]
    trunk.layers[1] = offload_wrapper(layer)
    assert why_not(trunk) == "activations are offloaded"
    trunk.layers[1] = layer
    layer.checkpoint_fn = another_function
    assert why_not(trunk) == "layers are recomputed by another function than torch's checkpoint"


# one rank shards nothing, of which FSDP1 warns
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("together", [False, True])
def test_weights_that_fsdp1_shards_run_without(model, monkeypatch, one_rank, together):
    """A capture found other tensors where it had put its own, and raised a TypeError."""
    kinds = {type(layer) for layer in model.base_model.layers}
    monkeypatch.setattr(whole, "why_not", why_not)
    wrapped = FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=None if together else ModuleWrapPolicy(kinds),
    )
    for _ in range(3):
        wrapped(**inputs_of(ROWS[0])).logits.sum().backward()
    assert "3 because FSDP shards its weights" in patch_report(wrapped).cuda_graphs


@pytest.mark.parametrize(
    ("recompute", "name"),
    [(checkpoint_layers, "_gradient_checkpointing_func"), (wrap_layers, "checkpoint_fn")],
)
def test_layers_that_are_recomputed(model, recompute, name):
    """Their gradients are those of layers that keep everything; the model's settings stay."""
    other = apply_patches(copy.deepcopy(remove_patches(model)))
    apply_patches(model, cuda_graphs="auto")
    recompute(model)
    functions = [getattr(layer, name) for layer in model.base_model.layers]
    for seed, lengths in enumerate(ROWS * 2):
        for each in (model, other):
            hidden(each, lengths, seed).pow(2).sum().backward()
        for (weight, mine), its in zip(
            model.base_model.named_parameters(), other.base_model.parameters(), strict=True
        ):
            assert torch.allclose(mine.grad, its.grad, atol=1e-4), weight
    assert runner_of(model).replayed >= len(ROWS)
    assert functions == [getattr(layer, name) for layer in model.base_model.layers]


@pytest.mark.parametrize("recompute", [checkpoint_layers, wrap_layers])
def test_layers_that_are_recomputed_and_draw_random_numbers_are_not_captured(model, recompute):
    """A second run of attention with dropout would drop other weights than the first."""
    recompute(model)
    for layer in model.base_model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.attention_dropout = 0.1
    for _ in range(4):
        hidden(model, ROWS[0]).sum().backward()
    assert runner_of(model).replayed == 0
    assert (
        "3 because layers draw random numbers, and are recomputed"
        in patch_report(model).cuda_graphs
    )


@needs("peft")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", ["qwen3_5", "llama", "gpt_oss", "kimi_linear"])
def test_adapters_that_drop_out_in_layers_that_are_recomputed(family):
    """In the fused layers, and in PEFT's own: Llama's attention calls its projections."""
    from peft import LoraConfig, get_peft_model

    model = tiny(family)
    get_peft_model(model, LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear"))
    apply_patches(model, cuda_graphs="auto", unpacked="native")
    checkpoint_layers(model)
    for _ in range(4):
        hidden(model, ROWS[0]).sum().backward()
    assert runner_of(model).replayed == 3, patch_report(model).cuda_graphs


def test_what_no_length_changes_is_tried_once(model, monkeypatch, caplog):
    """A model whose layers cannot be captured would pay for a capture of every bucket."""
    tried = []
    monkeypatch.setattr(whole, "Graph", lambda *args: tried.append(args) or on_cpu.Again(*args))
    mlp = model.base_model.layers[0].mlp
    _reads_its_own(mlp, mlp.down_proj.weight)
    for lengths in (ROWS[0], (90, 30), (20, 9)):
        for _ in range(3):
            hidden(model, lengths).sum().backward()
    assert len(tried) == 1 and runner_of(model).replayed == 0
    assert "8 because a layer reads a parameter of (64, 96)" in patch_report(model).cuda_graphs
    assert sum("without a CUDA graph" in record.message for record in caplog.records) == 1
    del mlp.forward
    hidden(model, ROWS[0]).sum().backward()
    assert len(tried) == 2 and runner_of(model).replayed == 1


def test_layers_of_which_nothing_is_trained_run_without(model, caplog, monkeypatch):
    """Only the head is."""
    prepared, in_bucket = [], bucket.in_bucket
    monkeypatch.setattr(
        bucket, "in_bucket", lambda *args: prepared.append(args) or in_bucket(*args)
    )
    model.base_model.requires_grad_(False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for _ in range(3):
        model(**inputs_of(ROWS[0]), labels=inputs_of(ROWS[0])["input_ids"]).loss.backward()
    assert runner_of(model).replayed == 0 and not caplog.records
    assert runner_of(model).reasons["none of its weights is trained"] == 2
    # the host's work for a capture is done once
    assert len(prepared) == 1
    assert model.lm_head.weight.grad.norm() > 0


def test_replicas_of_data_parallel_run_without(model):
    """Their threads would change the runners that others look through, and none lives for two
    rows.
    """
    for _ in range(2):
        replica = model.base_model._replicate_for_data_parallel()
        replica(**inputs_of(ROWS[0])).last_hidden_state.sum().backward()
        assert replica not in state_of(model).graphs._runners


def test_offloaded_activations_run_without(model):
    """Host memory that a capture copied to would be somebody else's at the next replay."""
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu():
            hidden(model, ROWS[0]).sum().backward()
    assert runner_of(model).replayed == 0
    assert "3 because activations are offloaded" in patch_report(model).cuda_graphs
    for _ in range(2):
        hidden(model, ROWS[0]).sum().backward()
    assert runner_of(model).replayed == 1


def test_outputs_of_layers_run_without(model):
    hidden(model, ROWS[0], output_hidden_states=True)
    assert "output_hidden_states is wanted" in patch_report(model).cuda_graphs
    model.base_model(**inputs_of((8200,)), use_cache=False)
    assert runner_of(model).replayed == 0


def test_a_capture_that_fails_is_not_tried_again(model, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(on_cpu.Again, "_capture", fails)
    for _ in range(4):
        hidden(model, ROWS[0]).sum().backward()
    assert (
        "3 because the capture failed: RuntimeError: operation not permitted"
        in patch_report(model).cuda_graphs
    )
    assert sum("without a CUDA graph" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("error", "captures"),
    [
        (RuntimeError("operation not permitted"), 1),
        # the longest row's, and no longer one's
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), 2),
        # as the driver raises it while a graph is instantiated
        (RuntimeError("CUDA error: out of memory"), 2),
    ],
)
def test_only_memory_depends_on_the_length_of_the_first_capture(
    model, monkeypatch, error, captures
):
    tried = []

    def fails(*_):
        tried.append(error)
        raise error

    monkeypatch.setattr(on_cpu.Again, "_capture", fails)
    for lengths in ((300, 100), (90, 30), (1000, 24)):
        for _ in range(3):
            hidden(model, lengths).sum().backward()
    assert len(tried) == captures and runner_of(model).replayed == 0


def test_a_layer_that_reads_one_row_s_lengths_is_not_captured(model, monkeypatch):
    forward = type(model.base_model.layers[0]).forward

    def reads(self, *args, **kwargs):
        assert kwargs["packed_sequence"].lengths
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.base_model.layers[0]), "forward", reads)
    for _ in range(3):
        hidden(model, ROWS[0]).sum().backward()
    assert runner_of(model).replayed == 0
    assert "a layer reads lengths of the record" in patch_report(model).cuda_graphs


def test_a_copy_and_a_pickle_have_no_graphs(model):
    for _ in range(3):
        hidden(model, ROWS[0]).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert runner_of(other).replayed == 0
        hidden(other, ROWS[0]).sum().backward()


def test_never_is_the_default():
    model = apply_patches(Qwen3_5ForCausalLM(tiny_config()).train())
    for _ in range(3):
        hidden(model, ROWS[0]).sum().backward()
    assert runner_of(model).replayed == 0 and patch_report(model).cuda_graphs == ""
    with pytest.raises(ValueError, match="cuda_graphs='always'"):
        apply_patches(Qwen3_5ForCausalLM(tiny_config()), cuda_graphs="always")


def test_a_row_that_ran_elsewhere_leaves_no_look_behind(model):
    """What changed after it is noticed by a call that is given its record."""
    packed = PackedSequence.from_lengths(ROWS[0])
    ids = inputs_of(ROWS[0])["input_ids"]
    for _ in range(3):
        model.base_model(input_ids=ids, packed_sequence=packed).last_hidden_state.sum().backward()
    # read, and upstream's to run
    model.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    replayed = runner_of(model).replayed
    model.base_model.layers[0].requires_grad_(False)
    model.zero_grad()
    model.base_model(input_ids=ids, packed_sequence=packed).last_hidden_state.sum().backward()
    assert runner_of(model).replayed <= replayed + 1 and len(runner_of(model).captures.graphs) <= 1
    assert all(x.grad is None for x in model.base_model.layers[0].parameters())


def test_graphs_of_before_a_failed_capture_are_captured_again(model, monkeypatch):
    """They hold the state of random numbers that the failed capture left unusable."""
    for seed in range(3):
        hidden(model, (300, 100), seed).sum().backward()
    (before,) = runner_of(model).captures.graphs.values()

    class Failing(on_cpu.Again):
        def _capture(self, *args):
            raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as patch:
        patch.setattr(whole, "Graph", Failing)
        for seed in range(2):
            hidden(model, ROWS[0], seed).sum().backward()
    assert not runner_of(model).captures.graphs
    replayed = runner_of(model).replayed
    hidden(model, (300, 100)).sum().backward()
    (after,) = runner_of(model).captures.graphs.values()
    assert after.graph is not before.graph and runner_of(model).replayed == replayed + 1


def test_a_graph_that_leaves_too_little_memory_is_dropped(model, monkeypatch, caplog):
    wanted = [hidden(model, ROWS[0]).detach()]
    monkeypatch.setattr(captures, "free_memory", lambda device: 0.12)
    for _ in range(4):
        wanted.append(hidden(model, ROWS[0]))
        wanted[-1].sum().backward()
    assert all(torch.equal(wanted[0], found) for found in wanted[1:])
    assert (
        not runner_of(model).captures.graphs
        and runner_of(model).replayed == 0
        and runner_of(model).captures.pool is None
    )
    assert "4 because with it, less than 12.5% of the GPU's" in patch_report(model).cuda_graphs
    # nor is one tried that needs more
    for _ in range(2):
        hidden(model, (300, 100)).sum().backward()
    assert sum("without a CUDA graph" in record.message for record in caplog.records) == 1


def test_a_plan_that_is_no_table_is_given_up(model, monkeypatch):
    def refuses(self, packed):
        raise captured_sequence.OtherPlan

    monkeypatch.setattr(captured_sequence.CapturedSequence, "become", refuses)
    for _ in range(4):
        hidden(model, ROWS[0]).sum().backward()
    assert not runner_of(model).captures.graphs and runner_of(model).replayed == 0
    assert "3 because its kernels' plan is not a table" in patch_report(model).cuda_graphs


def test_ranks_do_not_compare_their_graphs(model):
    """What ranks of a context-parallel group compare is the same of two models patched alike."""
    other = apply_patches(Qwen3_5ForCausalLM(tiny_config()).train(), cuda_graphs="auto")
    ranks = ContextParallel(group=None)
    assert setup_of(model, ranks) == setup_of(other, ranks)


def test_backends_that_nobody_tried_with_empty_documents_run_without(model, monkeypatch):
    monkeypatch.setattr(captured_layers, "_unbounded", UNBOUNDED)
    for _ in range(3):
        hidden(model, ROWS[0]).sum().backward()
    assert runner_of(model).replayed == 0
    assert "runs in torch, of which no graph can be captured" in patch_report(model).cuda_graphs
    names = {"conv": "triton", "delta_rule": "flash_qla", "attention": "triton"}
    monkeypatch.setattr(type(state_of(model)), "kernels_for", lambda *_: Kernels(names))
    # an unknown release plans by itself, where nobody writes another row's plan
    for release, known in (("0.1.3", True), ("0.9", False)):
        monkeypatch.setattr(flash_qla, "installed", lambda package, release=release: release)
        flash_qla.is_known.cache_clear()
        why = UNBOUNDED(model.base_model)
        assert why is None if known else "delta_rule runs in flash_qla" in why
    flash_qla.is_known.cache_clear()
    names["delta_rule"] = "fla"
    assert UNBOUNDED(model.base_model) is None
    # its states are counted on the host
    names["ssd"] = "fla"
    assert "ssd runs in fla" in UNBOUNDED(model.base_model)
    model.config._attn_implementation = "eager"
    assert "attention runs in eager" in UNBOUNDED(model.base_model)


def test_attention_that_is_loaded_as_eager_and_runs_in_ours_is_captured():
    """As gpt-oss is loaded, whose sinks transformers' sdpa does not know."""
    trunk = apply_patches(tiny("gpt_oss")).base_model
    assert trunk.config._attn_implementation == "eager"
    assert "attention runs in torch" in UNBOUNDED(trunk)


def test_models_without_attention_may_be_loaded_with_any(monkeypatch):
    """transformers loads pure Mamba-2 as eager."""
    trunk = apply_patches(tiny("mamba2")).base_model
    names = Kernels({"conv": "triton", "ssd": "mamba_ssm"})
    monkeypatch.setattr(type(state_of(trunk)), "kernels_for", lambda *_: names)
    assert trunk.config._attn_implementation == "eager" and UNBOUNDED(trunk) is None


def test_attention_with_dropout_is_not_captured(model, monkeypatch):
    """It runs in PyTorch, which has no empty documents."""
    names = Kernels({"conv": "triton", "delta_rule": "fla", "attention": "varlen"})
    monkeypatch.setattr(type(state_of(model)), "kernels_for", lambda *_: names)
    assert UNBOUNDED(model.base_model) is None
    model.config.attention_dropout = 0.1
    assert UNBOUNDED(model.base_model) == "attention has dropout"


@pytest.mark.parametrize("error", [ValueError("no such lengths"), AssertionError()])
def test_whatever_a_capture_raises_the_row_runs_without(model, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(whole, "Graph", fail)
    for _ in range(3):
        hidden(model, ROWS[0]).sum().backward()
    said = str(error) or "no message"
    assert f"the capture failed: {type(error).__name__}: {said}" in patch_report(model).cuda_graphs


def test_a_capture_is_tried_again_with_other_experts(monkeypatch):
    """Those of "eager" read on the host which experts have tokens."""
    model = apply_patches(tiny("qwen3_5_moe"), cuda_graphs="auto")
    trunk = model.base_model
    before = settings.switches_of(trunk)
    model.config._experts_implementation = "batched_mm"
    assert settings.switches_of(trunk) != before


def test_a_flash_attention_leaves_the_rows_of_graphs_to_ours(model, monkeypatch):
    monkeypatch.setattr(captured_layers, "_unbounded", UNBOUNDED)
    names = Kernels({"conv": "triton", "delta_rule": "fla", "attention": "varlen"})
    monkeypatch.setattr(type(state_of(model)), "kernels_for", lambda *_: names)
    for loaded in ("flash_attention_2", "kernels-community/flash-attn3"):
        model.config._attn_implementation_internal = loaded
        assert UNBOUNDED(model.base_model) is None
        said = f"; in graphs attention runs in varlen, in other rows in {loaded}"
        for replayed in (0, 1):
            runner_of(model).replayed = replayed
            assert patch_report(model).cuda_graphs.endswith(said) == bool(replayed)


def test_settings_that_changed_too_often_and_settle_have_graphs_again(model, monkeypatch):
    """Not those that still change."""
    monkeypatch.setattr(runner, "CHANGES", 3)
    monkeypatch.setattr(runner, "AGAIN", 5)
    found = runner_of(model)
    for seed in range(16):
        model.base_model.layers[0].anything = object()
        hidden(model, ROWS[0], seed).sum().backward()
    assert found.captures.why_not == "the model's settings change with its steps"
    replayed, captures = found.replayed, found.captures.bucketing.captures
    for seed in range(12):
        hidden(model, ROWS[0], seed).sum().backward()
    assert found.captures.why_not is None and found.captures.bucketing.captures == captures + 1
    assert found.replayed >= replayed + 4


def test_settings_that_always_change_are_not_compared_forever(model, monkeypatch):
    """Comparing took as long as a step of a small model."""
    monkeypatch.setattr(runner, "CHANGES", 3)
    compared = []
    monkeypatch.setattr(
        whole, "Settings", lambda *args: compared.append(args) or settings.Settings(*args)
    )
    for seed in range(12):
        model.base_model.layers[0].anything = object()
        hidden(model, ROWS[seed % 4], seed).sum().backward()
    assert len(compared) <= 5
    assert "the model's settings change with its steps" in patch_report(model).cuda_graphs
