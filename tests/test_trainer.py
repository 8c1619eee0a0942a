"""The Trainer with transformers' own collator: gradients of documents alone; the callback around
it.
"""

from __future__ import annotations

from functools import cache
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import (
    DataCollatorWithFlattening,
    DefaultDataCollator,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_packfree import PackFreeCallback, apply_patches, patch_report
from hf_packfree.errors import LeakDetected, PatchConflict
from hf_packfree.mtp import MTPOptions
from hf_packfree.trainer import callback, training_run
from hf_packfree.trainer.flops import FlopsPerToken, peak_of
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    ROW,
    documents,
    gradients,
    tiny,
    worst_gradient,
)

COLLATORS = {
    "default": {},
    "flash": {"return_flash_attn_kwargs": True},
    "seq_idx": {"return_seq_idx": True},
    "flash and seq_idx": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    "flash without positions": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "positions from 5": {"position_ids_start": 5},
}
# documents in a step
STEP = 4
NEW, OLD = "activation_checkpointing", "gradient_checkpointing"
CHECKPOINTING = NEW if hasattr(TrainingArguments, NEW) else OLD
"""What this transformers calls it."""


class KeepGradients(TrainerCallback):
    """Copies the gradients of the first optimizer step."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not state.global_step:
            self.found = gradients(kwargs["model"])


def arguments(folder, **more):
    settings = {
        "max_steps": 1,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    settings |= {
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "per_device_train_batch_size": STEP,
        "seed": 1,
    }
    return TrainingArguments(
        output_dir=str(folder), train_sampling_strategy="sequential", **settings | more
    )


def of_a_trainer():
    """Return what the callback reads of the Trainer's arguments."""
    return SimpleNamespace(torch_compile=False)


def dataset(lengths=ROW):
    return [{"input_ids": document.tolist()} for document in documents(lengths)]


def train(model, folder, callbacks, collator=(), **more):
    keep = KeepGradients()
    trainer = Trainer(
        model=model,
        args=arguments(folder, **more),
        train_dataset=dataset(),
        data_collator=DataCollatorWithFlattening(**dict(collator)),
        callbacks=[keep, *callbacks],
    )
    trainer.train()
    return trainer, keep.found


@cache
def per_document(count):
    """A tiny model's gradients of the token-weighted mean loss of the first `count` documents, each
    in its own forward.
    """
    model = tiny()
    parts = documents(ROW)[:count]
    targets = sum(len(part) - 1 for part in parts)
    for part in parts:
        if len(part) > 1:
            logits = model(input_ids=part[None], use_cache=False).logits[0, :-1]
            (F.cross_entropy(logits, part[1:], reduction="sum") / targets).backward()
    return gradients(model)


