"""The demo's text (from Python itself), tokenizer, small model and training. A training is written
as a user would: Hugging Face's Trainer and collators and, for packing, one callback.
"""

from __future__ import annotations

import random
import re
import time
from copy import deepcopy
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hf_packfree.bench.measure import peak_mib
from hf_packfree.demo.results import PACKED, PADDED, DemoOptions, Progress, Training
from hf_packfree.models.slow_decay import slow_decays
from hf_packfree.trainer import PackFreeCallback

SHORTEST = 20
"""The fewest tokens of a passage; shorter ones are left out."""
LONGEST = 600
"""The most tokens of a passage; longer ones are cut."""

VOCABULARY = 1024
PADDING = "<pad>"
END = "<eos>"


def passages() -> list[str]:
    """Return Python's language reference, which help() shows, cut into paragraphs with their
    indented examples.
    """
    return [
        passage for topic in sorted(topics) for passage in re.split(r"\n\n(?=\S)", topics[topic])
    ]


def train_tokenizer(texts: list[str]) -> Any:
    """Return a byte-level BPE tokenizer (a PreTrainedTokenizerFast) trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PADDING, END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=tokenizer, pad_token=PADDING, eos_token=END)


def choose_documents(tokenizer: Any, texts: list[str], count: int, seed: int) -> list[list[int]]:
    """Return up to `count` documents as token ids, each ended by the end token, in an order
    drawn with `seed`.
    """
    documents = [
        [*ids[: LONGEST - 1], tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]
    ]
    documents = [ids for ids in documents if len(ids) >= SHORTEST]
    random.Random(seed).shuffle(documents)
    return documents[:count]


def build_model(tokenizer: Any, seed: int) -> Any:
    """Return a Qwen3_5ForCausalLM of about a million random parameters: three linear layers, then
    one of full attention.

    The decay rate A is set to 0.01 ... 0.05, as in trained models with a long memory: the fast
    decay of fresh random weights forgets the document before within a few tokens and would hide
    most of a leak.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "tie_word_embeddings": True,
    }
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(vocab_size=len(tokenizer), **sizes, **special))
    with torch.no_grad():
        for parameter, decay in slow_decays(model).items():
            parameter.copy_(decay)
    return model


def train(
    name: str,
    model: nn.Module,
    tokenizer: Any,
    documents: list[list[int]],
    options: DemoOptions,
    progress: Progress,
) -> tuple[Training, Any]:
    """Train a copy of the model on documents of token ids, in the way that `name` says; return the
    results and the trained copy.
    """
    library: Any = transformers
    padded = library.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    recorder = _Recorder(name, progress)
    examples = [{"input_ids": ids} for ids in documents]
    trainer = library.Trainer(
        model=deepcopy(model),
        args=_arguments(options),
        train_dataset=examples,
        data_collator=padded if name == PADDED else library.DataCollatorWithFlattening(),
        callbacks=[PackFreeCallback(), recorder] if name == PACKED else [recorder],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    batch = trainer.data_collator(examples[: options.batch_size])

    def step() -> None:
        trainer.model.zero_grad()
        trainer.training_step(trainer.model, batch)

    # with the second row a graph is captured, whose memory is counted below
    for _ in range(2):
        step()
    trainer.model.zero_grad()
    peak = peak_mib(step, trainer.args.device, has_graphs=name == PACKED)
    columns = {key: tuple(step[key] for step in recorder.steps) for key in recorder.steps[0]}
    return Training(name, peak_mib=peak, **columns), trainer.model


def _arguments(options: DemoOptions) -> transformers.TrainingArguments:
    cuda = torch.cuda.is_available()
    return transformers.TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=2e-3,
        seed=options.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        # the Trainer turns TF32 on by itself, and its rounding would hide a small leak
        tf32=False if cuda else None,
    )


class _Recorder(transformers.TrainerCallback):
    """Records per step the loss that the Trainer logs, the tokens that the model sees, and the
    time from log to log.
    """

    def __init__(self, name: str, progress: Progress) -> None:
        self.steps: list[dict[str, Any]] = []
        self._name, self._progress, self._counts, self._since = (
            name,
            progress,
            dict[str, int](),
            0.0,
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].register_forward_pre_hook(self._count, with_kwargs=True)
        self._progress(self._name, 0, args.max_steps, "")
        self._since = time.perf_counter()

    def _count(self, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        tokens, targets = (
            int(ids.numel() if mask is None else mask.sum()),
            int(inputs.get("num_items_in_batch", 0)),
        )
        self._counts = {"tokens": tokens, "tokens_with_padding": ids.numel(), "targets": targets}

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs, now = kwargs["logs"], time.perf_counter()
        if "loss" in logs:
            self.steps.append(
                {"losses": logs["loss"], "seconds": now - self._since, **self._counts}
            )
            self._progress(self._name, len(self.steps), args.max_steps, f"loss {logs['loss']:.3f}")
            self._since = time.perf_counter()
