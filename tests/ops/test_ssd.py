"""Mamba-2's SSD against its definition, token by token in fp64, and its promises about packing."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import softplus

from hf_packfree.errors import BackendUnavailable, UnsupportedInput
from hf_packfree.ops import backend
from hf_packfree.ops import ssd as room
from hf_packfree.ops.backend import Target
from hf_packfree.ops.ssd import OP, mamba_ssm, recurrent_ssd, ssd
from hf_packfree.packing import PackedSequence
from tests.ops.recurrences import run
from tests.support import relative_rms

NAMES = ("out", "x", "dt", "A", "B", "C", "D")
LENGTHS = [300, 1, 63, 64, 65, 2, 127, 128, 129, 3]
SHAPES = [(4, 1, 8, 16), (4, 2, 16, 8), (3, 3, 5, 7), (20, 2, 8, 8)]
"""Heads, groups, their size and that of states; the last one has blocks that do not fill up."""
EXACT, SINGLE = 1e-12, 2e-6


def make_inputs(lengths, heads=4, groups=2, size=8, state=16, *, strong=False):
    """x, dt, A, B, C, D in fp64: of states that live for hundreds of tokens, or for one."""
    generator, tokens = torch.Generator().manual_seed(sum(lengths)), sum(lengths)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rate = torch.rand(heads, generator=generator, dtype=torch.float64)
    B, C = (random(1, tokens, groups, state) / 3 for _ in range(2))
    dt = softplus(random(1, tokens, heads) - (0 if strong else 3))
    return [
        random(1, tokens, heads, size),
        dt,
        -0.02 - rate * (16 if strong else 0.5),
        B,
        C,
        random(heads),
    ]


def worst(found, wanted, floor=1e-300):
    """The largest relative RMS, with its name."""
    errors = {
        name: relative_rms(a, b, floor) for name, a, b in zip(NAMES, found, wanted, strict=True)
    }
    return max((error, name) for name, error in errors.items())


@pytest.mark.parametrize("strong", [False, True], ids=["slow", "strong"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_match_the_recurrence(shape, strong):
    """Measured: 5e-15 and 5e-7."""
    inputs = make_inputs(LENGTHS, *shape, strong=strong)
    wanted = run(recurrent_ssd, inputs, LENGTHS)
    assert worst(run(ssd, inputs, LENGTHS), wanted)[0] <= EXACT
    single = run(ssd, [x.float() for x in inputs], LENGTHS)
    assert worst(single, wanted)[0] <= SINGLE
    assert {x.dtype for x in single} == {torch.float32}


@pytest.mark.parametrize("lengths", [[31, 32, 33], [255, 256, 257], [1] * 300, [300]], ids=len)
def test_edges_of_chunks(lengths):
    inputs = make_inputs(lengths, 2, 1, 8, 8)
    found, wanted = run(ssd, inputs, lengths), run(recurrent_ssd, inputs, lengths)
    assert worst(found, wanted, 1e-20)[0] <= EXACT


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    strong=st.booleans(),
)
def test_any_lengths_heads_and_sizes(lengths, groups, share, sizes, strong):
    inputs = make_inputs(lengths, groups * share, groups, *sizes, strong=strong)
    found, wanted = run(ssd, inputs, lengths), run(recurrent_ssd, inputs, lengths)
    # of A under strong decay little is left of the terms it is the sum of
    assert worst(found, wanted, 1.0)[0] <= EXACT


@pytest.mark.parametrize("strong", [False, True], ids=["slow", "strong"])
def test_decay_gradients_in_fp32_are_as_near_to_fp64_as_the_recurrences(strong):
    """The geometric mean of the errors' ratios is 0.8 to 1.2 over 12 rows; for strong decay it was
    1.9 and 23 when a token's gradient was a sum over later tokens, of which most cancels.
    """
    logs = {"dt": 0.0, "A": 0.0}
    for seed in range(12):
        lengths = [64, 5, 63, 30 + seed]
        inputs = make_inputs(lengths, strong=strong)
        wanted = run(recurrent_ssd, inputs, lengths)
        single = [x.float() for x in inputs]
        ours, recurrence = (run(rule, single, lengths) for rule in (ssd, recurrent_ssd))
        for name in logs:
            of = NAMES.index(name)
            pair = [relative_rms(found[of], wanted[of]) for found in (ours, recurrence)]
            logs[name] += math.log(pair[0] / pair[1]) / 12
    assert max(logs.values()) <= math.log(1.5), logs


def test_where_nothing_decays_no_gradient_reaches_the_rate():
    """The state before a document's first token is zero, whatever it decays by."""
    inputs = make_inputs([1] * 9)
    found = dict(zip(NAMES, run(ssd, inputs, [1] * 9), strict=True))
    assert not found["A"].any() and all(found[name].any() for name in NAMES if name != "A")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_gets_the_same_bits_alone(shape, dtype):
    inputs = [x.to(dtype) for x in make_inputs(LENGTHS, *shape)]
    packed = ssd(*inputs, PackedSequence.from_lengths(LENGTHS)).split(LENGTHS, 1)
    parts = zip(*(x.split(LENGTHS, 1) for x in inputs if x.dim() > 1), strict=True)
    for length, out, (x, dt, B, C) in zip(LENGTHS, packed, parts, strict=True):
        alone = ssd(x, dt, inputs[2], B, C, inputs[5], PackedSequence.from_lengths([length]))
        assert torch.equal(alone, out), length


