"""Rows that are replayed before the host has read their documents."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3_5ForCausalLM, Qwen3_5ForTokenClassification

from hf_packfree import apply_patches
from hf_packfree.errors import BoundaryError
from hf_packfree.graphs import ahead, captured, settings, whole
from hf_packfree.graphs.ahead import MISSES, Ahead
from hf_packfree.graphs.bucket import Bucket, bucket_of, in_bucket
from hf_packfree.graphs.capture import Graph, Pool
from hf_packfree.graphs.captured_sequence import CapturedSequence, OtherPlan
from hf_packfree.graphs.settings import Settings
from hf_packfree.graphs.unread import Plans, UnreadSequence
from hf_packfree.models import entry
from hf_packfree.models.qwen3_5 import tiny_config
from hf_packfree.ops.attention.triton_native import plan_blocks
from hf_packfree.ops.conv.triton_native import plan_masks
from hf_packfree.ops.delta_rule.even_segments import cut_evenly
from hf_packfree.ops.fla_support import plan_chunks
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.bounded import on_host
from hf_packfree.packing.opaque import replaced
from tests.graphs import on_cpu
from tests.integrations.marks import needs
from tests.support import GRADIENT_TOL, LOGIT_TOL, relative_rms, runner_of

ROWS = (55, 2), (3, 54), (30, 20, 7), (9, 9, 9, 9, 21), (19, 19, 19)
ONE_TOKEN_AT_THE_END = (56, 1)
PLANS = (plan_chunks, 64), (plan_blocks, False), (plan_blocks, True), (plan_masks,)
PLANS += ((cut_evenly, 1),)


def starts_of(lengths):
    starts = torch.zeros(sum(lengths), dtype=torch.bool)
    starts[torch.tensor([0, *lengths]).cumsum(0)[:-1]] = True
    return starts


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(0, 90))
def test_plans_from_the_starts_are_those_of_the_documents(lengths, spare):
    packed = PackedSequence.from_lengths(lengths)
    own = bucket_of(packed)
    bucket = Bucket(packed.num_tokens + spare, own.documents, own.longest + spare)
    wanted = in_bucket(on_host(packed), bucket)
    # padding is one document more
    found = UnreadSequence.of(starts_of(lengths + [spare] * (spare > 0)), bucket)
    assert torch.equal(wanted.cu_seqlens, found.cu_seqlens)
    assert torch.equal(wanted.seq_idx, found.seq_idx)
    assert found.cu_seqlens.dtype == found.seq_idx.dtype == torch.int32
    assert (wanted.max_seqlen, wanted.num_segments) == (found.max_seqlen, found.num_segments)
    for build, *args in PLANS:
        made, its = (record.cached(build, *args) for record in (wanted, found))
        for one, other in zip(*map(tensors, (made, its)), strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), build


def tensors(plan):
    """The tensors of a plan, of which records are part."""
    if isinstance(plan, PackedSequence):
        return [plan.cu_seqlens, plan.seq_idx]
    parts = plan if isinstance(plan, tuple) else (plan,)
    return [
        x for part in parts for x in ([part] if isinstance(part, torch.Tensor) else tensors(part))
    ]


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=10), min_size=2, max_size=4),
    st.sampled_from([64, 100, 640]),
)
def test_plans_are_written_anew_for_each_row(rows, longest):
    """Whatever lengths, numbers of documents and padding the row before had, and whether the host
    knows the documents.
    """
    rows.append([64] * 10)
    bucket = Bucket(640, 24, longest)
    records = [in_bucket(on_host(PackedSequence.from_lengths(row)), bucket) for row in rows]
    captured = CapturedSequence.of(records[0])
    for build, *args in PLANS:
        captured.cached(build, *args)
    with mock.patch.object(Plans, "_replay", Plans._write):
        plans = Plans(captured, bucket, mock.Mock(capture=nullcontext))
        for known in (False, True):
            for row, record in zip(rows, records, strict=True):
                if known:
                    plans.write_for(PackedSequence.from_lengths(row))
                else:
                    plans.write(starts_of(row))
                pairs = [*captured.pairs(record)]
                assert len(pairs) > len(PLANS) and all(torch.equal(*pair) for pair in pairs)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.booleans())
def test_more_documents_than_the_bucket_holds_are_read_nowhere_else(lengths, unmarked):
    """A kernel that reads these offsets stays within the row, whatever the starts."""
    starts = starts_of([*lengths, 5]) & (not unmarked)
    found = UnreadSequence.of(starts, Bucket(len(starts), 8, 64))
    assert found.cu_seqlens[0] == 0 and found.cu_seqlens[-1] == len(starts)
    assert found.cu_seqlens.numel() == 9 and (found.cu_seqlens.diff() >= 0).all()
    assert 0 <= found.seq_idx.min() and found.seq_idx.max() <= 7
    firsts, chunks = found.cached(plan_chunks, 4)
    assert firsts[-1] <= len(chunks) and chunks[:, 0].max() <= 7


@pytest.mark.parametrize("name", ["cu_seqlens_cpu", "lengths", "padding_segments", "indices"])
def test_what_the_host_would_have_to_know_is_refused(name):
    with pytest.raises(OtherPlan):
        getattr(UnreadSequence.of(starts_of([3, 4]), Bucket(16, 8, 16)), name)


@pytest.fixture
def model(monkeypatch):
    on_cpu.let_capture_whole_documents(monkeypatch)
    torch.manual_seed(0)
    return apply_patches(Qwen3_5ForCausalLM(tiny_config()).train(), cuda_graphs="auto")


def inputs_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 100, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "position_ids": positions}


def padded_inputs_of(lengths, seed=0):
    """The same documents, in rows of their own."""
    documents = inputs_of(lengths, seed)["input_ids"][0].split(lengths)
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def step(model, lengths, seed=0, inputs_of=inputs_of, **more):
    """Return the loss and the gradients of a training step."""
    model.zero_grad()
    inputs = inputs_of(lengths, seed) | more
    ids = inputs["input_ids"]
    loss = model(**inputs, labels=ids.masked_fill(ids == 0, -100)).loss
    loss.backward()
    return [loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


def test_rows_that_are_replayed_ahead_have_the_values_and_gradients_of_others(model, monkeypatch):
    launched = [step(model, lengths, seed) for seed, lengths in enumerate(ROWS * 2)]
    assert runner_of(model).ahead.taken >= 2 * len(ROWS) - 2
    monkeypatch.setattr(Ahead, "pays", lambda ahead: False)
    before = runner_of(model).ahead.taken
    others = [step(model, lengths, seed) for seed, lengths in enumerate(ROWS * 2)]
    assert runner_of(model).ahead.taken == before
    for found, wanted in zip(launched, others, strict=True):
        # in another bucket, sums are of other blocks
        for one, other in zip(found, wanted, strict=True):
            assert relative_rms(one, other) < GRADIENT_TOL


def test_nothing_reads_a_replay_that_still_runs(model, monkeypatch):
    """Whether its row takes the result, or nobody does."""
    pools, result, run = [], on_cpu.Again.result, on_cpu.Again._run_forward

    def joined(before):
        def check(graph, *args):
            pools.append(runner_of(model).captures.pool)
            assert before is run or not pools[-1].running
            return before(graph, *args)

        return check

    for lengths in (*ROWS, *ROWS):
        step(model, lengths)
    monkeypatch.setattr(on_cpu.Again, "result", joined(result))
    monkeypatch.setattr(on_cpu.Again, "_run_forward", joined(run))
    taken = runner_of(model).ahead.taken
    for lengths in (ROWS[0], ONE_TOKEN_AT_THE_END, ROWS[1]):
        step(model, lengths)
        assert not pools[-1].running
    assert runner_of(model).ahead.taken == taken + 2
    launched = len(pools)
    with pytest.raises(BoundaryError):
        step(model, ROWS[0], max_length_q=5)
    assert len(pools) > launched and not pools[-1].running
    # upstream runs a row of one document
    launched = len(pools)
    step(model, (57,))
    assert len(pools) > launched and not pools[-1].running


def test_a_row_whose_end_may_be_padding_is_replayed_once_its_documents_are_known(
    model, monkeypatch
):
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    runner, launched = runner_of(model), _launches(monkeypatch)
    monkeypatch.setattr(ahead, "AGAIN", 7)
    for seed in range(MISSES + 6):
        before, replayed = runner.ahead.taken, runner.replayed
        found = step(model, ONE_TOKEN_AT_THE_END, seed)
        wanted = _alone(model, ONE_TOKEN_AT_THE_END, seed)
        assert (found[0] - wanted).abs() < LOGIT_TOL
        assert (runner.ahead.taken, runner.replayed) == (before, replayed + 1)
    assert len(launched) == MISSES, "not a forward pass in vain in every step"
    for seed in range(7):
        step(model, ROWS[0], seed)
    assert runner.ahead.taken == before + 7, "tried again, and then for every row"


def _launches(monkeypatch):
    """Return a list that grows with each replay that is launched ahead."""
    launched, launch = [], Ahead.launch
    monkeypatch.setattr(Ahead, "launch", lambda *args: launched.append(launch(*args)))
    return launched


@pytest.mark.parametrize("changed", [False, True])
def test_a_row_is_embedded_once(model, changed, monkeypatch):
    """Its noise is drawn once, and ranks that shard the embedding gather it as often; also where a
    replay turns out to be on other settings.
    """
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    embedded, launched = [], _launches(monkeypatch)
    model.get_input_embeddings().register_forward_hook(lambda *args: embedded.append(0))
    if changed:
        model.model.layers[0].input_layernorm.eps = 0.5
        step(model, ROWS[0])
        assert len(embedded) == len(launched) == 1
        return
    for lengths in (ROWS[0], ONE_TOKEN_AT_THE_END, ROWS[1]):
        step(model, lengths)
    assert len(embedded) == len(launched) == 3


@needs("peft")
@pytest.mark.filterwarnings("default")
def test_weights_that_adapters_of_tokens_compute_are_not_read(model, monkeypatch):
    """PEFT's `trainable_token_indices` copies the whole embedding where its weight is read, which
    raises under FSDP2.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    options = {"target_modules": ["q_proj", "v_proj"], "trainable_token_indices": [5, 6, 7]}
    trained = get_peft_model(model, LoraConfig(**options)).train()
    for seed, lengths in enumerate(ROWS):
        step(trained, lengths, seed)
    computed, launched = [], _launches(monkeypatch)
    merged = TrainableTokensLayer.get_merged_weights
    monkeypatch.setattr(
        TrainableTokensLayer,
        "get_merged_weights",
        lambda *args: computed.append(0) or merged(*args),
    )
    step(trained, ROWS[0])
    assert len(computed) == len(launched) == 1


