"""`packfree mtp`: what a checkpoint's head is, putting one back, and counting accepted drafts."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_packfree import MTPOptions, apply_patches
from hf_packfree.cli import main
from hf_packfree.cli.commands import _prompts
from hf_packfree.errors import MissingHead, UnsupportedInput, UnsupportedModel
from hf_packfree.models.rotary import cos_and_sin
from hf_packfree.mtp.accept import accepted_drafts, rounds_over
from hf_packfree.mtp.files import copy_head, examine
from tests.mtp.heads import build, packed
from tests.mtp.names import of_head
from tests.mtp.test_checkpoint import checkpoint, same, tensors
from tests.support import slow_decay, tiny


@pytest.mark.parametrize(
    ("family", "layout", "found"),
    [
        ("qwen3_5", None, ("dense", 15)),
        ("qwen3_5_moe", "fused", ("fused", 19)),
        ("qwen3_next", "per expert", ("per expert", 29)),
    ],
)
def test_a_head_is_described(family, layout, found, tmp_path):
    report = examine(str(checkpoint(tmp_path, family, layout)))
    assert (report.layout, report.tensors, report.layers, report.promised) == (
        *found,
        1,
        1,
    ) and report.agrees


def promise(folder, layers=1):
    """Let a checkpoint's configuration promise a head."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": layers}))


