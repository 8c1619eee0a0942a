"""TRL's fused head (`add_fused_lm_head`, `model(..., fused_lm_head=True)`) on patched models, against
TRL's own on the stock model, one document at a time: values and gradients.
"""

from __future__ import annotations

import copy
from inspect import getclosurevars

import pytest
import torch

from hf_packfree import PackFreeCallback, apply_patches, patch_report, remove_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.models import fused_head
from hf_packfree.models.fused_head import fused_head_of
from hf_packfree.packing.marks import FUSED_HEAD
from tests.integrations.compare import IGNORED, KeepGradients, arguments, worst
from tests.integrations.marks import integration, needs
from tests.integrations.test_trl import sft, tokenizer, words
from tests.models.padded import padded_batch
from tests.support import (
    GRADIENT_TOL,
    LOGIT_TOL,
    documents,
    gradients,
    relative_rms,
    slow_decay,
    tiny,
)

# its dependencies deprecate things
pytestmark = [needs("trl", "datasets"), pytest.mark.filterwarnings("default")]

LENGTHS = (5, 64, 1, 30, 2)
ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def with_head(model, **settings):
    """Return the model with TRL's fused head."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(
        getattr(model, "get_base_model", lambda: model)(), **{"outputs": ALL, **settings}
    )
    return model


def packed(lengths=LENGTHS):
    """A row as TRL's collator makes it, with a prompt of a third of every document."""
    parts = documents(lengths, vocabulary=128)
    labels = [
        part.masked_fill(torch.arange(len(part)) <= len(part) // 3, IGNORED) for part in parts
    ]
    offsets = torch.tensor([0, *map(len, parts)]).cumsum(0).to(torch.int32)
    batch = {
        "input_ids": torch.cat(parts)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(part)) for part in parts])[None],
        "seq_idx": torch.repeat_interleave(torch.arange(len(parts)), offsets.diff())[None].int(),
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets),
        **dict.fromkeys(("max_length_q", "max_length_k"), max(lengths)),
    }
    return batch, [
        (0, slice(first, end)) for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist())
    ]


def padded(side):
    batch = padded_batch(side)
    real = batch["attention_mask"].bool()
    # the first token of a document is no target: padding would have to predict it
    batch["labels"][(real.cumsum(1) == 1) & real] = IGNORED
    rows = enumerate(real.cumsum(1)[:, -1].tolist())
    first = real.int().argmax(1).tolist()
    return batch, [(row, slice(first[row], first[row] + count)) for row, count in rows if count]


BATCHES = {
    "packed": packed,
    **{
        side: (lambda side=side: padded(side)) for side in ("left", "right", "both", "an empty row")
    },
}


def fields(output):
    return [output[name] for name in (*ALL, "label_mask")]


def scores(output, weight):
    """Something that every log-probability and entropy enters with a weight of its own, [B, S]."""
    count = output.log_probs.shape[1]
    return (output.log_probs * weight[0][:, :count] + output.entropy * weight[1][:, :count]).sum()


def weights(batch):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, *batch["input_ids"].shape, generator=generator)


def alone(model, batch, where, weight):
    """Return the fields of every document in a call of its own, placed where they are in the
    batch, and the gradients.
    """
    model.zero_grad(set_to_none=True)
    rows, tokens = batch["input_ids"].shape
    found = None
    for row, part in where:
        ids, labels = (batch[name][row, part][None] for name in ("input_ids", "labels"))
        output = model(input_ids=ids, labels=labels, fused_lm_head=True)
        scores(output, weight[:, row, part][:, None]).backward()
        if found is None:
            found = [torch.zeros(rows, tokens - 1, dtype=one.dtype) for one in fields(output)]
        for whole, one in zip(found, fields(output)):
            whole[row, part.start : part.stop - 1] = one.detach()[0]
    return found, gradients(model)


def together(model, batch, weight, **more):
    model.zero_grad(set_to_none=True)
    output = model(**batch, **more, fused_lm_head=True)
    scores(output, weight).backward()
    return output, gradients(model)


