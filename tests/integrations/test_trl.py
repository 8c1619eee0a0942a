"""TRL's SFTTrainer and DPOTrainer: it flattens or packs, calls the base model itself, and
checkpoints by default.
"""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from torch.nn import functional as F

from hf_packfree import PackFreeCallback, patch_report, register_patches
from hf_packfree.models.compat import RELEASE
from tests.integrations.compare import (
    IGNORED,
    RATE,
    KeepGradients,
    arguments,
    descend,
    in_steps,
    per_document,
    worst,
)
from tests.integrations.marks import integration, needs
from tests.support import CONTROL, GRADIENT_TOL, by_family, documents, gradients, slow_decay, tiny

# its dependencies deprecate things
pytestmark = [needs("trl", "datasets"), pytest.mark.filterwarnings("default")]

LENGTHS = (5, 64, 2, 129, 3, 63, 2, 65, 33, 7, 90, 12) * 4
STEPS = 2
OTHERS = [
    name
    for name in ("llama", "gpt_oss", "lfm2", "granitemoehybrid", "kimi_linear")
    if name in by_family
]


def tokenizer():
    """One word per token: "w7" is token 7."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, 128)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def words(ids) -> str:
    return " ".join(f"w{int(number)}" for number in ids)


def sft(folder, dataset, *, model=None, patch=True, **more):
    """Train, and return the trainer and every step's gradients."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    keep = KeepGradients()
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_length": None,
    }
    trainer = SFTTrainer(
        model=model or tiny(),
        args=arguments(folder, SFTConfig, **settings | more),
        train_dataset=Dataset.from_dict(dataset),
        processing_class=tokenizer(),
        callbacks=[keep, *([PackFreeCallback()] if patch else [])],
    )
    trainer.train()
    assert patch_report(trainer.model).patched or not patch
    return trainer, keep.steps


def documents_of(trainer, per_step: int = 4):
    """Return what the trainer's dataset holds, document by document, cut into its optimizer
    steps.
    """
    items = []
    for row in list(trainer.train_dataset)[: per_step * STEPS]:
        ids, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        lengths = row.get("seq_lengths") or [len(ids)]
        items.append(list(zip(ids.split(lengths), labels.split(lengths))))
    return [[document for row in step for document in row] for step in in_steps(items, per_step)]


@integration("TRL SFTTrainer", "`padding_free=True`")
@pytest.mark.parametrize("tail", [{}, {"pad_to_multiple_of": 16}], ids=["as it is", "padded tail"])
def test_padding_free(tail, same_gradients, tmp_path):
    trainer, found = sft(
        tmp_path, {"input_ids": [d.tolist() for d in documents(LENGTHS)]}, padding_free=True, **tail
    )
    same_gradients(found, per_document(tiny(), documents_of(trainer)))


@integration(
    "TRL SFTTrainer",
    "`padding_free=True`, `packing=True`: Llama, gpt-oss, LFM2, Granite 4-H, Kimi Linear",
)
@pytest.mark.parametrize("options", [{"padding_free": True}, {"packing": True, "max_length": 100}])
@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family, options, same_gradients, tmp_path):
    dataset = {"input_ids": [d.tolist() for d in documents(LENGTHS)]}
    # which the documents one by one have not; and TRL's reads a field that Granite's config lacks
    options = {"router_aux_loss_coef": 0.0, **options}
    trainer, found = sft(tmp_path, dataset, model=tiny(family), **options)
    same_gradients(found, per_document(tiny(family), documents_of(trainer)))


@pytest.mark.skipif(
    Version("5.20") > RELEASE,
    reason="transformers 5.2 to 5.19 train such rows as one document, in silence",
)
@integration("TRL SFTTrainer", "`padding_free=True`")
def test_upstream_refuses_what_trl_hands_it(tmp_path):
    with pytest.raises(ValueError, match="packed sequences"):
        sft(
            tmp_path,
            {"input_ids": [d.tolist() for d in documents(LENGTHS)]},
            padding_free=True,
            patch=False,
        )


