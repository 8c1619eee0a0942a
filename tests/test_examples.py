"""The complete files of docs/examples run on a tiny checkpoint: what a user copies trains, is exact
and saves what transformers loads.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from tests.data.processors import picture, vision_processor
from tests.support import tiny
from tests.vision import tiny_vision

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
TEMPLATE = "{% for turn in messages %}{{ turn.role }} : {{ turn.content }} <eos> {% endfor %}"
WORDS = ["<pad>", "<eos>", ":", "user", "assistant", *"abcdefghijklmnopqrstuvwxyz"]
pytestmark = [
    # the Trainer's default on a machine without an accelerator, and what libraries deprecate
    pytest.mark.filterwarnings("ignore:'pin_memory'"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a checkpoint in bfloat16, as released ones are, its tokenizer, texts and
    conversations.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("examples")
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tiny().bfloat16().save_pretrained(folder / "model")
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    ).save_pretrained(folder / "model")
    letters = random.Random(0)
    texts = [" ".join(letters.choices(WORDS[5:], k=letters.randint(3, 60))) for _ in range(40)]
    turns = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        for text in texts
    ]
    for name, rows in {"text": texts, "messages": turns}.items():
        lines = (json.dumps({name: row}) for row in rows)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def run(home, tmp_path, monkeypatch, capsys):
    """Run a file as a user does, in this process, and return what it printed."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def file(name: str, data: str, *more: str) -> str:
        given = ["--model", str(home / "model"), "--data", str(home / f"{data}.jsonl"), *more]
        monkeypatch.setattr(sys, "argv", [name, *given])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return file


def changed(before: Path, after: Path, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether a saved checkpoint is loaded as it was written, in float32, in which small updates
    are not lost, and has learned something.
    """
    old, new = (AutoModelForCausalLM.from_pretrained(path) for path in (before, after))
    assert new.state_dict().keys() == old.state_dict().keys()
    assert (old.dtype, new.dtype) == (dtype, torch.float32)
    return any(not torch.equal(b, a) for b, a in zip(old.parameters(), new.parameters()))


def test_sft_with_trl(run, home, tmp_path):
    pytest.importorskip("trl")
    out = str(tmp_path / "out")
    shown = run("sft_trl.py", "messages", "--out", out, "--steps", "2", "--max-length", "64")
    assert "packfree/documents_per_row" in shown and "'packfree/influence': '0'" in shown
    assert changed(home / "model", tmp_path / "out")


def test_the_trainer(run, home, tmp_path):
    shown = run("trainer.py", "text", "--out", str(tmp_path / "out"), "--steps", "2")
    assert "packfree/tokens_per_second" in shown and changed(home / "model", tmp_path / "out")


def test_a_loop_with_accelerate_saves_reloads_and_generates(run, home, tmp_path):
    shown = run("loop_accelerate.py", "text", "--out", str(tmp_path / "out"), "--steps", "2")
    assert shown.startswith("step 0: loss ") and changed(home / "model", tmp_path / "out")
    # what generate wrote behind the prompt
    assert len(shown.splitlines()[-1].split()) > 16


def test_qlora_with_trl(run, home, tmp_path):
    pytest.importorskip("bitsandbytes")
    shown = run("qlora_trl.py", "messages", "--out", str(tmp_path / "out"), "--steps", "2")
    assert "is patched" in shown and (tmp_path / "out" / "adapter_config.json").is_file()


@pytest.mark.parametrize("own", [False, True], ids=["its data set", "--data"])
def test_images(own, tmp_path, monkeypatch, capsys):
    """As a whole, on rows as those of the data set that it names, and on files of a user's."""
    tiny_vision("qwen3_5").bfloat16().save_pretrained(tmp_path / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": "a b"}],
            "completion": [{"role": "assistant", "content": "c d e"[: 1 + 2 * (seed % 3)]}],
            "images": [picture(16, 24, seed)],
        }
        for seed in range(16)
    ]
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: rows)
    # videos of this one are drawn, which no file could hold
    processor, saved = vision_processor(), []
    monkeypatch.setattr(processor, "save_pretrained", saved.append)
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda path: processor)
    options = ["--model", tmp_path / "model", "--out", tmp_path / "out", "--steps", "2"]
    if own:
        rows = [_with_a_file(row, tmp_path / f"{seed}.png") for seed, row in enumerate(rows)]
        data = tmp_path / "data.jsonl"
        # a line of text, not of JSONL, ends there
        rows[0]["messages"][0]["content"][1]["text"] = "a\u2028b"
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        data.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        options += ["--data", data]
    monkeypatch.setattr(sys, "argv", ["images.py", *map(str, options)])
    runpy.run_path(str(EXAMPLES / "images.py"), run_name="__main__")
    assert "'packfree/documents_per_row': '8'" in capsys.readouterr().out
    assert saved == [str(tmp_path / "out")]
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert trained.model.visual is not None and trained.dtype == torch.float32


def _with_a_file(row: dict, path: Path) -> dict:
    """A line of --data: the row's image in a file, whose path is in the messages."""
    (image,), (turn,) = row["images"], row["prompt"]
    Image.fromarray(image).save(path)
    parts = [{"type": "image", "path": str(path)}, {"type": "text", "text": turn["content"]}]
    return {"messages": [turn | {"content": parts}, *row["completion"]]}


def test_the_tiny_checkpoint_of_the_quickstart_trains(run, home, tmp_path, monkeypatch):
    """By its own tokenizer and chat template, in the place of a released one."""
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    page = (EXAMPLES.parent / "quickstart.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    for name, data in (("trainer.py", "text"), ("sft_trl.py", "messages")):
        out = str(tmp_path / name)
        run(name, data, "--model", "my-checkpoint", "--out", out, "--steps", "1")
        assert changed(tmp_path / "my-checkpoint", tmp_path / name, torch.float32)


@pytest.mark.slow
def test_fsdp2_on_two_processes(home):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / "fsdp2.py"), "--steps", "2"]
    command += ["--model", str(home / "model"), "--data", str(home / "text.jsonl")]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0 and "step 0: loss " in done.stdout, done.stderr[-3000:]


def test_every_example_is_run_and_named():
    """By this file or by the tests of context parallelism and of verl's calls; the quickstart names
    each.
    """
    quickstart = (EXAMPLES.parent / "quickstart.md").read_text()
    here = Path(__file__).parent
    files = (Path(__file__), here / "parallel/trainers.py", here / "models/test_rl_verl.py")
    tests = "".join(file.read_text() for file in files)
    for path in EXAMPLES.glob("*.py"):
        assert path.name in quickstart, path.name
        assert path.name in tests or path.name == "context_parallel.py", path.name
