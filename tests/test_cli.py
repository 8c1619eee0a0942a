"""The command line: exit codes that mean something, answers that end in a sentence, JSON that is
JSON.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

import pytest
from transformers import BloomConfig, ViTConfig

import hf_packfree.cli
import hf_packfree.demo
import hf_packfree.verify
from hf_packfree.cli import main, show
from hf_packfree.cli.arguments import EXAMPLES, MOST_VERIFIED, parser
from hf_packfree.cli.quiet import quiet_libraries
from hf_packfree.cli.text import section
from hf_packfree.verify.model_source import build_model
from tests.support import by_family, tiny
from tests.test_bench import Candidate
from tests.test_bench import report_of as bench_report
from tests.test_demo import PACKED, report_of, training

pytestmark = pytest.mark.usefixtures("imports_tried_once")
ROOT = Path(__file__).resolve().parents[1]
FAST = ("--lengths", "5,64,3", "--no-gradients")


def run(capsys, *argv: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr; argparse ends by SystemExit."""
    try:
        code = main(argv)
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def last(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_help_says_what_exit_codes_mean_and_is_what_comes_without_a_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert run(capsys) == (code, out, "") and code == 0
    for number, meaning in {1: "influence each other", 2: "wrong usage", 3: "broken"}.items():
        assert any(
            line.strip().startswith(str(number)) and meaning in line for line in out.splitlines()
        )


@pytest.mark.parametrize(
    "argv, said",
    [
        (("verfy", "qwen3_5"), "found command 'verfy', which is not known; did you mean verify?"),
        (("--versio",), "did you mean --version?"),
        (("bench", "--round", "3", "--picture", "x"), "found argument '--picture'"),
        (("models", "--jsn"), "usage: packfree models [-h]"),
        (("models", "--jsn"), "did you mean --json?"),
        (("verify",), "required: model"),
        (("verify", "qwen3_5", "--lengths", "5"), "two or more lengths"),
        (("verify", "qwen3_5", "--lengths", "5,x"), "two or more lengths"),
        (("verify", "qwen3_5", "--dtype", "int8"), "invalid choice"),
        (("verify", "qwen3_5", "--device", "nonsense"), "found device 'nonsense'"),
        (("demo", "--steps", "0"), "at least 1"),
        (("demo", "--batch-size", "1"), "at least 2"),
        (("verify", "qwen3_5", "--lengths", "5,99999999999"), "at most 1048576 in all"),
        (("verify", "qwen3_5", "--lengths", "5,1048572"), "found 1048577 tokens; wanted at most"),
        (("verify", "qwen3_5", "--lengths", "9,9", "--tree"), "found --tree with 2 lengths"),
        (("verify", "qwen3_5", "--device", "meta"), "found device 'meta', which holds no numbers"),
        (("bench", "--seed", "-1"), "at least 0 and at most 4294967295"),
        (("demo", "--seed", "4294967296"), "at least 0 and at most 4294967295"),
        (("bench", "--threads", "100000"), "at least 1 and at most"),
        (("demo", "--threads", "100000"), "at least 1 and at most"),
        (("bench", "--documents", "99999999999"), "at least 2 and at most"),
        (("bench", "--longest", "99999999999"), "at least 1 and at most"),
    ],
)
def test_wrong_usage_is_2_and_a_sentence(capsys, argv, said):
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == "" and said in err and "Traceback" not in err


def test_a_row_that_verify_takes_is_one_that_it_measures():
    assert MOST_VERIFIED == hf_packfree.verify.verify.MOST_TOKENS


def test_models_is_the_table(capsys):
    code, out, _ = run(capsys, "models", "--json", "--verbose")
    rows = json.loads(out)
    assert code == 0 and [row["name"] for row in rows] == list(by_family)
    assert all(row["swaps"] == by_family[row["name"]].swaps and row["heads"] for row in rows)
    (omni,) = [row for row in rows if row["name"] == "qwen3_omni_moe"]
    assert omni["heads"] == ["Qwen3OmniMoeThinkerForConditionalGeneration"], (
        "the talker is transformers' own"
    )
    assert omni["media"] == ["text", "images", "videos", "audio"]
    code, out, _ = run(capsys, "models", "--verbose")
    assert code == 0 and "Qwen3NextGatedDeltaNet" in out
    code, out, _ = run(capsys, "models")
    assert code == 0 and out.startswith(f"{len(by_family)} families are supported")
    assert "Qwen3NextGatedDeltaNet" not in out and "AutoModelForImageTextToText" in out
    assert "  nemotron, stablelm: its layers hand no keywords to their attention" in out
    assert run(capsys, "models", "--quiet")[1].split() == list(by_family)
    assert [row["name"] for row in json.loads(run(capsys, "models", "--json")[1])] == list(
        by_family
    )


def test_models_says_from_which_release_on_and_runs_on_older_ones(capsys, monkeypatch):
    """Which have no classes of a later family to name."""
    older = [row for row in by_family.values() if row.floor == "5.2.0"]
    monkeypatch.setattr("hf_packfree.patching.registry.FAMILIES", older)
    code, out, _ = run(capsys, "models", "--json", "--verbose")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0 and list(rows) == list(by_family)
    assert {name for name, row in rows.items() if "swaps" in row} == {row.name for row in older}
    assert rows["lfm2"]["transformers"] == ">=5.22.0" and rows["llama"]["transformers"] == ">=5.2"
    code, out, _ = run(capsys, "models", "--verbose")
    assert code == 0 and "LlamaAttention" in out and "Lfm2ShortConv" not in out
    assert re.search(r"  lfm2 +text +>=5\.22\.0 +AutoModelForCausalLM: Liquid", out)


def test_models_imports_neither_torch_nor_rich():
    """And answers in a tenth of a second, therefore."""
    code = (
        "import sys; from hf_packfree.cli import main; main(['models']); "
        "print({'torch', 'transformers', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert last(done.stdout) == "set()"


def test_every_help_has_examples_that_parse(capsys):
    for command, lines in EXAMPLES.items():
        _, out, _ = run(capsys, *filter(None, (command,)), "--help")
        for line in lines.splitlines():
            assert line in out
            words = shlex.split(line.partition("&&")[0], comments=True)
            assert parser().parse_args(words[1:]).command == (command or words[1])


def test_a_shell_completes_it():
    shtab = pytest.importorskip("shtab")
    script = shtab.complete(parser(), "bash")
    assert "--trust-remote-code" in script
    # releases quote the words of a list or not
    assert re.search(r"doctor\W+verify\W+models", script)


@pytest.mark.parametrize("columns", [20, 41, 80, 133])
def test_prose_breaks_between_words(capsys, monkeypatch, columns, leaking):
    """And with no width, in a pipe, a sentence is a line."""
    _, wanted, _ = run(capsys, "models", "-v")
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in (("verify", "qwen3_5", *FAST), ("models",), ("models", "-v"), ("--help",)):
        lines = run(capsys, *command)[1].splitlines()
        prose = [line for line in lines if not set(line) & set("┃│┏┡├└")]
        long = [line for line in prose if len(line) > columns and len(line.split()) > 3]
        # what usage and examples break is not ours
        assert command == ("--help",) or not long, long
    assert run(capsys, "models", "-v")[1].split() == wanted.split()


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "./nowhere"),
        ("verify", "qwen3_5", "--device", "nonsense"),
        ("bench", "--lenghts", "x"),
        ("bench", "--documents", "1"),
    ],
)
def test_what_went_wrong_breaks_between_words(capsys, monkeypatch, command):
    _, _, wanted = run(capsys, *command)
    monkeypatch.setenv("COLUMNS", "60")
    _, _, err = run(capsys, *command)
    assert err.split() == wanted.split()
    # what comes before is argparse's usage
    sentence = err[err.index("packfree: ") if "usage:" not in err else err.index(": error:") :]
    assert max(map(len, sentence.splitlines())) <= 60 and sentence.count("\n") > 1


