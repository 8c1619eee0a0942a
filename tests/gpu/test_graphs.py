"""CUDA graphs of the layers: the bits of the same layers without, whatever documents follow each
other in a bucket.
"""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_packfree import patch_report
from hf_packfree.graphs import bucketing, parts
from hf_packfree.graphs.bucket import bucket_of, in_bucket, lengthened
from hf_packfree.models.state import state_of
from hf_packfree.ops.fused import computed_weights
from tests.benchmarks.models import put_lora_on, quantise
from tests.gpu.checks import DEVICE, TRIAL, gpu, record_of, spans
from tests.gpu.small import NARROW, WIDE, hidden, packed_row, small
from tests.gpu.test_model import NOISE
from tests.integrations.marks import needs
from tests.support import checkpoint_layers, difference, gradients, relative_rms, runner_of

pytestmark = [*gpu, pytest.mark.skipif(TRIAL, reason="CUDA graphs need a GPU")]
ROWS = (
    (500, 500, 500, 500),
    (1, 2, 3, 63, 64, 65, 129, 200, 513, 960),
    (2000,),
    (1990,),
    (700, 1290),
    tuple([40] * 49),
    (1000, 500, 250, 125, 60, 30, 15, 7),
)
"""Of about one length, in buckets of 16 and of 64 documents."""


def model_of(**options: Any) -> Any:
    return small(NARROW, cuda_graphs="auto", unpacked="native", **options)


def step(model: Any, lengths: Any, seed: int = 0, tokens: Any = None) -> torch.Tensor:
    """Run a row forward and backward; return its hidden states."""
    if tokens is None:
        tokens, _ = packed_row(model, lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(DEVICE)
    out = model.base_model(input_ids=tokens, position_ids=positions).last_hidden_state
    return backward(out, seed)


def backward(out: torch.Tensor, seed: int) -> torch.Tensor:
    """Run the backward pass of a random weighting of the hidden states, outside of autocast, as
    trainers do; return them.
    """
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    with torch.autocast(DEVICE, enabled=False):
        (out.float() * weight).sum().backward()
    return out.detach()


def without(model: Any, lengths: Any, seed: int = 0, tokens: Any = None) -> torch.Tensor:
    """Do the same in the row's bucket, without a graph."""
    given, _ = packed_row(model, lengths)
    tokens, packed = given if tokens is None else tokens, record_of(lengths)
    # the last graph that was replayed comes last
    graphs = reversed([key[0] for key in runner_of(model).captures.graphs])
    bucket = next((one for one in graphs if one.takes(packed)), bucket_of(packed))
    trunk, row = model.base_model, in_bucket(packed, bucket)
    embeddings = lengthened(trunk.get_input_embeddings()(tokens), bucket, 1)
    positions = lengthened(packed.position_ids(), bucket, 1)
    state_of(trunk).__dict__["cuda_graphs"] = "never"
    out = trunk(inputs_embeds=embeddings, position_ids=positions, packed_sequence=row)
    state_of(trunk).__dict__["cuda_graphs"] = "auto"
    out = out.last_hidden_state[:, : packed.num_tokens]
    return backward(out, seed)


def padded_step(model: Any, lengths: Any, seed: int = 0) -> torch.Tensor:
    """As `step`, of the same documents in rows of their own, padded."""
    tokens, _ = packed_row(model, lengths)
    rows = pad_sequence(tokens[0].split(list(lengths)), batch_first=True)
    real = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]
    mask = real.to(DEVICE)
    out = model.base_model(input_ids=rows, attention_mask=mask.long()).last_hidden_state
    return backward(out[mask][None], seed)


def both(model: Any, lengths: Any, seed: int = 0, step: Any = step) -> tuple[float, float]:
    """The largest differences of values and gradients between a graph and the layers."""
    model.zero_grad(set_to_none=True)
    found = step(model, lengths, seed)
    grads = gradients(model)
    model.zero_grad(set_to_none=True)
    wanted = without(model, lengths, seed)
    values = difference(found, wanted)
    worst = max(difference(grads[name], grad) for name, grad in gradients(model).items())
    return values, worst


