"""Checkpoints as files: check that the head is the one that the configuration promises, and copy a
head back where it was lost.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from hf_packfree.errors import MissingHead, UnsupportedInput, UnsupportedModel, in_short
from hf_packfree.mtp.checkpoint import (
    INDEX,
    SINGLE,
    HeadTensors,
    Shapes,
    find_head_tensors,
    opened,
    read_index,
)
from hf_packfree.mtp.head import MTPHead, shapes_of

DEPTHS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""The fields of the text model's configuration for the number of the head's layers; Qwen3-Next's
has no such field.
"""


@dataclass(frozen=True)
class HeadReport:
    """The head that a checkpoint's configuration promises, and the head in its files.

    Attributes:
        checkpoint: folder or hub id.
        promised: the head's number of layers in the configuration, None where there is no such
            field.
        layers, tensors: the number of the head's layers and tensors in the files; 0 without a head.
        layout: "dense", "fused" (one tensor for all experts) or "per expert"; None where there is
            no head.
        faults: why the tensors are not the head of this model; empty if they are.
    """

    checkpoint: str
    promised: int | None
    layers: int
    tensors: int
    layout: str | None
    faults: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether the files hold what the configuration promises: a whole head, or none."""
        return not self.faults and self.layers == (
            self.promised if self.promised is not None else min(self.layers, 1)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self) | {"agrees": self.agrees}

    def __str__(self) -> str:
        promised = (
            "says nothing of a head"
            if self.promised is None
            else f"promises {self.promised} layer(s)"
        )
        held = (
            f"{self.tensors} tensors, {self.layers} layer(s), {self.layout}"
            if self.tensors
            else "no tensor of it"
        )
        rest = "they agree" if self.agrees else "they do not agree"
        faults = f": the checkpoint {'; '.join(self.faults)}" if self.faults else ""
        return (
            f"{self.checkpoint}: the configuration {promised}, the files hold {held}; "
            f"{rest}{faults}"
        )


def examine(checkpoint: str) -> HeadReport:
    """Report on a checkpoint's multi-token prediction head; reads only names and shapes.

    Args:
        checkpoint: folder or hub id.

    Raises:
        UnsupportedModel: its configuration cannot be read, or its family has no such heads.
        MissingHead: the checkpoint has no safetensors.
    """
    config = _config_of(checkpoint)
    tensors = _tensors_of(checkpoint)
    promised = next((getattr(config, name) for name in DEPTHS if hasattr(config, name)), None)
    faults = tensors.faults(wanted_shapes(config, max(tensors.layers, 1))) if tensors.files else []
    layout = (
        "per expert"
        if tensors.per_expert
        else "fused"
        if getattr(config, "num_experts", 0)
        else "dense"
    )
    return HeadReport(
        checkpoint,
        promised,
        tensors.layers,
        len(tensors.files),
        layout if tensors.files else None,
        tuple(faults),
    )


def _tensors_of(checkpoint: str) -> HeadTensors:
    """Return the tensors of a checkpoint's head, if it has one.

    Raises:
        MissingHead: the checkpoint has no safetensors.
    """
    found = find_head_tensors(checkpoint)
    if found is None:
        raise MissingHead(
            f"found neither {SINGLE} nor {INDEX} in {checkpoint}; wanted a checkpoint with its "
            "weights; check the name, and that the hub can be reached"
        )
    return found


def wanted_shapes(config: Any, layers: int) -> Shapes:
    """Return {name: shape} of a head's parameters, for a text model with this configuration."""
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.layer_types = 1, ["full_attention"]
    with torch.device("meta"):
        return shapes_of(MTPHead(AutoModel.from_config(one), layers))


