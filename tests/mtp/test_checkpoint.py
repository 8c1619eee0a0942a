"""The head in checkpoints: read, kept, written again, both layouts of experts, and what is
refused.
"""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hf_packfree import MTPOptions, add_mtp, apply_patches, remove_mtp, remove_patches
from hf_packfree.errors import MissingHead, PatchConflict, UnsupportedModel
from hf_packfree.mtp.attached import training_of
from hf_packfree.mtp.checkpoint import head_tensors
from hf_packfree.patching.apply import patches_lifted
from tests.mtp.heads import build, labelled, packed
from tests.mtp.names import DENSE, FUSED, PER_EXPERT, fused, of_head
from tests.support import tiny
from tests.vision import tiny_vision


def tensors(folder):
    return {
        name: part
        for file in sorted(folder.glob("*.safetensors"))
        for name, part in load_file(file).items()
    }


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], part) and found[name].dtype == part.dtype
        for name, part in wanted.items()
    )


def same_files(found, wanted):
    """Whether the head is the same byte for byte, and so is the model, whose experts' layout is
    transformers' choice.
    """
    models = (
        fused({name: part for name, part in all.items() if name not in of_head(all)})
        for all in (found, wanted)
    )
    return same(of_head(found), of_head(wanted)) and same(*models)


def checkpoint(folder, family="qwen3_5", layout=None, dtype=torch.bfloat16, **saving):
    """Write a tiny model's checkpoint that carries a head.

    Args:
        layout: of experts, which tiny models write apart: "fused", of all, or "fused head", of its
            alone.
    """
    build(family, dtype=dtype).save_pretrained(folder, **saving)
    if layout in ("fused", "fused head"):
        found = tensors(folder)
        apart = (
            {}
            if layout == "fused"
            else {name: part for name, part in found.items() if name not in of_head(found)}
        )
        whole = {
            name: part
            for name, part in fused(found).items()
            if layout == "fused" or name in of_head(fused(found))
        }
        save_file(apart | whole, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("family", "layout", "names"),
    [
        ("qwen3_5", None, DENSE),
        ("qwen3_5_moe", "fused", FUSED),
        ("qwen3_5_moe", "per expert", PER_EXPERT),
        ("qwen3_5_moe", "fused head", FUSED),
        ("qwen3_next", "per expert", PER_EXPERT),
    ],
)
@pytest.mark.compat
def test_kept_and_written_again_byte_for_byte(family, layout, names, tmp_path):
    before = tensors(checkpoint(tmp_path / "before", family, layout))
    assert of_head(before).keys() == names
    model = load(tmp_path / "before")
    assert not hasattr(model, "mtp"), "transformers reads it now: this room may go"
    apply_patches(model, mtp="keep").save_pretrained(tmp_path / "after")
    assert same_files(tensors(tmp_path / "after"), before)
    assert not any(parameter.requires_grad for parameter in model.mtp.parameters())
    assert load(tmp_path / "after").config.mtp_num_hidden_layers == 1


@pytest.mark.parametrize(("family", "names"), [("qwen3_5", DENSE), ("qwen3_5_moe", FUSED)])
def test_a_vision_language_checkpoint(family, names, tmp_path):
    """The head's names begin at the top, as published, and the text model's configuration speaks
    of it.
    """
    model = apply_patches(tiny_vision(family).bfloat16(), mtp=MTPOptions(from_scratch=True))
    model.save_pretrained(tmp_path / "before")
    before = tensors(tmp_path / "before")
    assert fused(of_head(before)).keys() == names and all(
        name.split(".")[0] in ("mtp", "model", "lm_head") for name in before
    )
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "before")
    assert again.config.text_config.mtp_num_hidden_layers == 1
    apply_patches(again, mtp="keep").save_pretrained(tmp_path / "after")
    assert same(tensors(tmp_path / "after"), before)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_sharded_files_and_a_model_in_another_dtype(family, tmp_path):
    folder = checkpoint(tmp_path / "before", family, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = add_mtp(load(folder, dtype=torch.float32))
    model.save_pretrained(tmp_path / "after", max_shard_size="100KB")
    assert same(of_head(tensors(tmp_path / "after")), of_head(tensors(folder)))


def test_training_leaves_a_kept_head_alone(tmp_path):
    model = apply_patches(load(checkpoint(tmp_path / "before")).train(), mtp="keep")
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1
    )
    before = {name: part.clone() for name, part in model.state_dict().items()}
    model(**packed(labelled())).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "after")
    assert same(of_head(tensors(tmp_path / "after")), of_head(tensors(tmp_path / "before")))
    assert not torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"])


