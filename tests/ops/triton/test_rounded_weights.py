"""fp32 weights that are rounded once for all products: copies follow every write to the weights, and
products read them.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch

from hf_packfree import patch_report
from hf_packfree.graphs import captures
from hf_packfree.graphs.of_model import Graphs
from hf_packfree.ops import rounded_weights
from hf_packfree.ops.fused import computed_weights
from hf_packfree.ops.fused.computed_weights import Weights, rounded
from hf_packfree.ops.rounded_weights import RoundedWeights, copy_of
from tests.graphs import on_cpu
from tests.integrations.marks import needs
from tests.ops.triton.kernels import on_kernels
from tests.ops.triton.test_lora import lora
from tests.support import gradients, runner_of, tiny

pytestmark = [
    pytest.mark.usefixtures("rounds_to_bf16"),
    pytest.mark.filterwarnings("default"),
]
KERNELS = {"find_changed", "round_changed"}
BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = (40, 24), (9, 16), (17, 35)


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape), requires_grad=False) for shape in SHAPES]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(rounded_weights, "_BLOCK", 16)


def copies_of(weights, dtype=BF16, rows=0, columns=0):
    """Copies of the weights with room for adapters, and how products read these."""
    made = RoundedWeights(weights)
    with made.in_use():
        read = [rounded(weight, dtype) for weight in weights]
        for weight, how in zip(weights, read, strict=True):
            assert torch.equal(how.compute(weight), weight.to(dtype))
            assert how.copy.beside(weight.new_empty(len(weight), columns)) is None
            assert how.copy.above(weight.new_empty(rows, weight.shape[1])) is None
    made.allocate(0.0)
    return made, read


def are_right(weights, read):
    return [
        torch.equal(how.compute(weight.new_empty(weight.shape)), weight.to(how.dtype))
        for weight, how in zip(weights, read, strict=True)
    ]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_copies(weights, dtype, launched):
    made, read = copies_of(weights, dtype)
    assert launched == KERNELS
    assert len(made) == len(weights)
    assert made.nbytes == sum(2 * weight.numel() for weight in weights)
    assert are_right(weights, read) == [True] * 3


WRITES = {
    "in place": lambda x: x.mul_(2),
    "one element in place": lambda x: x[3].view(-1)[7:8].add_(1),
    "through .data": lambda x: x.data.add_(1e-6),
    "one row through .data": lambda x: x.data[5].neg_(),
    "one column through .data": lambda x: x.data[:, 11].neg_(),
    "to NaN through .data": lambda x: x.data.fill_(float("nan")),
}


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_copies_follow_writes(weights, write):
    made, read = copies_of(weights)
    WRITES[write](weights[0])
    if "NaN" not in write:
        if write != "through .data":
            assert are_right(weights, read) == [False, True, True]
        made.refresh()
        assert are_right(weights, read) == [True] * 3
    else:
        made.refresh()
        assert read[0].compute(weights[0]).isnan().all()
        assert are_right(weights, read) == [False, True, True]


@torch.no_grad()
def test_weights_that_nobody_writes_are_not_rounded_again(weights):
    """What an optimizer may write without a trace, on the other hand, always is."""
    weights[2].requires_grad_()
    made, read = copies_of(weights)
    weights[1][3] = float("nan")
    made.refresh()
    for how in read:
        how.copy.memory.zero_()
    weights[2].add_(1)
    made.refresh()
    assert are_right(weights, read) == [False, False, True]


@torch.no_grad()
def test_room_for_adapters(weights):
    made, read = copies_of(weights, rows=3, columns=16)
    sizes = [(rows + 3, width + 16) for rows, width in SHAPES]
    assert [tuple(how.copy.memory.shape) for how in read] == sizes
    assert made.nbytes == sum(2 * rows * width for rows, width in sizes)
    joined = Weights(weights, read)
    for i, weight in enumerate(weights):
        one, own = slice(i, i + 1), weight.to(BF16)
        for rows, columns, inside in (
            (3, 16, [True, True]),
            (1, 8, [True, True]),
            (4, 24, [False, False]),
            # rows that are no whole vectors
            (2, 5, [False, True]),
        ):
            A = torch.randn(rows, weight.shape[1]).bfloat16()
            B = torch.randn(len(weight), columns).bfloat16()
            beside, above = joined.beside(i, [B]), joined.above(one, A)
            assert torch.equal(beside, torch.cat([own, B], 1))
            assert torch.equal(above, torch.cat([own, A], 0))
            memory = read[i].copy.memory.data_ptr()
            assert [x.data_ptr() == memory for x in (beside, above)] == inside
    weights[0].add_(1)
    made.refresh()
    assert are_right(weights, read) == [True] * 3


def test_weights_without_a_copy(weights):
    made, read = copies_of(weights)
    other, half = torch.nn.Parameter(torch.randn(4, 8)), torch.randn(4, 8).half()
    with made.in_use():
        assert copy_of(weights[0], BF16) is read[0].copy
        # the same memory, as a capture's stand-ins for parameters have
        assert copy_of(torch.nn.Parameter(weights[0].detach()), BF16) is read[0].copy
        assert copy_of(weights[0], FP16) is None and copy_of(weights[0].T, BF16) is None
        assert copy_of(other, BF16) is None and copy_of(other, FP16) is None
    assert copy_of(weights[0], BF16) is None and rounded(weights[0], BF16).copy is None
    for odd in (half, torch.randn(4), torch.randn(8, 4).T, torch.randn(99)[1:97].view(8, 12)):
        alone = RoundedWeights([odd])
        with alone.in_use():
            assert copy_of(odd, BF16) is None


def test_an_allocation_that_fails_leaves_no_copy(weights, monkeypatch):
    made = RoundedWeights(weights)
    with made.in_use():
        read = [rounded(weight, BF16) for weight in weights]
    for name in ("empty", "launch"):
        owner = rounded_weights.RoundedWeight if name == "empty" else rounded_weights._Kernels
        calls, real = [], getattr(owner, name)

        def fails(self, *args, calls=calls, real=real, last=3 if name == "empty" else 1, **kwargs):
            calls.append(self)
            if len(calls) == last:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(owner, name, fails)
            made.allocate(0.0)
        assert len(made) == 0 and [how.copy.memory for how in read] == [None] * 3
    made.allocate(0.0)
    assert len(made) == 3 and are_right(weights, read) == [True] * 3


def test_nobody_but_the_model_holds_the_weights_memory(weights):
    made, _ = copies_of(weights)
    storage = weights[0].untyped_storage()
    alive = weakref.ref(storage)
    weights[0].data = torch.zeros(1)
    del storage
    assert made.nbytes and alive() is None


def test_products_that_autograd_follows_read_the_weight(weights):
    """Such as those of references; ours run inside of autograd's functions."""
    weights[0].requires_grad_()
    _, read = copies_of(weights)
    assert read[0].compute(weights[0]).requires_grad
    with torch.no_grad():
        assert read[0].compute(weights[0]).data_ptr() == read[0].copy.memory.data_ptr()