def test_what_does_not_agree_is_said(tmp_path, capsys):
    tiny().save_pretrained(tmp_path)
    assert main(["mtp", str(tmp_path)]) == 0, "no head, and none promised"
    promise(tmp_path)
    assert main(["mtp", str(tmp_path)]) == 1
    assert (
        "promises 1 layer(s), the files hold no tensor of it; they do not agree"
        in capsys.readouterr().out
    )
    checkpoint(tmp_path)
    found = {name: part for name, part in tensors(tmp_path).items() if "mtp.norm" not in name}
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert main(["mtp", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"] == ["lacks mtp.norm.weight"]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("family", "layout"), [("qwen3_5", None), ("qwen3_next", "per expert")])
def test_a_lost_head_is_copied(family, layout, sharded, tmp_path, capsys):
    base, lost, out = (tmp_path / name for name in ("base", "lost", "out"))
    checkpoint(base, family, layout, **({"max_shard_size": "100KB"} if sharded else {}))
    tuned = slow_decay(AutoModelForCausalLM.from_pretrained(base), seed=7)
    tuned.save_pretrained(lost, **({"max_shard_size": "100KB"} if sharded else {}))
    assert not of_head(tensors(lost)) and not examine(str(lost)).agrees
    assert main(["mtp", str(lost), "--copy-from", str(base), "--to", str(out)]) == 0
    assert "they agree" in capsys.readouterr().out
    assert same(tensors(out), tensors(lost) | of_head(tensors(base)))
    model = apply_patches(AutoModelForCausalLM.from_pretrained(out), mtp="keep")
    assert same(
        model.state_dict(),
        AutoModelForCausalLM.from_pretrained(lost).state_dict() | of_head(model.state_dict()),
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(part.nbytes for part in tensors(out).values())
    assert index["weight_map"].keys() == tensors(out).keys()


def test_what_cannot_be_copied(tmp_path):
    base, lost = checkpoint(tmp_path / "base"), tmp_path / "lost"
    tiny().save_pretrained(lost)
    with pytest.raises(UnsupportedInput, match="found 15 tensors of a .* head in .*; wanted none"):
        copy_head(str(base), str(base), tmp_path / "out")
    with pytest.raises(UnsupportedInput, match="which is not empty"):
        copy_head(str(base), str(lost), base)
    with pytest.raises(UnsupportedInput, match="which is no folder"):
        copy_head(str(base), "no/such", tmp_path / "out")
    with pytest.raises(MissingHead, match="found no multi-token prediction head in"):
        copy_head(str(lost), str(lost), tmp_path / "out")
    with pytest.raises(
        MissingHead,
        match="lacks mtp.layers.0.mlp.down_proj.weight.*; has besides mtp.layers.0.mlp.experts",
    ):
        copy_head(str(checkpoint(tmp_path / "other", "qwen3_5_moe")), str(lost), tmp_path / "out")
    with pytest.raises(UnsupportedModel, match="found no configuration under"):
        examine(str(tmp_path / "nothing"))
    tiny("qwen2_5_vl").save_pretrained(tmp_path / "vl")
    with pytest.raises(UnsupportedModel, match="found a checkpoint of qwen2_5_vl"):
        examine(str(tmp_path / "vl"))
    assert not (tmp_path / "out").exists()


class TestCopiedFiles:
    def lost(self, tmp_path, **saving):
        """A base model's checkpoint, and one that lost its head."""
        base = checkpoint(tmp_path / "base")
        tiny().save_pretrained(tmp_path / "lost", **saving)
        return base, tmp_path / "lost", tmp_path / "out"

    def test_what_an_earlier_save_left_behind_stays_there(self, tmp_path):
        base, lost, out = self.lost(tmp_path, max_shard_size="100KB")
        stale = {path.name for path in lost.glob("model*")}
        slow_decay(tiny(), seed=7).save_pretrained(lost, max_shard_size="1GB")
        wanted = AutoModelForCausalLM.from_pretrained(lost).state_dict()
        copy_head(str(base), str(lost), out)
        assert len(stale) > 2 and len(list(out.glob("*.safetensors"))) == 2
        assert same(tensors(out), wanted | of_head(tensors(base)))

    def test_shards_in_a_folder_of_their_own(self, tmp_path):
        base, lost, out = self.lost(tmp_path, max_shard_size="100KB")
        (lost / "parts").mkdir()
        index = json.loads((lost / "model.safetensors.index.json").read_text())
        for part in set(index["weight_map"].values()):
            (lost / part).rename(lost / "parts" / part)
        index["weight_map"] = {name: f"parts/{part}" for name, part in index["weight_map"].items()}
        (lost / "model.safetensors.index.json").write_text(json.dumps(index))
        wanted = AutoModelForCausalLM.from_pretrained(lost).state_dict()
        copy_head(str(base), str(lost), out)
        assert same(AutoModelForCausalLM.from_pretrained(out).state_dict(), wanted)

    @pytest.mark.parametrize("name", ["notes.txt", "config.json", "model.safetensors"])
    def test_links_to_elsewhere_are_not_followed(self, name, tmp_path):
        base, lost, out = self.lost(tmp_path)
        elsewhere = tmp_path / "private"
        if (lost / name).exists():
            (lost / name).rename(elsewhere)
        else:
            elsewhere.write_text("secret")
        (lost / name).symlink_to(elsewhere)
        with pytest.raises(UnsupportedInput, match=f"found {name} in .*, a link to .*private"):
            copy_head(str(base), str(lost), out)
        assert not out.exists()

    def test_links_of_the_hubs_cache_are(self, tmp_path):
        base, lost, out = self.lost(tmp_path)
        snapshot = tmp_path / "models--a--b" / "snapshots" / "0"
        (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for path in lost.iterdir():
            path.rename(tmp_path / "models--a--b" / "blobs" / path.name)
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        assert copy_head(str(base), str(snapshot), out).agrees
        assert not any(path.is_symlink() for path in out.iterdir())


@pytest.mark.usefixtures("imports_tried_once")
def test_code_of_a_checkpoint_never_runs(tmp_path, capsys, monkeypatch):
    """Nor is anyone asked: what is on stdin is not read."""
    tiny().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    strange = {"model_type": "strange", "auto_map": {"AutoConfig": "mod.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config | strange))
    (tmp_path / "mod.py").write_text(
        f"open({str(tmp_path / 'RAN')!r}, 'w')\n"
        "from transformers import Qwen3_5TextConfig as Config\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (tmp_path / "prompts").write_text("a\n")
    accept = ["--accept", "--text", str(tmp_path / "prompts")]
    for command in (["mtp", str(tmp_path)], ["mtp", str(tmp_path), *accept]):
        assert main(command) == 2
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "found no config" in capsys.readouterr().err and not (tmp_path / "RAN").exists()


def test_a_tokenizers_code_does_not_run(tmp_path, capsys, monkeypatch):
    build().save_pretrained(tmp_path)
    strange = {
        "tokenizer_class": "Strange",
        "auto_map": {"AutoTokenizer": ["mod.Strange", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(strange))
    (tmp_path / "mod.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')\n")
    (tmp_path / "prompts").write_text("a\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    code = main(["mtp", str(tmp_path), "--accept", "--text", str(tmp_path / "prompts")])
    said = capsys.readouterr().err
    assert code == 2 and "found no tokenizer" in said and not (tmp_path / "RAN").exists()


def test_options_that_belong_together(tmp_path, capsys):
    for options in (["--copy-from", "base"], ["--to", "out"], ["--accept"], ["--text", "file"]):
        assert main(["mtp", str(tmp_path), *options]) == 2
        assert "found one of two options that belong together" in capsys.readouterr().err


def draft(model, prompt, new_tokens, depth):
    """Draft and check in rounds, with nothing kept between forwards; return what each round
    accepted.
    """
    trunk, ids, accepted = model.get_decoder(), prompt[None], []

    def logits_of(row):
        hidden = trunk(input_ids=row, use_cache=False).last_hidden_state
        return hidden, model.lm_head(hidden).argmax(-1)

    while ids.shape[1] < len(prompt) + new_tokens:
        hidden, likely = logits_of(ids)
        row = torch.cat([ids, likely[:, -1:]], 1)
        for step in range(1, depth + 1):
            count = ids.shape[1]
            positions = torch.arange(count)[None]
            table = trunk.embed_tokens(row[:, step : step + count])
            z = torch.cat(
                [model.mtp.pre_fc_norm_embedding(table), model.mtp.pre_fc_norm_hidden(hidden)], -1
            )
            mask = torch.full((count, count), torch.finfo(z.dtype).min).triu(1)[None, None]
            z = model.mtp.layers[0](
                model.mtp.fc(z),
                position_embeddings=cos_and_sin(trunk, z, positions),
                attention_mask=mask,
            )
            hidden = model.mtp.norm(z)
            row = torch.cat([row, model.lm_head(hidden[:, -1:]).argmax(-1)], 1)
        true = logits_of(row)[1][0, ids.shape[1] : -1]
        right = int((true == row[0, ids.shape[1] + 1 :]).long().cumprod(0).sum())
        accepted.append(right)
        ids = row[:, : ids.shape[1] + 1 + right]
    return accepted


def test_rounds_are_those_of_drafting():
    """Of a model that is right now and then."""
    model, prompt = build(depth=2).eval(), torch.arange(2, 9)
    with torch.no_grad():
        model.lm_head.weight[:, 8:] = 0.0
        wanted = draft(model, prompt, 24, 2)
        text = model.generate(prompt[None], max_new_tokens=40, do_sample=False)
        found = rounds_over(model, text, len(prompt), 2)
    assert {0, 1} <= set(wanted) and found[: len(wanted)] == wanted


def chains(lengths, generator):
    """A packed row of documents in which every token says the next one."""
    rule = torch.randperm(96, generator=torch.Generator().manual_seed(3)) + 2
    documents = []
    for length in lengths:
        tokens = [int(torch.randint(2, 98, (1,), generator=generator))]
        while len(tokens) < length:
            tokens.append(int(rule[tokens[-1] - 2]))
        documents.append(torch.tensor(tokens))
    return packed([(ids, ids) for ids in documents]), [ids[:2] for ids in documents]


@pytest.mark.slow
def test_accepted_drafts_rise():
    """A tiny model and its head learn together."""
    model, generator = (
        apply_patches(tiny(), mtp=MTPOptions(from_scratch=True, depth=2, weight=0.3)),
        torch.Generator(),
    )
    prompts = chains([4] * 3, generator)[1]
    before = accepted_drafts(model.eval(), prompts, new_tokens=16, depth=2)
    optimizer = torch.optim.AdamW(model.train().parameters(), 1e-2)
    for _ in range(40):
        model(**chains([48, 31, 64, 12, 37, 55], generator)[0]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = accepted_drafts(model.eval(), prompts, new_tokens=16, depth=2)
    assert before.per_round <= 0.1 and after.per_round >= 1.9, (str(before), str(after))


def test_the_command_that_counts(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    from tests.integrations.test_trl import tokenizer

    build().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "text").write_text("w3 w4 w5\n\nw7 w8\n")
    options = [
        "--accept",
        "--text",
        str(tmp_path / "text"),
        "--new-tokens",
        "12",
        "--depth",
        "2",
        "--json",
    ]
    assert main(["mtp", str(tmp_path), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["depth"] == 2 and found["rounds"] > 8 and len(found["by_position"]) == 2


def test_a_model_without_a_head_is_refused():
    with pytest.raises(
        UnsupportedInput, match="found a Qwen3_5ForCausalLM without a multi-token prediction head"
    ):
        accepted_drafts(tiny().eval(), [torch.tensor([3, 4])])


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(UnsupportedInput, match="found a prompt without tokens"):
        accepted_drafts(build().eval(), [torch.tensor([], dtype=torch.int64)])


@pytest.mark.parametrize("depth", [0, -1, 2.5, True])
def test_depths_that_are_no_count_are_refused(depth):
    with pytest.raises(ValueError, match=f"found depth={depth}; wanted a whole number"):
        accepted_drafts(build().eval(), [torch.tensor([3, 4])], depth=depth)


@pytest.mark.parametrize("prompt", [[3, 4], torch.tensor([[3, 4]]), "w3"])
def test_prompts_that_are_no_row_of_ids_are_refused(prompt):
    with pytest.raises(UnsupportedInput, match="found a prompt .*; wanted a tensor of token ids"):
        accepted_drafts(build().eval(), [prompt])


def test_a_kept_head_in_another_dtype_drafts_what_it_would_in_the_models():
    model, prompts = build().eval(), [torch.tensor([3, 4]), torch.tensor([9])]
    head = model.mtp.bfloat16()
    found = accepted_drafts(model, prompts, new_tokens=12, depth=2)
    head.float()
    assert found == accepted_drafts(model, prompts, new_tokens=12, depth=2)


def test_texts_shorter_than_a_round_are_refused():
    with pytest.raises(
        UnsupportedInput, match="found no text with more new tokens than the 9 drafts of a round"
    ):
        accepted_drafts(build().eval(), [torch.tensor([3, 4])], new_tokens=4, depth=9)


class TestAnswersAreSentences:
    def answer(self, capsys, *options):
        code = main(["mtp", *map(str, options)])
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err
        return code, " ".join(err.split())

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (None, "found no file"),
            (b"\n \n", "found no line of text"),
            (b"\xff\xfe\x00", "which is no text"),
        ],
    )
    def test_prompts_that_are_none(self, text, said, capsys, tmp_path):
        if text is not None:
            (tmp_path / "prompts.txt").write_bytes(text)
        code, answer = self.answer(
            capsys, "somewhere", "--accept", "--text", tmp_path / "prompts.txt"
        )
        assert code == 2 and said in answer

    def test_a_prompt_is_a_line_up_to_its_newline(self, tmp_path):
        file = tmp_path / "prompts.txt"
        file.write_bytes("\ufeffone\u2028still one\r\n\ntwo".encode())
        assert _prompts(file) == ["one\u2028still one", "two"]

    def test_a_checkpoint_without_weights(self, capsys, tmp_path):
        """By what the command can be given, and not by options of `apply_patches`."""
        tiny().save_pretrained(tmp_path / "whole")
        tiny().config.save_pretrained(tmp_path)
        for options in (
            [tmp_path],
            [tmp_path / "whole", "--copy-from", tmp_path, "--to", tmp_path / "new"],
        ):
            code, answer = self.answer(capsys, *options)
            assert code == 2 and answer.endswith(
                f"found neither model.safetensors nor model.safetensors.index.json in {tmp_path}; "
                "wanted a checkpoint with its weights; check the name, and that the hub can be reached"
            )

    def test_a_checkpoint_without_a_head_is_not_tried(self, capsys, tmp_path):
        tiny().save_pretrained(tmp_path)
        (tmp_path / "prompts.txt").write_text("w3")
        code, answer = self.answer(capsys, tmp_path, "--accept", "--text", tmp_path / "prompts.txt")
        assert (
            code == 2
            and "found no tensor of a multi-token prediction head" in answer
            and "--copy-from BASE" in answer
        )

    @pytest.mark.parametrize(
        ("place", "said"), [("", "which names nothing"), ("file/below", "which is no folder")]
    )
    def test_a_place_that_cannot_be_written(self, place, said, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        code, answer = self.answer(
            capsys, tmp_path, "--copy-from", "base", "--to", tmp_path / place if place else place
        )
        assert code == 2 and "found --to" in answer and said in answer

    def test_two_things_at_once(self, capsys, tmp_path):
        code, answer = self.answer(
            capsys, "a", "--accept", "--text", "b", "--copy-from", "c", "--to", "d"
        )
        assert code == 2 and "found --accept with --copy-from" in answer

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("model.safetensors", b""),
            ("model.safetensors", b"version https://git-lfs.github.com/spec/v1"),
            ("model.safetensors.index.json", b"{"),
            ("model.safetensors.index.json", b"[]"),
            (
                "model.safetensors.index.json",
                b'{"weight_map": {"mtp.fc.weight": "old-model.safetensors"}}',
            ),
        ],
        ids=["empty", "pointer", "index cut", "no index", "index of others"],
    )
    def test_damaged_files(self, name, content, capsys, tmp_path):
        tiny().save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "old-model.safetensors")
        (tmp_path / name).write_bytes(content)
        code, answer = self.answer(capsys, tmp_path)
        assert code == 2 and f"{name.removesuffix('.index.json')}" in answer and "damaged" in answer