def test_training_goes_on_from_the_checkpoint(tmp_path):
    wanted = build(depth=2)
    wanted.save_pretrained(tmp_path)
    model = apply_patches(load(tmp_path).train(), mtp=MTPOptions(depth=2, weight=0.3))
    assert torch.equal(model(**packed(labelled())).loss, wanted(**packed(labelled())).loss)


def test_another_checkpoint_may_be_named(tmp_path):
    base = checkpoint(tmp_path / "base")
    tiny().save_pretrained(tmp_path / "lost")
    model = add_mtp(load(tmp_path / "lost"), base)
    model.save_pretrained(tmp_path / "after")
    assert same(of_head(tensors(tmp_path / "after")), of_head(tensors(base)))


@pytest.mark.parametrize("first", [{}, {"max_shard_size": "100KB"}], ids=["whole", "shards"])
def test_a_folder_saved_twice_gives_trunk_and_head_of_one_save(first, tmp_path):
    """transformers prefers the only file, and leaves what an earlier save wrote in shards."""
    second = {} if first else {"max_shard_size": "100KB"}
    model = build()
    model.save_pretrained(tmp_path, **first)
    saved = [{name: part.clone() for name, part in model.state_dict().items()}]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(tmp_path, **second)
    saved.append(model.state_dict())
    found = apply_patches(load(tmp_path), mtp="keep").state_dict()
    assert [same(found, wanted) for wanted in saved].count(True) == 1


def test_the_hubs_cache_of_links_is_read(tmp_path, monkeypatch):
    """snapshots/COMMIT/NAME is a link to blobs/HASH."""
    folder = checkpoint(tmp_path / "whole", max_shard_size="100KB")
    cached = tmp_path / "models--a--b"
    snapshot = cached / "snapshots" / "0"
    (cached / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(cached / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert head_tensors(snapshot).files.keys() == DENSE


class TestRefused:
    @pytest.mark.parametrize(
        "part", [5, None, "", "/etc/hosts", "../whole/model.safetensors", "a/../../b"]
    )
    def test_an_index_that_names_no_file_of_its_folder(self, part, tmp_path):
        checkpoint(tmp_path / "whole")
        folder = tmp_path / "index"
        folder.mkdir()
        index = {"weight_map": dict.fromkeys(DENSE, part)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(MissingHead, match="damaged .*it names .*, no file of its folder"):
            head_tensors(folder)

    def test_a_name_of_a_layer_beyond_all_others(self, tmp_path):
        """A head of so many layers is not built to compare with."""
        checkpoint(tmp_path)
        more = {"mtp.layers.999999999.input_layernorm.weight": torch.zeros(64)}
        found = tensors(tmp_path) | more
        save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(MissingHead, match="has besides mtp.layers.999999999.input"):
            add_mtp(load(tmp_path))

    def test_a_checkpoint_without_a_head(self, tmp_path):
        tiny().save_pretrained(tmp_path)
        model = load(tmp_path)
        with pytest.raises(
            MissingHead,
            match="found 0 tensors .* lacks mtp.fc.weight, mtp.layers.0.input.*; wanted 15",
        ):
            apply_patches(model, mtp="keep")
        assert type(model) is type(load(tmp_path)) and not hasattr(model, "mtp"), (
            "nothing was changed"
        )

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                lambda all: {name: all[name] for name in all if "q_norm" not in name},
                r"lacks \S+q_norm.weight; wanted 15",
            ),
            (
                lambda all: all | {"mtp.extra.weight": torch.zeros(1)},
                "has besides mtp.extra.weight",
            ),
            (
                lambda all: all | {"mtp.fc.weight": torch.zeros(64, 64)},
                r"has mtp.fc.weight \[64, 64\] instead of \[64, 128\]",
            ),
        ],
    )
    def test_a_part_of_one(self, change, said, tmp_path):
        checkpoint(tmp_path)
        save_file(
            change(tensors(tmp_path)), tmp_path / "model.safetensors", metadata={"format": "pt"}
        )
        with pytest.raises(MissingHead, match=said):
            apply_patches(load(tmp_path), mtp="keep")

    def test_an_expert_that_is_missing(self, tmp_path):
        checkpoint(tmp_path, "qwen3_5_moe")
        found = {
            name: part
            for name, part in tensors(tmp_path).items()
            if "mtp.layers.0.mlp.experts.2.up" not in name
        }
        save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(
            MissingHead, match="lacks mtp.layers.0.mlp.experts.2.up_proj.weight; wanted 29"
        ):
            add_mtp(load(tmp_path))

    def test_a_file_that_the_index_names(self, tmp_path):
        folder = checkpoint(tmp_path, max_shard_size="100KB")
        model = load(folder)
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        (folder / index["mtp.fc.weight"]).unlink()
        with pytest.raises(MissingHead, match="which is not there; wanted every file of the index"):
            add_mtp(model)

    def test_a_model_from_no_checkpoint(self):
        with pytest.raises(MissingHead, match="the model came from none"):
            apply_patches(tiny(), mtp="train")

    def test_a_family_without_heads(self):
        with pytest.raises(UnsupportedModel, match="family qwen2_5_vl, whose checkpoints carry no"):
            apply_patches(tiny("qwen2_5_vl"), mtp="keep")

    def test_a_model_without_a_language_modelling_head(self):
        with pytest.raises(
            UnsupportedModel, match="found a Qwen3_5TextModel without a language modelling head"
        ):
            apply_patches(tiny().model, mtp="keep")

    @pytest.mark.parametrize("mtp", ["kept", True, 3])
    def test_an_unknown_value(self, mtp):
        with pytest.raises(ValueError, match="wanted None, 'keep', 'train' or MTPOptions"):
            apply_patches(tiny(), mtp=mtp)

    @pytest.mark.parametrize(
        "options",
        [
            {"depth": 0},
            {"depth": 1.5},
            {"weight": 0},
            {"weight": "x"},
            {"weight": True},
            {"weight": float("nan")},
            {"train": "no"},
            {"detach": None},
            {"checkpoint": 5},
            {"checkpoint": ""},
            {"from_scratch": True, "train": False},
        ],
    )
    def test_options_that_no_head_has(self, options):
        with pytest.raises(ValueError, match=f"found {next(iter(options))}.*; wanted"):
            MTPOptions(**options)

    def test_other_options_than_it_has(self):
        model = build()
        with pytest.raises(PatchConflict, match="found mtp with .*; wanted .*; call remove_mtp"):
            apply_patches(model, mtp=MTPOptions(depth=2, from_scratch=True))