@pytest.mark.parametrize("columns", [20, 60])
def test_no_number_and_no_name_of_a_table_is_cut_short(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    before = Candidate("unpatched padded", 16_384, (1.2345,), 107_112.0)
    show.bench(bench_report(before, Candidate("patched padded", 5_496, (0.5,), 11_118.0)))
    out = capsys.readouterr().out
    assert "…" not in out
    words = set(re.split(r"[^\w.,/%]+", out))
    assert {"unpatched", "padded", "16,384", "1,234.5", "107,112", "tokens/s", "floor"} <= words


@pytest.mark.parametrize(
    "logger, said",
    [
        ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-comm"),
        ("huggingface_hub.utils._http", "Retrying in 1s [Retry 1/5]."),
    ],
)
def test_what_libraries_say_of_no_harm_is_left_out(caplog, logger, said):
    with quiet_libraries(bars=False):
        logging.getLogger(logger).warning(said)
        logging.getLogger(logger).warning("something else")
    logging.getLogger(logger).warning(said)
    assert [record.getMessage() for record in caplog.records] == ["something else", said]


def test_verbose_logs_and_quiet_says_one_line(capsys, caplog):
    code, out, err = run(capsys, "verify", "qwen3_next", "--quiet", *FAST)
    assert (code, err) == (0, "") and out.startswith("exact: ") and out.count("\n") == 1
    assert not caplog.records
    code, out, err = run(capsys, "verify", "qwen3_next", "--verbose", *FAST)
    assert code == 0 and "Qwen3NextForCausalLM is patched" in caplog.text


def test_verify_is_0_and_ends_in_the_sentence(capsys):
    code, out, err = run(capsys, "verify", "qwen3_next", *FAST)
    assert code == 0 and "5, 64, 3 tokens" in out
    assert last(out).startswith(
        "exact: Qwen3NextForCausalLM (float32, cpu): 3 packed documents equal the same documents "
    )
    assert "is falling back" not in err


def test_verify_json(capsys):
    code, out, _ = run(capsys, "verify", "qwen3_5", "--json", "--lengths", "5,64,3")
    found = json.loads(out)
    assert code == 0 and found["failures"] == [] and found["lengths"] == [5, 64, 3]
    assert found["patched"]["logits"] < 1e-5 < 1e-2 < found["unpatched"]["logits"]
    assert found["patched"]["gradients"] < 1e-4 and found["patched"]["cross_gradient"] == 0.0


@pytest.mark.parametrize("more", [(), ("--verbose",)])
def test_what_libraries_print_is_not_in_the_json(capsys, monkeypatch, more):
    measure = hf_packfree.verify.verify_packing

    def printing(*args, **options):
        print("TileLang begins to compile")
        return measure(*args, **options)

    monkeypatch.setattr(hf_packfree.verify, "verify_packing", printing)
    code, out, err = run(capsys, "verify", "qwen3_5", "--json", *more, *FAST)
    assert code == 0 and json.loads(out)["failures"] == []
    assert "TileLang begins to compile" in err


@pytest.fixture
def leaking(monkeypatch):
    """Models are measured as they come, unpatched."""
    measure = hf_packfree.verify.verify_packing

    def as_it_comes(name, device, dtype, trust_remote_code, **options):
        return measure(build_model(name), **options)

    monkeypatch.setattr(hf_packfree.verify, "verify_packing", as_it_comes)


def test_a_leak_is_1_with_its_numbers(capsys, leaking):
    code, out, _ = run(capsys, "verify", "qwen3_5", *FAST)
    assert (
        code == 1
        and "logits" in out
        and last(out).startswith("LEAK: Qwen3_5ForCausalLM leaks between packed documents: logits")
    )
    code, out, _ = run(capsys, "verify", "qwen3_5", "--json", *FAST)
    found = json.loads(out)
    assert (
        code == 1
        and found["patched"]["logits"] > 1e-2
        and found["failures"]
        and found["unpatched"] is None
    )


@pytest.mark.slow
def test_a_model_that_is_refused_is_measured_as_it_is(capsys, tmp_path):
    BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    why = "it is not patched: its attention does not go through transformers' AttentionInterface"
    code, out, _ = run(capsys, "verify", str(tmp_path), *FAST, "--quiet")
    assert (
        code == 1 and out.startswith("LEAK: BloomForCausalLM leaks") and out.endswith(f"{why}.\n")
    )
    code, out, _ = run(capsys, "verify", str(tmp_path), *FAST, "--json")
    found = json.loads(out)
    assert code == 1 and found["patched"]["influence"] > 1e-4 and found["unpatched"] is None
    assert found["family"] == "bloom" and f"it is not patched: {found['not_patched']}" == why
    code, out, err = run(capsys, "doctor", "--model", str(tmp_path))
    assert code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith("packfree: found a BloomModel of bloom, which is not patched: its attent")


CODE = {
    "conf.py": "from transformers import LlamaConfig\nclass Config(LlamaConfig):\n"
    "    model_type = 'of_its_own'\n",
    "mod.py": "from transformers import LlamaForCausalLM\nfrom .conf import Config\n"
    "class Model(LlamaForCausalLM):\n    config_class = Config\n",
}
"""A Llama by another name."""


def test_code_of_a_checkpoint_runs_where_it_is_trusted_alone(capsys, tmp_path, monkeypatch):
    # where transformers copies such code to
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    model = build_model("llama")
    for folder, part in ((tmp_path / "config", model.config), (tmp_path / "weights", model)):
        part.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        own = {"AutoConfig": "conf.Config", "AutoModelForCausalLM": "mod.Model"}
        config |= {"model_type": "of_its_own", "architectures": ["Model"], "auto_map": own}
        (folder / "config.json").write_text(json.dumps(config))
        for name, text in CODE.items():
            (folder / name).write_text(text)
        for command in (("verify",), ("bench",), ("doctor", "--model")):
            code, _, err = run(capsys, *command, str(folder))
            assert code == 2 and "packfree verify --trust-remote-code" in " ".join(err.split())
        code, out, err = run(capsys, "verify", str(folder), *FAST, "--trust-remote-code")
        assert code == 0 and last(out).startswith("exact: Model (float32, cpu): 3 packed"), err


def test_a_model_that_transformers_cannot_run_is_2(capsys):
    """A tiny one of this type, whose layers have other sizes than its heads."""
    code, out, err = run(capsys, "verify", "xlstm", *FAST)
    assert code == 2 and out == "" and "which fails as it is (RuntimeError" in err, err


def test_a_device_that_is_absent_is_said_in_a_sentence(capsys):
    code, _, err = run(capsys, "verify", "qwen3_5", "--device", "mps")
    if code == 0:
        pytest.skip("there is one")
    assert code == 2 and "found device 'mps'" in err and len(err) < 300, err


def test_a_model_without_text_is_2(capsys, tmp_path):
    ViTConfig().save_pretrained(tmp_path)
    code, out, err = run(capsys, "verify", str(tmp_path))
    assert code == 2 and out == "" and "for which transformers has no language model" in err


def damage(folder, what: str) -> None:
    """Save a tiny model there and spoil it."""
    tiny().save_pretrained(folder)
    if what == "weights":
        (folder / "model.safetensors").write_bytes(b"garbage")
        return
    wrong = {
        "sizes that differ": {"hidden_size": 128},
        "no heads": {"linear_num_key_heads": 0},
        "words": {"hidden_size": "a"},
    }
    config = json.loads((folder / "config.json").read_text()) | wrong[what]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("what", ["weights", "sizes that differ", "no heads", "words"])
def test_a_damaged_checkpoint_is_2_and_a_sentence(capsys, tmp_path, what):
    damage(tmp_path, what)
    code, _, err = run(capsys, "verify", str(tmp_path))
    assert code == 2 and "wanted" in err and "Traceback" not in err, err


def test_doctor_with_a_damaged_config_is_2_and_a_sentence(capsys, tmp_path):
    damage(tmp_path, "words")
    code, _, err = run(capsys, "doctor", "--model", str(tmp_path))
    assert code == 2 and "found no config under" in err and "Traceback" not in err, err


@pytest.mark.parametrize(
    "fla, wanted, other",
    [("0.6.0", "pip uninstall fla-core", "please report it")]
    + [(None, "please report it", "pip uninstall fla-core")],
)
def test_kernels_without_a_gpu_are_3_and_said(capsys, monkeypatch, fla, wanted, other):
    """What Triton says where transformers calls flash-linear-attention on a CPU."""

    def called(options):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setitem(hf_packfree.cli.COMMANDS, "models", called)
    monkeypatch.setattr("hf_packfree.ops.backend.installed", lambda package: fla)
    code, _, err = run(capsys, "models")
    assert code == 3 and wanted in err and other not in err


def test_what_nobody_expected_is_3_and_a_sentence_or_a_traceback_where_asked(capsys, monkeypatch):
    monkeypatch.setitem(hf_packfree.cli.COMMANDS, "models", lambda options: [][0])
    code, _, err = run(capsys, "models")
    assert (
        code == 3 and "IndexError: list index out of range" in err and "PACKFREE_TRACEBACK=1" in err
    )
    for value, shown in {"1": True, "0": False, "": False}.items():
        monkeypatch.setenv("PACKFREE_TRACEBACK", value)
        code, _, err = run(capsys, "models")
        assert code == 3 and ("Traceback" in err and "in <lambda>" in err) is shown
        assert "IndexError: list index out of range, an unexpected error" in last(err)


def test_a_folder_without_a_model_is_2(capsys, tmp_path):
    code, _, err = run(capsys, "verify", str(tmp_path))
    assert code == 2 and "found no model under" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", [("verify",), ("bench",), ("doctor", "--model")])
def test_a_wrong_name_is_2_and_the_near_one_is_proposed(capsys, monkeypatch, command):
    def asked(*args, **options):
        raise OSError("not there")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)
    for name, said in (
        ("qwen3.5", "packfree models lists (did you mean qwen3_5?); check the name"),
        ("Qwen3_Next", "packfree models lists (did you mean qwen3_next?); check the name"),
        ("me/mine", "packfree models lists; check the name, and that the hub can be reached"),
    ):
        code, out, err = run(capsys, *command, name)
        assert code == 2 and out == "" and said in err, err


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "../no/where", "out/run/checkpoint-3"])
def test_a_path_to_nothing_is_2_and_not_asked_of_the_hub(capsys, monkeypatch, name):
    def asked(*args, **options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)
    for command in (("verify", name), ("bench", name), ("doctor", "--model", name)):
        code, out, err = run(capsys, *command)
        assert code == 2 and out == "" and f"found no file or folder '{name}'" in err, err