def test_inference_tensors_are_trained_on(model, monkeypatch):
    """A collator, or the rollouts of the step before, may have made them."""
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    wanted, launched = step(model, ROWS[0]), _launches(monkeypatch)
    with torch.inference_mode():
        positions = inputs_of(ROWS[0])["position_ids"].clone()
    found = step(model, ROWS[0], position_ids=positions)
    assert launched == [] and torch.equal(found[0], wanted[0])


def test_a_model_that_is_recomputed_as_a_whole_saves_the_same_tensors_again(model, monkeypatch):
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    launched = _launches(monkeypatch)
    for seed in range(MISSES + 4):
        inputs = inputs_of(ROWS[0], seed)
        out = checkpoint(lambda given: model(**given).logits, inputs, use_reentrant=False)
        out.square().mean().backward()
    assert launched == []


def test_a_text_model_that_gets_embeddings_is_not_run_for_ids(model, monkeypatch):
    """As inside a vision-language model, which reads the boundaries before it embeds."""
    for seed, lengths in enumerate(ROWS):
        inputs = inputs_of(lengths, seed)
        embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
        model.base_model(**inputs, inputs_embeds=embeddings).last_hidden_state.sum().backward()
    launched, runner = _launches(monkeypatch), runner_of(model)
    assert runner.ahead.taken > 0 and runner.given == torch.float32
    step(model, ROWS[0])
    assert launched == [] and runner.given == torch.int64
    step(model, ROWS[0])
    assert len(launched) == 1