class TestTakingItAway:
    def test_a_trained_head_is_handed_back(self):
        model = build()
        with pytest.raises(
            PatchConflict,
            match="found a multi-token prediction head in training.*call head = remove_mtp",
        ):
            remove_patches(model)
        head = model.mtp
        assert remove_mtp(model) is head and not hasattr(model, "mtp") and remove_mtp(model) is None
        remove_patches(model)
        assert (
            not model._forward_hooks
            and not model._forward_pre_hooks
            and not hasattr(model.config, "mtp_num_hidden_layers")
        )

    def test_without_it_the_loss_is_the_main_one(self):
        model, inputs = build(), packed(labelled())
        with_head, facts = model(**inputs).loss.item(), training_of(model).take()
        remove_mtp(model)
        assert model(**inputs).loss.item() < with_head and facts.keys() == {
            "packfree/mtp_loss_1",
            "packfree/mtp_accuracy_1",
        }

    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
        ids=["copy", "pickle"],
    )
    def test_a_copy_trains_its_own(self, copied):
        model, inputs = build(), packed(labelled())
        other = copied(model)
        other(**inputs).loss.backward()
        assert training_of(other).take() and not training_of(model).take()
        assert other.mtp.fc.weight.grad is not None and model.mtp.fc.weight.grad is None
        remove_mtp(other)
        remove_patches(other)
        assert not other._forward_hooks and hasattr(model, "mtp") and model._forward_hooks

    def test_lifted_for_a_control_it_is_back_afterwards(self):
        model, inputs = build(), packed(labelled())
        wanted = model(**inputs).loss
        with patches_lifted(model):
            assert not hasattr(model, "mtp") and not model._forward_hooks
        assert torch.equal(model(**inputs).loss, wanted)
        assert len(model._forward_hooks) == 1 and len(vars(model)["packfree"].followers) == 1

    def test_a_kept_head_goes_with_the_patches(self, tmp_path):
        model = load(checkpoint(tmp_path / "before", "qwen3_5_moe", "fused head"))
        names, save = list(model.state_dict()), type(model).save_pretrained
        apply_patches(model, mtp="keep")
        copy.deepcopy(model).save_pretrained(tmp_path / "copied")
        assert same(of_head(tensors(tmp_path / "copied")), of_head(tensors(tmp_path / "before")))
        remove_patches(model)
        assert list(model.state_dict()) == names and model.config.mtp_num_hidden_layers == 1
        assert model.save_pretrained.__func__ is save