@pytest.mark.parametrize(
    "lora", ["", "fp32", "bf16", pytest.param("in 4 bits", marks=needs("peft", "bitsandbytes"))]
)
def test_packings_in_turns(record, lora):
    """Other lengths, other numbers of documents: each row has the bits of its bucket without a
    graph.
    """
    model = model_of()
    if lora == "in 4 bits":
        quantise(model, twice=True)
    if lora:
        put_lora_on(model, "bf16" if lora == "in 4 bits" else lora, False)
    # rows that no bucket was captured for run as they are
    for lengths in ROWS * 2:
        step(model, lengths)
    for turn in range(2):
        for number, lengths in enumerate(ROWS):
            values, grads = both(model, lengths, number)
            record(f"{lengths[:3]}, turn {turn}, values", values, 0.0)
            record(f"{lengths[:3]}, turn {turn}, gradients", grads, 0.0)
    runner = runner_of(model)
    assert runner.replayed >= 3 * len(ROWS), patch_report(model).cuda_graphs
    assert runner.ahead.taken >= 2 * len(ROWS)


def test_a_replay_writes_into_memory_of_its_own(record):
    """Also after torch freed cuBLAS's workspaces, as `torch.compile(mode="reduce-overhead")` does."""
    model = small(WIDE, cuda_graphs="auto", unpacked="native")
    for lengths in ROWS * 2:
        step(model, lengths)
    before = runner_of(model).replayed
    torch._C._cuda_clearCublasWorkspaces()
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    # the workspaces' memory, and more
    others = [torch.full((32 << 20,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
    for number, lengths in enumerate(ROWS):
        values, grads = both(model, lengths, number)
        record(f"{lengths[:3]}, values", values, 0.0)
        record(f"{lengths[:3]}, gradients", grads, 0.0)
    assert runner_of(model).replayed > before
    assert all((one == 7).all() for one in others)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", ["", "fp32"])
def test_layers_that_are_recomputed(record, lora, reentrant):
    """The bits of layers that are recomputed without a graph, and less memory than those that keep
    everything.
    """
    model = model_of()
    if lora:
        put_lora_on(model, lora, False)
    kept = []
    for recomputed in (False, True):
        if recomputed:
            checkpoint_layers(model, reentrant=reentrant)
        for lengths in ROWS * 2:
            step(model, lengths)
        kept.append(of_pools())
    record("memory of recomputed layers", kept[1] / kept[0], 0.8)
    for number, lengths in enumerate(ROWS):
        values, grads = both(model, lengths, number)
        record(f"{lengths[:3]}, values", values, 0.0)
        record(f"{lengths[:3]}, gradients", grads, 0.0)
    assert runner_of(model).replayed >= 3 * len(ROWS), patch_report(model).cuda_graphs


def kept_loss(model: Any, lengths: Any) -> torch.Tensor:
    """A step whose loss outlives it, as `loss = model(...).loss` does in a loop of one's own."""
    tokens, packed = packed_row(model, lengths)
    loss = model.base_model(input_ids=tokens, packed_sequence=packed).last_hidden_state
    loss = loss.float().pow(2).sum()
    loss.backward()
    return loss


def test_losses_that_are_kept_do_not_hinder_a_capture(record):
    """They keep nodes of autograd that belong to the default stream."""
    model = model_of()
    kept = [kept_loss(model, ROWS[0]) for _ in range(4)]
    assert runner_of(model).replayed == 3, patch_report(model).cuda_graphs
    record("losses", max((one - kept[0]).abs().item() for one in kept), 0.0)


def test_ddp(record):
    """Its reducer keeps such nodes, too; of one rank, whose gradients are the same without it."""
    dist = torch.distributed
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = model_of()
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            values = step(model, ROWS[0])
        wanted = gradients(model)
        model = model_of()
        wrapped = torch.nn.parallel.DistributedDataParallel(model.base_model)
        tokens, packed = packed_row(model, ROWS[0])
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            out = wrapped(input_ids=tokens, packed_sequence=packed).last_hidden_state
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
            (out.float() * weight).sum().backward()
        assert runner_of(model).replayed == 3, patch_report(model).cuda_graphs
        record("values", difference(out.detach(), values), 0.0)
        worst = max(difference(wanted[name], grad) for name, grad in gradients(model).items())
        record("gradients", worst, 0.0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_backward_pass_in_parts(record, monkeypatch, recomputed):
    """The bits of the backward pass as one graph, in every row."""
    found = []
    for most in (parts.PARTS, 1):
        monkeypatch.setattr(parts, "PARTS", most)
        model = model_of()
        if recomputed:
            checkpoint_layers(model)
        rows = []
        for number, lengths in enumerate((ROWS[0], *ROWS[:4])):
            model.zero_grad(set_to_none=True)
            step(model, lengths, number)
            rows.append(gradients(model))
        (captured,) = {len(each.graph.parts) for each in runner_of(model).captures.graphs.values()}
        assert captured == min(most, len(model.base_model.layers))
        found.append(rows)
    for lengths, one, other in zip((ROWS[0], *ROWS[:4]), *found, strict=True):
        assert one.keys() == other.keys()
        worst = max(difference(one[name], grad) for name, grad in other.items())
        record(f"{lengths[:3]}", worst, 0.0)


def test_random_numbers_are_drawn_after_a_capture_that_failed():
    """Here because a layer waits for the device; the row runs without, and says why."""
    model = model_of()
    activation = model.base_model.layers[0].mlp.act_fn
    activation.forward = lambda x: torch.nn.functional.silu(x * float(x.new_ones(()).item()))
    for _ in range(3):
        step(model, ROWS[0])
    assert "the capture failed" in patch_report(model).cuda_graphs
    assert runner_of(model).replayed == 0
    assert torch.rand(4, device=DEVICE).unique().numel() == 4


def test_gradients_are_not_copied(record):
    """They lie where the graph wrote them, and a list of them outlives the next row."""
    model = model_of()
    parameters = [*model.base_model.layers.parameters()]
    for _ in range(3):
        step(model, ROWS[0])
    pools = [
        (one["address"], one["address"] + one["total_size"])
        for one in torch.cuda.memory_snapshot()
        if one["segment_pool_id"] != (0, 0)
    ]

    def in_pools(x):
        return any(begin <= x.data_ptr() < end for begin, end in pools)

    model.zero_grad(set_to_none=True)
    step(model, ROWS[0])
    assert all(in_pools(parameter.grad) for parameter in parameters)
    step(model, ROWS[0])
    assert not any(in_pools(parameter.grad) for parameter in parameters)
    model.zero_grad(set_to_none=True)
    tokens, packed = packed_row(model, ROWS[0])
    out = model.base_model(input_ids=tokens, packed_sequence=packed).last_hidden_state
    kept = torch.autograd.grad(out.float().pow(2).sum(), parameters)
    copies, replayed = [grad.clone() for grad in kept], runner_of(model).replayed
    step(model, ROWS[0])
    record("kept", max(map(difference, kept, copies)), 0.0)
    assert runner_of(model).replayed == replayed
    assert "kept elsewhere than in .grad" in patch_report(model).cuda_graphs


def of_pools() -> int:
    """Return the bytes that graphs keep for replays, without those of tensors: cuBLAS's workspaces
    have one size, whatever the layers keep.
    """
    # models of tests before, whose graphs hold what holds them
    gc.collect()
    torch.cuda.empty_cache()
    pools = [one for one in torch.cuda.memory_snapshot() if one["segment_pool_id"] != (0, 0)]
    return sum(one["total_size"] - one["allocated_size"] for one in pools)


def test_influence_is_zero(record):
    """Another document's tokens change nothing in a graph, whatever row was before."""
    model = model_of()
    for lengths in ROWS * 2:
        step(model, lengths)
    for lengths in ROWS:
        tokens, _ = packed_row(model, lengths)
        before = step(model, lengths, tokens=tokens)
        for begin, end in spans(lengths)[:4]:
            step(model, ROWS[1])
            other = tokens.clone()
            other[:, begin:end] = (other[:, begin:end] + 1) % 500
            moved = (step(model, lengths, tokens=other) - before).abs()
            inside = moved[:, begin:end].max().item()
            moved[:, begin:end] = 0
            record(f"influence of {begin}:{end}", moved.max().item(), 0.0)
            assert inside > 0
    # the control: a later token reads the ones before
    assert runner_of(model).replayed > 0


def test_what_changes_between_steps(record):
    """Weights, what is trained, gradients kept and summed: never what was captured."""
    model, lengths = model_of(), ROWS[0]
    for _ in range(3):
        step(model, lengths)
        # whose long document is cut in a graph
        step(model, ROWS[4])
    replayed = runner_of(model).replayed
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    record("after an optimizer", max(both(model, lengths)), 0.0)
    assert runner_of(model).replayed > replayed
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    record("other memory", max(both(model, lengths)), 0.0)
    model.load_state_dict({name: x * 0.99 for name, x in model.state_dict().items()})
    record("loaded", max(both(model, lengths)), 0.0)
    model.base_model.layers[0].mlp.requires_grad_(False)
    record("frozen", max(both(model, lengths)), 0.0)
    model.base_model.layers[0].mlp.requires_grad_(True)
    for _ in range(3):
        record("again", max(both(model, lengths)), 0.0)
    # gradients of two rows together, which are those of each
    model.zero_grad(set_to_none=False)
    step(model, ROWS[0], 1)
    first = gradients(model)
    step(model, ROWS[4], 2)
    together = gradients(model)
    model.zero_grad(set_to_none=True)
    step(model, ROWS[4], 2)
    second = gradients(model)
    error = max(difference(together[n], first[n] + second[n]) for n in together)
    record("summed", error, 0.0)


@pytest.mark.parametrize("change", ["setting", "memory"])
def test_padded_rows_of_a_model_that_changed(record, change):
    """A row is launched before settings are compared: it is run again on others."""
    model, lengths = model_of(), ROWS[4]
    for _ in range(3):
        before = padded_step(model, lengths)
    record("before", max(both(model, lengths, step=padded_step)), 0.0)
    replayed, norm = runner_of(model).replayed, model.base_model.layers[0].input_layernorm
    assert replayed > 0
    if change == "setting":
        norm.eps = 0.5
    else:
        norm.weight.data = norm.weight.data + 0.5
        torch.cuda.empty_cache()
    for _ in range(3):
        record("changed", max(both(model, lengths, step=padded_step)), 0.0)
    # the control
    assert difference(padded_step(model, lengths), before) > 0
    assert runner_of(model).replayed > replayed


def test_two_rows_before_a_backward(record):
    """The second row runs without a graph, and the first one's backward is its own."""
    model = model_of()
    for _ in range(3):
        step(model, ROWS[0])
    tokens, packed = packed_row(model, ROWS[0])
    others, _ = packed_row(model, ROWS[4])

    def out(ids, lengths):
        return model.base_model(input_ids=ids, packed_sequence=record_of(lengths)).last_hidden_state

    model.zero_grad(set_to_none=True)
    out(tokens, ROWS[0]).float().pow(2).sum().backward()
    wanted = gradients(model)
    model.zero_grad(set_to_none=True)
    first = out(tokens, ROWS[0])
    second = out(others, ROWS[4])
    first.float().pow(2).sum().backward()
    found = gradients(model)
    record("first", max(difference(found[n], wanted[n]) for n in found), 0.0)
    second.float().pow(2).sum().backward()
    loss = out(tokens, ROWS[0]).float().pow(2).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


LONGEST, SHORTER = (2000, 2000, 2000), ((200, 313), (1000, 1048), (2000, 2000))


@pytest.fixture
def own_graphs(monkeypatch):
    """Lets a row have a graph of its own at once, without padding that pays for it."""
    monkeypatch.setattr(bucketing, "CAPTURE", 0)


def have_graphs(model: Any, rows: Any) -> bool:
    graphs = [key[0] for key in runner_of(model).captures.graphs]
    return all(any(one.holds(record_of(lengths)) for one in graphs) for lengths in rows)


@pytest.mark.parametrize("lora", ["", "fp32"])
@pytest.mark.usefixtures("own_graphs")
def test_buckets_that_share_memory_in_turns(record, lora):
    """A short row's replay leaves nothing in a long one's, nor the other way round."""
    model, rows = model_of(), (LONGEST, *SHORTER)
    if lora:
        put_lora_on(model, lora, False)
    for lengths in rows:
        for _ in range(3):
            step(model, lengths)
    assert have_graphs(model, rows)
    replayed = runner_of(model).replayed
    for number, lengths in enumerate((*rows, *rows[::-1])):
        values, grads = both(model, lengths, number)
        record(f"{lengths}, turn {number}, values", values, 0.0)
        record(f"{lengths}, turn {number}, gradients", grads, 0.0)
    assert runner_of(model).replayed == replayed + 2 * len(rows), patch_report(model).cuda_graphs


@pytest.mark.parametrize("lora", ["", "fp32"])
def test_rows_in_a_longer_row_s_graph(record, lora, monkeypatch):
    """The bits of the same layers in that bucket, most of which is padding, in several documents
    where it is longer than the row's; and the values of the row's documents alone.
    """
    monkeypatch.setattr(bucketing, "CAPTURE", 999)
    model = model_of()
    if lora:
        put_lora_on(model, lora, False)
    for _ in range(2):
        step(model, (1024, 500, 300, 176))
    rows = (1000, 500), (1, 2, 3), (64,) * 9, (1023, 1), (700, 300, 200)
    for number, lengths in enumerate(rows):
        model.zero_grad(set_to_none=True)
        found = step(model, lengths, number)
        grads = gradients(model)
        model.zero_grad(set_to_none=True)
        record(f"{lengths[:3]}, values", difference(found, without(model, lengths, number)), 0.0)
        worst = max(difference(grads[name], grad) for name, grad in gradients(model).items())
        record(f"{lengths[:3]}, gradients", worst, 0.0)
        tokens, _ = packed_row(model, lengths)
        with torch.no_grad():
            alone = [hidden(model, ids) for ids in tokens.split(lengths, 1)]
        record(f"{lengths[:3]}, alone", relative_rms(found, torch.cat(alone, 1)), NOISE)
    assert runner_of(model).replayed_in_longer == len(rows), patch_report(model).cuda_graphs


@pytest.mark.usefixtures("own_graphs")
def test_buckets_share_memory(record):
    """What four buckets' graphs keep is little more than what the longest one's keeps alone."""

    def kept(*rows):
        model = model_of()
        for lengths in rows:
            for _ in range(3):
                step(model, lengths)
        assert have_graphs(model, rows)
        # of pools that are gone
        torch.cuda.empty_cache()
        return of_pools()

    alone = kept(LONGEST)
    assert alone > 0
    record("memory of four buckets", kept(*SHORTER, LONGEST, *SHORTER) / alone, 1.15)


def test_evaluation_and_hooks_run_without():
    """Each says so in the report."""
    model = model_of()
    for _ in range(3):
        step(model, ROWS[0])
    replayed = runner_of(model).replayed
    with torch.no_grad():
        model.base_model(input_ids=packed_row(model, ROWS[0])[0])
    assert runner_of(model).replayed == replayed
    model.base_model.layers[1].register_forward_hook(lambda *_: None)
    step(model, ROWS[0])
    assert "layers.1 has hooks" in patch_report(model).cuda_graphs


WRITES: dict[str, Any] = {
    "nobody": lambda model: None,
    "in place": lambda model: [each.mul_(1.01) for each in model.parameters()],
    "through .data": lambda model: [each.data.mul_(1.01) for each in model.parameters()],
    "other memory": lambda model: [
        setattr(each, "data", each.data * 1.01) for each in model.parameters()
    ],
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_frozen_fp32_weights_are_rounded_once(record, write, checkpointing):
    """And again when they were written, by whatever way: bits stay those of rounding them in every
    product.
    """
    model = small(NARROW, torch.float32, cuda_graphs="auto", unpacked="native")
    put_lora_on(model, "fp32", False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    if checkpointing:
        checkpoint_layers(model, reentrant=False)
    with torch.autocast("cuda", torch.bfloat16):
        for lengths in ROWS[:2] * 3:
            step(model, lengths)
    before, seen = runner_of(model).replayed, []
    for turn in range(4):
        with torch.autocast("cuda", torch.bfloat16):
            values, grads = both(model, ROWS[turn % 2])
            seen.append(step(model, ROWS[0]))
        record(f"{write}, turn {turn}, values", values, 0.0)
        record(f"{write}, turn {turn}, gradients", grads, 0.0)
        with torch.no_grad():
            WRITES[write](model)
    same = [torch.equal(*pair) for pair in pairwise(seen)]
    assert same == [write == "nobody"] * 3
    if write != "other memory":
        assert runner_of(model).replayed >= before + 8
        assert len(runner_of(model).captures.rounded) > 0, patch_report(model).cuda_graphs


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("lora", [True, False])
def test_rows_without_graphs_round_fp32_weights_once(record, monkeypatch, lora, reentrant):
    """Forward, backward, and where layers are recomputed: bits are those of rounding them in every
    product.
    """
    model = small(NARROW, torch.float32, unpacked="native")
    if lora:
        put_lora_on(model, "fp32", False)
        model.enable_input_require_grads()
    if reentrant is not None:
        checkpoint_layers(model, reentrant=reentrant)

    def outcome(turn: int) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            values = step(model, ROWS[turn % 2])
        return [values, *gradients(model).values()]

    # there are no copies before an optimizer has its states
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    for turn in range(4):
        outcome(turn)
        optimizer.step()
        found = outcome(turn)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(computed_weights, "copy_of", lambda *_: None)
            wanted = outcome(turn)
        worst = max(difference(*pair) for pair in zip(found, wanted, strict=True))
        record(f"turn {turn}", worst, 0.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
    assert "rounded once for each training row, in copies of" in patch_report(model).autocast


def test_autocast(record):
    """Trained fp32 weights are rounded in every step, so that those of the step are read."""
    model = small(NARROW, torch.float32, cuda_graphs="auto")
    with torch.autocast("cuda", torch.bfloat16):
        for lengths in ROWS[:2] * 2:
            step(model, lengths)
    for turn in range(5):
        with torch.autocast("cuda", torch.bfloat16):
            values, grads = both(model, ROWS[turn % 2])
        record(f"turn {turn}", max(values, grads), 0.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
    assert runner_of(model).replayed > 0


def dropping(recomputed: bool) -> Any:
    """A model whose adapters drop half of their input."""
    torch.manual_seed(0)
    model = model_of()
    put_lora_on(model, "bf16", False)
    for module in model.modules():
        for name in getattr(module, "lora_dropout", {}):
            module.lora_dropout[name] = torch.nn.Dropout(0.5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    if recomputed:
        checkpoint_layers(model)
    return model


def test_dropout_draws_anew(record):
    """Two replays of one row drop other activations, of one state of torch's generator the same;
    layers that are recomputed drop what they dropped, so that gradients are those of layers that
    keep everything.
    """
    found: dict[bool, list[Any]] = {False: [], True: []}
    for recomputed, rows in found.items():
        model = dropping(recomputed)
        tokens, _ = packed_row(model, ROWS[0])
        for turn in range(6):
            torch.manual_seed(turn % 3)
            model.zero_grad(set_to_none=True)
            rows.append((step(model, ROWS[0], tokens=tokens), gradients(model)))
        assert runner_of(model).replayed == 5, patch_report(model).cuda_graphs
        values = [values for values, _ in rows]
        assert not torch.equal(values[1], values[2])
        record("of one state", max(map(difference, values[1:3], values[4:6])), 0.0)
    for (values, grads), (others, its) in zip(*(rows[1:] for rows in found.values()), strict=True):
        record("values", difference(values, others), 0.0)
        record("gradients", max(difference(grads[name], one) for name, one in its.items()), 0.0)