def _alone(model, lengths, seed):
    """Return the mean loss of the row's documents, run one by one without graphs."""
    parts = inputs_of(lengths, seed)["input_ids"].split(lengths, 1)
    losses = []
    with torch.no_grad():
        for ids in (part for part in parts if part.shape[1] > 1):
            losses.append(model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1))
    return sum(losses) / sum(length - 1 for length in lengths)


def test_more_documents_than_any_graph_holds_are_a_row_for_another_graph(model):
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    before, many = runner_of(model).ahead.taken, (3,) * 19
    found = step(model, many)
    assert runner_of(model).ahead.taken == before
    assert (found[0] - _alone(model, many, 0)).abs() < LOGIT_TOL


def test_a_call_that_raises_leaves_the_graph_free(model):
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    before = runner_of(model).ahead.taken
    with pytest.raises(BoundaryError):
        step(model, ROWS[0], max_length_q=5)
    step(model, ROWS[0])
    assert runner_of(model).ahead.taken == before + 1


def test_ids_that_change_before_the_layers_read_them_are_run_again(model):
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    wanted = step(model, ROWS[0], 8)
    before = runner_of(model).ahead.taken
    others = inputs_of(ROWS[0], 8)["input_ids"]

    def change(module, args, kwargs):
        kwargs["input_ids"].copy_(others)

    handle = model.model.register_forward_pre_hook(change, with_kwargs=True)
    try:
        inputs = inputs_of(ROWS[0], 9)
        loss = model(**inputs, labels=others).loss
    finally:
        handle.remove()
    assert runner_of(model).ahead.taken == before
    assert torch.equal(loss.detach(), wanted[0])