def test_documents_do_not_influence_each_other_and_the_control_does():
    inputs = make_inputs(LENGTHS)
    changed = [x.clone() for x in inputs]
    for x in (x for x in changed if x.dim() > 1):
        x[:, :300] = x[:, :300].flip(1)

    def rest(lengths):
        packed = PackedSequence.from_lengths(lengths)
        return [ssd(*x, packed)[:, 300:] for x in (inputs, changed)]

    assert torch.equal(*rest(LENGTHS))
    assert relative_rms(*rest([sum(LENGTHS)])) > 1e-2


def test_parameters_may_be_wider_than_the_row():
    """As under autocast: A is fp32 always, the steps are where the kernels make them."""
    x, dt, A, B, C, D = make_inputs([65, 5])
    mixed = [x.bfloat16(), dt.float(), A.float(), B.bfloat16(), C.bfloat16(), D.float()]
    found, wanted = run(ssd, mixed, [65, 5]), run(ssd, [one.double() for one in mixed], [65, 5])
    assert [one.dtype for one in found[1:]] == [one.dtype for one in mixed]
    assert worst(found, wanted)[0] <= 2 * torch.finfo(torch.bfloat16).eps


def test_any_strides():
    """As a convolution leaves x, B and C, side by side, and transposed."""
    x, dt, A, B, C, D = (one.float() for one in make_inputs([65, 5], 4, 2, 16, 16))
    packed = PackedSequence.from_lengths([65, 5])
    wanted = ssd(x, dt, A, B, C, D, packed)
    beside = torch.cat([part.flatten(2) for part in (x, B, C)], 2).split([64, 32, 32], 2)
    x, B, C = (part.unflatten(2, (-1, 16)) for part in beside)
    assert torch.equal(ssd(x, dt, A, B, C, D, packed), wanted)
    x, B, C, dt = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (x, B, C, dt))
    assert torch.equal(ssd(x, dt, A, B, C, D, packed), wanted)


def test_what_is_refused():
    inputs, packed = make_inputs([3]), PackedSequence.from_lengths([3])
    with pytest.raises(BackendUnavailable, match=r"'nope'; wanted one of fla, mamba_ssm, torch"):
        ssd(*inputs, packed, backend="nope")
    with pytest.raises(UnsupportedInput, match="tree of shared prefixes for Mamba-2's SSD"):
        ssd(*inputs, PackedSequence.from_tree([1, 1, 1], [None, 0, 0]))
    inputs[0].requires_grad_()
    out = ssd(*inputs, packed)
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(UnsupportedInput, match="found a second derivative"):
        gradient.sum().backward()


@pytest.fixture
def mamba(monkeypatch):
    """The stand-in for mamba-ssm, on the path and forgotten afterwards."""

    def forget():
        mamba_ssm._kernel.cache_clear()
        mamba_ssm._broken.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
            del sys.modules[name]

    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fakes_mamba")
    forget()
    yield
    forget()