def worst(found, wanted):
    return worst_gradient(found, wanted, floor=0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("collator", COLLATORS)
def test_gradients_are_those_of_documents_alone(collator, checkpointing, tmp_path):
    if (
        collator == "positions from 5"
        and "position_ids_start" not in signature(DataCollatorWithFlattening).parameters
    ):
        pytest.skip(f"transformers {transformers.__version__} numbers documents from 0")
    options = {CHECKPOINTING: True} if checkpointing else {}
    _, found = train(tiny(), tmp_path, [PackFreeCallback()], COLLATORS[collator].items(), **options)
    wanted = per_document(STEP)
    assert worst(found, wanted) <= GRADIENT_TOL


def test_the_unpatched_model_leaks_under_the_same_collator(tmp_path):
    _, found = train(tiny(), tmp_path, [])
    assert worst(found, per_document(STEP)) >= CONTROL * GRADIENT_TOL


def test_gradient_accumulation_weighs_tokens(tmp_path, caplog):
    _, found = train(tiny(), tmp_path, [PackFreeCallback()], gradient_accumulation_steps=2)
    assert worst(found, per_document(2 * STEP)) <= GRADIENT_TOL
    assert "found" not in caplog.text


def test_gradients_that_accelerate_divides_once_more_are_warned_of(tmp_path, caplog):
    """As transformers 5.2 to 5.4 let it, of any model."""
    keep = KeepGradients()
    trainer = Trainer(
        tiny(),
        arguments(tmp_path, gradient_accumulation_steps=2),
        DataCollatorWithFlattening(),
        dataset(),
        callbacks=[keep, PackFreeCallback()],
    )
    trainer.accelerator.gradient_accumulation_steps = 2
    trainer.train()
    assert (
        worst({name: 2 * grad for name, grad in keep.found.items()}, per_document(2 * STEP))
        <= GRADIENT_TOL
    )
    assert "trainer.accelerator.gradient_accumulation_steps = 1" in caplog.text


def test_packing_facts_are_in_the_trainers_logs(tmp_path):
    trainer, _ = train(tiny(), tmp_path, [PackFreeCallback(verify_first_batch=True)], max_steps=2)
    first, second = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert first["packfree/documents_per_row"] == second["packfree/documents_per_row"] == STEP
    assert first["packfree/real_token_share"] == 1.0 and first["packfree/tokens_per_second"] > 0
    assert first["packfree/influence"] == 0.0 and "packfree/influence" not in second
    assert not trainer.model.model.packfree.observers and not trainer.model.model._forward_pre_hooks


class Clock(TrainerCallback):
    """A second in each step, and what somebody else adds."""

    now = 0.0

    def on_step_begin(self, *args, **kwargs):
        self.now += 1


def test_speed_is_that_of_training_alone(tmp_path, monkeypatch):
    """Without passes that have no gradients, such as a reference model's, and without evaluation."""
    clock = Clock()
    monkeypatch.setattr(training_run, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    class Twice(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            with torch.no_grad():
                model(**inputs)
            return super().compute_loss(model, inputs, **kwargs)

        def evaluate(self, *args, **kwargs):
            clock.now += 100
            return super().evaluate(*args, **kwargs)

    often = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    trainer = Twice(
        tiny().train(),
        arguments(tmp_path, max_steps=3, logging_steps=1, **often),
        DataCollatorWithFlattening(),
        dataset(),
        dataset(ROW[:2]),
        callbacks=[PackFreeCallback(), clock],
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    steps = ROW[:STEP], ROW[STEP:], ROW[:STEP]
    assert [log["packfree/tokens_per_second"] for log in logs] == [*map(sum, steps)]
    assert [log["packfree/documents_per_row"] for log in logs] == [*map(len, steps)]


def test_padding_is_counted_as_padding(tmp_path):
    def pad(features):
        rows = [torch.tensor(feature["input_ids"]) for feature in features]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(row) for row in rows], batch_first=True
        )
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
        }

    trainer = Trainer(
        model=tiny(),
        args=arguments(tmp_path),
        train_dataset=dataset(),
        data_collator=pad,
        callbacks=[PackFreeCallback()],
    )
    trainer.train()
    facts = trainer.state.log_history[0]
    assert facts["packfree/documents_per_row"] == 1.0
    assert facts["packfree/real_token_share"] == pytest.approx(
        sum(ROW[:STEP]) / (STEP * max(ROW[:STEP]))
    )


def test_added_too_late_is_refused(tmp_path):
    trainer = Trainer(
        model=tiny(),
        args=arguments(tmp_path),
        train_dataset=dataset(),
        data_collator=DataCollatorWithFlattening(),
    )
    trainer.add_callback(PackFreeCallback())
    with pytest.raises(PatchConflict, match=r"Trainer\(callbacks=\[PackFreeCallback\(\)\]\)"):
        trainer.train()
    apply_patches(trainer.model)
    trainer.train()
    assert patch_report(trainer.model).patched


@pytest.mark.slow
def test_a_model_init_that_patches_works_and_one_that_does_not_is_refused_by_name(tmp_path):
    def trainer(model_init, callback):
        return Trainer(
            args=arguments(tmp_path),
            data_collator=DataCollatorWithFlattening(),
            train_dataset=dataset(),
            model_init=model_init,
            callbacks=[callback],
        )

    with pytest.raises(PatchConflict, match="let model_init return apply_patches"):
        trainer(lambda: tiny(), PackFreeCallback()).train()
    search = trainer(lambda: apply_patches(tiny()), PackFreeCallback(verify_first_batch=True))
    for _ in range(2):
        search.train()
        assert search.state.log_history[0]["packfree/influence"] == 0.0
    with pytest.raises(PatchConflict, match="without the multi-token prediction head"):
        head = PackFreeCallback(mtp=MTPOptions(from_scratch=True))
        trainer(lambda: apply_patches(tiny()), head).train()


def test_a_leak_stops_training_at_the_first_batch(tmp_path, monkeypatch):
    from hf_packfree.ops import conv_delta_rule
    from hf_packfree.packing import PackedSequence

    whole = conv_delta_rule.gated_delta_rule

    def leaky(q, k, v, g, beta, packed, **options):
        return whole(q, k, v, g, beta, PackedSequence.from_lengths([packed.num_tokens]), **options)

    monkeypatch.setattr(conv_delta_rule, "gated_delta_rule", leaky)
    with pytest.raises(LeakDetected, match="first batch"):
        train(tiny(), tmp_path, [PackFreeCallback(verify_first_batch=True)])


def test_options_are_those_of_apply_patches():
    options = {
        "backend": "torch",
        "batch_invariant": True,
        "unpacked": "native",
        "padded": "lazy",
        "cuda_graphs": "never",
    }
    by_callback, model = tiny(), apply_patches(tiny(), **options)
    arguments = of_a_trainer()
    PackFreeCallback(**options).on_init_end(arguments, None, None, model=by_callback)
    assert (
        by_callback.model.packfree == model.model.packfree and model.model.packfree.batch_invariant
    )
    with pytest.raises(ValueError, match="wanted 'lazy' or 'upstream'"):
        PackFreeCallback(padded="never")


@pytest.mark.parametrize(
    ("before", "given", "wanted"),
    [
        (None, {}, True),
        (None, {"cuda_graphs": "never"}, False),
        ("never", {}, False),
        ("auto", {}, True),
    ],
)
def test_steps_are_replayed_by_default_unless_the_model_was_patched_otherwise(
    before, given, wanted
):
    Accelerator(cpu=True)
    model = tiny() if before is None else apply_patches(tiny(), cuda_graphs=before)
    arguments = of_a_trainer()
    PackFreeCallback(**given).on_init_end(arguments, None, None, model=model)
    assert patch_report(model).cuda_graphs.startswith("CUDA graphs: 0 rows") == wanted


@pytest.mark.parametrize("alpha", [None, 5.0])
def test_it_warns_of_noise_that_depends_on_the_length_of_a_row(alpha, caplog):
    Accelerator(cpu=True)
    given = SimpleNamespace(**vars(of_a_trainer()), neftune_noise_alpha=alpha)
    PackFreeCallback().on_init_end(given, None, None, model=tiny())
    assert ("found neftune_noise_alpha=5.0" in caplog.text) == (alpha is not None)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", [Trainer, type("TRLs", (Trainer,), {"compute_loss": len})])
@pytest.mark.parametrize("shard", [False, True])
def test_it_warns_of_labels_that_are_not_shifted(smoothing, kind, shard, one_rank, caplog):
    model, trainer = fully_shard(tiny()) if shard else tiny(), object.__new__(kind)
    trainer.args = SimpleNamespace(label_smoothing_factor=smoothing)
    callback._warn_of_labels_in_place(trainer, model)
    warns = bool(smoothing) and kind is Trainer and shard
    assert ("every token is its own target" in caplog.text) == warns


KEEPS = "which PackFreeCallback keeps"


@pytest.mark.parametrize(
    ("before", "given", "said"),
    [
        (None, {}, None),
        ({}, {}, "unpacked='upstream', cuda_graphs='never', which"),
        ({"unpacked": "native"}, {}, "cuda_graphs='never', which"),
        ({}, {"unpacked": "upstream"}, "cuda_graphs='never', which"),
        ({}, {"unpacked": "upstream", "cuda_graphs": "never"}, None),
        ({"unpacked": "native", "cuda_graphs": "auto"}, {}, None),
    ],
)
def test_it_says_what_it_keeps_of_a_model_that_was_patched_before(before, given, said, caplog):
    Accelerator(cpu=True)
    model = tiny() if before is None else apply_patches(tiny(), **before)
    PackFreeCallback(**given).on_init_end(of_a_trainer(), None, None, model=model)
    assert (KEEPS in caplog.text) == (said is not None)
    assert said is None or f"found the model patched with {said}" in caplog.text


@pytest.mark.parametrize(
    ("packing", "warns"),
    [
        ({}, False),
        ({"packing_strategy": "bfd"}, False),
        ({"packing_strategy": "wrapped"}, True),
        ({"packing_strategy": "wrapped", "packing": False}, False),
        ({"packing_strategy": "wrapped", "packing": False, "eval_packing": True}, True),
    ],
)
def test_it_warns_of_rows_that_say_nothing_of_their_documents(packing, warns, caplog):
    Accelerator(cpu=True)
    arguments = of_a_trainer()
    vars(arguments).update({"packing": True, **packing})
    PackFreeCallback().on_init_end(arguments, None, None, model=tiny())
    assert ("found packing_strategy='wrapped'" in caplog.text) == warns


FLAT = DataCollatorWithFlattening


class Own(FLAT):
    """One that may tell documents apart in a way of its own."""


@pytest.mark.parametrize(
    ("column", "collator", "said"),
    [
        ("labels", FLAT(), None),
        ("labels", FLAT(return_position_ids=False, return_seq_idx=True), None),
        ("labels", FLAT(return_position_ids=False, return_flash_attn_kwargs=True), None),
        ("labels", FLAT(return_position_ids=False), "with return_position_ids=False"),
        ("seq_lengths", FLAT(), "that drops it"),
        ("seq_lengths", DefaultDataCollator(), "that drops it"),
        ("seq_lengths", lambda rows: rows[0], None),
        ("seq_lengths", Own(), None),
        ("labels", Own(return_position_ids=False), None),
    ],
)
def test_it_warns_of_documents_that_the_collator_does_not_tell_apart(
    column, collator, said, tmp_path, caplog
):
    rows = SimpleNamespace(column_names=["input_ids", column], __len__=lambda: 0)
    Trainer(
        tiny(),
        arguments(tmp_path),
        train_dataset=rows,
        data_collator=collator,
        callbacks=[PackFreeCallback()],
    )
    found = [one for one in caplog.messages if "so that they read each other" in one]
    assert len(found) == (said is not None) and all(said in one for one in found)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_it_warns_of_documents_that_evaluation_does_not_tell_apart(
    packed, several, tmp_path, caplog
):
    """As TRL's `eval_packing=True` makes them, without `packing=True`."""
    of_documents = SimpleNamespace(column_names=["input_ids", "labels"], __len__=lambda: 0)
    rows = SimpleNamespace(column_names=["input_ids", "seq_lengths"], __len__=lambda: 0)
    rows = rows if packed else of_documents
    Trainer(
        tiny(),
        arguments(tmp_path),
        train_dataset=of_documents,
        eval_dataset={"other": of_documents, "some": rows} if several else rows,
        data_collator=DefaultDataCollator(),
        callbacks=[PackFreeCallback()],
    )
    found = [one for one in caplog.messages if "the column seq_lengths of eval_dataset" in one]
    assert len(found) == packed


def row_with(*columns):
    """A row of two documents and columns that say so."""
    said = {
        "position_ids": [0, 1, 2, 0, 1],
        "seq_idx": [0, 0, 0, 1, 1],
        "cu_seq_lens_q": [0, 3, 5],
        "seq_lengths": [3, 2],
    }
    row = {"input_ids": [2, 3, 4, 5, 6], "labels": [-100, 3, 4, -100, 6]}
    return row | {name: said[name] for name in columns}


@pytest.mark.parametrize(
    ("columns", "removes", "said"),
    [
        (["seq_idx"], True, "found the column seq_idx of train_dataset"),
        (["cu_seq_lens_q"], True, "found the column cu_seq_lens_q of train_dataset"),
        (["seq_lengths"], True, "found the column seq_lengths of train_dataset"),
        (["position_ids", "seq_idx"], True, None),
        (["seq_idx"], False, None),
        ([], True, None),
    ],
)
def test_it_warns_of_columns_that_the_trainer_removes(columns, removes, said, tmp_path, caplog):
    def collate(rows):
        given.update(*rows)
        return {name: torch.tensor([value]) for name, value in rows[0].items()}

    given = {}
    trainer = Trainer(
        tiny(),
        arguments(tmp_path, per_device_train_batch_size=1, remove_unused_columns=removes),
        train_dataset=[row_with(*columns)],
        data_collator=collate,
        callbacks=[PackFreeCallback()],
    )
    trainer.train()
    found = [one for one in caplog.messages if "removes before the collator" in one]
    assert len(found) == (said is not None) and all(one.startswith(said) for one in found)
    # what it says is so
    assert bool(found) == bool(columns and not {*columns} & {*given})


def test_evaluation_and_saving(tmp_path):
    from transformers import Qwen3_5ForCausalLM

    trainer, _ = train(tiny(), tmp_path, [PackFreeCallback()])
    trainer.eval_dataset = dataset(ROW[:2])
    trainer.args.per_device_eval_batch_size = 1
    loss = trainer.evaluate(dataset(ROW[:2]))["eval_loss"]
    trainer.save_model(str(tmp_path / "saved"))
    loaded = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "saved")
    assert not patch_report(loaded).patched
    with torch.no_grad():
        plain = [loaded(input_ids=d[None], labels=d[None]).loss for d in documents(ROW[:2])]
    assert loss == pytest.approx(float(sum(plain)) / 2, rel=1e-5)


