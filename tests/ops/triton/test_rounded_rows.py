"""Training rows without CUDA graphs read each fp32 weight rounded once, recomputed layers included:
the same bits as with a rounding in every product, whatever happens to the weights.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.optim import optimizer as all_optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_packfree import patch_report, remove_patches
from hf_packfree.graphs import copies
from hf_packfree.models import captured_layers
from hf_packfree.models.state import state_of
from hf_packfree.ops import rounded_weights
from hf_packfree.ops.fused import computed_weights
from hf_packfree.ops.rounded_weights import RoundedWeights, copy_of
from hf_packfree.packing import PackedSequence
from tests.graphs import on_cpu
from tests.integrations.marks import needs
from tests.ops.triton.kernels import on_kernels
from tests.ops.triton.test_lora import lora
from tests.support import checkpoint_layers, gradients, runner_of, tiny, trunk_of, wrap_layers

pytestmark = [
    pytest.mark.usefixtures("rounds_to_bf16"),
    pytest.mark.filterwarnings("default"),
]
BF16, FP16 = torch.bfloat16, torch.float16
MATRICES = 8
LENGTHS = 3, 4, 1


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(rounded_weights, "_BLOCK", 16)
    # these steps have no optimizer
    monkeypatch.setattr(copies, "PATIENCE", 0)
    monkeypatch.setattr(
        captured_layers,
        "_is_training_step",
        lambda trunk, row: trunk.training and torch.is_grad_enabled(),
    )


def made(kind="lora", family="qwen3_5", recompute=None):
    model = tiny(family)
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    if kind == "lora":
        model = lora(model).base_model.model
        model.enable_input_require_grads()
    if recompute in ("reentrant", "not reentrant"):
        checkpoint_layers(model, reentrant=recompute == "reentrant")
    model = on_kernels(model, fused="triton")
    if recompute == "wrapper":
        wrap_layers(model)
    return model


@pytest.fixture
def model():
    return made() if pytest.importorskip("peft") else None


def forward(model, seed=0):
    """The loss of a row under autocast."""
    ids = torch.randint(1, 60, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.autocast("cpu", BF16):
        out = model.base_model(input_ids=ids, position_ids=positions).last_hidden_state
    return out.float()[..., ::3].pow(2).sum()


def step(model, seed=0):
    """The loss of a row, and all gradients."""
    model.zero_grad()
    loss = forward(model, seed)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@contextmanager
def without_copies():
    """Within the block, weights are rounded in every product."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computed_weights, "copy_of", lambda *_: None)
        yield


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def base_weights(model):
    """The matrices that products read, by name."""
    return {
        name: one
        for name, one in trunk_of(model).named_parameters()
        if one.ndim == 2 and "lora" not in name and "embed" not in name
    }


def copies_of(model):
    """The copies of the text model's weights."""
    graphs = state_of(trunk_of(model)).graphs
    return graphs._copies_of(trunk_of(model)).rounded


class Roundings(TorchDispatchMode):
    """Counts how often weights are rounded in products."""

    def __init__(self, model):
        super().__init__()
        self.weights = {one.data_ptr() for one in base_weights(model).values()}
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten._to_copy.default and args[0].ndim == 2:
            self.count += args[0].data_ptr() in self.weights
        return op(*args, **kwargs or {})


KINDS = [
    pytest.param("lora", marks=needs("peft")),
    "full",
]
RECOMPUTED = None, "not reentrant", "reentrant", "wrapper"


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_and_round_once(kind, recompute, monkeypatch):
    """Over steps of two rows each, of an optimizer that writes the trained weights."""
    launches, launch = [], rounded_weights._Kernels.launch
    monkeypatch.setattr(
        rounded_weights._Kernels,
        "launch",
        lambda self, every: launches.append(every) or launch(self, every),
    )

    def train(model):
        optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2)
        found, counts = [], []
        for number in range(4):
            before = len(launches)
            with Roundings(model) as roundings:
                loss = forward(model, number % 2)
                loss.backward()
            counts.append((len(launches) - before, roundings.count))
            found.append({"loss": loss.detach(), **gradients(model)})
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return found, counts

    model = made(kind, recompute=recompute)
    reference = made(kind, recompute=recompute)
    reference.load_state_dict(model.state_dict())
    found, counts = train(model)
    with without_copies():
        wanted, every = train(reference)
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)
    assert found[0]["loss"] != found[2]["loss"]
    # forward, backward, and forward once more
    assert every[-1][1] == (2 if recompute is None else 3) * MATRICES
    assert counts[0] == every[0]
    # the second row makes the copies and has them looked at
    assert counts[1:] == [(2, 0)] + [(1, 0)] * 2
    assert len(copies_of(model)) == len(base_weights(model)) == MATRICES