def test_copies_that_would_take_too_much_memory(weights, monkeypatch):
    monkeypatch.setattr(rounded_weights, "_fits", lambda copies, spare: False)
    made, read = copies_of(weights)
    assert made.refused and len(made) == made.nbytes == 0 and read[0].copy.memory is None
    made.refresh()
    assert are_right([weights[0]], read[:1]) == [False]
    assert torch.equal(read[0].compute(weights[0]), weights[0].bfloat16())
    assert computed_weights.materialize(read[0]).dtype == BF16


# 16 tokens fill a bucket: products of more rows may sum in another order
LENGTHS = 5, 7, 4


@pytest.fixture
def graphed(monkeypatch):
    """A model with LoRA on fp32 weights, whose rows the stand-in for CUDA graphs replays with the
    copies in use.
    """
    on_cpu.let_capture_whole_documents(monkeypatch)
    model = tiny()
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    model = on_kernels(lora(model), fused="triton").base_model.model
    on_cpu.replay_with_copies(monkeypatch, model)
    return model


def step(model, cuda_graphs="auto"):
    """The hidden states of a row under autocast, and the adapters' gradients."""
    for module in model.modules():
        if "packfree" in vars(module):
            vars(module)["packfree"].__dict__["cuda_graphs"] = cuda_graphs
    ids = torch.randint(1, 60, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    model.zero_grad()
    with torch.autocast("cpu", BF16):
        out = model.base_model(input_ids=ids, position_ids=positions).last_hidden_state
    out.float().pow(2).sum().backward()
    return {"out": out.detach(), **gradients(model)}


def step_without_copies(model):
    """The same without a graph, each weight rounded in every product."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computed_weights, "copy_of", lambda *_: None)
        return step(model, "never")


@needs("peft")
@pytest.mark.parametrize("name", ["in place", "through .data", "in other memory", "merged"])
def test_replays_read_the_weights_of_their_step(graphed, name):
    before = [step(graphed) for _ in range(3)][-1]["out"]
    runner, weight = runner_of(graphed), graphed.model.layers[0].mlp.down_proj.base_layer.weight
    assert len(runner.captures.rounded) > 5, patch_report(graphed).cuda_graphs
    assert (
        "fp32 weights were rounded before each, in copies of" in patch_report(graphed).cuda_graphs
    )
    with torch.no_grad():
        if name == "in place":
            weight.mul_(3)
        elif name == "through .data":
            weight.data.mul_(3)
        elif name == "in other memory":
            weight.data = 3 * weight
        else:
            graphed.model.layers[0].mlp.down_proj.merge()
    replayed, found = runner.replayed, [step(graphed) for _ in range(3)]
    wanted = step_without_copies(graphed)
    assert runner.replayed > replayed, runner.reasons
    assert (before - wanted["out"]).abs().max() > 1e-2
    for each in found:
        assert each.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(each[key], wanted[key])] == []


@needs("peft")
def test_a_graph_without_copies_is_better_than_none(graphed, monkeypatch):
    """Where too little memory would be free with a graph, the copies are what goes first."""
    runner = runner_of(graphed)
    monkeypatch.setattr(
        captures, "free_memory", lambda device: 0.0 if len(runner.captures.rounded) else 1
    )
    memory = allocating_at_once(monkeypatch)
    steps = [step(graphed) for _ in range(4)]
    assert memory and not any(each() is not None for each in memory)
    assert (
        runner.replayed == 2
        and len(runner.captures.graphs) == 1
        and not len(runner.captures.rounded)
    )
    assert [why[:24] for why in runner.reasons] == [
        "a row of about this leng",
        "with it, less than 12.5%",
    ]
    assert "in every product, for lack of memory" in patch_report(graphed).cuda_graphs
    wanted = step_without_copies(graphed)
    assert all(torch.equal(one[key], wanted[key]) for one in steps for key in wanted)


def allocating_at_once(monkeypatch):
    """The second run of a warm-up finds what the first looked for; the stand-in has one run. Return
    references to the memory of all copies that are made.
    """
    memory, allocate = [], RoundedWeights.allocate

    def allocate_at_once(self, spare):
        copies = [self.of(weight, BF16) for weight in self._weights.values()]
        allocate(self, spare)
        memory.extend(weakref.ref(each.memory) for each in copies if each.memory is not None)

    monkeypatch.setattr(RoundedWeights, "allocate", allocate_at_once)
    return memory


@needs("peft")
def test_a_capture_that_fails_leaves_no_copies(graphed, monkeypatch):
    memory = allocating_at_once(monkeypatch)
    monkeypatch.setattr(
        on_cpu.capture, "refuse_other_leaves", lambda *_: (_ for _ in ()).throw(RuntimeError("no"))
    )
    runner = runner_of(graphed)
    # rows that then run without a graph would make others
    monkeypatch.setattr(Graphs, "rounded_once", lambda *_: nullcontext())
    for _ in range(3):
        step(graphed)
    assert not runner.captures.graphs and runner.captures.rounded.nbytes == 0
    assert memory and not any(each() is not None for each in memory)
    assert "the capture failed: RuntimeError: no" in patch_report(graphed).cuda_graphs
    assert "copies" not in patch_report(graphed).cuda_graphs
    assert patch_report(graphed).autocast == ""