def test_the_first_and_the_last_step_are_logged_with_facts(tmp_path):
    steps = {"max_steps": 3, "logging_steps": 500}
    trainer, _ = train(tiny().train(), tmp_path, [PackFreeCallback()], **steps)
    logs = [log for log in trainer.state.log_history if "packfree/tokens_per_second" in log]
    assert [log["step"] for log in logs] == [1, 3]
    assert all({"loss", "packfree/documents_per_row"} <= log.keys() for log in logs)
    silent = steps | {"logging_strategy": "no"}
    trainer, _ = train(tiny().train(), tmp_path, [PackFreeCallback()], **silent)
    assert not [log for log in trainer.state.log_history if "loss" in log]


def test_utilisation_is_logged_where_the_peak_is_known(tmp_path, monkeypatch):
    assert peak_of(torch.device("cpu")) is None
    monkeypatch.setattr("hf_packfree.trainer.training_run.peak_of", lambda device: 1e9)
    trainer, _ = train(tiny().train(), tmp_path, [PackFreeCallback()])
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    tokens = sum(ROW[:STEP])
    flops = FlopsPerToken(trainer.model, trainer.model.model)(tokens / STEP)
    wanted = 100 * flops * log["packfree/tokens_per_second"] / 1e9
    assert log["packfree/mfu"] == pytest.approx(wanted)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200 NVL")
    assert peak_of(torch.device("cuda")) == 835e12


def test_utilisation_is_left_out_with_a_reason_where_operations_are_not_known(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("hf_packfree.trainer.training_run.peak_of", lambda device: 1e9)
    monkeypatch.setattr(
        "hf_packfree.trainer.training_run.why_not_counted", lambda trunk: "found such experts"
    )
    trainer, _ = train(tiny().train(), tmp_path, [PackFreeCallback()])
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    assert "packfree/tokens_per_second" in log and "packfree/mfu" not in log
    assert sum("found such experts; packfree/mfu" in line.message for line in caplog.records) == 1