@pytest.mark.parametrize("inputs_of", [inputs_of, padded_inputs_of])
@pytest.mark.parametrize("change", ["setting", "memory"])
def test_a_model_that_changed_is_no_longer_replayed(model, change, inputs_of, monkeypatch):
    """A replay on other settings is launched, and dropped; of weights that were moved, whose memory
    may be freed, none is launched.
    """
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed, inputs_of)
    before = {each.graph for each in runner_of(model).captures.graphs.values()}
    taken, launched, run = runner_of(model).ahead.taken, [], on_cpu.Again._run_forward
    monkeypatch.setattr(
        on_cpu.Again, "_run_forward", lambda graph: launched.append(graph) or run(graph)
    )
    norm = model.model.layers[0].input_layernorm
    if change == "setting":
        norm.eps = 0.5
    else:
        norm.weight.data = norm.weight.data.clone()
    found = step(model, ROWS[0], inputs_of=inputs_of)
    assert len(before & {*launched}) == (change == "setting")
    assert runner_of(model).ahead.taken == taken
    assert before.isdisjoint(each.graph for each in runner_of(model).captures.graphs.values())
    monkeypatch.setattr(runner_of(model).captures, "why_not", "a test")
    for one, other in zip(found, step(model, ROWS[0], inputs_of=inputs_of), strict=True):
        assert relative_rms(one, other) < GRADIENT_TOL


def test_a_row_that_is_captured_notices_a_model_that_changed(model, monkeypatch):
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed, padded_inputs_of)
    before = {each.graph for each in runner_of(model).captures.graphs.values()}
    longer = [3 * length for length in ROWS[0]]
    model.model.layers[0].input_layernorm.eps = 0.5
    found = step(model, longer, inputs_of=padded_inputs_of)
    (captured,) = runner_of(model).captures.graphs.values()
    assert captured.graph not in before
    monkeypatch.setattr(runner_of(model).captures, "why_not", "a test")
    wanted = step(model, longer, inputs_of=padded_inputs_of)
    for one, other in zip(found, wanted, strict=True):
        assert relative_rms(one, other) < GRADIENT_TOL