@integration("TRL SFTTrainer", "`packing=True`, `bfd` and `bfd_split`")
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_packing_keeps_documents_apart(strategy, same_gradients, tmp_path):
    dataset = {"input_ids": [d.tolist() for d in documents(LENGTHS)]}
    trainer, found = sft(tmp_path, dataset, packing=True, packing_strategy=strategy, max_length=100)
    steps = documents_of(trainer)
    assert (
        max(len(ids) for step in steps for ids, _ in step) == 100
        and sum(map(len, steps)) > 4 * STEPS
    )
    whole_rows = [[tuple(map(torch.cat, zip(*step)))] for step in steps]
    same_gradients(found, per_document(tiny(), steps), per_document(tiny(), whole_rows))


@pytest.mark.parametrize("free", [True, False])
def test_rows_packed_beforehand(free, caplog, tmp_path):
    """Without `padding_free` TRL's collator drops their documents' lengths, which a warning says."""
    from datasets import Dataset
    from trl import pack_dataset

    texts = [d.tolist() for d in documents(LENGTHS)]
    rows = pack_dataset(Dataset.from_dict({"input_ids": texts, "labels": texts}), 140, "bfd")
    trainer, found = sft(tmp_path, rows[:], padding_free=free)
    error = worst(found, per_document(tiny(), documents_of(trainer)))
    assert ("found rows of several documents" in caplog.text) == (not free)
    assert error <= GRADIENT_TOL if free else error >= CONTROL * GRADIENT_TOL


@integration(
    "TRL SFTTrainer",
    "`packing=True`, `wrapped`",
    "works; TRL means the documents of a row to mix: upstream's, to rounding",
)
def test_wrapped_rows_are_upstreams(tmp_path, record_property):
    dataset = {"input_ids": [d.tolist() for d in documents(LENGTHS)]}
    options = {"packing": True, "packing_strategy": "wrapped", "max_length": 100}
    (trainer, found), (_, wanted) = (
        sft(tmp_path, dataset, **options),
        sft(tmp_path, dataset, patch=False, **options),
    )
    assert {len(row["input_ids"]) for row in list(trainer.train_dataset)[:8]} == {100}
    record_property("error", worst(found, wanted))
    assert worst(found, wanted) <= GRADIENT_TOL
    # 5.2 to 5.9 count the first token of every row among the targets, of any model
    if Version("5.12") <= RELEASE:
        assert worst(found, per_document(tiny(), documents_of(trainer))) <= GRADIENT_TOL