@integration(
    "TRL trainers", "`fused_lm_head=True`: every trainer's log-probabilities, entropy, accuracy"
)
@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_5", name) for name in BATCHES] + [("qwen3_5_moe", "packed"), ("qwen3_next", "packed")],
)
def test_equals_trls_own_one_by_one(family, name, record_property):
    batch, where = BATCHES[name]()
    weight = weights(batch)
    model = with_head(apply_patches(tiny(family)), temperature=0.7)
    found, grads = together(model, batch, weight)
    assert fused_head_of(model) is not None and "forward" not in vars(model)
    wanted, grads_alone = alone(with_head(tiny(family), temperature=0.7), batch, where, weight)
    for one, other in zip(fields(found), wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert relative_rms(one, other) <= LOGIT_TOL
    record_property("error", worst([grads], [grads_alone]))
    assert worst([grads], [grads_alone]) <= GRADIENT_TOL
    if name == "packed":
        whole, _ = alone(
            with_head(tiny(family), temperature=0.7),
            batch,
            [(0, slice(0, weight.shape[-1]))],
            weight,
        )
        assert relative_rms(whole[0], wanted[0]) >= 100 * LOGIT_TOL, "the control does not leak"


@pytest.mark.parametrize(
    "more", [{}, {"num_items_in_batch": torch.tensor(31)}], ids=["mean", "count"]
)
def test_the_loss_is_the_models_own(more):
    batch, _ = packed()
    model = with_head(apply_patches(tiny()), outputs=("log_probs",))
    output = model(**batch, **more, fused_lm_head=True)
    assert relative_rms(output.loss, model(**batch, **more).loss) <= 1e-6
    assert output.entropy is output.is_top1 is output.aux_loss is None
    shifted = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=IGNORED)[:, 1:]
    again = model(**batch, **more, shift_labels=shifted, fused_lm_head=True)
    assert again.log_probs.shape == shifted.shape and torch.equal(again.loss, output.loss)
    assert torch.equal(again.log_probs[:, :-1], output.log_probs)


@pytest.mark.parametrize("name", ["packed", "left"])
def test_the_experts_loss_is_the_models_and_trls(name):
    batch, _ = BATCHES[name]()
    batch["output_router_logits"] = True
    model = with_head(apply_patches(tiny("qwen3_5_moe")))
    found = model(**batch, fused_lm_head=True)
    wanted = [model(**batch)]
    if name == "left":
        wanted.append(with_head(tiny("qwen3_5_moe"))(**batch, fused_lm_head=True))
    for one in wanted:
        assert relative_rms(found.aux_loss, one.aux_loss) <= 1e-5
        assert relative_rms(found.loss, one.loss) <= 1e-5
    assert found.aux_loss > 0 and "forward" not in vars(model)


def test_a_documents_first_token_is_nobodys_target():
    """Labels that say otherwise, as trainers of one document a row make them, leak nothing."""
    batch, where = packed()
    batch["labels"] = batch["input_ids"].clone()
    found, _ = together(with_head(apply_patches(tiny())), batch, weights(batch))
    wanted, _ = alone(with_head(tiny()), batch, where, weights(batch))
    assert not found.label_mask[0, [part.stop - 1 for _, part in where[:-1]]].any()
    assert relative_rms(found.log_probs, wanted[0]) <= LOGIT_TOL


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["packed", "left", "one document"])
def test_logits_are_made_in_chunks(name, training, monkeypatch):
    from hf_packfree.ops.loss import chunked_loss, log_probs
    from hf_packfree.packing.lazy import Origin

    rows = []
    make = log_probs.logits_in_chunks
    monkeypatch.setattr(chunked_loss, "_ELEMENTS_ELSEWHERE", 16 * 128)
    monkeypatch.setattr(chunked_loss, "_FEWEST", 1)
    monkeypatch.setattr(Origin, "read", lambda source: pytest.fail("logits of all tokens are made"))
    monkeypatch.setattr(
        log_probs,
        "logits_in_chunks",
        lambda *args: ((rows.append(len(one)), (part, one))[1] for part, one in make(*args)),
    )
    ids = documents((60,), vocabulary=128)[0][None]
    one = {"input_ids": ids, "labels": ids.clone()}
    batch = one if name == "one document" else BATCHES[name]()[0]
    model = with_head(apply_patches(tiny(), unpacked="native")).train(training)
    with torch.set_grad_enabled(training):
        output = model(**batch, fused_lm_head=True)
        if training:
            output.loss.backward()
    assert len(rows) > 2 and max(rows) <= 16


@pytest.mark.parametrize("order", ["patched first", "head first"])
def test_every_order_and_back(order):
    batch, where = packed()
    model = tiny()
    if order == "patched first":
        model = with_head(apply_patches(model))
    else:
        head = with_head(model).forward
        model = apply_patches(model)
    report = patch_report(model)
    assert report.left_alone == {} and report.swaps["Qwen3_5ForCausalLM"] == 1
    assert report.implementations["loss"] == "torch"
    first = together(model, batch, weights(batch))[0]
    # a second trainer adds its own, with other settings
    with_head(model, outputs=("log_probs",), temperature=2.0)
    assert model(**batch, fused_lm_head=True).entropy is None
    with_head(model)
    assert torch.equal(together(model, batch, weights(batch))[0].log_probs, first.log_probs)
    assert torch.equal(model(**batch).loss, apply_patches(tiny())(**batch).loss)
    remove_patches(model)
    assert not patch_report(model).patched and FUSED_HEAD.of(model) is None
    assert "forward" in vars(model) and (
        order == "patched first" or model.forward.__func__ is not head.__func__
    )
    one = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    assert torch.equal(
        model(**one, fused_lm_head=True).log_probs,
        with_head(tiny())(**one, fused_lm_head=True).log_probs,
    )
    assert torch.equal(model(**one).loss, tiny()(**one).loss)
    apply_patches(model)
    assert torch.equal(together(model, batch, weights(batch))[0].log_probs, first.log_probs)