def merge_and_unmerge(model, weight):
    layer = model.model.layers[0].mlp.down_proj
    layer.merge()
    layer.unmerge()


def load(model, weight):
    state = {name: 3 * x for name, x in model.state_dict().items() if "down_proj.base" in name}
    assert state and not model.load_state_dict(state, strict=False).unexpected_keys


def replace_parameter(model, weight):
    model.model.layers[0].mlp.down_proj.base_layer.weight = torch.nn.Parameter(
        3 * weight.detach(), requires_grad=False
    )


def swap_data(model, weight):
    """Two weights of one shape change places."""
    mlp = model.model.layers[0].mlp
    one, other = (part.base_layer.weight for part in (mlp.gate_proj, mlp.up_proj))
    one.data, other.data = other.data, one.data


WRITES = {
    "copy_": lambda model, weight: weight.copy_(3 * weight),
    ".data.copy_": lambda model, weight: weight.data.copy_(3 * weight),
    "load_state_dict": load,
    "merged": lambda model, weight: model.model.layers[0].mlp.down_proj.merge(),
    "merged and unmerged": merge_and_unmerge,
    "moved": lambda model, weight: setattr(weight, "data", 3 * weight),
    "replaced": replace_parameter,
    "swapped": swap_data,
    "trained": lambda model, weight: weight.requires_grad_(),
}


@needs("peft")
@pytest.mark.parametrize("write", WRITES)
def test_rows_read_the_weights_of_their_step(model, write):
    weight = model.model.layers[0].mlp.down_proj.base_layer.weight
    before = [step(model) for _ in range(3)][-1]
    assert len(copies_of(model)) == MATRICES
    with torch.no_grad():
        WRITES[write](model, weight)
    found = [step(model) for _ in range(2)]
    with Roundings(model) as roundings:
        found.append(step(model))
    assert roundings.count == 0
    with without_copies():
        wanted = step(model)
    for each in found:
        assert_same(each, wanted)
    assert len(copies_of(model)) == MATRICES
    if write not in ("merged and unmerged", "trained"):
        assert before["loss"] != wanted["loss"]