def test_a_padded_row_of_a_model_that_cannot_be_captured_any_more(model, monkeypatch):
    """As by a hook: its graph was launched, and is not captured again."""
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed, padded_inputs_of)
    replayed = runner_of(model).replayed
    monkeypatch.setattr(whole, "why_not", settings.why_not)
    monkeypatch.setattr(settings, "_why_not_part", lambda name, part: "a hook")
    model.model.layers[0].input_layernorm.eps = 0.5
    step(model, ROWS[0], inputs_of=padded_inputs_of)
    assert (runner_of(model).captures.graphs, runner_of(model).replayed) == ({}, replayed)
    assert runner_of(model).reasons["a hook"] == 1


def test_what_had_no_room_is_tried_again_at_once_with_other_settings(model):
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed, padded_inputs_of)
    longer = [3 * length for length in ROWS[0]]
    runner_of(model).captures.bucketing.no_room = sum(longer), "there is no room"
    step(model, longer, inputs_of=padded_inputs_of)
    assert runner_of(model).reasons["there is no room"] == 1
    model.model.layers[0].input_layernorm.eps = 0.5
    step(model, longer, inputs_of=padded_inputs_of)
    assert runner_of(model).reasons["there is no room"] == 1 and runner_of(model).captures.graphs


def test_a_caller_s_autocast_for_the_text_model_alone_is_no_change(model):
    """Settings are read in the head and in the text model in turns."""
    forward = model.model.forward

    def autocast(*args, **kwargs):
        torch.set_autocast_enabled("cuda", True)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_enabled("cuda", False)

    model.model.forward = autocast
    for seed in range(3):
        for lengths in ROWS:
            step(model, lengths, seed)
            step(model, lengths, seed, padded_inputs_of)
    # the first row finds no runner in the head
    assert runner_of(model)._changes == 2 and runner_of(model).replayed > 3 * len(ROWS)


def test_memory_is_dropped_once_the_graph_in_it_has_run(model, monkeypatch):
    """Of a graph of other settings, and of graphs that a longer row's takes the place of."""
    ended = []
    monkeypatch.setattr(on_cpu.OnACPU, "end", lambda pool: ended.append(pool.tokens))
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed, padded_inputs_of)
    assert ended == []
    model.model.layers[0].input_layernorm.eps = 0.5
    step(model, ROWS[0], inputs_of=padded_inputs_of)
    assert len(ended) == 1
    for _ in range(2):
        step(model, [3 * length for length in ROWS[0]], inputs_of=padded_inputs_of)
    assert len(ended) == 2
    pool = object.__new__(Pool)
    pool.stream, pool._last = on_cpu.Stream(), on_cpu.Stream()
    pool.end()
    assert pool.stream.waited == [pool._last]


def test_a_record_that_nobody_compared_for_is_compared_in_the_run(model, monkeypatch):
    """Boundaries that are read another way than where replays are launched meanwhile."""
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    monkeypatch.setattr("hf_packfree.packing.inputs.offsets_of_one_row", lambda *given: None)
    taken = runner_of(model).ahead.taken
    step(model, ROWS[0])
    assert runner_of(model).ahead.taken == taken and runner_of(model).captures.graphs
    before = {each.graph for each in runner_of(model).captures.graphs.values()}
    model.model.layers[0].input_layernorm.eps = 0.5
    step(model, ROWS[0])
    assert before.isdisjoint(each.graph for each in runner_of(model).captures.graphs.values())


@pytest.mark.parametrize("why", ["positions", "labels of padding"])
def test_graphs_of_other_settings_keep_no_memory(model, why):
    """Though no row comes to the graphs: here upstream runs it, without reading its positions in the
    way in which a row is launched, or since padding has labels.
    """
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    assert runner_of(model).captures.graphs
    model.model.layers[0].input_layernorm.eps = 0.5
    ids = torch.randint(1, 100, (2, 20))
    inputs = {"position_ids": torch.arange(20).expand(2, -1)}
    if why != "positions":
        inputs = {"attention_mask": (torch.arange(20) < torch.tensor([[20], [9]])).long()}
    model(input_ids=ids, labels=ids, **inputs).loss.backward()
    assert not runner_of(model).captures.graphs