@pytest.mark.parametrize("name", ["mamba_ssm", "fla"])
def test_kernels_get_what_they_compute_with(name, request):
    request.getfixturevalue({"mamba_ssm": "mamba", "fla": "stand_ins"}[name])
    lengths = [65, 1, 5, 70]
    for groups in (1, 2, 4):
        inputs = [x.float() for x in make_inputs(lengths, 4, groups)]
        wanted = run(recurrent_ssd, [x.double() for x in inputs], lengths)
        assert worst(run(ssd, inputs, lengths, backend=name), wanted)[0] <= SINGLE
    assert "selective_scan_cuda" not in sys.modules
    room.fla._kernel.cache_clear()


def test_a_package_that_was_compiled_keeps_its_parts(mamba, monkeypatch):
    compiled = ModuleType("selective_scan_cuda")
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", compiled)
    inputs = [x.float() for x in make_inputs([65, 5])]
    found = ssd(*inputs, PackedSequence.from_lengths([65, 5]), backend="mamba_ssm")
    assert relative_rms(found, ssd(*inputs, PackedSequence.from_lengths([65, 5]))) <= SINGLE
    assert sys.modules["selective_scan_cuda"] is compiled


def test_a_release_that_asks_for_no_compiled_part(mamba, tmp_path, monkeypatch):
    """As mamba-ssm's main branch since its scan in CUDA is optional, without causal-conv1d, too."""
    shutil.copytree(Path(__file__).parents[1] / "fakes_mamba", tmp_path, dirs_exist_ok=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("__version__ = '2.3.3.dev0'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", None)
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    inputs, lengths = [x.float() for x in make_inputs([65, 5])], [65, 5]
    wanted = run(recurrent_ssd, [x.double() for x in inputs], lengths)
    assert worst(run(ssd, inputs, lengths, backend="mamba_ssm"), wanted)[0] <= SINGLE
    assert sys.modules["mamba_ssm"].__version__ == "2.3.3.dev0"


def test_rows_beyond_the_kernels_offsets_are_refused(mamba):
    tokens, heads, size, state = 2**20, 32, 64, 16

    def row(*shape):
        return torch.zeros(1).expand(1, tokens, *shape)

    inputs = row(heads, size), row(heads), torch.zeros(heads), row(1, state), row(1, state)
    with pytest.raises(BackendUnavailable, match=r"1048576 tokens.*reach 2147483648; wanted less"):
        ssd(*inputs, torch.zeros(heads), PackedSequence.from_lengths([tokens]), backend="mamba_ssm")


@pytest.fixture
def anywhere(monkeypatch):
    """A GPU on which Triton runs."""
    monkeypatch.setattr(mamba_ssm, "needs_triton", lambda target: None)


GPU = Target("cuda", (9, 0))


def test_where_mamba_ssm_cannot_run(anywhere, mamba, monkeypatch):
    unusable = OP.backends["mamba_ssm"].unusable
    assert unusable(GPU) is None
    assert unusable(Target("cuda", dtype=torch.float64)).endswith("this is float64")
    monkeypatch.setattr(mamba_ssm, "installed", lambda package: "2.2.5")
    assert "mamba-ssm 2.2.5 is too old for packed rows" in unusable(GPU)


def test_mamba_ssm_that_is_absent_or_broken_says_so(anywhere, tmp_path, monkeypatch):
    unusable = OP.backends["mamba_ssm"].unusable
    assert "mamba-ssm is not installed; pip install" in unusable(GPU)
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    mamba_ssm._broken.cache_clear()
    assert "is broken (OSError: undefined symbol); reinstall it" in unusable(GPU)
    mamba_ssm._broken.cache_clear()


def test_on_a_cpu_torch_runs(monkeypatch):
    assert "this is a cpu" in OP.backends["mamba_ssm"].unusable(Target("cpu"))
    assert "this is a cpu" in OP.backends["fla"].unusable(Target("cpu"))
    monkeypatch.setattr(backend, "needs_cuda", lambda target: None)
    monkeypatch.setattr(room.fla, "needs_fla", lambda target: None)
    monkeypatch.setattr("hf_packfree.ops.fla_support.installed", lambda package: "3.6.0")
    assert "refuses to run on Hopper with triton 3.6.0" in room.fla.unusable(GPU)