@needs("peft")
def test_weights_of_new_modules_are_rounded_where_they_are_read_until_they_are_found(
    model, monkeypatch
):
    monkeypatch.setattr(copies, "AGAIN", 6)
    for _ in range(3):
        step(model)
    layer = model.model.layers[0].mlp.down_proj
    layer.base_layer = copy.deepcopy(layer.base_layer)
    with torch.no_grad():
        layer.base_layer.weight.mul_(3)
    counted, found = [], []
    for _ in range(6):
        found.append(step(model))
        with Roundings(model) as roundings:
            found.append(step(model))
        counted.append(roundings.count)
    assert counted[0] > 0 and counted[-1] == 0 and len(copies_of(model)) == MATRICES
    with without_copies():
        wanted = step(model)
    for each in found:
        assert_same(each, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_by_itself_is_recomputed_by_itself(reentrant):
    """After rows, and after weights were written through `.data`, which torch does not count."""
    model = made("full")
    for _ in range(3):
        step(model)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    trunk, packed = trunk_of(model), PackedSequence.from_lengths(LENGTHS)
    x = torch.randn(1, 8, trunk.config.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = packed.position_ids()

    def layer(h):
        emb = trunk.rotary_emb(h, positions[None].expand(3, 1, 8))
        return trunk.layers[0](h, position_embeddings=emb, packed_sequence=packed)

    def alone():
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", BF16):
            out = checkpoint(layer, leaf, use_reentrant=reentrant)
        out.float().pow(2).sum().backward()
        return {"x": leaf.grad, **gradients(model)}

    found = alone()
    with without_copies():
        wanted = alone()
    assert len(wanted) > MATRICES
    assert_same(found, wanted)


def test_models_that_share_weights_recompute_their_own_rows():
    one, other = (made("full", recompute="not reentrant") for _ in range(2))
    for name, parameter in one.named_parameters():
        owner, _, last = name.rpartition(".")
        setattr(other.get_submodule(owner), last, parameter)
    for model in (one, other) * 3:
        step(model)
    for model in (other, one, other):
        for parameter in one.parameters():
            parameter.data.mul_(1.2)
        found = step(model)
        with without_copies():
            assert_same(found, step(model))


@needs("peft")
@pytest.mark.parametrize("fused", [False, True])
def test_copies_wait_for_the_optimizer(fused, model, monkeypatch):
    """Whose states they leave memory to. torch counts no version of what a fused one writes. A
    loop without steps has copies all the same, later.
    """
    monkeypatch.setattr(copies, "PATIENCE", 4)
    for rows in range(1, 8):
        step(model)
        assert (len(copies_of(model)) > 0) == (rows > 4)
    monkeypatch.setattr(copies, "PATIENCE", 100)
    other = made()
    optimizers = [
        torch.optim.AdamW([x for x in each.parameters() if x.requires_grad], fused=fused)
        for each in (model, other)
    ]
    for optimizer in optimizers:
        step(other)
        step(other)
        assert len(copies_of(other)) == 0
        optimizer.step()
    step(other)
    assert len(copies_of(other)) == MATRICES


def test_who_waits_for_the_optimizer_leaves_nothing_behind():
    """One hook is enough for all, and what dies while torch calls hooks takes none away."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    hooks = all_optimizers._global_optimizer_post_hooks
    first, dying = copies.FirstStep(weights[:1]), []
    user = all_optimizers.register_optimizer_step_post_hook(lambda *_: dying.clear())
    dying += [copies.FirstStep(weights) for _ in range(3)]
    number, other = len(hooks), copies.FirstStep(weights[1:])
    weights[0].grad = torch.ones(1)
    try:
        torch.optim.SGD(weights[:1]).step()
    finally:
        user.remove()
    assert first.made and not other.made and copies.FirstStep([]).made
    assert len(hooks) == number - 1 and {*copies._waiting} & {first, other} == {other}


def test_a_copy_is_of_no_other_weight_at_its_address():
    """Weights that are moved, or freed, leave their addresses to others."""
    weights = [torch.nn.Parameter(torch.randn(8, 8), requires_grad=False) for _ in range(3)]
    rounded = RoundedWeights(weights)
    with rounded.in_row():
        assert all(copy_of(weight, BF16) is not None for weight in weights)
        rounded.allocate(0.0)
        one, other, third = weights
        moved = copy_of(one, BF16)
        assert moved.memory is not None
        # as it was seen, but nobody knows whether it is what it was
        assert copy_of(torch.nn.Parameter(one.detach()), BF16) is None
        assert rounded.of(third.T, BF16) is None
        other.data, one.data = one.data, torch.randn(8, 8)
        assert copy_of(one, BF16) is None and copy_of(other, BF16) is None
        read = copy_of(third, BF16)
        assert read.read(third).data_ptr() == read.memory.data_ptr()
        # what products hold up to their backward pass
        assert torch.equal(moved.read(one), one.bfloat16())
        with torch.no_grad():
            third.add_(1)
        assert torch.equal(read.read(third), third.bfloat16())
        assert read.above(torch.zeros(1, 8)) is None
    assert copy_of(third, BF16) is None
    shared = torch.randn(8, 8)
    twice = RoundedWeights([torch.nn.Parameter(shared, requires_grad=False) for _ in range(2)])
    assert twice.of(shared, BF16) is None


@needs("peft")
@pytest.mark.parametrize("recompute", [None, "reentrant", "not reentrant"])
def test_two_rows_before_their_backward_passes(recompute):
    model = made(recompute=recompute)
    for number in range(3):
        step(model, number)

    def both(in_one):
        model.zero_grad()
        first, second = forward(model, 1), forward(model, 2)
        if in_one:
            (first - 2 * second).backward()
        else:
            first.backward()
            second.backward()
        return gradients(model)

    for in_one in (False, True):
        found = both(in_one)
        with without_copies():
            assert_same(found, both(in_one))


@needs("peft")
@pytest.mark.parametrize("recompute", [None, "reentrant", "not reentrant"])
def test_a_weight_that_changes_before_the_backward_pass(recompute):
    """Recomputation reads it as it is then; else autograd refuses."""
    model = made(recompute=recompute)
    weight = model.model.layers[0].mlp.down_proj.base_layer.weight
    for number in range(3):
        step(model, number)

    def change():
        model.zero_grad()
        loss = forward(model)
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(3)
        try:
            loss.backward()
        finally:
            with torch.no_grad():
                weight.copy_(before)
        return gradients(model)

    if recompute is None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            change()
        return
    found = change()
    with without_copies():
        assert_same(found, change())


@needs("peft")
def test_other_passes_round_for_themselves():
    """A reference pass between forward and backward, evaluation, and layers that are called alone
    read no copy; the backward pass does.
    """
    model = made(recompute="not reentrant")
    for _ in range(3):
        step(model)
    weight = model.model.layers[0].mlp.down_proj.base_layer.weight
    wanted = step(model)
    model.zero_grad()
    loss = forward(model)
    with torch.no_grad(), Roundings(model) as roundings:
        again = forward(model)
    assert roundings.count == MATRICES and torch.equal(again, loss)
    with Roundings(model) as roundings:
        loss.backward()
    assert roundings.count == 0
    assert_same({"loss": loss.detach(), **gradients(model)}, wanted)
    # which nothing notices before the next row
    weight.data.mul_(3)
    for grad in (True, False):
        model.eval()
        with torch.set_grad_enabled(grad), Roundings(model) as roundings:
            changed = forward(model)
        assert roundings.count == MATRICES and changed != loss
        model.train()
    layer = model.model.layers[0].mlp.down_proj
    assert copy_of(layer.base_layer.weight, BF16) is None
    with without_copies():
        assert_same(step(model), step(model))


@needs("peft")
def test_recomputation_after_a_row_that_read_no_copies():
    """A weight is written through .data before a row that is no training step, but trains."""
    model = made(recompute="not reentrant")
    for _ in range(3):
        step(model)
    weight = model.model.layers[0].mlp.gate_proj.base_layer.weight
    weight.data.mul_(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_layers, "_is_training_step", lambda *_: False)
        found = step(model)
    with without_copies():
        assert_same(found, step(model))


@needs("peft")
@pytest.mark.parametrize("wide", [FP16, torch.float32])
def test_other_dtypes_of_autocast(model, wide):
    for _ in range(3):
        step(model)

    def other():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "BF16", wide)
            return step(model)

    found = other()
    with without_copies():
        assert_same(found, other())


@needs("peft")
def test_the_report_says_what_copies_cost(model, monkeypatch):
    assert patch_report(model).autocast == ""
    step(model)
    assert patch_report(model).autocast == ""
    step(model)
    nbytes = copies_of(model).nbytes
    # with room for the adapters' factors
    assert nbytes > sum(2 * x.numel() for x in base_weights(model).values())
    monkeypatch.setattr(RoundedWeights, "nbytes", property(lambda self: 12 << 20))
    said = "fp32 weights were rounded once for each training row, in copies of 12 MiB"
    report = patch_report(model)
    assert report.autocast == said and said in str(report)
    assert report.cuda_graphs == ""


@needs("peft")
@pytest.mark.parametrize("raises", [False, True])
def test_rows_without_memory_for_copies(model, raises, monkeypatch):
    if raises:

        def fails(self):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(rounded_weights.RoundedWeight, "empty", fails)
    else:
        monkeypatch.setattr(rounded_weights, "_fits", lambda copies, spare: spare != copies_spare)
    found = [step(model) for _ in range(3)]
    assert not len(copies_of(model)) and copies_of(model).refused
    assert (
        patch_report(model).autocast
        == "fp32 weights were rounded in every product, for lack of memory for copies"
    )
    with without_copies():
        assert_same(found[-1], step(model))


copies_spare = copies.SPARE


@needs("peft")
def test_no_copies_before_the_optimizer_has_its_states(model):
    graphs = state_of(trunk_of(model)).graphs
    graphs.wait = True
    for _ in range(3):
        step(model)
    assert not len(copies_of(model))
    graphs.wait = False
    step(model)
    assert len(copies_of(model)) == MATRICES


def test_copies_of_the_model_have_none_and_removal_frees_them():
    model = made("full")
    for _ in range(2):
        step(model)
    memory = [weakref.ref(each.memory) for each in copies_of(model)._made]
    assert len(memory) == MATRICES and all(each() is not None for each in memory)
    size = len(pickle.dumps(model.state_dict()))
    twin = copy.deepcopy(model)
    assert not len(copies_of(twin)) and len(pickle.dumps(twin)) < 2 * size
    step(twin)
    assert not [name for name in model.state_dict() if "round" in name]
    assert_same(step(model), step(model))
    remove_patches(model)
    gc.collect()
    assert not any(each() is not None for each in memory)


def rows(model, cuda_graphs):
    for module in model.modules():
        if "packfree" in vars(module):
            vars(module)["packfree"] = replace(vars(module)["packfree"], cuda_graphs=cuda_graphs)


@pytest.fixture
def graphed(monkeypatch):
    """A model whose rows the stand-in for CUDA graphs replays with the copies in use."""
    on_cpu.let_capture_whole_documents(monkeypatch)
    # 16 tokens fill a bucket: products of more rows may sum in another order
    monkeypatch.setitem(globals(), "LENGTHS", (5, 7, 4))
    model = made()
    rows(model, "auto")
    on_cpu.replay_with_copies(monkeypatch, model)
    return model


@needs("peft")
def test_graphs_and_rows_without_share_copies(graphed, monkeypatch):
    for _ in range(3):
        step(graphed)
    runner, made = runner_of(graphed), copies_of(graphed)
    assert runner.replayed and runner.captures.rounded is made and len(made) == MATRICES
    said = patch_report(graphed)
    assert "fp32 weights were rounded before each, in copies of" in said.cuda_graphs
    # a longer row
    replayed, found = runner.replayed, None
    with pytest.MonkeyPatch.context() as patch, Roundings(graphed) as roundings:
        patch.setattr(captured_layers, "_why_not", lambda *_: "it is long")
        found = step(graphed)
    assert roundings.count == 0 and runner.replayed == replayed
    assert copies_of(graphed) is made
    with without_copies():
        assert_same(found, step(graphed))


@needs("peft")
def test_what_a_graphs_backward_pass_reads_stays(graphed):
    for _ in range(3):
        step(graphed)
    runner = runner_of(graphed)
    graphed.zero_grad()
    first = forward(graphed, 1)
    replayed = runner.replayed
    with Roundings(graphed) as roundings:
        second = forward(graphed, 2)
    assert runner.replayed == replayed and roundings.count == MATRICES
    assert "still to come" in str(runner.reasons)
    first.backward()
    second.backward()
    found = gradients(graphed)
    rows(graphed, "never")
    with without_copies():
        graphed.zero_grad()
        for number in (1, 2):
            forward(graphed, number).backward()
        assert_same(found, gradients(graphed))


@needs("peft")
def test_copies_that_were_in_the_way_of_graphs_are_not_made_again(graphed, monkeypatch):
    runner = runner_of(graphed)
    monkeypatch.setattr(
        "hf_packfree.graphs.captures.free_memory",
        lambda device: 0.0 if len(runner.captures.rounded) else 1,
    )
    # the stand-in for a warm-up has one run, so that a row without a graph comes before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_layers, "_why_not", lambda *_: "it is long")
        for _ in range(2):
            step(graphed)
    assert len(copies_of(graphed)) == MATRICES
    for _ in range(2):
        step(graphed)
    runner.captures.drop()
    assert not len(copies_of(graphed)) and copies_of(graphed).refused
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_layers, "_why_not", lambda *_: "it is long")
        for _ in range(2):
            step(graphed)
    assert not len(copies_of(graphed))
    assert "for lack of memory" in patch_report(graphed).autocast


@pytest.mark.parametrize(
    "mark", ["_is_replica", "_is_fsdp_managed_module"], ids=["DataParallel", "FSDP"]
)
def test_weights_that_are_not_the_models_own(mark, monkeypatch):
    model = made("full")
    monkeypatch.setattr(type(trunk_of(model)), mark, True, raising=False)
    for _ in range(3):
        step(model)
    assert not len(copies_of(model))


def test_parameters_that_are_gathered_from_parts():
    model = made("full")
    for one in model.parameters():
        one.ds_shape = one.shape
    for _ in range(3):
        step(model)
    assert not len(copies_of(model))