def test_graphs_of_a_classifier_of_other_settings_keep_no_memory(monkeypatch):
    on_cpu.let_capture_whole_documents(monkeypatch)
    model = Qwen3_5ForTokenClassification(tiny_config()).train()
    model = apply_patches(model, cuda_graphs="auto")
    for seed, lengths in enumerate(ROWS):
        inputs = padded_inputs_of(lengths, seed)
        labels = inputs["attention_mask"].masked_fill(inputs["attention_mask"] == 0, -100)
        model(**inputs, labels=labels).loss.backward()
    assert runner_of(model).captures.graphs
    model.model.layers[0].input_layernorm.eps = 0.5
    inputs = padded_inputs_of(ROWS[0])
    model(**inputs, labels=inputs["attention_mask"]).loss.backward()
    assert not runner_of(model).captures.graphs


def test_plans_live_as_long_as_a_backward_pass_reads_them(model):
    """A setting that changes between a row's forward and its backward pass drops the graph for new
    rows.
    """
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    loss = model(**inputs_of(ROWS[0]), labels=inputs_of(ROWS[0])["input_ids"]).loss
    (found,) = (
        each for each in runner_of(model).captures.graphs.values() if not each.graph.is_free
    )
    graph, packed = found.graph, weakref.ref(found.packed)
    del found
    # what the stand-in keeps, and a CUDA graph does not
    for name in ("body", "live", "nodes"):
        vars(graph).pop(name, None)
    model.model.layers[0].input_layernorm.eps = 0.5
    step(model, ROWS[1])
    gc.collect()
    assert not graph.is_free and packed() is not None
    del loss, graph
    gc.collect()
    assert packed() is None


@pytest.mark.parametrize("inputs_of", [inputs_of, padded_inputs_of])
def test_settings_are_compared_while_the_gpu_runs(model, inputs_of, monkeypatch):
    """Behind a row's launch, which is before the host waits for its documents, or after it where
    their mask has to be read; and before the host waits where nothing is launched.
    """
    happened, compare, launch = [], Settings.hold, Graph.launch
    monkeypatch.setattr(
        Settings, "hold", lambda *given: happened.append("compared") or compare(*given)
    )
    monkeypatch.setattr(
        Graph, "launch", lambda *given: happened.append("launched") or launch(*given)
    )
    read = entry.read_call
    monkeypatch.setattr(
        entry, "read_call", lambda *args, **named: happened.append("read") or read(*args, **named)
    )
    step(model, ROWS[0], inputs_of=inputs_of)
    happened.clear()
    step(model, ROWS[0], inputs_of=inputs_of)
    assert happened == ["compared", "read", "launched"]
    happened.clear()
    step(model, ROWS[1], inputs_of=inputs_of)
    assert happened == ["read", "launched", "compared"]


def test_plans_of_documents_that_the_host_knows_are_written_by_the_graph(model, monkeypatch):
    for seed, lengths in enumerate(ROWS):
        step(model, lengths, seed)
    written, replay = [], Plans._replay
    monkeypatch.setattr(Plans, "_replay", lambda plans: written.append(plans) or replay(plans))
    monkeypatch.setattr(captured, "in_bucket", None)
    ids = inputs_of(ROWS[0])["input_ids"]
    before = runner_of(model).replayed
    record = PackedSequence.from_lengths(list(ROWS[0]))
    model(input_ids=ids, labels=ids, packed_sequence=record).loss.backward()
    assert len(written) == 1 and runner_of(model).replayed == before + 1


def test_a_row_that_ends_in_a_document_without_tokens():
    packed = PackedSequence.from_lengths([40, 24])
    offsets = torch.tensor([0, 40, 64, 64], dtype=torch.int32)
    empty = replaced(packed, cu_seqlens=offsets, cu_seqlens_cpu=offsets)
    bucket = Bucket(64, 16, 64)
    made = CapturedSequence.of(in_bucket(on_host(packed), bucket))
    with mock.patch.object(Plans, "_replay", Plans._write):
        Plans(made, bucket, mock.Mock(capture=nullcontext)).write_for(empty)
    assert all(torch.equal(*pair) for pair in made.pairs(in_bucket(on_host(empty), bucket)))