def copy_head(base: str, checkpoint: str, out: str | Path) -> HeadReport:
    """Write a copy of `checkpoint`, a folder, into the new or empty folder `out`, and add the head
    of `base`.

    Every tensor keeps its layout and dtype; the configuration and the index are updated.

    Raises:
        UnsupportedInput: `checkpoint` is no folder, has a head, or contains links to other folders;
            or `out` is not empty.
        UnsupportedModel: see `examine`.
        MissingHead: `base` does not hold the whole head, in the sizes of `checkpoint`.
    """
    source, target = Path(checkpoint), Path(out)
    if not source.is_dir():
        raise UnsupportedInput(
            f"found {checkpoint}, which is no folder; wanted the fine-tuned checkpoint's; download "
            "it first"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UnsupportedInput(
            f"found {out}, which is not empty; wanted a new folder; name another one"
        )
    if found := _tensors_of(checkpoint).files:
        raise UnsupportedInput(
            f"found {len(found)} tensors of a multi-token prediction head in {checkpoint}; wanted "
            f"none; packfree mtp {checkpoint} says whether they are whole"
        )
    config, tensors = _config_of(checkpoint), _tensors_of(base)
    if not tensors.files:
        raise MissingHead(
            f"found no multi-token prediction head in {base}; wanted the base model's checkpoint; "
            "name one"
        )
    tensors.check(wanted_shapes(config, tensors.layers))
    _write(source, target, tensors)
    return examine(str(target))


def _write(source: Path, target: Path, tensors: HeadTensors) -> None:
    """Copy a checkpoint's files and add the head's. The index is written last: an interrupted copy
    has none, and cannot be loaded.
    """
    index, files = _index_of(source), _files_of(source)
    alone = (source / SINGLE).is_file()
    renamed = {SINGLE: "model-00001-of-00002.safetensors"} if alone else {}
    own = "model-00002-of-00002.safetensors" if alone else "model-mtp.safetensors"
    names = {*index["weight_map"].values(), *(name for name in files if not _is_weights(name))}
    copied = {name: _inside(source, name) for name in sorted(names)}
    config = json.loads(copied.pop("config.json").read_text())
    for name, path in copied.items():
        to = target / renamed.get(name, name)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)
    head = {name: tensors.tensor(name) for name in sorted(tensors.files)}
    save_file(head, target / own, metadata={"format": "pt"})
    text = config.get("text_config", config)
    if not any(name in text for name in DEPTHS):
        text[DEPTHS[0]] = tensors.layers
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    trunk = {name: renamed.get(part, part) for name, part in index["weight_map"].items()}
    index["weight_map"] = trunk | dict.fromkeys(head, own)
    index["metadata"]["total_size"] += sum(part.nbytes for part in head.values())
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _files_of(source: Path) -> list[str]:
    return [path.name for path in source.iterdir() if path.is_file() and path.name != INDEX]


def _is_weights(name: str) -> bool:
    """Whether a file is named like the model's weights; if the index does not name it, it is of an
    earlier save.
    """
    return name.startswith("model") and name.endswith(".safetensors")


def _inside(source: Path, name: str) -> Path:
    """Return the resolved path of a checkpoint's file, which is in the folder itself or in the
    hub's cache.

    Raises:
        UnsupportedInput: the file is a link to another place, whose content should not be copied.
    """
    path, folder = (source / name).resolve(), source.resolve()
    # snapshots/COMMIT/NAME is a link to blobs/HASH
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if not (path.is_relative_to(folder) or path.is_relative_to(blobs)):
        raise UnsupportedInput(
            f"found {name} in {source}, a link to {path}; wanted files of this folder, or of the "
            "hub's cache; put the file itself there, or take it away"
        )
    return path


def _index_of(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's index; where there is a single file, which transformers prefers, an
    index of that.
    """
    if not (folder / SINGLE).is_file():
        return read_index(folder / INDEX)
    with opened(folder / SINGLE) as file:
        names = list(file.keys())
    with open(folder / SINGLE, "rb") as raw:
        header = 8 + int.from_bytes(raw.read(8), "little")
    return {
        "metadata": {"total_size": (folder / SINGLE).stat().st_size - header},
        "weight_map": dict.fromkeys(names, SINGLE),
    }


def _config_of(checkpoint: str) -> Any:
    """Return the text model's configuration."""
    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False).get_text_config()
    except Exception as error:
        # transformers raises errors of many classes for bad fields
        raise UnsupportedModel(
            f"found no configuration under {checkpoint!r} ({in_short(error)}); wanted a checkpoint "
            "folder or a hub id; check the name"
        ) from error
    if not config.model_type.startswith(("qwen3_5", "qwen3_next")):
        raise UnsupportedModel(
            f"found a checkpoint of {config.model_type}, of which no multi-token prediction head "
            "is known; wanted Qwen3.5 or Qwen3-Next; name a checkpoint of these"
        )
    return config