def test_generation_and_copies_are_as_without():
    model, plain = with_head(apply_patches(tiny())).eval(), tiny().eval()
    ids = documents((9,), vocabulary=128)[0][None]
    assert torch.equal(
        model.generate(ids, max_new_tokens=4, do_sample=False),
        plain.generate(ids, max_new_tokens=4, do_sample=False),
    )
    twin, (batch, _) = copy.deepcopy(model), packed()
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        found = twin(**batch, fused_lm_head=True).log_probs
    assert found[0, -1] == pytest.approx(-torch.tensor(128.0).log().item(), abs=1e-5)


@pytest.mark.parametrize("fp32", [False, True], ids=["", "head in fp32"])
def test_under_autocast(fp32):
    batch, where = packed()
    models = [
        with_head(m, cast_lm_head_to_fp32=fp32) for m in (apply_patches(tiny()), tiny(), tiny())
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, grads = together(models[0], batch, weights(batch))
        rounded, grads_rounded = alone(models[1], batch, where, weights(batch))
    exact, grads_exact = alone(models[2], batch, where, weights(batch))
    assert found.log_probs.dtype == torch.float32
    assert relative_rms(found.log_probs, exact[0]) <= 1.2 * relative_rms(rounded[0], exact[0])
    assert worst([grads], [grads_exact]) <= 1.2 * worst([grads_rounded], [grads_exact])


@needs("peft")
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["LoRA on the head", "modules_to_save"],
)
def test_adapted_heads(options):
    from peft import LoraConfig, get_peft_model

    def adapted(model):
        torch.manual_seed(5)
        return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **options))

    batch, where = packed()
    model = with_head(adapted(apply_patches(tiny())))
    with torch.no_grad():
        getattr(
            model.base_model.model.lm_head, "modules_to_save", {"default": torch.nn.Linear(1, 1)}
        )["default"].weight.mul_(1.5)
    found, grads = together(model, batch, weights(batch))
    # TRL's own leaves LoRA on the head out
    stock = adapted(tiny())
    stock.load_state_dict(model.state_dict())
    log_p, total = torch.zeros_like(found.log_probs), 0.0
    for _, part in where:
        logits = (
            stock(input_ids=batch["input_ids"][:, part], use_cache=False)
            .logits[:, :-1]
            .log_softmax(-1)
        )
        labels = batch["labels"][:, part][:, 1:]
        entropy = -(logits.exp() * logits).sum(-1) * (labels != IGNORED)
        one = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != IGNORED)
        log_p[:, part.start : part.stop - 1] = one.detach()
        weight = weights(batch)[:, :, part][..., : one.shape[1]]
        total = total + (one * weight[0] + entropy * weight[1]).sum()
    total.backward()
    assert relative_rms(found.log_probs, log_p) <= LOGIT_TOL
    assert worst([grads], [gradients(stock)]) <= GRADIENT_TOL
    with model.disable_adapter(), torch.no_grad():
        plain = model(**batch, fused_lm_head=True).log_probs
        wanted = with_head(apply_patches(tiny()))(**batch, fused_lm_head=True).log_probs
    assert relative_rms(plain, wanted) <= LOGIT_TOL


def test_what_we_lack_is_trls_own():
    model = apply_patches(tiny())
    model.config.final_logit_softcapping = 3.0
    model = with_head(model)
    assert "forward" in vars(model) and patch_report(model).left_alone
    (batch, _), stock = packed(), tiny()
    stock.config.final_logit_softcapping = 3.0
    one = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    found, wanted = (m(**one, fused_lm_head=True).log_probs for m in (model, with_head(stock)))
    assert torch.equal(found, wanted)