@integration("TRL SFTTrainer", "completion-only loss, packed")
@pytest.mark.parametrize(
    "options",
    [{"padding_free": True}, {"packing": True, "max_length": 140}],
    ids=["padding-free", "bfd"],
)
def test_completion_only_loss(options, same_gradients, tmp_path):
    parts = [
        document.split([len(document) // 2, len(document) - len(document) // 2])
        for document in documents(LENGTHS)
    ]
    prompts, completions = zip(*parts)
    dataset = {
        "prompt": [words(p) for p in prompts],
        "completion": [" " + words(c) for c in completions],
    }
    trainer, found = sft(tmp_path, dataset, **options)
    steps = documents_of(trainer)
    share = [float((labels != IGNORED).float().mean()) for step in steps for _, labels in step]
    assert 0.4 < sum(share) / len(share) < 0.8, "half of every document and its end are targets"
    everything = [[(ids, ids) for ids, _ in step] for step in steps]
    same_gradients(found, per_document(tiny(), steps), per_document(tiny(), everything))


@integration("TRL SFTTrainer", "with PEFT (LoRA), packed")
@needs("peft")
def test_with_lora(same_gradients, tmp_path):
    from tests.integrations.test_peft import lora

    dataset = {"input_ids": [d.tolist() for d in documents(LENGTHS)]}
    trainer, found = sft(tmp_path, dataset, model=lora(tiny()), packing=True, max_length=140)
    steps = documents_of(trainer)
    whole_rows = [[tuple(map(torch.cat, zip(*step)))] for step in steps]
    same_gradients(found, per_document(lora(tiny()), steps), per_document(lora(tiny()), whole_rows))


QLORA = "works; TRL makes the adapters bf16, which rounds as much packed as per document"


@integration("TRL SFTTrainer", "with PEFT (QLoRA), packed", QLORA)
@needs("peft", "bitsandbytes")
def test_with_qlora(record_property, tmp_path):
    from tests.integrations.test_peft import lora, quantised

    def model(dtype):
        made = lora(quantised(tmp_path / "whole"))
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.bfloat16().to(dtype)
        return made

    tiny().save_pretrained(tmp_path / "whole")
    dataset = {"input_ids": [d.tolist() for d in documents(LENGTHS)]}
    trainer, found = sft(
        tmp_path, dataset, model=model(torch.float32), packing=True, max_length=140
    )
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.bfloat16}
    steps = documents_of(trainer)
    whole_rows = [[tuple(map(torch.cat, zip(*step)))] for step in steps]
    exact, rounded = (
        per_document(model(dtype), steps) for dtype in (torch.float32, torch.bfloat16)
    )
    error, leak = worst(found, exact), worst(per_document(model(torch.float32), whole_rows), exact)
    record_property("error", error)
    record_property("control", leak)
    assert error <= 2 * worst(rounded, exact) < leak / 2


def preferences_per_document(model, reference, pairs, beta, steps=STEPS, size=2):
    """DPO's sigmoid loss with every answer in a forward of its own."""

    def logp(of, prompt, answer):
        ids = torch.cat([prompt, answer])
        chances = F.log_softmax(of(input_ids=ids[None], use_cache=False).logits[0, :-1], -1)
        return chances.gather(1, ids[1:, None])[len(prompt) - 1 :].sum()

    kept = []
    for step in in_steps(pairs, size)[:steps]:
        model.zero_grad(set_to_none=True)
        for prompt, chosen, rejected in step:
            gained = [
                logp(model, prompt, a) - logp(reference, prompt, a).detach()
                for a in (chosen, rejected)
            ]
            (-F.logsigmoid(beta * (gained[0] - gained[1])) / len(step)).backward()
        kept.append(gradients(model))
        descend(model, RATE)
    return kept


@integration("TRL DPOTrainer", "padded batches")
def test_preferences(same_gradients, tmp_path):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    parts = documents((9, 30, 12, 40, 5, 17, 33, 3, 70, 20, 11, 6))
    pairs = [tuple(parts[start : start + 3]) for start in range(0, len(parts), 3)]
    ended = [(p, *(torch.cat([a, torch.tensor([1])]) for a in answers)) for p, *answers in pairs]
    dataset = [
        {"prompt": words(p), "chosen": " " + words(c), "rejected": " " + words(r)}
        for p, c, r in pairs
    ]
    keep, model, given, run = KeepGradients(), tiny(), [], []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: given.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    model.model.layers[0].register_forward_pre_hook(
        lambda m, args: run.append(args[0].shape[:2].numel())
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=slow_decay(tiny(), seed=1),
        args=arguments(
            tmp_path, DPOConfig, max_steps=STEPS, per_device_train_batch_size=2, beta=0.1
        ),
        train_dataset=Dataset.from_list(dataset),
        processing_class=tokenizer(),
        callbacks=[keep, PackFreeCallback()],
    )
    trainer.train()
    wanted = preferences_per_document(tiny(), slow_decay(tiny(), seed=1), ended, beta=0.1)
    same_gradients(keep.steps, wanted)
    assert max(run) < min(given), "the layers ran on padding"
    other = preferences_per_document(tiny(), tiny(), ended, beta=0.1)
    assert worst(other, wanted) >= CONTROL * GRADIENT_TOL, "the reference model counts"


@pytest.mark.parametrize("bf16", [False, True])
def test_rewards_of_the_first_step_are_zero_where_the_reference_is_patched_too(bf16, tmp_path):
    """As the docs have it for a reference model that the trainer loads."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    tiny().save_pretrained(tmp_path / "whole")
    model = type(tiny()).from_pretrained(tmp_path / "whole", dtype=torch.float32)
    parts = [words(part) for part in documents((9, 30, 12, 40, 5, 17))]
    names = "prompt", "chosen", "rejected"
    pairs = [dict(zip(names, [p, " " + c, " " + r])) for p, c, r in (parts[:3], parts[3:])]
    settings = {"max_steps": 1, "per_device_train_batch_size": 2, "bf16": bf16}
    with register_patches(unpacked="native", cuda_graphs="auto"):
        trainer = DPOTrainer(
            model=model,
            args=arguments(tmp_path, DPOConfig, **settings),
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer(),
            callbacks=[PackFreeCallback()],
        )
    trainer.train()
    assert patch_report(trainer.ref_model).patched
    logged = next(one for one in trainer.state.log_history if "rewards/margins" in one)
    assert {logged[f"rewards/{name}"] for name in (*names[1:], "margins", "accuracies")} == {0.0}