def test_doctor_works_where_nothing_is_installed():
    """Without torch, transformers, rich and any other package, and says so."""
    bare = [sys.executable, "-S", "-m", "hf_packfree"]
    done = subprocess.run([*bare, "doctor"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 3 and done.stderr == "", done.stderr
    assert "pip install 'transformers>=5.2'" in done.stdout and "  OS  " in done.stdout
    assert last(done.stdout).startswith("To be mended: torch (")
    found = json.loads(
        subprocess.run([*bare, "doctor", "--json"], capture_output=True, text=True, cwd=ROOT).stdout
    )
    assert not found["healthy"] and {"OS", "Python", "GPU, driver", "nvcc"} <= set(found["machine"])
    done = subprocess.run([*bare, "verify", "qwen3_5"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 3 and "packfree doctor says what is installed" in done.stderr


# transformers deprecates what PEFT asks for
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")
def test_adapters_are_verified_on_their_model(capsys, tmp_path):
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    tiny().save_pretrained(base)
    config = peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(build_model(str(base)), config)
    adapted.save_pretrained(tmp_path / "adapters")
    code, out, err = run(capsys, "verify", str(tmp_path / "adapters"), "--lengths", "5,64,3")
    assert code == 0 and last(out).startswith("exact: PeftModel (float32"), err
    short = ("--documents", "2", "--longest", "16", "--rounds", "1", "--threads", "1")
    code, out, err = run(capsys, "bench", str(tmp_path / "adapters"), *short)
    assert code == 0 and last(out).startswith("PeftModel ("), err
    (tmp_path / "base").rename(tmp_path / "gone")
    code, _, err = run(capsys, "verify", str(tmp_path / "adapters"))
    assert code == 2 and "found no file or folder" in err


def test_doctor_json_is_json_alone(capsys):
    code, out, _ = run(capsys, "doctor", "--json", "--model", "qwen3_5")
    found = json.loads(out)
    assert (
        code == 0
        and found["healthy"]
        and found["plans"][0]["name"] == "qwen3_5 (Qwen3_5ForCausalLM)"
    )
    assert {"torch", "fla-core", "trl"} <= {package["name"] for package in found["packages"]}


def test_doctor_is_3_when_something_is_broken(capsys, tmp_path, monkeypatch):
    (tmp_path / "trl.py").write_text("raise RuntimeError('built for another torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run(capsys, "doctor")
    assert (
        code == 3
        and "built for another torch" in " ".join(out.split())
        and last(out) == "To be mended: trl (broken)."
    )


@pytest.fixture
def stub(monkeypatch):
    """Put something else in the place of the demo's work; tables and sentences stay."""

    def put(result):
        def run_demo(options, progress):
            progress("stage", 1, 1, "")
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(hf_packfree.demo, "run_demo", run_demo)

    # which the command sets, for one GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    return put


def test_demo_is_0_when_all_is_as_promised(capsys, stub):
    stub(report_of(training(PACKED)))
    code, out, _ = run(capsys, "demo")
    assert (
        code == 0
        and last(out).startswith("Packed training equals padded training")
        and "packfree-demo" in out
    )
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert "change by up to 25.0% with its neighbours' tokens (patched: 0e+00)" in out
    assert "without patches: 'down' or 'upon'" in out and "  patched: 'upon'\n" in out
    found = json.loads(run(capsys, "demo", "--json")[1])
    assert found["failures"] == [] and "25.0%" in found["harm"]
    assert run(capsys, "demo", "--quiet")[1].count("\n") == 1


def test_demo_is_1_when_its_check_fails(capsys, stub):
    stub(report_of(training(PACKED, losses=(6.0, 5.1, 4.0))))
    code, out, _ = run(capsys, "demo", "--no-plots")
    assert code == 1 and last(out).startswith(
        "The demo's check failed: the loss curves differ by 2.0e-02"
    )


def test_demo_is_3_when_a_training_breaks_off(capsys, stub):
    stub(RuntimeError("out of memory"))
    code, _, err = run(capsys, "demo")
    assert code == 3 and last(err).startswith(
        "packfree: found RuntimeError: out of memory, an unexpected error"
    )


def test_demo_without_matplotlib_says_how_to_get_it(capsys, stub, monkeypatch):
    monkeypatch.setattr("hf_packfree.cli.commands.find_spec", lambda name: None)
    stub(report_of(training(PACKED)))
    code, out, _ = run(capsys, "demo")
    assert code == 0 and "pip install matplotlib" in out and "--no-plots" in out
    assert "pip install" not in run(capsys, "demo", "--no-plots")[1]


def test_a_folder_that_cannot_be_written_is_2(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "demo", "--out", str(tmp_path / "file"))
    assert code == 2 and "file" in last(err) and "Traceback" not in err


def test_interrupted_is_130(capsys, monkeypatch):
    @contextmanager
    def interrupted(*args):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("hf_packfree.cli.show.spinner", interrupted)
    assert run(capsys, "verify", "qwen3_5") == (130, "", "packfree: stopped\n")


def test_nan_becomes_null_in_json(capsys):
    from hf_packfree.cli.text import as_json

    as_json({"a": [float("nan"), 1.0], "b": {"c": float("inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.0], "b": {"c": None}}


def test_the_module_is_the_command_and_starts_light():
    done = subprocess.run(
        [sys.executable, "-m", "hf_packfree", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("packfree 0.")
    code = (
        "import sys, hf_packfree.cli, hf_packfree.doctor, hf_packfree.demo; print('torch' in "
        "sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


@contextmanager
def unread_stdout():
    """A pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    with suppress(BrokenPipeError), os.fdopen(write, "w") as stdout, redirect_stdout(stdout):
        yield


WRITERS = [
    ("models",),
    ("models", "--json"),
    ("verify", "qwen3_5", *FAST),
    ("--help",),
    ("doctor", "--help"),
]


@pytest.mark.parametrize("argv", WRITERS)
def test_an_answer_that_nobody_reads_is_the_shells_141(capsys, leaking, argv):
    """And not 1, the exit code of the leak that this model has, or of a traceback."""
    with unread_stdout():
        assert main(argv) == 141
    assert "pipe" not in capsys.readouterr().err.lower()


def test_a_process_whose_pipe_was_closed_ends_in_silence():
    read, write = os.pipe()
    os.close(read)
    command, buffered = (
        [sys.executable, "-m", "hf_packfree", "--help"],
        {**os.environ, "PYTHONUNBUFFERED": ""},
    )
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""


@pytest.mark.parametrize("argv", [("models",), ("models", "--json"), ("--help",)])
def test_a_process_without_stdout_or_stderr_answers_nobody(argv):
    """As a service may be started; its exit code is that of the answer all the same, not the 1 of
    a traceback, which means a leak."""
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        command = f"{shlex.join([sys.executable, '-m', 'hf_packfree', *argv])} {closed}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), closed


def test_a_long_cell_does_not_move_other_lines_in_a_pipe(capsys, monkeypatch):
    """What is redirected into a file is pasted into an issue."""
    monkeypatch.delenv("COLUMNS", raising=False)
    section("title", [("a", "short"), ("b" * 200, "long")])
    assert capsys.readouterr().out.splitlines() == [
        "title",
        f"  {'a':40}  short",
        f"  {'b' * 200}  long",
    ]


@pytest.mark.parametrize("columns", ["0", "00"])
def test_a_width_of_0_is_none(capsys, monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    code, wanted, _ = run(capsys, "models")
    monkeypatch.setenv("COLUMNS", columns)
    assert run(capsys, "models") == (code, wanted, "") and "Qwen3-Next" in wanted