def test_what_is_read_of_trls_forward():
    """It has no public name: every setting that it is made from is known here."""
    model = with_head(
        tiny(), temperature=0.5, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy")
    )
    found = getclosurevars(model.forward.__func__).nonlocals
    assert set(model.forward.__func__.__code__.co_freevars) == fused_head._SETTINGS
    assert (found["temperature"], found["cast_lm_head_to_fp32"], found["outputs"]) == (
        0.5,
        True,
        ("log_probs", "entropy"),
    )
    head = fused_head_of(apply_patches(model))
    assert head.output.__name__ == "FusedCausalLMOutput" and head.names == {"log_probs", "entropy"}
    assert (
        head.question.temperature == 0.5 and head.question.in_fp32 and head.question.wanted.entropy
    )


def test_context_parallelism_is_refused(monkeypatch):
    model = with_head(apply_patches(tiny()))
    monkeypatch.setattr(
        fused_head, "state_of", lambda head: type("State", (), {"context_parallel": 1})
    )
    with pytest.raises(UnsupportedInput, match="context parallelism"):
        model(**packed()[0], fused_lm_head=True)


def half_foreseen(document):
    """Return a document's ids, of which the second half is what the model that is trained takes
    for most likely.
    """
    model, ids = tiny().eval(), document[: len(document) // 2 + 1]
    with torch.no_grad():
        while len(ids) < len(document):
            ids = torch.cat([ids, model(input_ids=ids[None]).logits[0, -1:].argmax(-1)])
    return ids.tolist()


@integration("TRL SFTTrainer", "its log: loss, entropy, token accuracy")
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "autocast"])
def test_sft_logs_what_trl_logs(precision, tmp_path):
    keys, logs = ("loss", "entropy", "num_tokens", "mean_token_accuracy"), []
    texts = documents((5, 40, 2, 33, 7, 21, 12, 3) * 2, vocabulary=128)
    dataset = {"input_ids": [half_foreseen(one) for one in texts]}
    for patch in (True, False):
        trainer, _ = sft(tmp_path, dataset, patch=patch, **precision)
        logs.append([[row[key] for key in keys] for row in trainer.state.log_history[:-1]])
        if patch:
            head = fused_head_of(trainer.model)
            assert head.question.expected.uniform and not head.question.expected.entropy
            assert patch_report(trainer.model).left_alone == {}
    ours, stock = ([row[:-1] for row in log] for log in logs)
    assert ours == [pytest.approx(row, rel=2e-2 if precision else 1e-5) for row in stock]
    ours, stock = ([row[-1] for row in log] for log in logs)
    # of the smallest of two batches, 13 targets, one may tie in half precision
    assert ours == pytest.approx(stock, rel=1e-5, abs=0.5 / 13 if precision else 0.0)
    assert 0.2 < stock[0] < 0.8


@integration("TRL trainers", "GRPOTrainer, RLOOTrainer: padded batches")
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_rewards(kind, tmp_path):
    import trl
    from datasets import Dataset

    prompts = [{"prompt": words(part)} for part in documents((9, 3, 12, 5), vocabulary=100)]
    steps = []
    for patch in (True, False):
        keep = KeepGradients()
        settings = {
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 7,
            "beta": 0.0,
            "use_cpu": True,
        }
        trainer = getattr(trl, f"{kind}Trainer")(
            model=tiny(),
            reward_funcs=lambda completions, **kwargs: [
                float(len(set(text))) for text in completions
            ],
            args=arguments(tmp_path, getattr(trl, f"{kind}Config"), **settings),
            train_dataset=Dataset.from_list(prompts),
            processing_class=tokenizer(),
            callbacks=[keep, *([PackFreeCallback()] if patch else [])],
        )
        trainer.train()
        steps.append(keep.steps)
        assert not patch or fused_head_of(trainer.model) is not None
    assert (
        worst(*steps) <= 10 * GRADIENT_TOL and max(g.abs().max() for g in steps[0][0].values()) > 0
    )


@pytest.mark.slow
def test_preferences_of_single_answers(tmp_path):
    """KTO: answers that are liked or not."""
    import trl
    from datasets import Dataset

    prompts, answers = documents((9, 12, 5, 33), vocabulary=100), documents((30, 40, 17, 3))
    rows = [
        {"prompt": words(prompt), "completion": f" {words(answer)}", "label": number % 2 == 0}
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    steps = []
    for patch in (True, False):
        keep = KeepGradients()
        trainer = trl.KTOTrainer(
            model=tiny(),
            ref_model=slow_decay(tiny(), seed=1),
            args=arguments(
                tmp_path, trl.KTOConfig, max_steps=2, per_device_train_batch_size=4, use_cpu=True
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            callbacks=[keep, *([PackFreeCallback()] if patch else [])],
        )
        trainer.train()
        steps.append(keep.steps)
        assert not patch or fused_head_of(trainer.model) is not None
    assert worst(*steps) <= GRADIENT_TOL and max(g.abs().max() for g in steps[0][0].values()) > 0
